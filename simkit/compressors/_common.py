"""What the gradient compressors share: tensors as matrices, rows of device work, the plain fusing rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simkit.roofline import GEMM, MEMORY, QR, Columns
from simkit.spec.plan import DTYPE_BYTES, Plan

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Shapes = Sequence[tuple[int, ...]]

FP32_BYTES = 4.0
INT32_BYTES = 4.0
STAGES = ("encode", "between", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Rows of device work and the tensor that each row belongs to; a tensor has any number of rows, also none."""

    columns: Columns
    tensor: Ints
    tensors: int

    def per_tensor(self, seconds: Array) -> Array:
        """Seconds of each tensor from the seconds of each row."""
        return np.asarray(np.bincount(self.tensor, weights=seconds, minlength=self.tensors), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """Tensors viewed as matrices: rows = first dimension, cols = the rest; numel; matrix = more than one dimension."""

    rows: Array
    cols: Array
    numel: Array
    matrix: NDArray[np.bool_]


@lru_cache(maxsize=64)
def _extents(shapes: tuple[tuple[int, ...], ...]) -> Extents:
    numel = np.array([math.prod(s) for s in shapes], dtype=np.float64)
    rows = np.array([s[0] if s else 1 for s in shapes], dtype=np.float64)
    matrix = np.array([len(s) > 1 for s in shapes], dtype=bool)
    cols = np.divide(numel, rows, out=np.zeros_like(numel), where=rows > 0)
    for array in (numel, rows, matrix, cols):
        array.flags.writeable = False
    return Extents(rows=rows, cols=cols, numel=numel, matrix=matrix)


def extents(shapes: Shapes) -> Extents:
    """The shapes as arrays; a model's shapes are converted once."""
    return _extents(shapes if isinstance(shapes, tuple) else tuple(shapes))


class Rows:
    """Collects rows of device work tensor by tensor. Every method takes the tensors concerned and arrays over them."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._parts: list[tuple[int, Ints, dict[str, Array | float]]] = []

    def memory(self, tensor: Ints, nbytes: Array, kernels: Array | float) -> None:
        """Streaming kernels: `nbytes` read and written in total by `kernels` launches."""
        self._parts.append((MEMORY, tensor, {"nbytes": nbytes, "kernels": kernels}))

    def gemm(self, tensor: Ints, *, m: Array, n: Array, k: Array) -> None:
        """One fp32 product out[m,n] = a[m,k] b[k,n]; each operand moves once."""
        nbytes = FP32_BYTES * (m * k + k * n + m * n)
        self._parts.append((GEMM, tensor, {"batch": 1.0, "m": m, "n": n, "k": k, "nbytes": nbytes, "kernels": 1.0}))

    def qr(self, tensor: Ints, *, m: Array, r: Array, kernels: Array) -> None:
        """Orthonormalise the r columns of an m x r factor in place: a chain of dependent small kernels."""
        nbytes = FP32_BYTES * 4.0 * m * r
        self._parts.append((QR, tensor, {"batch": 1.0, "m": m, "n": r, "k": r, "nbytes": nbytes, "kernels": kernels}))

    def build(self) -> Work:
        """The rows in the order in which they were added."""
        tensor = np.concatenate([np.zeros(0, dtype=np.int64), *(t for _, t, _ in self._parts)])
        kind = np.repeat(np.array([k for k, _, _ in self._parts], dtype=np.int8), [len(t) for _, t, _ in self._parts])
        columns = {name: self._column(name) for name in ("batch", "m", "n", "k", "nbytes", "kernels")}
        return Work(columns=Columns(kind=kind, **columns), tensor=tensor, tensors=self._tensors)

    def _column(self, name: str) -> Array:
        out, begin = np.zeros(sum(len(t) for _, t, _ in self._parts)), 0
        for _, t, f in self._parts:
            end = begin + len(t)
            out[begin:end] = f.get(name, 0.0)
            begin = end
        return out


def reduce_bytes(plan: Plan) -> float:
    """Bytes of one element of an uncompressed gradient on the wire."""
    return DTYPE_BYTES[plan.reduce_dtype]


def per_message(plan: Plan) -> float:
    """Launches per tensor of a kernel that runs once per message: one where each tensor is a message of its own.

    Where tensors are fused it is one in hundreds of tensors, and counted as none.
    """
    return 1.0 if plan.fusion == "none" else 0.0


def bucket_copy(rows: Rows, shape: Extents, plan: Plan, element_bytes: float) -> None:
    """Copy every gradient into its bucket, or out of it: read and write once, one launch per tensor.

    PyTorch's DDP does both unless gradients are views of the buckets (``reducer.cpp``, mark_variable_ready_dense and
    copy_bucket_to_grad); so do Horovod's and MG-WFBP's fusion buffers. A tensor that is not fused is sent in place.
    """
    if plan.fusion != "none":
        rows.memory(np.arange(len(shape.numel)), 2.0 * element_bytes * shape.numel, 1.0)


def plain_fusing(shapes: Shapes, plan: Plan) -> tuple[Array, float]:
    """Fuse by the bytes of uncompressed gradients, up to the bucket size of the plan."""
    return reduce_bytes(plan) * extents(shapes).numel, plan.bucket_bytes


def message_elements(shapes: Shapes, plan: Plan) -> float:
    """Elements of the largest fused message: all of them, a bucket, or the largest tensor where that is more."""
    numel = extents(shapes).numel
    if not len(numel):
        return 0.0
    largest, total = float(numel.max()), float(numel.sum())
    if plan.fusion == "all":
        return total
    bucket = 0.0 if plan.fusion == "none" else plan.bucket_bytes / reduce_bytes(plan)
    return min(total, max(largest, bucket))


def no_stage(stage: str, phase: int | None = None) -> ValueError:
    """For a stage that the method does not have: a fault of the caller, never of the user."""
    return ValueError(f"no work in stage {stage!r}, phase {phase!r}")


# --- low-rank factors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """M (rows x cols) ~ P Q^T with P rows x r and Q cols x r, for the tensors `index`; `rest` is sent as it is."""

    index: Ints
    rest: Ints
    rows: Array
    cols: Array
    r: Array
    rest_numel: Array
    tensors: int

    def spread(self, values: Array, rest: Array | float) -> Array:
        """Values over `index` and over `rest` as one array over all tensors."""
        out = np.zeros(self.tensors)
        out[self.index] = values
        out[self.rest] = rest
        return out


@lru_cache(maxsize=64)
def _factors(shapes: tuple[tuple[int, ...], ...], rank: int, min_rate: float) -> Factors:
    shape = _extents(shapes)
    r = np.minimum(np.minimum(shape.rows, shape.cols), rank)
    chosen = shape.matrix & (r > 0)
    if min_rate > 0.0:
        chosen &= (shape.rows + shape.cols) * r * min_rate < shape.numel
    index, rest = np.flatnonzero(chosen), np.flatnonzero(~chosen)
    return Factors(
        index=index,
        rest=rest,
        rows=shape.rows[index],
        cols=shape.cols[index],
        r=r[index],
        rest_numel=shape.numel[rest],
        tensors=len(shape.numel),
    )


def factors(shapes: Shapes, *, rank: int, min_rate: float = 0.0) -> Factors:
    """Which tensors are factored, and how: r = min(rank, rows, cols).

    min_rate > 0 leaves a tensor alone unless rows·cols > (rows + cols)·r·min_rate.
    """
    return _factors(shapes if isinstance(shapes, tuple) else tuple(shapes), rank, min_rate)


def householder_kernels(r: Array) -> Array:
    """Launches of a thin QR through ``torch.linalg.qr`` on CUDA: 2 r + 8.

    geqrf and orgqr of a panel of r <= 32 columns are unblocked (LAPACK geqr2, org2r): one dependent reflector per
    column each, the rest are copies and workspace. cuSOLVER has no batched orgqr, so equal shapes gain nothing (PyTorch
    issue 143281). A measured check: 128 x 32 takes 179 us, 4096 x 4 takes 74 us (FlagGems pull request 5586).
    """
    return 2.0 * r + 8.0
