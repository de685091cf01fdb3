"""Power-SGD as PyTorch's communication hook runs it.

For each matrix M (rows x cols) of the gradient, E the error kept from the step before, W ranks:

    M <- M + E;  Q <- orth(Q);  P <- M Q       encode
    P <- sum_w P_w                             all-reduce
    P <- orth(P);  Q <- M^T P                  between
    Q <- (1/W) sum_w Q_w                       all-reduce
    M' = P Q^T;  E <- M - M'                   decode

The two all-reduces depend on each other: 4 (W-1) alpha + 2 (W-1)/W (P + Q) beta on a ring. Tensors of one dimension,
and those with rows·cols <= (rows + cols)·r·2, are not compressed; the hook sends them first, in an all-reduce of
their own for which the chain waits. So a bucket has three phases: 0 uncompressed, 1 P, 2 Q; no bytes is no message.

Every tensor is its own product and its own QR: batching of equal shapes exists and is off by default. For r <= 2 the
factors are orthonormalised by Gram-Schmidt in whole-tensor operations, else by ``torch.linalg.qr``.
Back-propagation stands still while a chain is under way (see `simkit.timeline.Step`): its last callback calls
``torch.cuda.synchronize`` in the thread that launches back-propagation.
Sources: T. Vogels et al., "PowerSGD", NeurIPS 2019; torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py;
PyTorch pull request 49435 (the synchronisation), issues 74148 and 74907 (scaling, many small products).
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
    bucket_copy,
    extents,
    factors,
    householder_kernels,
    message_elements,
    no_stage,
    per_message,
    plain_fusing,
)
from simkit.spec.plan import Plan

PHASES = 3
OP = ("all_reduce", "all_reduce", "all_reduce")
PLACEMENT = "hook"
BLOCKING = True
REDUCES = True
ERROR_FEEDBACK = True
BUCKETS = "bucket"

MIN_COMPRESSION_RATE = 2.0
"""Default of PowerSGDState: a matrix is compressed only if that makes it smaller by more than this."""
GRAM_SCHMIDT_RANK = 2.0


def variants(plan: Plan) -> int:
    """Every step is the same."""
    return 1


def _factors(shapes: Shapes, plan: Plan) -> Factors:
    return factors(shapes, rank=plan.rank, min_rate=MIN_COMPRESSION_RATE)


def _orth_kernels(r: Array) -> Array:
    # Gram-Schmidt: norm and divide for each column; multiply, sum, multiply, subtract for all but the last.
    return np.where(r <= GRAM_SCHMIDT_RANK, 6.0 * r - 4.0, householder_kernels(r))


def wire_bytes(shapes: Shapes, *, plan: Plan, phase: int = 0, variant: int = 0) -> Array:
    """Phase 0: the tensors that are not compressed; 1: the P factors; 2: the Q factors. fp32."""
    f = _factors(shapes, plan)
    if phase == 0:
        return f.spread(np.zeros(len(f.index)), FP32_BYTES * f.rest_numel)
    return f.spread(FP32_BYTES * f.r * (f.rows if phase == 1 else f.cols), 0.0)


def work(
    shapes: Shapes, *, plan: Plan, stage: str, variant: int = 0, ranks: int = 1, phase: int | None = None
) -> Work:
    """The hook's operations one by one. Stage ``between`` needs its phase: 1 unpacks what was not compressed, 2
    orthonormalises P and computes Q."""
    f, shape = _factors(shapes, plan), extents(shapes)
    every, rows, launches = np.arange(f.tensors), Rows(f.tensors), per_message(plan)
    if stage == "encode":
        bucket_copy(rows, shape, plan, FP32_BYTES)
        rows.memory(every, FP32_BYTES * 5.0 * shape.numel, 2.0 * launches)
        rows.memory(f.rest, FP32_BYTES * 2.0 * f.rest_numel, launches)
        rows.qr(f.index, m=f.cols, r=f.r, kernels=_orth_kernels(f.r))
        rows.gemm(f.index, m=f.rows, n=f.r, k=f.cols)
    elif stage == "between" and phase == 1:
        rows.memory(f.rest, FP32_BYTES * 4.0 * f.rest_numel, 1.0 + launches)
    elif stage == "between" and phase == 2:
        rows.qr(f.index, m=f.rows, r=f.r, kernels=_orth_kernels(f.r))
        rows.gemm(f.index, m=f.cols, n=f.r, k=f.rows)
    elif stage == "decode":
        rows.memory(f.index, FP32_BYTES * 2.0 * f.cols * f.r, launches)
        rows.gemm(f.index, m=f.rows, n=f.cols, k=f.r)
        rows.memory(every, FP32_BYTES * 3.0 * shape.numel, launches)
        bucket_copy(rows, shape, plan, FP32_BYTES)
    else:
        raise no_stage(stage, phase)
    return rows.build()


def fusing(shapes: Shapes, *, plan: Plan, variant: int = 0) -> tuple[Array, float]:
    """Uncompressed bytes, the bucket size of the plan: the hook sees DDP's buckets."""
    return plain_fusing(shapes, plan)


def memory_bytes(shapes: Shapes, *, plan: Plan, ranks: int) -> dict[str, float]:
    """The error and the buckets, a copy of the gradients each; both factors; the copy of the bucket in the chain."""
    f = _factors(shapes, plan)
    total = FP32_BYTES * float(extents(shapes).numel.sum())
    return {
        "error_feedback": total,
        "buckets": 0.0 if plan.fusion == "none" else total,
        "factors": FP32_BYTES * float((f.r * (f.rows + f.cols)).sum()),
        "payload": FP32_BYTES * (message_elements(shapes, plan) + float(f.rest_numel.sum())),
    }
