"""The placement problem as arrays, and the dynamic programme that solves a chain.

A stage that holds units i..j-1 costs peer k, per micro-batch,

    T_k(i, j) = max( compute_k(i, j) · slow_k,  (act(j) + grad(i)) / up_k,  (act(i) + grad(j)) / down_k )

and needs  states(i, j) + in_flight_k · kept(i, j)  bytes; act, grad: bytes of what crosses a cut forward and backward.
Since a message takes bytes/min(up, down) = max(bytes/up, bytes/down), the slowest of all T is the slowest of all peers'
own, and the chain is solved exactly by

    best_k(j) = min over i <= j of max(best_{k-1}(i), T_k(i, j)),      T_k(j, j) = 0: peer k is left out

in O(peers · units²). Source: the bottleneck objective of FusionAI (arXiv 2309.01172) and of PipeDream's partitioner
(arXiv 1806.03377, section 3.2); S. Bokhari, "Partitioning problems in parallel, pipelined and distributed computing"
(IEEE ToC 1988) for chains on chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Held:
    """Peer number `peer` of the problem holds units begin..end-1."""

    peer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The chains, in order, and the peers that are left over."""

    pipelines: tuple[tuple[Held, ...], ...]
    spare: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What is to be placed. n units, c kinds of device, P peers.

    compute_s: (c, n+1, n+1), forward and backward of units i..j-1 of one micro-batch; state_bytes: (c, n+1, n+1);
    kept_bytes: (n+1, n+1), activations of one micro-batch. cut_bytes: (n+1,) what crosses the cut before unit j, one
    way, on the wire; 0 at both ends. kind, slow, room_bytes, up_Bps, down_Bps: (P,): the kind of each peer, its time
    over that of its kind, what it can hold, its line. region: where each peer is. in_flight: micro-batches that a stage
    holds by its distance from the end (1 = last): (P+1,), entry 0 unused. seed: of the random placement.
    depth: the most peers a chain may have; forced: none of a chain's peers may be left out.
    """

    compute_s: Array
    state_bytes: Array
    kept_bytes: Array
    cut_bytes: Array
    kind: Ints
    slow: Array
    room_bytes: Array
    up_Bps: Array
    down_Bps: Array
    region: tuple[str, ...]
    in_flight: Array
    seed: int = 0
    depth: int = 10**9
    forced: bool = False

    @property
    def units(self) -> int:
        return len(self.cut_bytes) - 1

    @cached_property
    def both_bytes(self) -> Array:
        """(n+1, n+1) what a stage sends in both directions; 0 on the diagonal."""
        both = self.cut_bytes[None, :] + self.cut_bytes[:, None]
        np.fill_diagonal(both, 0.0)
        return np.asarray(both)

    @cached_property
    def forbidden(self) -> Array:
        """inf below the diagonal (and on it, where nobody may be left out), 0 above it."""
        n = len(self.cut_bytes)
        return np.where(np.tri(n, n, 0 if self.forced else -1, dtype=bool), np.inf, 0.0)

    @property
    def most(self) -> int:
        """The most peers that a chain can use."""
        return min(self.units, self.depth)

    @property
    def peers(self) -> int:
        return len(self.kind)

    @cached_property
    def line_Bps(self) -> Array:
        """The slower direction of each peer's line."""
        return np.minimum(self.up_Bps, self.down_Bps)

    @cached_property
    def speed(self) -> Array:
        """Whole micro-batches a second that each peer could compute alone."""
        return np.asarray(1.0 / (self.compute_s[self.kind, 0, -1] * self.slow))

    @cached_property
    def alike(self) -> Ints:
        """A number per peer; peers with the same number are the same."""
        rows = np.stack([self.kind, self.slow, self.room_bytes, self.up_Bps, self.down_Bps], axis=1)
        return np.asarray(np.unique(rows, axis=0, return_inverse=True)[1]).ravel()


def stage_cost(problem: Problem, peer: int, behind: int) -> Array:
    """(n+1, n+1) T_k(i, j) of a peer with `behind` stages from it to the end, itself included; inf where i > j or where
    the memory does not suffice; 0 on the diagonal, where the peer is left out."""
    kind = int(problem.kind[peer])
    held = problem.state_bytes[kind] + problem.in_flight[min(behind, len(problem.in_flight) - 1)] * problem.kept_bytes
    return np.where(held <= problem.room_bytes[peer], _seconds(problem, peer), np.inf)


def _seconds(problem: Problem, peer: int) -> Array:
    """The stage cost whatever the memory; the diagonal needs none, since nothing is held there."""
    cost = problem.compute_s[int(problem.kind[peer])] * problem.slow[peer]
    both = problem.both_bytes
    cost = np.maximum(cost, both * (1.0 / min(problem.up_Bps[peer], problem.down_Bps[peer])))
    found: Array = cost + problem.forbidden
    return found


def solve_chain(problem: Problem, order: Sequence[int], *, costs: dict[tuple[int, int], Array] | None = None
                ) -> tuple[float, tuple[Held, ...]]:
    """(slowest stage in seconds, the chain) of the best cut of all units over `order`; inf where none fits.

    costs: stage costs already worked out, by (kind of peer, stages behind), shared between calls.
    """
    known = costs if costs is not None else {}
    base: dict[int, Array] = {}
    alike = problem.alike
    n = problem.units
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choice: list[Ints] = []
    for position, peer in enumerate(order):
        key = int(alike[peer]), int(problem.in_flight[min(len(order) - position, len(problem.in_flight) - 1)])
        if key not in known:
            if key[0] not in base:
                base[key[0]] = _seconds(problem, peer)
            held = problem.state_bytes[int(problem.kind[peer])] + float(key[1]) * problem.kept_bytes
            known[key] = np.where(held <= problem.room_bytes[peer], base[key[0]], np.inf)
        reached = np.maximum(best[:, None], known[key])
        from_where = reached.argmin(axis=0)
        best = reached[from_where, np.arange(n + 1)]
        choice.append(from_where)
    if not np.isfinite(best[n]):
        return float("inf"), ()
    chain: list[Held] = []
    at = n
    for peer, came in zip(reversed(order), reversed(choice), strict=True):
        begin = int(came[at])
        if begin < at:
            chain.append(Held(int(peer), begin, at))
        at = begin
    return float(best[n]), tuple(reversed(chain))


def bottleneck(problem: Problem, chain: Sequence[Held]) -> float:
    """The slowest stage of a chain in seconds, whatever its memory."""
    worst = 0.0
    for held in chain:
        cut = float(problem.cut_bytes[held.begin] + problem.cut_bytes[held.end])
        line = cut / float(problem.line_Bps[held.peer])
        worst = max(worst, float(problem.compute_s[problem.kind[held.peer], held.begin, held.end]
                                 * problem.slow[held.peer]), line)  # fmt: skip
    return worst


def split(peers: Sequence[int], pipelines: int, *, most: int) -> tuple[list[list[int]], list[int]]:
    """(equal runs of consecutive peers, the rest): at most `most` to a run."""
    each = min(len(peers) // pipelines, most)
    runs = [list(map(int, peers[i * each : (i + 1) * each])) for i in range(pipelines)]
    return runs, list(map(int, peers[pipelines * each :]))


def dealt(peers: Sequence[int], pipelines: int, *, most: int) -> tuple[list[list[int]], list[int]]:
    """Peers handed out one at a time, to and fro, so that every run gets as many good ones; the rest is left over."""
    each = min(len(peers) // pipelines, most)
    taken = list(map(int, peers[: each * pipelines]))
    runs: list[list[int]] = [[] for _ in range(pipelines)]
    for turn in range(each):
        row = taken[turn * pipelines : (turn + 1) * pipelines]
        for run, peer in zip(runs if turn % 2 == 0 else runs[::-1], row, strict=True):
            run.append(peer)
    return runs, list(map(int, peers[each * pipelines :]))


def spares(problem: Problem, chains: Sequence[Sequence[Held]]) -> tuple[int, ...]:
    """The peers that no chain uses."""
    used = {held.peer for chain in chains for held in chain}
    return tuple(p for p in range(problem.peers) if p not in used)


def at_shares(total: int, weights: Array) -> list[int]:
    """`total` units cut in proportion to `weights`, at least one each: the ends of the runs."""
    edges = np.round(np.cumsum(weights) / weights.sum() * total).astype(int)
    count = len(weights)
    for i in range(count):
        low = (edges[i - 1] if i else 0) + 1
        edges[i] = min(max(edges[i], low), total - (count - 1 - i))
    return [int(e) for e in edges]


def chained(peers: Sequence[int], ends: Sequence[int]) -> tuple[Held, ...]:
    """Consecutive runs of units that end at `ends`."""
    begins = [0, *ends[:-1]]
    return tuple(Held(p, a, b) for p, a, b in zip(peers, begins, ends, strict=True))
