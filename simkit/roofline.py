"""Seconds for one operator on one device; every formula takes a column of operators at once.

An operator is a row of `Columns`. Its time is

    t = max(t_math, bytes / (B · f)) + kernels · kernel_s

with t_math from the law of its kind (`matmul_seconds`, `attention_seconds`) and f the fraction of the memory bandwidth
that streaming kernels reach. The constants come from the device's calibration; without one they take the priors of
`simkit.spec.priors`, and the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KINDS = ("memory", "gemm", "conv", "attention", "qr", "attention_grad", "timed")
"""What a row does: streams memory; a matrix product out[m,n] = in[m,k] w[k,n], `batch` copies; a convolution as an
implicit GEMM (m = batch·h·w, n = channels out, k = channels in per group · kernel²); fused attention (m queries, n
keys, batch · heads copies) and its gradient; a thin QR; what was measured and takes k seconds on any device."""
MEMORY, GEMM, CONV, ATTENTION, QR, ATTENTION_GRAD, TIMED = range(len(KINDS))


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


TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64), (16, 64))
"""Output tiles a GEMM library chooses from (rows x columns of out)."""
WIDE_TILES = ((256, 256), (256, 128), (128, 192), (128, 128), (256, 64), (64, 256), (64, 64))
"""The same from Hopper on, whose processors do `WIDE_FLOP_PER_CLOCK` or more and share operands between two blocks."""
WIDE_FLOP_PER_CLOCK = 4096.0
PLAIN_TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (16, 64))
"""The same for plain fp32 arithmetic, at `PLAIN_FLOP_PER_CLOCK` or less: no tensor cores."""
PLAIN_FLOP_PER_CLOCK = 256.0
CORE_TILES = ((128, 128), (64, 64), (16, 64), (4, 64), (1, 64))
"""The same for a core of a CPU, at `CORE_FLOP_PER_CLOCK` or less: a row of `in` alone is no loss, vectors run along
`out`'s columns."""
CORE_FLOP_PER_CLOCK = 64.0
CORE_OPERAND = 4.0
"""`OPERAND` of a core of a CPU, which loads two vectors a clock from its first cache, as many as it multiplies."""
SPLITS = (1, 2)
"""Ways of cutting the inner dimension of a product (split-k)."""
SPLIT_S = 2e-6
"""Seconds of the second kernel that adds the parts of a cut product."""
TAIL = 0.6
"""Share of an unfinished last wave that is lost; 1 = whole waves only, 0 = perfect balance."""
OPERAND = 16.0
"""Relative cost of bringing a tile's operands on chip, 1/e_tile = 1 + OPERAND·(tm + tn)/(tm·tn), where a processor
does at least `OPERAND_FLOP_PER_CLOCK` and on plain arithmetic, which reads operands into registers; on slower tensor
cores less, as the root of their rate, for the same shared memory feeds them."""
OPERAND_FLOP_PER_CLOCK = 2048.0
QUERY_BLOCK = 128.0
"""Queries that one thread block of a fused attention kernel handles (FlashAttention 2 and 3 at head size 128)."""
ATTENTION_GRAD_RATE = 0.8
"""Rate of the gradient of fused attention relative to its forward pass: FlashAttention-2 (arXiv 2307.08691, figures 5
and 6: about 0.8 at head size 128); its 2.5 times more FLOPs are the workload's to count."""
L2_SPEED = 4.0
"""Rate of the second-level cache relative to device memory. All of the constants above are pooled over the operator
tables; `simkit calibrate` fits ceilings, depths and fractions with them fixed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Law:
    """The constants of one device, dtype and software stack, ready for the formulas.

    peak_flops: dense peak of the dtype; ceiling: fraction of it that an endless product with an ideal tile reaches;
    depth: k0, the inner length whose cost equals the start-up of a 128x128 tile; flop_per_clock: of one processor,
    decides tiles and operands; sm_count: processors that share the tiles; memory_Bps: streaming rate (peak times the
    fitted fraction); stream: rate at which products stream, relative to it; attention_ceiling, attention_depth: of
    fused attention; conv: time of a convolution relative to the product of the same shape; elementwise: bytes an eager
    framework really moves per byte counted; kernel_s: device time per launch; split_s: of the second kernel of a split
    product; sustained: clock under load relative to that of the operator tables; compress: (method, seconds of its
    work relative to what `simkit.compressors` counts), where an implementation was measured on the device.
    """

    peak_flops: float
    ceiling: float
    depth: float
    sm_count: float
    memory_Bps: float
    flop_per_clock: float = OPERAND_FLOP_PER_CLOCK
    stream: float = 1.0
    attention_ceiling: float = 0.6
    attention_depth: float = 300.0
    conv: float = 1.0
    elementwise: float = 1.0
    kernel_s: float = 0.0
    split_s: float = SPLIT_S
    sustained: float = 1.0
    element_bytes: float = 2.0
    compress: tuple[tuple[str, float], ...] = ()


# -- the law of matrix products ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _choices(flop_per_clock: float, sm_count: float, depth: float, axes: int) -> tuple[Array, ...]:
    """(tm, tn, splits per processor, splits, start-up, FLOP-equivalents of a wave per inner length, 8 bytes a partial
    sum, second kernel) of everything a library may choose on such a processor; shape (choices, 1, ...)."""
    plain = flop_per_clock <= PLAIN_FLOP_PER_CLOCK
    operand = OPERAND * (1.0 if plain else min(flop_per_clock / OPERAND_FLOP_PER_CLOCK, 1.0) ** 0.5)
    tiles: tuple[tuple[int, int], ...] = PLAIN_TILES
    if not plain:
        tiles = WIDE_TILES if flop_per_clock >= WIDE_FLOP_PER_CLOCK else TILES
    if flop_per_clock <= CORE_FLOP_PER_CLOCK:
        operand, tiles = CORE_OPERAND, CORE_TILES
    tm, tn, split = np.array([(*tile, q) for tile in tiles for q in SPLITS], dtype=float).T
    flops = 2.0 * (tm * tn + operand * (tm + tn)) * sm_count
    cut = split > 1.0
    start = depth * 128.0 / np.sqrt(tm * tn)
    columns = (tm, tn, split / sm_count, split, start, flops, 8.0 * split * cut, cut.astype(float))
    return tuple(c.reshape(-1, *(1,) * axes) for c in columns)


BLOCK = 4096
"""Rows above which choices are tried one after the other, so that intermediate arrays stay in the cache."""


def matmul_seconds(batch: Array, m: Array, n: Array, k: Array, law: Law) -> Array:
    """Seconds of `batch` products out[m,n] = in[m,k] w[k,n] on the arithmetic units alone.

    Minimum over tiles (tm, tn) and splits q of

        w' · SM · 2·tm·tn·(k/q + k0·128/√(tm·tn)) / (peak · ceiling · e_tile),
        w = batch·ceil(m/tm)·ceil(n/tn)·q / SM,    w' = w + TAIL·(ceil(w) - w),
        1/e_tile = 1 + OPERAND·(tm+tn)/(tm·tn), OPERAND less on slow tensor cores,

    plus, for q > 1, the partial sums' way through memory and a second kernel. Shapes: all (..., rows). Tile and wave
    quantisation after NVIDIA's "Matrix Multiplication Background User's Guide"; the k0 ramp and the operand term are
    ours.
    """
    choices = _choices(law.flop_per_clock, law.sm_count, law.depth, m.ndim)
    written = batch * m * n
    if m.size <= BLOCK:
        return np.asarray(np.minimum.reduce(_tried(batch, m, n, k, written, law, *choices)))
    best = np.full(np.broadcast_shapes(written.shape, k.shape), np.inf)
    for choice in zip(*choices, strict=True):
        np.minimum(best, _tried(batch, m, n, k, written, law, *choice), out=best)
    return best


def _tried(batch: Array, m: Array, n: Array, k: Array, written: Array, law: Law, *choice: Array) -> Array:
    """Seconds with the given tiles and splits."""
    tm, tn, share, split, start, flops, partial, cut = choice
    waves = m / tm
    np.ceil(waves, out=waves)
    across = n / tn
    np.ceil(across, out=across)
    waves = waves * across
    waves = waves * (batch * share)
    whole = np.ceil(waves)
    waves *= 1.0 - TAIL
    whole *= TAIL
    waves += whole
    waves = waves * ((k / split + start) * (flops / (law.peak_flops * law.ceiling * law.sustained)))
    waves += written * (partial / law.memory_Bps)
    waves += cut * law.split_s
    return waves


# -- the law of fused attention ----------------------------------------------------------------------------------------


def attention_seconds(batch: Array, m: Array, n: Array, k: Array, law: Law) -> Array:
    """Seconds of fused attention of m queries to n keys, `batch` = samples · heads, on the arithmetic units alone.

        w' · SM · 2·min(m, 128)·(n + s0)·k / (peak · attention_ceiling),    w = batch·ceil(m/128)/SM

    k holds head size and mask (head size + value size, half of it under a causal mask), s0 = `attention_depth`: the
    softmax statistics, the masked halves of diagonal blocks and the start of a block cost as much as s0 keys.
    w' = w + TAIL·(ceil(w) - w), at least 1 where there is work. Shapes: all (..., rows). The form s/(s + s0) and the
    rounds of blocks follow FlashAttention-2 (arXiv 2307.08691, section 3.2).
    """
    waves = batch * np.ceil(m / QUERY_BLOCK) / law.sm_count
    whole = np.ceil(waves)
    waves = np.maximum(waves + TAIL * (whole - waves), np.minimum(whole, 1.0))
    rate = law.peak_flops * law.attention_ceiling * law.sustained
    per_key = waves * (2.0 * law.sm_count / rate) * np.minimum(m, QUERY_BLOCK) * k
    return np.asarray(per_key * (n + law.attention_depth))


def seconds(columns: Columns, law: Law) -> tuple[Array, NDArray[np.bool_]]:
    """Seconds of each operator, and whether arithmetic (rather than memory) bounds it.

    t = max(t_math, bytes/memory_Bps) + kernels·kernel_s; products stream at `law.stream` times memory_Bps, a
    convolution takes `law.conv` times the product of its shape, the gradient of fused attention runs at
    `ATTENTION_GRAD_RATE`, streaming rows move `law.elementwise` times their bytes.
    A thin QR is a chain of dependent small kernels: its `kernels` say how many.
    """
    kinds = columns.kind.tobytes()
    products, factors, fused, gradients, streamed, timed = _rows(kinds, law.conv, law.elementwise, law.stream)
    math_s = np.zeros(np.broadcast_shapes(columns.m.shape, columns.nbytes.shape))
    if products.size:
        batch, m, n, k = (c.take(products, axis=-1) for c in (columns.batch, columns.m, columns.n, columns.k))
        math_s[..., products] = matmul_seconds(batch, m, n, k, law) * factors
    if fused.size:
        batch, m, n, k = (c.take(fused, axis=-1) for c in (columns.batch, columns.m, columns.n, columns.k))
        math_s[..., fused] = attention_seconds(batch, m, n, k, law) * gradients
    if timed.size:
        math_s[..., timed] = columns.k.take(timed, axis=-1)
    memory_s = columns.nbytes * (streamed * (1.0 / (law.memory_Bps * law.sustained)))
    return np.maximum(math_s, memory_s) + columns.kernels * law.kernel_s, math_s > memory_s


Index = NDArray[np.intp]


@lru_cache(maxsize=1024)
def _rows(
    kinds: bytes, conv: float, elementwise: float, stream: float
) -> tuple[Index, Array, Index, Array, Array, Index]:
    """(rows that are products, their factors, rows that are fused attention, theirs, bytes moved per byte counted,
    rows whose seconds are given)."""
    kind = np.frombuffer(kinds, dtype=np.int8)
    products = np.flatnonzero((kind == GEMM) | (kind == CONV))
    fused = np.flatnonzero((kind == ATTENTION) | (kind == ATTENTION_GRAD))
    streamed = np.where(kind == MEMORY, elementwise, 1.0)
    streamed[products] /= stream
    factors = np.where(kind[products] == CONV, conv, 1.0)
    gradients = np.where(kind[fused] == ATTENTION_GRAD, 1.0 / ATTENTION_GRAD_RATE, 1.0)
    return products, factors, fused, gradients, streamed, np.flatnonzero(kind == TIMED)
