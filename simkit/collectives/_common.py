"""What the collective algorithms share: the round a simulation replays, lower bounds, small array helpers.

The cost model is Hockney's: a message of m bytes takes ``alpha_s + m / Bps``; a rank sends and receives at the same
time, each at ``Bps`` (R. Hockney, Parallel Computing 20, 1994; R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
collective communication operations in MPICH", IJHPCA 19, 2005). Reduction arithmetic is left out: it is hidden behind
the transfers on a GPU, and a fitted rate contains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import unknown

Num = Any  # float, int or a numpy array of them: every formula takes either
ALL_OPS: tuple[str, ...] = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Transfers that start together; the next round of a rank starts when its own transfers of this one are done.

    src, dst: rank numbers, one entry a transfer; nbytes: bytes of every transfer; repeat: how many times in a row;
    hops: messages of a round pass `hops` ranks in a pipeline of small chunks, so the round costs ``hops * alpha`` of
    latency but its bytes only once (NCCL's chains and trees). Which link a transfer takes
    follows from where its two ranks sit.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: float
    repeat: int = 1
    hops: int = 1


def shift(ranks: int, by: int, nbytes: float, *, repeat: int = 1) -> Round:
    """The symmetric round: every rank r sends nbytes to (r + by) mod ranks."""
    src = np.arange(ranks, dtype=np.int64)
    return Round(src=src, dst=(src + by) % ranks, nbytes=nbytes, repeat=repeat)


def pairs(src: Iterable[int], dst: Iterable[int], nbytes: float, *, hops: int = 1) -> Round:
    """A round of explicitly listed transfers."""
    return Round(src=np.array([*src], dtype=np.int64), dst=np.array([*dst], dtype=np.int64), nbytes=nbytes, hops=hops)


def some(ranks: Num) -> Num:
    """0 for one rank and 1 for more: what happens once, however many take part."""
    if isinstance(ranks, int):
        return min(ranks - 1, 1)
    return np.minimum(ranks - 1, 1)


def log2_ceil(ranks: Num) -> Num:
    """ceil(log2 ranks), exact for integers up to 2**53: rounds of a binomial tree, of recursive doubling, of Bruck."""
    mantissa, exponent = np.frexp(np.asarray(ranks, dtype=np.float64))
    return (exponent - (mantissa == 0.5))[()]


def log2_floor(ranks: Num) -> Num:
    """floor(log2 ranks): the height of a complete binary tree of that many nodes."""
    if isinstance(ranks, int):
        return max(ranks, 1).bit_length() - 1
    return (np.frexp(np.asarray(ranks, dtype=np.float64))[1] - 1)[()]


def bound_bytes(op: str, *, ranks: Num, nbytes: Num) -> Num:
    """Bytes the busiest rank must send or receive whatever the algorithm: the bandwidth bound times Bps.

    all_reduce 2(n-1)/n S; reduce_scatter, all_gather, all_to_all (n-1)/n S; broadcast, reduce, send_recv S; 0 at n = 1.
    Source: E. Chan et al., "Collective communication: theory, practice, and experience", CCPE 19, 2007, table 1.
    Raises InputError for an unknown op.
    """
    share = (ranks - 1) / ranks
    if op == "all_reduce":
        return 2 * share * nbytes
    if op in ("reduce_scatter", "all_gather", "all_to_all"):
        return share * nbytes
    check(op, ALL_OPS, "collective")
    return some(ranks) * nbytes


def check(op: str, ops: Iterable[str], algorithm: str) -> None:
    """Raises InputError when `op` is none of `ops`."""
    if op not in ops:
        raise unknown(f"operation of {algorithm}", op, ops, key="op")
