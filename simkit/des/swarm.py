"""A swarm of peers under churn: broker, backup pool, takeovers over links, checkpoints, and what is left of the work.

Only what changes is an event: a peer comes, leaves, is missed, is served by the broker, has its state, slows down; a
checkpoint is due. Between them every pipeline follows its closed form (`simkit.des.swarm_parts`), so a run costs some
tens of microseconds a change, whatever the number of micro-batches.

Assumed: a pipeline that stood still catches up with the others at its next exchange; each peer keeps the last
checkpoint of its stage on its own disk, so that only newcomers fetch it; the optimizer step is in the backward time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from simkit import plugins
from simkit.des.clock import Clock, Token
from simkit.des.streams import Streams
from simkit.des.swarm_broker import Broker
from simkit.des.swarm_config import SwarmConfig
from simkit.des.swarm_outcome import Mark, Outcome, Stall
from simkit.des.swarm_parts import Node, Unit
from simkit.des.swarm_population import Population
from simkit.des.swarm_transfer import Book, Load, Transfers
from simkit.spec.hardware import IDLE_SHARE
from simkit.spec.peers import Peer

COLUMNS = ("t_s", "online", "spares", "running", "done", "useful", "lost")

_ACTIVE = frozenset({"running", "checkpoint"})
Watch = Callable[["Swarm"], None]


class Swarm:
    """One run. watch: called after every change, for tests of what must always hold."""

    def __init__(self, cfg: SwarmConfig, *, watch: Watch | None = None) -> None:
        self.cfg, self.watch = cfg, watch
        self.clock = Clock()
        self.streams = Streams(cfg.seed)
        self.broker = Broker(self.clock, mean_s=cfg.broker_s, law=cfg.broker_law, rng=self.streams.of("broker"))
        self.book = Book(cfg.stages.stages)
        self.dead: set[int] = set()
        self.transfers = Transfers(self, cfg, self.clock, self.book, self._loaded)
        self.relay_Bps = self.transfers.relay_share_Bps()
        self.wiring = plugins.get("simkit.des.wiring", cfg.wiring).Wiring(self)
        self.population = Population(self)
        self.counts: Counter[str] = Counter()
        self.happened: list[tuple[float, str, str, float]] = []
        self.marks: list[Mark] = []
        self.live = self.active = 0
        self.stalled_s: float | None = 0.0
        self.stall_reason = "start"
        self.stalls: list[Stall] = []
        self.tick: Token | None = None
        self.writing = False
        self.gone: list[tuple[float, float, float]] = []
        self.cost_usd = self.energy_j = 0.0
        self.takeover_s: list[float] = []
        self.recovery_s: list[float] = []
        self.broken_s: dict[int, float] = {}
        self.table: list[tuple[float, ...]] = []
        self.ideal_hz = 0.0

    # -- what peers do ----------------------------------------------------------------------------------------

    def come(self, node: Node) -> None:
        """A peer asks to join: the broker registers it, then it starts up."""
        self.note(node, "joining", "joining")
        self.broker.ask(self._registered, node)

    def _registered(self, node: Node) -> None:
        self.clock.after(self.cfg.startup_s, self._ready, node)

    def _ready(self, node: Node) -> None:
        if node.state == "joining":
            self.wiring.offer(node)
            self._changed()

    def announce(self, node: Node) -> None:
        node.leaving = True
        if node.state == "working":
            self.wiring.leaving(node)
            self._changed()

    def leave(self, node: Node) -> None:
        """A peer goes, whatever it was doing."""
        state, stage = node.state, node.stage
        self.transfers.abandon(node)
        if state in ("spare", "loading", "working"):
            self.wiring.lost(node, announced=node.leaving)
        node.state = "gone"
        self.transfers.orphan(node)
        if state == "working":
            self.count("left" if node.leaving else "failed")
            self.check_blocks(s for s in (stage - 1, stage, stage + 1) if 0 <= s < self.cfg.stages.stages)
        self.note(node, "gone", "gone")
        self._account(node)
        self._changed()

    def remains(self, node: Node) -> bool:
        return not node.leaving

    def _loaded(self, load: Load) -> None:
        self.takeover_s.append(self.clock.now - load.began_s)
        self.wiring.loaded(load.node, load.unit, load.stage)
        self._changed()

    def _account(self, node: Node) -> None:
        online = self.clock.now - node.joined_s
        self.gone.append((online, node.working_s, node.busy_s))
        self.cost_usd += node.peer.price_usd_per_hour * online / 3600.0
        busy = min(node.busy_s, online)
        self.energy_j += node.peer.power_w * (busy + IDLE_SHARE * (online - busy))

    def latency(self, a: Peer, b: Peer) -> float:
        """One way between two peers; by a relay twice as far, as in `simkit.decentral_lines`."""
        between = self.cfg.latency_s.get((a.region, b.region), self.cfg.latency_s.get((b.region, a.region), 0.0))
        return (a.latency_s + b.latency_s) * (2.0 if a.relay or b.relay else 1.0) + between

    # -- running and standing still ---------------------------------------------------------------------------

    def enter(self, unit: Unit, state: str) -> None:
        """A unit enters a state; keeps the checkpoint timer and the list of stalls."""
        if state == "running" and self.writing:
            state = "checkpoint"
        before, now = unit.running, self.clock.now
        was = unit.state
        unit.be(state, now)
        if was in ("running", "checkpoint", "start") and state not in ("running", "checkpoint"):
            self.broken_s.setdefault(unit.key, now)
        elif state in ("running", "checkpoint") and unit.key in self.broken_s:
            self.recovery_s.append(now - self.broken_s.pop(unit.key))
        self.live += unit.running - before
        self.active += (state in _ACTIVE) - (was in _ACTIVE)
        if self.active and self.stalled_s is not None:
            self._resume()
        elif not self.active and self.stalled_s is None:
            self.stalled_s = now
            self.clock.cancel(self.tick)
        if not self.active:
            self.stall_reason = state

    def _resume(self) -> None:
        now = self.clock.now
        if self.stalled_s is not None and now > self.stalled_s:
            self.stalls.append(Stall(start_s=self.stalled_s, end_s=now, reason=self.stall_reason))
        self.stalled_s = None
        self.clock.cancel(self.tick)
        self.tick = self.clock.after(self.cfg.checkpoint_interval_s, self._checkpoint)

    def check_blocks(self, stages: Iterable[int]) -> None:
        """Nobody left who has the state of a stage: all go back to the last checkpoint."""
        for stage in stages:
            if stage in self.dead or self.book.at[stage] or self.wiring.alive(stage):
                continue
            self.dead.add(stage)
            self.count("block lost")
            self.event("block lost", f"stage {stage}", 0.0)
            for unit in self.wiring.units:
                unit.advance(self.clock.now)
                unit.roll_back("block lost")

    def _checkpoint(self) -> None:
        cfg, self.tick = self.cfg, None
        if any(not held for held in self.book.at):
            self.tick = self.clock.after(min(cfg.checkpoint_interval_s, 60.0), self._checkpoint)
            return
        self.wiring.settle()
        saved = [(unit, unit.useful, unit.rolls) for unit in self.wiring.units]
        if cfg.checkpoint_s > 0.0:
            self.writing = True
            for unit in self.wiring.units:
                if unit.running:
                    self.enter(unit, "running")
            wait = cfg.checkpoint_s
        else:
            slowest = min(peer.up_Bps for peer in cfg.peers)
            wait = float(cfg.stages.state_bytes.max()) / slowest
        self.clock.after(wait, self._written, saved)

    def _written(self, saved: list[tuple[Unit, int, int]]) -> None:
        self.count("checkpoint")
        for unit, useful, rolls in saved:
            if unit.rolls == rolls:
                unit.safe = max(unit.safe, useful)
        if self.writing:
            self.writing = False
            for unit in self.wiring.units:
                if unit.state == "checkpoint":
                    self.enter(unit, "running")
        if self.active:
            self.clock.cancel(self.tick)
            self.tick = self.clock.after(self.cfg.checkpoint_interval_s, self._checkpoint)

    # -- the books --------------------------------------------------------------------------------------------

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def event(self, what: str, where: str, value: float) -> None:
        self.happened.append((self.clock.now, what, where, float(value)))

    def note(self, node: Node, what: str, kind: str) -> None:
        if self.cfg.record:
            self.marks.append(Mark(start_s=self.clock.now, node=node.key, name=node.peer.name, what=what, kind=kind))

    def _changed(self) -> None:
        if self.watch is not None:
            self.watch(self)

    def _sample(self) -> None:
        self.wiring.settle()
        units = self.wiring.units
        useful = sum(unit.useful + unit.progress.count() for unit in units)
        lost = sum(unit.lost_total for unit in units)
        self.table.append((self.clock.now, self.population.present, self.wiring.pool_size(), self.live,
                           useful + lost, useful, lost))

    def run(self) -> Outcome:
        """Runs to the horizon."""
        cfg = self.cfg
        nodes = self.population.start()
        self.wiring.start(nodes)
        for stage, held in enumerate(self.book.at):
            if not held:
                self.dead.add(stage)
                self.event("no holder", f"stage {stage}", 0.0)
        self.ideal_hz = sum(
            unit.progress.per_round / unit.progress.round_s for unit in self.wiring.units if unit.running
        )
        self._changed()
        for k in range(cfg.bins + 1):
            self.clock.at(cfg.horizon_s * k / cfg.bins, self._sample)
        self.clock.run(cfg.horizon_s)
        self.wiring.finish()
        for node in self.population.nodes.values():
            self._account(node)
        if self.stalled_s is not None and self.stalled_s < cfg.horizon_s:
            self.stalls.append(Stall(start_s=self.stalled_s, end_s=cfg.horizon_s, reason=self.stall_reason))
        return self._outcome()

    def _outcome(self) -> Outcome:
        cfg, units = self.cfg, self.wiring.units
        lost: Counter[str] = Counter()
        time_by: Counter[str] = Counter()
        for unit in units:
            lost.update(unit.lost)
            for state, seconds in unit.time_by.items():
                time_by[state] += seconds
        open_ = sum(unit.progress.count() for unit in units)
        useful = sum(unit.useful for unit in units) + open_
        table = np.array(self.table)
        stays = np.array(self.gone).reshape(len(self.gone), 3)
        detections = getattr(self.wiring, "detections", [])
        return Outcome(
            horizon_s=cfg.horizon_s, ideal_hz=self.ideal_hz, done=sum(unit.done for unit in units), useful=useful,
            lost=dict(sorted(lost.items())), open=open_, joins=self.population.joins, leaves=self.population.leaves,
            outages=self.population.outages, counts=dict(sorted(self.counts.items())),
            time_by=dict(sorted(time_by.items())), units=len(units), stalls=tuple(self.stalls),
            samples={name: table[:, i] for i, name in enumerate(COLUMNS)},
            peers={name: stays[:, i] for i, name in enumerate(("online_s", "working_s", "busy_s"))},
            detection_s=_mean(detections), recovery_s=_mean(self.recovery_s), takeover_s=_mean(self.takeover_s),
            moved_bytes=self.transfers.moved_bytes,
            broker_response_s=self.broker.response_s / max(self.broker.requests, 1),
            broker_longest_s=self.broker.longest_s, cost_usd=self.cost_usd, energy_j=self.energy_j,
            events=self.clock.events, happened=tuple(self.happened), marks=tuple(self.marks),
        )  # fmt: skip


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def simulate(cfg: SwarmConfig, *, watch: Watch | None = None) -> Outcome:
    """One run of a swarm. The same configuration gives the same outcome, bit by bit."""
    return Swarm(cfg, watch=watch).run()


__all__ = ["Any", "Outcome", "Swarm", "SwarmConfig", "simulate"]
