"""Recursive halving and doubling, in Bruck's form that holds for any number of ranks.

    all_gather, reduce_scatter    ceil(log2 n) alpha +  (n-1)/n S/B
    all_reduce                  2 ceil(log2 n) alpha + 2(n-1)/n S/B
    all_to_all                    ceil(log2 n) alpha + S/(nB) * sum of the binary digit sums of 0..n-1

In round k of the all-gather every rank passes min(2^k, n - 2^k) blocks to the one 2^k away; the reduce-scatter runs the
same rounds backwards (commutative reduction). For a power of two these are the costs of recursive doubling.
Sources: J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
IEEE TPDS 8, 1997; Thakur et al. 2005, sections 4.1-4.4; J. Träff, "Optimal, non-pipelined reduce-scatter and allreduce
algorithms", 2024 (any n without the fold of Thakur's section 4.4).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simkit.collectives._common import Num, Round, bound_bytes, check, log2_ceil, shift

OPS: frozenset[str] = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all"})
_BITS = 40


def steps(op: str, ranks: Num) -> Num:
    """Latency steps one after another. Raises InputError for an op outside OPS."""
    check(op, OPS, "halving-doubling")
    return log2_ceil(ranks) * (2 if op == "all_reduce" else 1)


def _with_bit(ranks: Num, k: int) -> Num:
    """How many of 0..ranks-1 have bit k set."""
    return ranks // 2 ** (k + 1) * 2**k + np.maximum(ranks % 2 ** (k + 1) - 2**k, 0)


def wire_bytes(op: str, *, ranks: Num, nbytes: Num) -> Num:
    """Bytes each rank sends."""
    check(op, OPS, "halving-doubling")
    if op == "all_to_all":
        return sum(_with_bit(ranks, k) for k in range(_BITS)) * nbytes / ranks
    return bound_bytes(op, ranks=ranks, nbytes=nbytes)


def seconds(op: str, *, ranks: Num, nbytes: Num, alpha_s: Num, Bps: Num) -> Num:
    """steps * alpha + wire / Bps, in s."""
    return steps(op, ranks) * alpha_s + wire_bytes(op, ranks=ranks, nbytes=nbytes) / Bps


def rounds(op: str, *, ranks: int, nbytes: float) -> Iterable[Round]:
    """Distances halve in the reduce-scatter and double in the all-gather."""
    check(op, OPS, "halving-doubling")
    block = nbytes / ranks
    levels = range(int(log2_ceil(ranks)))
    if op == "all_to_all":
        for k in levels:
            yield shift(ranks, 2**k, int(_with_bit(ranks, k)) * block)
        return
    if op in ("all_reduce", "reduce_scatter"):
        for k in reversed(levels):
            yield shift(ranks, 2**k, min(2**k, ranks - 2**k) * block)
    if op in ("all_reduce", "all_gather"):
        for k in levels:
            yield shift(ranks, -(2**k), min(2**k, ranks - 2**k) * block)
