"""Stochastic wiring: any peer of the next stage takes a micro-batch, faster ones more often (SWARM, arXiv 2301.11913).

A peer is worth 1/max(compute, upload) micro-batches a second, a stage the sum of its peers, the mesh the least of its
stages. Whoever comes joins the weakest stage; nobody is spare. When a peer fails its neighbours notice at the next
message and go round it, and its share of the round is done again by the others of its stage; the mesh stands still
only where a stage has no peer at all. Every `patience_s` peers of the richest stage move to the weakest one, where
both then have more than the weakest had by `hysteresis`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simkit.des.swarm_parts import Node, Unit
from simkit.des.wiring import _common

RESUM = 4096
"""Changes of rates after which sums are made anew, so that rounding errors do not add up."""


class Whole(Unit):
    """All peers together."""

    def __init__(self, wiring: Wiring) -> None:
        cfg = wiring.cfg
        super().__init__(0, cfg.micro_batches * cfg.pipelines, cfg.steps_per_round, cfg.exchange_s)
        self.wiring = wiring
        self.passed = 0

    def advance(self, now: float) -> None:
        super().advance(now)
        done = self.done
        if done > self.passed:
            self.wiring.used_s += (done - self.passed) / np.maximum(self.wiring.rate, 1e-300)
            self.passed = done

    def beside(self, stage: int) -> list[Node]:
        held = self.wiring.swarm.book.at
        return [held[s][0] for s in (stage - 1, stage + 1) if 0 <= s < len(held) and held[s]]


class Wiring(_common.Wiring):
    """rate: micro-batches/s of each stage; coming: of those who still load; used_s: busy seconds of any peer there."""

    def __init__(self, swarm: Any) -> None:
        super().__init__(swarm)
        self.sent = [float(x) for x in self.cost.activation_bytes]
        self.sent_back = [float(x) for x in self.cost.gradient_bytes]
        self.rate = np.zeros(self.stages)
        self.coming = np.zeros(self.stages)
        self.message_s = np.zeros(self.stages)
        self.used_s = np.zeros(self.stages)
        self.worth: dict[Node, tuple[float, float]] = {}
        self.changes = 0
        self.whole = Whole(self)
        self.units = [self.whole]
        self.idle: dict[Node, None] = {}

    def _value(self, node: Node, stage: int) -> tuple[float, float]:
        """(micro-batches/s, seconds of the messages of one) of a peer at a stage."""
        send = (self.sent[stage] + self.sent_back[stage]) / self.up_Bps(node, stage)
        return 1.0 / max(self.seconds(node, stage), send), send + 2.0 * node.peer.latency_s

    def _count(self, node: Node, stage: int, sign: float) -> None:
        rate, message = self.worth[node]
        self.rate[stage] += sign * rate
        self.message_s[stage] += sign * message
        self.changes += 1
        if not self.swarm.book.at[stage]:
            self.rate[stage] = self.message_s[stage] = 0.0
        elif self.changes % RESUM == 0:
            for s, held in enumerate(self.swarm.book.at):
                self.rate[s] = sum(self.worth[n][0] for n in held)
                self.message_s[s] = sum(self.worth[n][1] for n in held)

    def _repace(self) -> None:
        held = self.swarm.book.at
        empty = [s for s in range(self.stages) if not held[s]]
        unit = self.whole
        if not empty:
            count = np.array([len(nodes) for nodes in held])
            fill = float((count / self.rate).sum() + (self.message_s / count).sum())
            unit.progress.pace(fill, float(1.0 / self.rate.min()))
            self.swarm.enter(unit, "running")
        else:
            self.swarm.enter(unit, "load" if all(self.coming[s] > 0.0 for s in empty) else "starved")

    def start(self, nodes: list[Node]) -> None:
        for node in nodes:
            stage = self._weakest(node)
            if stage is None:
                self._idle(node)
            else:
                self._hold(node, stage)
        self._repace()
        self._balance_later()

    def _idle(self, node: Node) -> None:
        node.state = "spare"
        self.idle[node] = None

    def _weakest(self, node: Node) -> int | None:
        """The stage that needs a peer most, among those it has the memory for."""
        need = self.rate + self.coming
        for stage in np.argsort(need, kind="stable").tolist():
            if self.fits(node, stage):
                return int(stage)
        return None

    def _hold(self, node: Node, stage: int) -> None:
        node.state, node.unit, node.stage = "working", self.whole, stage
        node.since_s = self.swarm.clock.now
        node.mark = float(self.used_s[stage])
        self.swarm.book.add(node, stage)
        self.swarm.dead.discard(stage)
        self.worth[node] = self._value(node, stage)
        self._count(node, stage, 1.0)
        self.swarm.note(node, f"stage {stage}", "working")

    def _settle(self, node: Node) -> None:
        """Books what a peer computed since it was last asked: at most the time that passed, since micro-batches count
        when they leave."""
        used, now = float(self.used_s[node.stage]), self.swarm.clock.now
        node.busy_s += min(used - node.mark, now - node.since_s)
        node.working_s += now - node.since_s
        node.mark, node.since_s = used, now

    def _release(self, node: Node) -> float:
        """Takes a peer out of its stage; the share of the stage it was."""
        stage, now = node.stage, self.swarm.clock.now
        self.whole.advance(now)
        self._settle(node)
        share = self.worth[node][0] / float(self.rate[stage])
        self.swarm.book.remove(node, stage)
        self._count(node, stage, -1.0)
        del self.worth[node]
        return share

    def offer(self, node: Node) -> None:
        stage = self._weakest(node)
        if stage is None:
            self._idle(node)
        else:
            self._load(node, stage)

    def _load(self, node: Node, stage: int) -> None:
        node.state, node.unit, node.stage = "loading", self.whole, stage
        node.mark = 1.0 / self.seconds(node, stage)
        self.coming[stage] += node.mark
        self.swarm.note(node, f"load stage {stage}", "load")
        self.swarm.broker.ask(self._told, node, stage)

    def _told(self, node: Node, stage: int) -> None:
        if node.state == "loading" and node.stage == stage:
            self.swarm.transfers.begin(node, self.whole, stage)

    def loaded(self, node: Node, unit: Unit, stage: int) -> None:
        self._come(node)
        self.whole.advance(self.swarm.clock.now)
        self._hold(node, stage)
        self.swarm.count("recovery")
        self._repace()

    def _come(self, node: Node) -> None:
        self.coming[node.stage] = max(self.coming[node.stage] - node.mark, 0.0)
        if self.coming[node.stage] < 1e-9 * node.mark:
            self.coming[node.stage] = 0.0

    def lost(self, node: Node, *, announced: bool) -> None:
        if node.state == "spare":
            self.idle.pop(node, None)
        elif node.state == "loading":
            self._come(node)
            self._repace()
        elif node.state == "working":
            share = self._release(node)
            node.state = "gone"
            if not announced:
                self._redo(share, "peer failed")
            self._repace()

    def slowed(self, node: Node) -> None:
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        if node.state != "working":
            return
        stage = node.stage
        self.whole.advance(self.swarm.clock.now)
        self._count(node, stage, -1.0)
        self.worth[node] = self._value(node, stage)
        self._count(node, stage, 1.0)
        self._repace()

    def _redo(self, share: float, reason: str) -> None:
        """A share of the round is done again; what is still in the pipes stays there."""
        count = self.whole.progress.count()
        again = int(share * count)
        if again:
            self.whole.drop(count - again, reason)

    def alive(self, stage: int) -> bool:
        if self.swarm.book.at[stage]:
            return True
        policy, view = self.swarm.transfers.policy, self.swarm.transfers.view
        return bool(policy.sources(view, self.whole, stage, 0.5))

    def _balance_later(self) -> None:
        if self.cfg.patience_s > 0.0:
            self.swarm.clock.after(self.cfg.patience_s, self._balance)

    def _balance(self) -> None:
        """Moves peers from the richest to the weakest stage, while that lifts it by more than the hysteresis."""
        held = self.swarm.book.at
        for _ in range(1 + len(self.worth) // 200):
            need = self.rate + self.coming
            poor, rich = int(need.argmin()), int(self.rate.argmax())
            if len(held[rich]) < 2 or poor == rich:
                break
            node = held[rich][-1]
            gained = min(float(need[poor]) + 1.0 / self.seconds(node, poor),
                         float(self.rate[rich]) - self.worth[node][0])
            if not self.fits(node, poor) or gained <= float(need[poor]) * (1.0 + self.cfg.hysteresis):
                break
            share = self._release(node)
            node.state = "moving"
            self._redo(share, "rebalanced")
            self.swarm.transfers.orphan(node)
            self.swarm.count("move")
            self._load(node, poor)
            self._repace()
        self._balance_later()

    def pool_size(self) -> int:
        return len(self.idle)

    def finish(self) -> None:
        now = self.swarm.clock.now
        self.whole.advance(now)
        for held in self.swarm.book.at:
            for node in held:
                self._settle(node)
