"""Top-k SGD with error feedback.

    a = g + e;   S = the k largest |a_i|;   send (i, a_i) for i in S;   e <- a with S set to 0
    g <- (1/W) sum_w scatter(sent by w)          k = max(1, ceil(density n)) per tensor

Index sets differ between ranks, so contributions are gathered: one all-gather of k fp32 values and k int32 indices
from each rank, (W-1) alpha + (W-1) 8 k beta.

Selection. ``sampled`` (default): the threshold comes from a 1 % sample (Lin et al. sample 0.1 to 1 %), then one masked
pass over the tensor; ``exact``: torch.topk, a radix selection that reads the tensor once for each of its four 8-bit
digits and once to gather, after a pass that takes magnitudes. Both are bound by memory.
Sources: A. Aji, K. Heafield, EMNLP 2017; Y. Lin et al., "Deep gradient compression", ICLR 2018; formula and settings as
compared in L. Zhang et al., arXiv 2306.08881.
"""

from __future__ import annotations

import numpy as np

from simkit.compressors._common import (
    FP32_BYTES,
    INT32_BYTES,
    Array,
    Rows,
    Shapes,
    Work,
    extents,
    no_stage,
    plain_fusing,
)
from simkit.errors import unknown
from simkit.spec.plan import Plan

PHASES = 1
OP = ("all_gather",)
PLACEMENT = "inline"
BLOCKING = False
REDUCES = False
ERROR_FEEDBACK = True
BUCKETS = "bucket"

SELECTIONS = ("sampled", "exact")
SAMPLE = 0.01
SECTOR_BYTES = 32.0
"""The least that a GPU moves for one scattered element (a memory sector)."""


def variants(plan: Plan) -> int:
    """Every step is the same."""
    return 1


def _kept(shapes: Shapes, plan: Plan) -> Array:
    numel = extents(shapes).numel
    return np.minimum(np.maximum(1.0, np.ceil(plan.density * numel)), numel)


def wire_bytes(shapes: Shapes, *, plan: Plan, phase: int = 0, variant: int = 0) -> Array:
    """Bytes of values and indices that each rank contributes; the all-gather's nbytes is ranks times this."""
    return (FP32_BYTES + INT32_BYTES) * _kept(shapes, plan)


def _selection(numel: Array, kept: Array, selection: str) -> tuple[Array, float]:
    """Bytes and launches of finding the indices of the kept elements."""
    if selection == "exact":
        return FP32_BYTES * 7.0 * numel + 12.0 * kept, 8.0
    if selection == "sampled":
        sample = FP32_BYTES * (SECTOR_BYTES / FP32_BYTES + 6.0) * SAMPLE * numel
        magnitude_mask = (FP32_BYTES + 1.0) * numel
        nonzero = 2.0 * numel + 8.0 * kept
        return sample + magnitude_mask + nonzero, 14.0
    raise unknown("selection", selection, SELECTIONS)


def work(
    shapes: Shapes,
    *,
    plan: Plan,
    stage: str,
    variant: int = 0,
    ranks: int = 1,
    phase: int | None = None,
    selection: str = "sampled",
) -> Work:
    """Encode: add the error, select, gather, clear; decode: zero the gradient, scatter the pairs of all ranks into it.

    Raises InputError for an unknown selection.
    """
    shape, kept = extents(shapes), _kept(shapes, plan)
    index, rows = np.arange(len(shape.numel)), Rows(len(shape.numel))
    if stage == "encode":
        nbytes, kernels = _selection(shape.numel, kept, selection)
        feedback = 3.0 * FP32_BYTES * shape.numel
        moved = (2.0 * SECTOR_BYTES + FP32_BYTES + INT32_BYTES) * kept
        rows.memory(index, feedback + nbytes + moved, 3.0 + kernels)
    elif stage == "decode":
        pair = FP32_BYTES + INT32_BYTES + 2.0 * SECTOR_BYTES
        rows.memory(index, FP32_BYTES * shape.numel + pair * ranks * kept, 3.0)
    else:
        raise no_stage(stage, phase)
    return rows.build()


def fusing(shapes: Shapes, *, plan: Plan, variant: int = 0) -> tuple[Array, float]:
    """Uncompressed bytes, the bucket size of the plan."""
    return plain_fusing(shapes, plan)


def memory_bytes(shapes: Shapes, *, plan: Plan, ranks: int) -> dict[str, float]:
    """The error, one more copy of the gradients; what is sent; what all ranks sent."""
    payload = float(wire_bytes(shapes, plan=plan).sum())
    return {
        "error_feedback": FP32_BYTES * float(extents(shapes).numel.sum()),
        "payload": payload,
        "gather": ranks * payload,
    }
