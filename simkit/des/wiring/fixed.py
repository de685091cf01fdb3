"""Fixed pipelines: a place a stage and pipeline. A pipeline with a hole stands still until a spare has taken the place.

The loss of a holder is noticed after missed heartbeats, then queued at the broker, given to a spare, loaded. Holes of
the least broken pipeline are filled first. A pipeline that has starved for `patience_s` while another starves too is
taken apart for its peers, and put together again once the pool has its peers and `hysteresis` more.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

from simkit import plugins
from simkit.des.swarm_broker import detection_s
from simkit.des.swarm_parts import Node, Unit
from simkit.des.wiring import _common

STALLS = ("detect", "starved", "broker", "load")
"""States of a hole, the one that names the stall of its pipeline first."""


class Chain(Unit):
    """One pipeline. hole[s]: why stage s has no holder; successor[s]: who is about to take it over."""

    def __init__(self, key: int, wiring: Wiring) -> None:
        cfg = wiring.cfg
        super().__init__(key, cfg.micro_batches, cfg.steps_per_round, cfg.exchange_s)
        self.wiring = wiring
        self.holder: list[Node | None] = [None] * wiring.stages
        self.successor: list[Node | None] = [None] * wiring.stages
        self.hole: dict[int, str] = {}
        self.wanted: dict[int, None] = {}
        self.parked = False
        self.starved_since = math.inf
        self.compute = [0.0] * wiring.stages
        self.line = [0.0] * wiring.stages
        self.message = [0.0] * max(wiring.stages - 1, 0)

    def beside(self, stage: int) -> list[Node]:
        found = [self.holder[s] for s in (stage - 1, stage + 1) if 0 <= s < len(self.holder)]
        return [node for node in found if node is not None and node.state == "working"]

    def measure(self, stage: int) -> None:
        """Seconds of a stage, of its line and of its messages, after its holder or the holder's speed changed."""
        w, node = self.wiring, self.holder[stage]
        if node is None:
            return
        self.compute[stage] = w.seconds(node, stage)
        self.line[stage] = max(w.sends[stage] / w.up_Bps(node, stage), w.gets[stage] / w.down_Bps(node))
        for left in (stage - 1, stage):
            if 0 <= left < len(self.message):
                a, b = self.holder[left], self.holder[left + 1]
                if a is not None and b is not None:
                    there = w.sent[left] / min(w.up_Bps(a, left), w.down_Bps(b))
                    back = w.sent_back[left + 1] / min(w.up_Bps(b, left + 1), w.down_Bps(a))
                    self.message[left] = 2.0 * w.swarm.latency(a.peer, b.peer) + there + back

    def repace(self) -> None:
        """The closed forms of `simkit.des.swarm_parts`; 1F1B holds at most stages - r micro-batches between the passes
        of stage r, so an interval is never shorter than the time one is out over that number."""
        interval = max(max(self.compute), max(self.line))
        if self.wiring.cfg.schedule == "1f1b":
            out, stages = 0.0, len(self.compute)
            for r in range(stages - 1, -1, -1):
                out += self.compute[r] + (self.message[r] if r < stages - 1 else 0.0)
                interval = max(interval, out / (stages - r))
        stretch = self.wiring.cfg.stretch
        self.progress.pace((sum(self.compute) + sum(self.message)) * stretch, interval * stretch)

    def status(self) -> str:
        if self.parked:
            return "parked"
        if not self.hole:
            return "running"
        found = set(self.hole.values())
        return next(state for state in STALLS if state in found)


class Wiring(_common.Wiring):
    """Pipelines, the holes in them and the spare peers."""

    def __init__(self, swarm: Any) -> None:
        super().__init__(swarm)
        self.sent = [float(x) for x in self.cost.activation_bytes]
        self.sent_back = [float(x) for x in self.cost.gradient_bytes]
        self.sends = [a + b for a, b in zip(self.sent, self.sent_back, strict=True)]
        self.gets = [a + b for a, b in zip([0.0, *self.sent[:-1]], [*self.sent_back[1:], 0.0], strict=True)]
        self.units: list[Chain] = [Chain(k, self) for k in range(self.cfg.pipelines)]
        self.rank = plugins.get("simkit.policies.placement", self.cfg.placement).rank
        self.limit_s = plugins.get("simkit.policies.deadline", self.cfg.deadline).limit_s
        self.pool: list[tuple[Any, int, Node]] = []
        self.spares = 0
        self.queue: list[tuple[int, int]] = []
        self.parked: list[Chain] = []
        self.detections: list[float] = []
        self.handovers = 0

    # -- filling places ---------------------------------------------------------------------------------------

    def start(self, nodes: list[Node]) -> None:
        placed = self.cfg.holders
        free = list(nodes)
        if placed is not None:
            taken = {i for chain in placed for i in chain}
            free = [node for i, node in enumerate(nodes) if i not in taken]
        for unit in self.units:
            for stage in range(self.stages):
                node = nodes[placed[unit.key][stage]] if placed is not None else self._pick(free, stage)
                if node is None:
                    unit.hole[stage] = "starved"
                else:
                    self._hold(node, unit, stage)
            self._update(unit)
        for node in free:
            self._spare(node)
        self.fill()

    def _pick(self, free: list[Node], stage: int) -> Node | None:
        for i, node in enumerate(free):
            if self.fits(node, stage):
                return free.pop(i)
        return None

    def _hold(self, node: Node, unit: Chain, stage: int) -> None:
        node.state, node.unit, node.stage = "working", unit, stage
        node.since_s = self.swarm.clock.now
        node.mark, node.marked_s = unit.done, node.since_s
        unit.holder[stage] = node
        unit.hole.pop(stage, None)
        self.swarm.book.add(node, stage)
        self.swarm.dead.discard(stage)
        unit.measure(stage)
        self.swarm.note(node, f"stage {stage} of pipeline {unit.key}", "working")

    def _release(self, node: Node) -> None:
        """Takes a holder out of its place and settles what it did there."""
        unit, stage = node.unit, node.stage
        now = self.swarm.clock.now
        unit.advance(now)
        self._settle(node)
        node.working_s += now - node.since_s
        unit.holder[stage] = None
        self.swarm.book.remove(node, stage)
        node.unit, node.stage = None, -1

    def _settle(self, node: Node) -> None:
        """Books what a holder computed. Micro-batches count when they leave the pipeline, some of them after a peer
        took its place; nobody is busier than the time that passed."""
        unit, now = node.unit, self.swarm.clock.now
        node.busy_s += min((unit.done - node.mark) * unit.compute[node.stage], now - node.marked_s)
        node.mark, node.marked_s = unit.done, now

    def _spare(self, node: Node) -> None:
        node.state = "spare"
        self.spares += 1
        heapq.heappush(self.pool, (self.rank(node), node.key, node))
        self.swarm.note(node, "spare", "spare")

    def offer(self, node: Node) -> None:
        self._spare(node)
        self.fill()

    def _take(self, stage: int) -> Node | None:
        """The best spare with the memory for a stage; slow ones on probation only where nobody else is there."""
        aside: list[tuple[Any, int, Node]] = []
        found, second = None, None
        while self.pool:
            entry = heapq.heappop(self.pool)
            node = entry[2]
            if node.state != "spare" or entry[0] != self.rank(node):
                continue
            if self.fits(node, stage):
                if not node.probation:
                    found = node
                    break
                second = second or node
            aside.append(entry)
        for entry in aside:
            if found is not None or entry[2] is not second:
                heapq.heappush(self.pool, entry)
        found = found or second
        if found is not None:
            self.spares -= 1
        return found

    def fill(self) -> None:
        """Gives spares to open places, those of the least broken pipeline first; then handovers, then new pipelines."""
        unfit: set[int] = set()
        again: dict[int, None] = {}
        while self.spares and self.queue:
            holes, key = heapq.heappop(self.queue)
            unit = self.units[key]
            open_ = [s for s, state in unit.hole.items() if state == "starved" and unit.successor[s] is None]
            if key in again:
                continue
            if unit.parked or not open_ or holes != len(unit.hole):
                if open_ and not unit.parked:
                    heapq.heappush(self.queue, (len(unit.hole), key))
                continue
            if self._fill_unit(unit, open_, unfit):
                again[key] = None
        for key in again:
            heapq.heappush(self.queue, (len(self.units[key].hole), key))
        for unit in self.units if self.spares and self.handovers else ():
            for stage in list(unit.wanted):
                self._succeed(unit, stage)
        need = math.ceil(self.stages * (1.0 + self.cfg.hysteresis))
        while self.parked and self.spares >= need and not self.queue:
            self._unpark(self.parked.pop())

    def _fill_unit(self, unit: Chain, open_: list[int], unfit: set[int]) -> bool:
        """Assigns spares to the holes of a unit; whether holes are left that no spare has the memory for."""
        left = False
        for stage in open_:
            if stage in unfit or not self.spares:
                left = True
                continue
            node = self._take(stage)
            if node is None:
                unfit.add(stage)
                left = True
                continue
            unit.hole[stage] = "broker"
            self._assign(node, unit, stage)
        self._update(unit)
        return left

    def _assign(self, node: Node, unit: Chain, stage: int) -> None:
        node.state, node.unit, node.stage = "loading", unit, stage
        unit.successor[stage] = node
        self.swarm.note(node, f"load stage {stage} of pipeline {unit.key}", "load")
        self.swarm.broker.ask(self._told, node, unit, stage)

    def _told(self, node: Node, unit: Chain, stage: int) -> None:
        if node.state != "loading" or node.unit is not unit or unit.successor[stage] is not node:
            return
        if stage in unit.hole:
            unit.hole[stage] = "load"
            self._update(unit)
        self.swarm.transfers.begin(node, unit, stage, unit.holder[stage])

    def loaded(self, node: Node, unit: Any, stage: int) -> None:
        unit.advance(self.swarm.clock.now)
        unit.successor[stage] = None
        old = unit.holder[stage]
        if old is not None:
            self._release(old)
            old.state = "done"
            self.swarm.transfers.orphan(old)
            if unit.wanted.pop(stage, 0) is None:
                self.handovers -= 1
            self.swarm.count("handover")
            if self.swarm.remains(old):
                self._spare(old)
        else:
            self.swarm.count("recovery")
        self._hold(node, unit, stage)
        self._update(unit)
        if node.slow != 1.0:
            self.slowed(node)
        if old is not None and old.state == "spare":
            self.fill()

    # -- losing peers -----------------------------------------------------------------------------------------

    def lost(self, node: Node, *, announced: bool) -> None:
        unit, stage = node.unit, node.stage
        if node.state == "spare":
            self.spares -= 1
            return
        if node.state == "loading":
            unit.successor[stage] = None
            if unit.holder[stage] is None:
                unit.hole[stage] = "detect"
                self._later(node, unit, stage, announced)
            self._update(unit)
            return
        if node.state != "working":
            return
        self._release(node)
        node.state = "gone"
        if unit.wanted.pop(stage, 0) is None:
            self.handovers -= 1
        if unit.successor[stage] is not None:
            unit.hole[stage] = "load"
        else:
            unit.hole[stage] = "detect"
            self._later(node, unit, stage, announced)
        if self.cfg.replacement == "checkpoint":
            unit.roll_back("peer left" if announced else "peer failed")
        else:
            unit.drop(0, "peer left" if announced else "peer failed")
        self._update(unit)

    def _later(self, node: Node, unit: Chain, stage: int, announced: bool) -> None:
        wait = 0.0
        if not announced:
            cfg = self.cfg
            wait = detection_s(node, self.swarm.clock.now, heartbeat_s=cfg.heartbeat_s, misses=cfg.misses)
        self.detections.append(wait)
        self.swarm.clock.after(wait, self._noticed, unit, stage)

    def _noticed(self, unit: Chain, stage: int) -> None:
        if unit.hole.get(stage) != "detect":
            return
        unit.hole[stage] = "starved"
        self._update(unit)
        self.fill()

    def _update(self, unit: Chain) -> None:
        """Runs or stops a pipeline after its holes changed, and queues those that want a spare."""
        now = self.swarm.clock.now
        state = unit.status()
        if state == "starved":
            heapq.heappush(self.queue, (len(unit.hole), unit.key))
            if unit.starved_since == math.inf:
                unit.starved_since = now
                self.swarm.clock.after(self.cfg.patience_s, self._regroup, unit, now)
        else:
            unit.starved_since = math.inf
            if "starved" in unit.hole.values():
                heapq.heappush(self.queue, (len(unit.hole), unit.key))
        if state == "running":
            unit.advance(now)
            unit.repace()
        self.swarm.enter(unit, state)

    def alive(self, stage: int) -> bool:
        if self.swarm.book.at[stage]:
            return True
        policy, view = self.swarm.transfers.policy, self.swarm.transfers.view
        return any(policy.sources(view, unit, stage, 0.5) for unit in self.units)

    # -- changing places --------------------------------------------------------------------------------------

    def _regroup(self, unit: Chain, since: float) -> None:
        """Takes a pipeline that starved too long apart, where its peers help another one that starves."""
        if unit.starved_since != since or unit.parked:
            return
        starving = [u for u in self.units if not u.parked and u.starved_since < math.inf]
        worst = max(starving, key=lambda u: (len(u.hole), u.key))
        if len(starving) < 2 or self.spares or worst is not unit:
            self.swarm.clock.after(self.cfg.patience_s, self._regroup, unit, since)
            return
        unit.parked = True
        unit.advance(self.swarm.clock.now)
        unit.drop(0, "regrouped")
        self.parked.append(unit)
        self.swarm.count("regroup")
        freed = []
        for stage in range(self.stages):
            loader, holder = unit.successor[stage], unit.holder[stage]
            if loader is not None:
                self.swarm.transfers.abandon(loader)
                unit.successor[stage] = None
                loader.unit, loader.stage = None, -1
                freed.append(loader)
            if holder is not None:
                self._release(holder)
                holder.state = "done"
                freed.append(holder)
                self.swarm.transfers.orphan(holder)
            unit.hole[stage] = "starved"
            if unit.wanted.pop(stage, 0) is None:
                self.handovers -= 1
        self._update(unit)
        for node in freed:
            self._spare(node)
        self.swarm.check_blocks(range(self.stages))
        self.fill()

    def _unpark(self, unit: Chain) -> None:
        unit.parked = False
        self._update(unit)
        self.fill()

    def leaving(self, node: Node) -> None:
        self._want(node.unit, node.stage)

    def _want(self, unit: Chain, stage: int) -> None:
        if stage not in unit.wanted and unit.successor[stage] is None:
            unit.wanted[stage] = None
            self.handovers += 1
            self._succeed(unit, stage)

    def _succeed(self, unit: Chain, stage: int) -> None:
        if unit.successor[stage] is None and self.spares and unit.holder[stage] is not None:
            node = self._take(stage)
            if node is not None:
                self._assign(node, unit, stage)

    def slowed(self, node: Node) -> None:
        self.refresh(node)
        if node.state == "working" and node.slow > 1.0 and self.cfg.deadline != "none":
            self.swarm.clock.after(self.cfg.patience_s, self._overdue, node, node.unit)

    def _overdue(self, node: Node, unit: Chain) -> None:
        """After its patience: a peer that is still beyond the deadline is replaced by a spare that gains enough."""
        if node.state != "working" or node.unit is not unit or node.slow <= 1.0:
            return
        mine = unit.compute[node.stage]
        if mine <= self.limit_s(unit.compute) or not self.spares:
            return
        best = min((n for _, _, n in self.pool if n.state == "spare"), key=lambda n: (-n.peer.flops, n.key))
        if self.seconds(best, node.stage) < mine * (1.0 - self.cfg.hysteresis):
            node.probation = True
            self.swarm.count("deadline")
            self._want(unit, node.stage)

    def refresh(self, node: Node) -> None:
        if node.state != "working":
            return
        unit: Chain = node.unit
        now = self.swarm.clock.now
        unit.advance(now)
        stage = node.stage
        self._settle(node)
        unit.measure(stage)
        if unit.running:
            unit.repace()

    def pool_size(self) -> int:
        return self.spares

    def finish(self) -> None:
        now = self.swarm.clock.now
        for unit in self.units:
            unit.advance(now)
            for node in unit.holder:
                if node is not None:
                    self._settle(node)
                    node.working_s += now - node.since_s
                    node.since_s = now
