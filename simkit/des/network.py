"""Event simulation of collectives: transfers as fluid flows with max-min fair sharing, and a replay of whole steps.

`run` replays the rounds of an algorithm rank by rank: a transfer starts when both its ranks have finished their
previous round, waits hops * alpha, and then moves at its max-min fair share of the ports it crosses (D. Bertsekas,
R. Gallager, "Data Networks", section 6.5.2: progressive filling). With equal ports and no other traffic this is the
closed form of the algorithm. `replay` is the coarse form for training steps: an event per rank and collective.
The queue is a plain heap: simpy costs 4 to 20 times as much for the same semantics.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simkit import plugins
from simkit.collectives._common import Round
from simkit.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SAME = 1e-12  # relative distance below which two events are one


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ports and nodes. Ranks of one node talk through their inner ports, others through outer ports and node NICs.

    node: node of each rank; up_Bps, down_Bps: outer ports of each rank; inner_Bps: inner port of each rank, each way;
    node_Bps: NICs of a node, each way; alpha_s, inner_alpha_s: latency of a message.
    """

    node: Ints
    up_Bps: Floats
    down_Bps: Floats
    inner_Bps: Floats
    node_Bps: Floats
    alpha_s: float
    inner_alpha_s: float = 0.0

    @property
    def ranks(self) -> int:
        return len(self.node)

    def capacities(self) -> Floats:
        """All ports in one vector: up, down, inner out, inner in, node out, node in, and one without limit."""
        parts = (self.up_Bps, self.down_Bps, self.inner_Bps, self.inner_Bps, self.node_Bps, self.node_Bps, [math.inf])
        return np.concatenate(parts)

    def routes(self, src: Ints, dst: Ints) -> Ints:
        """The four ports each transfer crosses, as indices into `capacities`; unused places name the free port."""
        n, nodes = self.ranks, len(self.node_Bps)
        free = np.full_like(src, 4 * n + 2 * nodes)
        local = self.node[src] == self.node[dst]
        out = np.where(local, 2 * n + src, src)
        into = np.where(local, 3 * n + dst, n + dst)
        node_out = np.where(local, free, 4 * n + self.node[src])
        node_in = np.where(local, free, 4 * n + nodes + self.node[dst])
        return np.stack([out, into, node_out, node_in], axis=1)

    def latencies(self, src: Ints, dst: Ints) -> Floats:
        """Latency of one message of each transfer, in s."""
        return np.where(self.node[src] == self.node[dst], self.inner_alpha_s, self.alpha_s)


def star(ranks: int, *, Bps: float | Sequence[float], alpha_s: float) -> Topology:
    """Ranks on one switch that is never the bottleneck; Bps for all or for each."""
    port = np.broadcast_to(np.asarray(Bps, dtype=np.float64), (ranks,)).copy()
    free = np.full(ranks, math.inf)
    return Topology(node=np.arange(ranks), up_Bps=port, down_Bps=port, inner_Bps=free, node_Bps=free, alpha_s=alpha_s)


def tiers(
    *,
    nodes: int,
    per_node: int,
    alpha_s: float,
    inner_alpha_s: float,
    inner_Bps: float,
    rank_Bps: float = math.inf,
    node_Bps: float = math.inf,
) -> Topology:
    """Equal nodes: rank_Bps limits a rank's way out of its node, node_Bps all ranks of the node together."""
    ranks = nodes * per_node
    return Topology(
        node=np.repeat(np.arange(nodes), per_node),
        up_Bps=np.full(ranks, rank_Bps),
        down_Bps=np.full(ranks, rank_Bps),
        inner_Bps=np.full(ranks, inner_Bps),
        node_Bps=np.full(nodes, node_Bps),
        alpha_s=alpha_s,
        inner_alpha_s=inner_alpha_s,
    )


def fair_rates(routes: Ints, capacities: Floats) -> Floats:
    """Max-min fair byte/s of flows, given the ports each crosses: the fullest port is shared out first, and so on."""
    rates = np.full(len(routes), math.inf)
    open_flows = np.arange(len(routes))
    left = capacities.copy()
    while open_flows.size:
        crossed = routes[open_flows]
        load = np.bincount(crossed.ravel(), minlength=len(left))
        share = np.full(len(left), math.inf)
        np.divide(left, load, out=share, where=load > 0)
        of_flow = share[crossed].min(axis=1)
        least = of_flow.min()
        if math.isinf(least):
            break
        fixed = of_flow <= least * (1 + _SAME)
        rates[open_flows[fixed]] = least
        np.subtract.at(left, crossed[fixed].ravel(), least)
        np.maximum(left, 0.0, out=left)
        open_flows = open_flows[~fixed]
    return rates


class _Fluid:
    """Active flows, advanced from event to event."""

    def __init__(self, capacities: Floats) -> None:
        self.capacities = capacities
        self.ids: Ints = np.empty(0, dtype=np.int64)
        self.left: Floats = np.empty(0)
        self.size: Floats = np.empty(0)
        self.routes: Ints = np.empty((0, 4), dtype=np.int64)
        self.rates: Floats = np.empty(0)

    def add(self, ids: Ints, size: Floats, routes: Ints) -> None:
        self.ids = np.concatenate([self.ids, ids])
        self.left = np.concatenate([self.left, size])
        self.size = np.concatenate([self.size, size])
        self.routes = np.concatenate([self.routes, routes])
        self.rates = fair_rates(self.routes, self.capacities)

    def until_next(self) -> float:
        return float((self.left / self.rates).min()) if self.ids.size else math.inf

    def advance(self, step_s: float) -> Ints:
        """Moves the flows on; returns and removes those that are done."""
        if not self.ids.size:
            return self.ids
        with np.errstate(invalid="ignore"):
            moved = self.rates * step_s
        self.left = np.where(np.isinf(self.rates), 0.0, self.left - moved)
        done = self.left <= self.size * _SAME
        finished = self.ids[done]
        if finished.size:
            keep = ~done
            self.ids, self.left, self.size = self.ids[keep], self.left[keep], self.size[keep]
            self.routes = self.routes[keep]
            self.rates = fair_rates(self.routes, self.capacities)
        return finished


def flows(*, start_s: Floats, nbytes: Floats, routes: Ints, capacities: Floats) -> Floats:
    """Finish times of independent flows that start when told and share ports fairly.

    start_s, nbytes: one a flow; routes: shape (flows, ports a flow), indices into capacities (byte/s).
    """
    fluid = _Fluid(np.asarray(capacities, dtype=np.float64))
    fluid.routes = np.empty((0, routes.shape[1]), dtype=np.int64)
    end = np.array(start_s, dtype=np.float64)
    order = np.argsort(start_s, kind="stable")
    now, k = 0.0, 0
    while k < len(order) or fluid.ids.size:
        begin = float(start_s[order[k]]) if k < len(order) else math.inf
        step = min(begin - now, fluid.until_next())
        end[fluid.advance(step)] = now + step
        now += step
        first = k
        while k < len(order) and start_s[order[k]] <= now * (1 + _SAME):
            k += 1
        if k > first:
            new = order[first:k]
            fluid.add(new, np.asarray(nbytes, dtype=np.float64)[new], routes[new])
    return end


class _Replay:
    """The rounds of one collective, rank by rank."""

    def __init__(self, rounds: Iterable[Round], topology: Topology) -> None:
        self.topology = topology
        self.rounds = [one for one in rounds for _ in range(one.repeat)]
        self.fluid = _Fluid(topology.capacities())
        # Flow ids count through all rounds; `first` finds the round of an id.
        sizes = [len(one.src) for one in self.rounds]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.started = [np.zeros(size, dtype=bool) for size in sizes]
        self.degree = [self._degree(one) for one in self.rounds]
        self.at = np.full(topology.ranks, -1, dtype=np.int64)
        self.pending = np.zeros(topology.ranks, dtype=np.int64)
        self.finish = np.zeros(topology.ranks)
        self.heap: list[tuple[float, int, Ints]] = []
        self.count = 0

    def _degree(self, one: Round) -> Ints:
        n = self.topology.ranks
        return np.bincount(one.src, minlength=n) + np.bincount(one.dst, minlength=n)

    def push(self, time: float, ids: Ints) -> None:
        heapq.heappush(self.heap, (time, self.count, ids))
        self.count += 1

    def advance_ranks(self, ranks: Ints, now: float) -> None:
        """Ranks that are done with a round go to the next one that has a transfer of theirs; ready ones start."""
        touched = set()
        for r in ranks.tolist():
            k = int(self.at[r]) + 1
            while k < len(self.rounds) and not self.degree[k][r]:
                k += 1
            self.at[r] = k
            self.finish[r] = now
            if k < len(self.rounds):
                self.pending[r] = self.degree[k][r]
                touched.add(k)
        for k in sorted(touched):
            one = self.rounds[k]
            ready = (self.at[one.src] == k) & (self.at[one.dst] == k) & ~self.started[k]
            if ready.any():
                self.started[k] |= ready
                index = np.flatnonzero(ready)
                wait = self.topology.latencies(one.src[index], one.dst[index]) * one.hops
                for latency in np.unique(wait):
                    self.push(now + float(latency), self.first[k] + index[wait == latency])

    def begin(self, ids: Ints) -> None:
        of_round = np.searchsorted(self.first, ids, side="right") - 1
        for k in np.unique(of_round):
            mine = ids[of_round == k]
            one, index = self.rounds[k], mine - self.first[k]
            routes = self.topology.routes(one.src[index], one.dst[index])
            self.fluid.add(mine, np.full(len(mine), one.nbytes, dtype=np.float64), routes)

    def complete(self, ids: Ints, now: float) -> None:
        of_round = np.searchsorted(self.first, ids, side="right") - 1
        ends = []
        for k in np.unique(of_round):
            one, index = self.rounds[k], ids[of_round == k] - self.first[k]
            ends.append(np.concatenate([one.src[index], one.dst[index]]))
        touched = np.concatenate(ends)
        np.subtract.at(self.pending, touched, 1)
        ranks = np.unique(touched)
        self.advance_ranks(ranks[self.pending[ranks] == 0], now)


def run(rounds: Iterable[Round], topology: Topology, *, enter_s: Floats | None = None) -> Floats:
    """When each rank has finished, in s; enter_s: when each enters (default 0). Exact for fluid flows.

    Raises InputError when a round names a rank which the topology does not have.
    """
    state = _Replay(rounds, topology)
    if any(len(d) > topology.ranks for d in state.degree):
        raise InputError(f"name ranks beyond the {topology.ranks} of the topology", key="rounds")
    entries = np.zeros(topology.ranks) if enter_s is None else np.asarray(enter_s, dtype=np.float64)
    arrivals = [(float(t), np.flatnonzero(entries == t)) for t in np.unique(entries)][::-1]
    now = 0.0
    while arrivals or state.heap or state.fluid.ids.size:
        begin = state.heap[0][0] if state.heap else math.inf
        enter = arrivals[-1][0] if arrivals else math.inf
        # Steps, not dates, are compared: far from zero a date cannot hold the last bits of a short step.
        step = max(min(begin - now, enter - now, state.fluid.until_next()), 0.0)
        done = state.fluid.advance(step)
        now += step
        if done.size:
            state.complete(done, now)
        while arrivals and arrivals[-1][0] <= now * (1 + _SAME):
            state.advance_ranks(arrivals.pop()[1], now)
        starting = []
        while state.heap and state.heap[0][0] <= now * (1 + _SAME):
            starting.append(heapq.heappop(state.heap)[2])
        if starting:
            state.begin(np.concatenate(starting))
    return state.finish


def simulate(
    op: str, *, algorithm: str, nbytes: float, topology: Topology, inner_ranks: int = 1, enter_s: Floats | None = None
) -> float:
    """Seconds until the last rank has finished `op` by that algorithm on that topology.

    Raises InputError for an unknown algorithm or an op it does not offer.
    """
    module = plugins.get("simkit.collectives", algorithm)
    inner = {"inner_ranks": inner_ranks} if algorithm == "hierarchical" else {}
    rounds = module.rounds(op, ranks=topology.ranks, nbytes=nbytes, **inner)
    return float(run(rounds, topology, enter_s=enter_s).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a replay. ranks: who takes part, None = all; work_s: what a rank does between its previous
    collective and this one; ready_s: the earliest entry. Both are one number or one a rank of the whole replay."""

    duration_s: float
    ranks: tuple[int, ...] | None = None
    work_s: float | Floats = 0.0
    ready_s: float | Floats = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """finish_s of each rank, begin_s and end_s of each collective, waited_s of each rank, events handled."""

    finish_s: Floats
    begin_s: Floats
    end_s: Floats
    waited_s: Floats
    events: int


def replay(collectives: Sequence[Collective], ranks: int) -> Replayed:
    """Plays collectives in order, one event a rank and collective.

    A rank enters a collective at max(ready, end of its previous one + work); the collective starts when the last of its
    ranks has entered and ends duration_s later for all of them.

    Raises InputError when a collective names a rank outside 0..ranks-1.
    """
    everyone = tuple(range(ranks))
    members = [everyone if c.ranks is None else c.ranks for c in collectives]
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for k, group in enumerate(members):
        for r in group:
            if not 0 <= r < ranks:
                raise InputError(f"is outside 0..{ranks - 1}", key="ranks", value=r)
            mine[r].append(k)
    work = [np.broadcast_to(np.asarray(c.work_s, dtype=np.float64), (ranks,)).tolist() for c in collectives]
    ready = [np.broadcast_to(np.asarray(c.ready_s, dtype=np.float64), (ranks,)).tolist() for c in collectives]
    missing = [len(group) for group in members]
    entered: list[list[tuple[float, int]]] = [[] for _ in collectives]
    position, finish, waited = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    begin_s, end_s = np.zeros(len(collectives)), np.zeros(len(collectives))
    heap = [(max(ready[own[0]][r], work[own[0]][r]), r, own[0]) for r, own in enumerate(mine) if own]
    heapq.heapify(heap)
    events = 0
    while heap:
        now, r, k = heapq.heappop(heap)
        events += 1
        entered[k].append((now, r))
        missing[k] -= 1
        if missing[k]:
            continue
        end = now + collectives[k].duration_s
        begin_s[k], end_s[k] = now, end
        for came, one in entered[k]:
            waited[one] += now - came
            finish[one] = end
            position[one] += 1
            if position[one] < len(mine[one]):
                following = mine[one][position[one]]
                heapq.heappush(heap, (max(ready[following][one], end + work[following][one]), one, following))
    return Replayed(
        finish_s=np.asarray(finish), begin_s=begin_s, end_s=end_s, waited_s=np.asarray(waited), events=events
    )
