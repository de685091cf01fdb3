"""S-SGD: gradients are summed as they are.

    g <- (1/W) sum_w g_w          one all-reduce of N bytes per step, 2 (W-1) alpha + 2 (W-1)/W N beta on a ring

W ranks, N = elements x bytes of `reduce_dtype`. Fused tensors are copied into their bucket and out of it.
Source: S. Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.
"""

from __future__ import annotations

from simkit.compressors._common import (
    Array,
    Rows,
    Shapes,
    Work,
    bucket_copy,
    extents,
    no_stage,
    plain_fusing,
    reduce_bytes,
)
from simkit.spec.plan import Plan

PHASES = 1
OP = ("all_reduce",)
PLACEMENT = "inline"
BLOCKING = False
REDUCES = True
ERROR_FEEDBACK = False
BUCKETS = "bucket"


def variants(plan: Plan) -> int:
    """Every step is the same."""
    return 1


def wire_bytes(shapes: Shapes, *, plan: Plan, phase: int = 0, variant: int = 0) -> Array:
    """Bytes of each gradient in `reduce_dtype`."""
    return reduce_bytes(plan) * extents(shapes).numel


def work(
    shapes: Shapes, *, plan: Plan, stage: str, variant: int = 0, ranks: int = 1, phase: int | None = None
) -> Work:
    """Encode: gradients into buckets, the mean folded in; decode: out again. Nothing where tensors are not fused."""
    if stage not in ("encode", "decode"):
        raise no_stage(stage, phase)
    shape = extents(shapes)
    rows = Rows(len(shape.numel))
    bucket_copy(rows, shape, plan, reduce_bytes(plan))
    return rows.build()


def fusing(shapes: Shapes, *, plan: Plan, variant: int = 0) -> tuple[Array, float]:
    """Uncompressed bytes, the bucket size of the plan."""
    return plain_fusing(shapes, plan)


def memory_bytes(shapes: Shapes, *, plan: Plan, ranks: int) -> dict[str, float]:
    """The buckets: one copy of the gradients, where tensors are fused."""
    fused = 0.0 if plan.fusion == "none" else 1.0
    return {"buckets": fused * reduce_bytes(plan) * float(extents(shapes).numel.sum())}
