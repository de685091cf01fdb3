"""Seconds for one operator on one device; every formula takes a column of operators at once.

An operator is a row of `Columns`. Its time is

    t = max(flops / (peak · e), bytes / (B · f)) + kernels · kernel_s

with e the fraction of the dense peak that its shape reaches (tiles, waves, depth) and f the fraction of the memory
bandwidth that streaming kernels reach. e and f come from the device's calibration; without one they take the priors
named in `PRIORS`, and the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KINDS = ("memory", "gemm", "conv", "attention", "qr")
"""What a row does: streams memory; a matrix product out[m,n] = in[m,k] w[k,n], `batch` copies; a convolution as an
implicit GEMM (m = batch·h·w, n = channels out, k = channels in per group · kernel²); fused attention; a thin QR."""
MEMORY, GEMM, CONV, ATTENTION, QR = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Operators as a struct of arrays; the last axis is the operator, axes before it are sweep points.

    kind: int codes of KINDS, shape (rows,). batch, m, n, k: of the matrix product, 0 where there is none.
    nbytes: bytes moved to and from device memory. kernels: launches. fp32: rows whose arithmetic stays fp32 under
    mixed precision (boolean). flops = 2·batch·m·n·k.
    """

    kind: NDArray[np.int8]
    batch: Array
    m: Array
    n: Array
    k: Array
    nbytes: Array
    kernels: Array

    @property
    def flops(self) -> Array:
        return 2.0 * self.batch * self.m * self.n * self.k

    def __len__(self) -> int:
        return int(self.kind.shape[-1])


def concat(parts: list[Columns]) -> Columns:
    """The rows of `parts`, one after the other."""
    return Columns(
        kind=np.concatenate([p.kind for p in parts], axis=-1),
        **{
            c: np.concatenate([getattr(p, c) for p in parts], axis=-1)
            for c in ("batch", "m", "n", "k", "nbytes", "kernels")
        },
    )


# -- the law of matrix products ----------------------------------------------------------------------------------------

TILES: Array = np.array(
    [
        (256.0, 128.0),
        (128.0, 256.0),
        (128.0, 128.0),
        (128.0, 64.0),
        (64.0, 128.0),
        (64.0, 64.0),
        (32.0, 64.0),
        (16.0, 64.0),
    ]
)
"""Output tiles a GEMM library chooses from (rows x columns of out)."""
SPLITS: Array = np.array([1.0, 2.0, 4.0, 8.0])
"""Ways of cutting the inner dimension (split-k)."""
TAIL = 0.6
"""Share of an unfinished last wave that is lost; 1 = whole waves only, 0 = perfect balance. Pooled over the operator
tables of 20 devices (`simkit calibrate` refits the ceilings with it fixed)."""
OPERAND = 0.5 * 32.0
"""Relative cost of bringing a tile's operands on chip: 1/e_tile = 1 + OPERAND·(tm + tn)/(tm·tn). Pooled likewise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """The constants of one device, dtype and software stack, ready for the formulas.

    peak_flops: dense peak of the dtype; ceiling: fraction of it that an endless product with an ideal tile reaches;
    depth: k0, the inner length whose cost equals the start-up of a tile; sm_count: processors that share the tiles;
    memory_Bps: streaming rate (peak times the fitted fraction); conv: time of a convolution over that of the product of
    the same shape; elementwise: bytes an eager framework really moves per byte counted; kernel_s: device time a launch.
    evidence: {constant: datasheet | fitted | end-to-end | assumed}.
    """

    peak_flops: float
    ceiling: float
    depth: float
    sm_count: float
    memory_Bps: float
    conv: float = 1.0
    elementwise: float = 1.0
    kernel_s: float = 0.0
    sustained: float = 1.0
    element_bytes: float = 2.0


def matmul_seconds(batch: Array, m: Array, n: Array, k: Array, law: Law) -> Array:
    """Seconds of `batch` products out[m,n] = in[m,k] w[k,n] on the arithmetic units alone.

    Minimum over tiles (tm, tn) and splits q of

        w' · SM · 2·tm·tn·(k/q + k0) / (peak · ceiling · e_tile),    w = batch·ceil(m/tm)·ceil(n/tn)·q / SM,
        w' = w + TAIL·(ceil(w) - w),    e_tile = 1 / (1 + OPERAND·(tm+tn)/(tm·tn)),

    plus, for q > 1, the partial sums' way through memory. Shapes: all (..., rows). Tile and wave quantisation after
    NVIDIA's "Matrix Multiplication Background User's Guide"; the k0 ramp and the operand term are ours.
    """
    shape = (len(TILES), len(SPLITS)) + (1,) * m.ndim
    tm, tn = (TILES[:, i].reshape((-1, 1) + (1,) * m.ndim) for i in (0, 1))
    split = SPLITS.reshape((1, -1) + (1,) * m.ndim)
    tiles = batch * np.ceil(m / tm) * np.ceil(n / tn)
    waves = tiles * split / law.sm_count
    waves = waves + TAIL * (np.ceil(waves) - waves)
    per_wave = law.sm_count * 2.0 * (tm * tn + OPERAND * (tm + tn)) / (law.peak_flops * law.ceiling * law.sustained)
    seconds = waves * per_wave * (k / split + law.depth)
    partial = (split > 1.0) * split * (batch * m * n) * (8.0 / law.memory_Bps)
    return np.asarray((seconds + partial).reshape((shape[0] * shape[1], *m.shape)).min(axis=0))


def seconds(columns: Columns, law: Law) -> tuple[Array, NDArray[np.bool_]]:
    """Seconds of each operator, and whether arithmetic (rather than memory) bounds it.

    t = max(t_math, bytes/memory_Bps) + kernels·kernel_s; t_math from `matmul_seconds`, for convolutions x `law.conv`;
    fused attention at the ceiling of a product of its depth; streaming rows move `law.elementwise` times their bytes.
    A thin QR is a chain of dependent small kernels: its `kernels` say how many.
    """
    kind = columns.kind
    products = np.flatnonzero((kind == GEMM) | (kind == CONV) | (kind == ATTENTION))
    math_s = np.zeros(np.broadcast_shapes(columns.m.shape, columns.nbytes.shape))
    if products.size:
        batch, m, n, k = (
            np.maximum(c[..., products], tiny)
            for c, tiny in ((columns.batch, 0.0), (columns.m, 0.0), (columns.n, 0.0), (columns.k, 0.0))
        )
        t = matmul_seconds(batch, m, n, k, law)
        math_s[..., products] = t * np.where(kind[products] == CONV, law.conv, 1.0)
    memory_s = columns.nbytes * np.where(kind == MEMORY, law.elementwise, 1.0) / (law.memory_Bps * law.sustained)
    return np.maximum(math_s, memory_s) + columns.kernels * law.kernel_s, math_s > memory_s
