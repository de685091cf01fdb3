"""Two tiers: inside the node first, then one ring per local rank ("rail") between nodes, then inside again.

With g ranks a node, N = n/g nodes, (a, B) between nodes and (a', B') inside, B being what *one rank* gets of the NICs:

    all_reduce      2(g-1) a' + 2(g-1)/g S/B' + 2(N-1) a + 2(N-1)/N (S/g)/B
    reduce_scatter   (g-1) a' +  (g-1)/g S/B' +  (N-1) a +  (N-1)/N (S/g)/B     all_gather the same, the other way round
    all_to_all       (g-1) a' +  (g-1)/g S/B' +  (N-1) a +  (N-1)/N  S   /B     regroup in the node, then by rail
    broadcast        (g-1) a' + [g>1] S/B'    +  (N-1) a + [N>1]     S   /B     leaders' chain, then a chain in the node

Both tiers vanish by themselves at degree 1. A node sends 2(N-1)/N S in an all-reduce, against 2(n-1)/n S by a flat
ring: with two nodes of eight this is S against 1.875 S, so the bus bandwidth may exceed the NIC.
Sources: H. Mikami et al., "Massively distributed SGD" (2D-torus all-reduce), 2018; M. Cho et al., BlueConnect, MLSys
2019.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from simkit.collectives import ring
from simkit.collectives._common import Num, Round, check
from simkit.errors import InputError

OPS: frozenset[str] = frozenset({"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"})
# Which share of the buffer a rank carries over its rail: S/g where the node has divided the work, else all of it.
_SPLIT = frozenset({"all_reduce", "reduce_scatter", "all_gather"})


def _outer(op: str, *, ranks: Num, nbytes: Num, inner_ranks: Num) -> tuple[Num, Num]:
    return ranks / inner_ranks, nbytes / inner_ranks if op in _SPLIT else nbytes


def steps(op: str, ranks: Num, *, inner_ranks: Num = 1) -> Num:
    """Latency steps between nodes. Raises InputError for an op outside OPS."""
    check(op, OPS, "hierarchical")
    return ring.steps(op, ranks / inner_ranks)


def wire_bytes(op: str, *, ranks: Num, nbytes: Num, inner_ranks: Num = 1) -> Num:
    """Bytes the busiest rank sends over both tiers."""
    check(op, OPS, "hierarchical")
    nodes, share = _outer(op, ranks=ranks, nbytes=nbytes, inner_ranks=inner_ranks)
    inner = ring.wire_bytes(op, ranks=inner_ranks, nbytes=nbytes)
    return inner + ring.wire_bytes(op, ranks=nodes, nbytes=share)


def seconds(
    op: str,
    *,
    ranks: Num,
    nbytes: Num,
    alpha_s: Num,
    Bps: Num,
    inner_ranks: Num = 1,
    inner_alpha_s: Num = 0.0,
    inner_Bps: Num = math.inf,
) -> Num:
    """The inner collective plus the outer one, in s; Bps is one rank's share of the node's NICs."""
    check(op, OPS, "hierarchical")
    nodes, share = _outer(op, ranks=ranks, nbytes=nbytes, inner_ranks=inner_ranks)
    inner = ring.seconds(op, ranks=inner_ranks, nbytes=nbytes, alpha_s=inner_alpha_s, Bps=inner_Bps)
    return inner + ring.seconds(op, ranks=nodes, nbytes=share, alpha_s=alpha_s, Bps=Bps)


def rounds(op: str, *, ranks: int, nbytes: float, inner_ranks: int = 1) -> Iterable[Round]:
    """Ranks are numbered node by node. Raises InputError when the nodes are not of equal size."""
    check(op, OPS, "hierarchical")
    if ranks % inner_ranks:
        raise InputError(f"does not divide {ranks} ranks", key="inner_ranks", value=inner_ranks)
    nodes, share = _outer(op, ranks=ranks, nbytes=nbytes, inner_ranks=inner_ranks)
    leaders = op in ("broadcast", "reduce")
    outer = [_spread(r, inner_ranks, leaders) for r in ring.rounds(op, ranks=int(nodes), nbytes=share)]
    inner = [_repeat_in_nodes(r, int(nodes), inner_ranks) for r in ring.rounds(op, ranks=inner_ranks, nbytes=nbytes)]
    if op == "all_reduce":
        half = [replace(r, repeat=r.repeat // 2) for r in inner]
        return [*half, *outer, *half]
    return [*outer, *inner] if op in ("all_gather", "broadcast") else [*inner, *outer]


def _spread(one: Round, inner_ranks: int, leaders: bool) -> Round:
    """A round between nodes, done on every rail at once, or by the nodes' first ranks alone."""
    rail = np.arange(1 if leaders else inner_ranks)
    src = (one.src[:, None] * inner_ranks + rail).ravel()
    dst = (one.dst[:, None] * inner_ranks + rail).ravel()
    return replace(one, src=src, dst=dst)


def _repeat_in_nodes(one: Round, nodes: int, inner_ranks: int) -> Round:
    """A round of one node, done in all of them at once."""
    first = np.arange(nodes)[:, None] * inner_ranks
    return replace(one, src=(first + one.src).ravel(), dst=(first + one.dst).ravel())
