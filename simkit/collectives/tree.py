"""Binomial trees, store and forward: logarithmic latency, the whole message at every level; for short messages.

    broadcast, reduce   ceil(log2 n) (alpha + S/B)
    all_reduce        2 ceil(log2 n) (alpha + S/B)     reduce to rank 0, then broadcast

Source: Thakur et al. 2005, section 4 (binomial tree broadcast and reduce). Vanishes at n = 1 because log2 1 = 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from simkit.collectives._common import Num, Round, check, log2_ceil, pairs

OPS: frozenset[str] = frozenset({"all_reduce", "broadcast", "reduce"})


def steps(op: str, ranks: Num) -> Num:
    """Latency steps one after another. Raises InputError for an op outside OPS."""
    check(op, OPS, "tree")
    return log2_ceil(ranks) * (2 if op == "all_reduce" else 1)


def wire_bytes(op: str, *, ranks: Num, nbytes: Num) -> Num:
    """Bytes on the critical path, S a level: what the root sends in a broadcast (or receives in a reduce)."""
    return steps(op, ranks) * nbytes


def seconds(op: str, *, ranks: Num, nbytes: Num, alpha_s: Num, Bps: Num) -> Num:
    """steps * (alpha + S/Bps), in s."""
    return steps(op, ranks) * (alpha_s + nbytes / Bps)


def rounds(op: str, *, ranks: int, nbytes: float) -> Iterable[Round]:
    """Level by level; in a broadcast the ranks below 2^k which have the data send it 2^k further."""
    check(op, OPS, "tree")
    levels = range(int(log2_ceil(ranks)))
    if op in ("all_reduce", "reduce"):
        for k in reversed(levels):
            low = range(min(2**k, ranks - 2**k))
            yield pairs((r + 2**k for r in low), low, nbytes)
    if op in ("all_reduce", "broadcast"):
        for k in levels:
            low = range(min(2**k, ranks - 2**k))
            yield pairs(low, (r + 2**k for r in low), nbytes)
