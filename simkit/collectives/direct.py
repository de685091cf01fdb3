"""Direct exchange: every rank talks to all its peers at once; fewest steps, for a switch without congestion.

    all_reduce                              2 alpha + 2(n-1)/n S/B    each rank reduces its block, then hands it out
    reduce_scatter, all_gather, all_to_all    alpha +  (n-1)/n S/B
    broadcast, reduce                         alpha +    (n-1) S/B    the root serves everybody
    send_recv                                 alpha +          S/B

n - 1 messages leave at once and share the rank's rate, so the bandwidth term is that of the ring: on a switch a direct
all-reduce saves latency, never bytes. Vanishes at n = 1 with min(n-1, 1). Source: Chan et al. 2007.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simkit.collectives._common import Num, Round, bound_bytes, check, pairs, some

OPS: frozenset[str] = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"}
)


def steps(op: str, ranks: Num) -> Num:
    """Latency steps one after another. Raises InputError for an op outside OPS."""
    check(op, OPS, "direct")
    return some(ranks) * (2 if op == "all_reduce" else 1)


def wire_bytes(op: str, *, ranks: Num, nbytes: Num) -> Num:
    """Bytes the busiest rank sends (reduce: receives)."""
    check(op, OPS, "direct")
    if op in ("broadcast", "reduce"):
        return (ranks - 1) * nbytes
    return bound_bytes(op, ranks=ranks, nbytes=nbytes)


def seconds(op: str, *, ranks: Num, nbytes: Num, alpha_s: Num, Bps: Num) -> Num:
    """steps * alpha + wire / Bps, in s."""
    return steps(op, ranks) * alpha_s + wire_bytes(op, ranks=ranks, nbytes=nbytes) / Bps


def rounds(op: str, *, ranks: int, nbytes: float) -> Iterable[Round]:
    """All pairs at once; the all-reduce does it twice."""
    check(op, OPS, "direct")
    if ranks > 1:
        yield from _rounds(op, ranks, nbytes)


def _rounds(op: str, ranks: int, nbytes: float) -> Iterable[Round]:
    others = range(1, ranks)
    if op == "broadcast":
        yield pairs([0] * (ranks - 1), others, nbytes)
    elif op == "reduce":
        yield pairs(others, [0] * (ranks - 1), nbytes)
    elif op == "send_recv":
        yield pairs([0], [1], nbytes)
    else:
        src, dst = np.nonzero(~np.eye(ranks, dtype=bool))
        yield Round(src=src, dst=dst, nbytes=nbytes / ranks, repeat=2 if op == "all_reduce" else 1)
