"""ACP-SGD: alternately compressed Power-SGD, one factor per step.

For each matrix M (rows x cols) of the gradient, E the error, W ranks; P-steps and Q-steps alternate:

    P-step: Q <- orth(Q);  P <- (M + E) Q;    E <- E + M - P Q^T;  all-reduce P
    Q-step: P <- orth(P);  Q <- (M + E)^T P;  E <- E + M - P Q^T;  all-reduce Q
    then M' = P Q^T / W

One all-reduce per bucket and step, 2 (W-1) alpha + 2 (W-1)/W N_c beta on a ring, N_c the bytes of P or of Q plus those
of the tensors of one dimension, which ride along uncompressed. Nothing but the update waits for it, so wait-free
back-propagation applies: each tensor is encoded on the compute stream when its gradient is ready.

Buffers are fused greedily in the compressed sizes, with the threshold scaled so that there are about as many as there
would be uncompressed: T_P = T · size(P) / size(gradients), T_Q likewise.
Sources: L. Zhang et al., "Evaluation and optimization of gradient compression for distributed deep learning", ICDCS
2023, arXiv 2306.08881; lzhangbv/acpsgd, acpsgd.py (the passes counted below are those of _alternative_compress and
_bp_barrier).
"""

from __future__ import annotations

import numpy as np

from simkit.compressors._common import (
    FP32_BYTES,
    Array,
    Factors,
    Rows,
    Shapes,
    Work,
    extents,
    factors,
    householder_kernels,
    no_stage,
)
from simkit.spec.plan import Plan

PHASES = 1
OP = ("all_reduce",)
PLACEMENT = "inline"
BLOCKING = False
REDUCES = True
ERROR_FEEDBACK = True
BUCKETS = "greedy"

P_STEP, Q_STEP = range(2)


def variants(plan: Plan) -> int:
    """Two: the P-step (0) and the Q-step (1)."""
    return 2


def _sides(f: Factors, variant: int) -> tuple[Array, Array]:
    """(rows of the factor that is computed, rows of the one that is orthonormalised)."""
    return (f.rows, f.cols) if variant == P_STEP else (f.cols, f.rows)


def wire_bytes(shapes: Shapes, *, plan: Plan, phase: int = 0, variant: int = P_STEP) -> Array:
    """Bytes of the factor of this step, and of each tensor of one dimension. fp32."""
    f = factors(shapes, rank=plan.rank)
    new, _ = _sides(f, variant)
    return f.spread(FP32_BYTES * new * f.r, FP32_BYTES * f.rest_numel)


def work(
    shapes: Shapes, *, plan: Plan, stage: str, variant: int = P_STEP, ranks: int = 1, phase: int | None = None
) -> Work:
    """Encode: QR, sum, product, copy, product, difference, error update; decode: product, copy, division."""
    f = factors(shapes, rank=plan.rank)
    rows, numel = Rows(f.tensors), f.rows * f.cols
    new, old = _sides(f, variant)
    if stage == "encode":
        rows.qr(f.index, m=old, r=f.r, kernels=householder_kernels(f.r))
        rows.gemm(f.index, m=new, n=f.r, k=old)
        rows.gemm(f.index, m=f.rows, n=f.cols, k=f.r)
        passes = 9.0 * numel + 2.0 * (new + old) * f.r
        rows.memory(f.index, FP32_BYTES * passes, 5.0)
        rows.memory(f.rest, FP32_BYTES * 2.0 * f.rest_numel, 1.0)
    elif stage == "decode":
        rows.gemm(f.index, m=f.rows, n=f.cols, k=f.r)
        rows.memory(f.index, FP32_BYTES * 4.0 * numel, 2.0)
        rows.memory(f.rest, FP32_BYTES * 4.0 * f.rest_numel, 2.0)
    else:
        raise no_stage(stage, phase)
    return rows.build()


def fusing(shapes: Shapes, *, plan: Plan, variant: int = P_STEP) -> tuple[Array, float]:
    """Compressed bytes, and the bucket size of the plan scaled by compressed over uncompressed size."""
    sizes = wire_bytes(shapes, plan=plan, variant=variant)
    total = FP32_BYTES * float(extents(shapes).numel.sum())
    return sizes, plan.bucket_bytes * float(sizes.sum()) / total if total else plan.bucket_bytes


def memory_bytes(shapes: Shapes, *, plan: Plan, ranks: int) -> dict[str, float]:
    """The error of every matrix; the buffers of both factors, each with the tensors of one dimension."""
    f = factors(shapes, rank=plan.rank)
    both = float((f.r * (f.rows + f.cols)).sum()) + 2.0 * float(f.rest_numel.sum())
    return {
        "error_feedback": FP32_BYTES * float(np.sum(f.rows * f.cols)),
        "factors": FP32_BYTES * both,
    }
