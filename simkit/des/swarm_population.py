"""Who comes and goes: arrivals, sessions, outages, join storms, and peers that slow down.

``open``: a Poisson process of rate (peers on average)/(mean session), times the intensity of the law, by thinning; the
number there is then that of M/G/inf, Poisson with that mean (Little's law gives the rate). ``recruit``: every loss
below the target is replaced after an exponential time: the machine-repair model. Everything about a peer is drawn from
its own stream, so lives do not depend on what else happens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from simkit import plugins
from simkit.churn._common import Visit
from simkit.des.swarm_config import check_changes
from simkit.des.swarm_parts import Node
from simkit.spec.peers import Peer

if TYPE_CHECKING:
    from simkit.des.swarm import Swarm

BLOCK = 1024
"""Gaps between arrivals drawn at once."""


class Population:
    """nodes: who is there, by key. present: how many; joins, leaves: how many so far, the start not counted."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm, self.cfg, self.clock = swarm, swarm.cfg, swarm.clock
        self.nodes: dict[int, Node] = {}
        self.next_key = 0
        self.joins = self.leaves = self.outages = 0
        self.incoming = 0
        self.recruits = 0
        self.blocked: dict[str, float] = {}
        self.peak = self.cfg.churn.peak()
        self.rng = swarm.streams.of("arrivals")
        self.gaps: list[float] = []
        mean = self.cfg.churn.mean_session_s()
        policy = plugins.get("simkit.policies.pool", self.cfg.pool)
        lead = self.cfg.recruit_s + self.cfg.startup_s
        losses = self.cfg.slots / mean
        self.spares: int = policy.target(
            slots=self.cfg.slots, backup_pool=self.cfg.backup_pool, losses_per_s=losses, lead_s=lead
        )
        self.target = len(self.cfg.peers) + self.spares
        check_changes(self.cfg, self.target)
        self.rate_hz = self.target / mean * self.peak

    @property
    def present(self) -> int:
        return len(self.nodes)

    # -- the start --------------------------------------------------------------------------------------------

    def start(self) -> list[Node]:
        """The peers of the start; whatever comes later is on the clock."""
        visits = self.cfg.churn.visits()
        if visits is not None:
            return self._replay(visits)
        found = []
        for i in range(self.target):
            peer = self.cfg.peers[i] if i < len(self.cfg.peers) else None
            node = self._create(peer, residual=True)
            found.append(node)
            self._live(node)
        if self.cfg.arrivals == "open" and self.rate_hz > 0.0:
            self._next_arrival()
        for time_s, count in self.cfg.joins:
            self.clock.at(time_s, self._storm, count)
        rng = self.swarm.streams.of("outages")
        for number, (start_s, length_s) in enumerate(self.cfg.churn.outages(rng, self.cfg.horizon_s)):
            self.clock.at(start_s, self._outage, number, length_s)
        return found

    def _replay(self, visits: tuple[Visit, ...]) -> list[Node]:
        found = []
        by_device: dict[str, list[Peer]] = {}
        for peer in self.cfg.peers:
            by_device.setdefault(peer.device, []).append(peer)
        for i, visit in enumerate(visits):
            kinds = by_device.get(visit.device, list(self.cfg.peers))
            if visit.join_s <= 0.0:
                node = self._create(kinds[i % len(kinds)], leaves_s=visit.leave_s)
                found.append(node)
                self._live(node)
            else:
                self.clock.at(visit.join_s, self._visit, kinds[i % len(kinds)], visit.leave_s)
        return found

    def _visit(self, peer: Peer, leaves_s: float) -> None:
        self._come(self._create(peer, leaves_s=leaves_s))

    def _create(self, peer: Peer | None, *, residual: bool = False, leaves_s: float | None = None) -> Node:
        key, now = self.next_key, self.clock.now
        self.next_key += 1
        rng = self.swarm.streams.of("peer", key)
        pick, *draws = rng.random(4).tolist()
        if peer is None:
            peer = self.cfg.peers[int(pick * len(self.cfg.peers))]
        if leaves_s is None:
            churn = self.cfg.churn
            leaves_s = now + (churn.residual(rng) if residual else churn.sample(rng))
        node = Node(key, peer, now, leaves_s, (draws[0], draws[1], draws[2]), self.cfg.graceful, self.cfg.heartbeat_s)
        if math.isfinite(self.cfg.slow_every_s):
            self.clock.after(self.cfg.slow_every_s * float(rng.standard_exponential()), self._slow, node, rng)
        return node

    def _live(self, node: Node) -> None:
        self.nodes[node.key] = node
        if node.leaves_s <= self.cfg.horizon_s:
            node.leave_token = self.clock.at(node.leaves_s, self._go, node)
            if node.graceful:
                self.clock.at(node.leaves_s - self.cfg.notice_s, self.swarm.announce, node)

    # -- coming and going -------------------------------------------------------------------------------------

    def _come(self, node: Node) -> None:
        self.joins += 1
        self._live(node)
        self.swarm.come(node)

    def _next_arrival(self) -> None:
        if not self.gaps:
            self.gaps = self.rng.standard_exponential(BLOCK).tolist()[::-1]
        self.clock.after(self.gaps.pop() / self.rate_hz, self._arrival)

    def _arrival(self) -> None:
        if self.peak == 1.0 or self.rng.random() * self.peak < self.cfg.churn.intensity(self.clock.now):
            node = self._create(None)
            until = self.blocked.get(node.peer.region, -math.inf)
            if self.clock.now >= until or node.draw >= float(self.cfg.churn.p.get("share", 1.0)):
                self._come(node)
        self._next_arrival()

    def _go(self, node: Node) -> None:
        self.leaves += 1
        del self.nodes[node.key]
        self.swarm.leave(node)
        if self.cfg.arrivals == "recruit" and self.cfg.churn.visits() is None:
            while self.present + self.incoming < self.target:
                self.incoming += 1
                rng = self.swarm.streams.of("recruit", self.recruits)
                self.recruits += 1
                self.clock.after(self.cfg.recruit_s * float(rng.standard_exponential()), self._recruit)

    def _recruit(self) -> None:
        self.incoming -= 1
        self._come(self._create(None))

    def _storm(self, count: int) -> None:
        for _ in range(count):
            self._come(self._create(None))

    def _outage(self, number: int, length_s: float) -> None:
        """Takes a share of one region; they come back together when it is over."""
        self.outages += 1
        rng = self.swarm.streams.of("outage", number)
        regions = sorted({peer.region for peer in self.cfg.peers})
        region = regions[int(rng.random() * len(regions))]
        share = float(self.cfg.churn.p["share"])
        here = [node for node in self.nodes.values() if node.peer.region == region]
        hit = [n for n, u in zip(here, rng.random(len(here)).tolist(), strict=True) if u < share]
        self.blocked[region] = self.clock.now + length_s
        self.swarm.event("outage", region, len(hit))
        for node in hit:
            self.clock.cancel(node.leave_token)
            self.leaves += 1
            del self.nodes[node.key]
            node.graceful = False
            self.swarm.leave(node)
        self.clock.after(length_s, self._return, [node.peer for node in hit])

    def _return(self, peers: list[Peer]) -> None:
        self.swarm.event("return", "", len(peers))
        for peer in peers:
            self._come(self._create(peer))

    # -- slowing down -----------------------------------------------------------------------------------------

    def _slow(self, node: Node, rng: np.random.Generator) -> None:
        if node.key not in self.nodes:
            return
        node.slow = self.cfg.slow_factor
        self.swarm.count("slowdown")
        self.swarm.wiring.slowed(node)
        self.clock.after(self.cfg.slow_s * float(rng.standard_exponential()), self._recover, node, rng)

    def _recover(self, node: Node, rng: np.random.Generator) -> None:
        if node.key not in self.nodes:
            return
        node.slow, node.probation = 1.0, False
        self.swarm.wiring.slowed(node)
        self.clock.after(self.cfg.slow_every_s * float(rng.standard_exponential()), self._slow, node, rng)
