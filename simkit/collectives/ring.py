"""Ring algorithms: neighbours pass blocks round; bandwidth-optimal, latency linear in the ranks.

    all_reduce       2(n-1) alpha + 2(n-1)/n S/B      reduce-scatter, then all-gather
    reduce_scatter    (n-1) alpha +  (n-1)/n S/B      all_gather the same
    all_to_all        (n-1) alpha +  (n-1)/n S/B      pairwise: in round k every rank sends to the one k further
    broadcast, reduce (n-1) alpha +          S/B      a chain, pipelined in small chunks
    send_recv               alpha +          S/B

Sources: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69, 2009;
Thakur et al. 2005 (pairwise exchange); NCCL (chains). Every term vanishes at n = 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from simkit.collectives._common import Num, Round, bound_bytes, check, pairs, shift, some

OPS: frozenset[str] = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"}
)


def steps(op: str, ranks: Num) -> Num:
    """Latency steps one after another. Raises InputError for an op outside OPS."""
    check(op, OPS, "ring")
    if op == "send_recv":
        return some(ranks)
    return (ranks - 1) * (2 if op == "all_reduce" else 1)


def wire_bytes(op: str, *, ranks: Num, nbytes: Num) -> Num:
    """Bytes the busiest rank sends: the bandwidth bound itself."""
    check(op, OPS, "ring")
    return bound_bytes(op, ranks=ranks, nbytes=nbytes)


def seconds(op: str, *, ranks: Num, nbytes: Num, alpha_s: Num, Bps: Num) -> Num:
    """steps * alpha + wire / Bps, in s."""
    return steps(op, ranks) * alpha_s + wire_bytes(op, ranks=ranks, nbytes=nbytes) / Bps


def rounds(op: str, *, ranks: int, nbytes: float) -> Iterable[Round]:
    """The rounds an event simulation replays; none at one rank."""
    check(op, OPS, "ring")
    if ranks > 1:
        yield from _rounds(op, ranks, nbytes)


def _rounds(op: str, ranks: int, nbytes: float) -> Iterable[Round]:
    if op == "all_to_all":
        for k in range(1, ranks):
            yield shift(ranks, k, nbytes / ranks)
    elif op in ("broadcast", "reduce"):
        chain = range(ranks)
        heads, tails = (chain[:-1], chain[1:]) if op == "broadcast" else (chain[1:], chain[:-1])
        yield pairs(heads, tails, nbytes, hops=ranks - 1)
    elif op == "send_recv":
        yield pairs([0], [1], nbytes)
    else:
        yield shift(ranks, 1, nbytes / ranks, repeat=int(steps(op, ranks)))
