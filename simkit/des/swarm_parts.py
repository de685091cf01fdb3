"""A peer in the simulation, how far a pipeline is in its round, and what it did, lost and waited for.

Between two changes a pipeline runs like clockwork: its progress is a closed form. With C_p the compute of a stage,
R a message (latency + bytes/rate) and L_p the bytes that a peer sends or gets per micro-batch over its line,
micro-batch k of a step is through at

    fill + (k - 1) · interval,   fill = sum C + sum R,   interval = max(C, L)

(FusionAI, arXiv 2309.01172: a line of resources that each do one thing at a time, compute and line apart, without bound
on what waits between them; latency delays but occupies nothing; 1F1B bounds it, see
`simkit.des.wiring.fixed`). A step of n micro-batches takes fill + (n - 1) ·
interval, a round of H steps H times that and its exchange.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from simkit.des.clock import Token
from simkit.spec.peers import Peer

SLACK = 1e-9
"""Share of a micro-batch by which sums of floats may fall short of a whole one."""


class Node:
    """One stay of a peer. state: ``joining spare loading working gone``; unit, stage: the place it has or fetches."""

    __slots__ = (
        "busy_s",
        "draw",
        "graceful",
        "joined_s",
        "key",
        "leave_token",
        "leaves_s",
        "leaving",
        "load",
        "mark",
        "marked_s",
        "peer",
        "phase_s",
        "probation",
        "serving",
        "since_s",
        "slow",
        "stage",
        "state",
        "unit",
        "uploads",
        "working_s",
    )  # fmt: skip

    def __init__(self, key: int, peer: Peer, joined_s: float, leaves_s: float, draws: tuple[float, float, float],
                 graceful: float, heartbeat_s: float) -> None:
        self.key, self.peer, self.joined_s, self.leaves_s = key, peer, joined_s, leaves_s
        self.draw = draws[0]
        self.graceful = draws[1] < graceful
        self.phase_s = draws[2] * heartbeat_s
        self.state = "joining"
        self.unit: Any = None
        self.stage = -1
        self.slow = 1.0
        self.uploads = 0
        self.serving: dict[Any, None] = {}
        self.load: Any = None
        self.leave_token: Token | None = None
        self.probation = False
        self.leaving = False
        self.mark = 0.0
        self.marked_s = joined_s
        self.busy_s = 0.0
        self.working_s = 0.0
        self.since_s = joined_s

    @property
    def name(self) -> str:
        return f"{self.peer.name}#{self.key}"


class Progress:
    """Where a unit is in its round. at_s: seconds since the round began, at the present pace."""

    __slots__ = ("at_s", "exchange_s", "fill_s", "interval_s", "n", "round_s", "step_s", "steps")

    def __init__(self, micro_batches: int, steps: int, exchange_s: float) -> None:
        self.n, self.steps, self.exchange_s = micro_batches, steps, exchange_s
        self.fill_s = self.interval_s = self.step_s = self.round_s = math.inf
        self.at_s = 0.0

    @property
    def per_round(self) -> int:
        return self.n * self.steps

    def pace(self, fill_s: float, interval_s: float) -> None:
        """Changes the pace. What is through stays through; the share of the interval (or of the fill) under way that
        is done stays done, and so does the rest of an exchange."""
        step, at = 0, self.at_s
        through = share = 0.0
        if at > 0.0:
            step = min(self.steps, math.floor(at / self.step_s + SLACK))
            at = max(at - step * self.step_s, 0.0)
            through = self._of_step(at) if step < self.steps else 0
            if through:
                share = max((at - self.fill_s) / self.interval_s - (through - 1), 0.0) if self.interval_s > 0.0 else 0.0
            else:
                share = at / self.fill_s
        self.fill_s, self.interval_s = fill_s, interval_s
        self.step_s = fill_s + (self.n - 1) * interval_s
        self.round_s = self.steps * self.step_s + self.exchange_s
        if self.at_s > 0.0:
            inside = fill_s + (through - 1 + share) * interval_s if through else share * fill_s
            self.at_s = step * self.step_s + (at if step == self.steps else inside)

    def advance(self, seconds: float) -> int:
        """Moves on; the number of rounds that end meanwhile."""
        at = self.at_s + seconds
        rounds = math.floor(at / self.round_s + 1e-12)
        self.at_s = max(at - rounds * self.round_s, 0.0)
        return rounds

    def count(self) -> int:
        """Micro-batches of this round that are through."""
        if self.at_s <= 0.0 or self.step_s == math.inf:
            return 0
        step = min(self.steps, math.floor(self.at_s / self.step_s + SLACK))
        return self.per_round if step == self.steps else step * self.n + self._of_step(self.at_s - step * self.step_s)

    def _of_step(self, u: float) -> int:
        over = u - self.fill_s
        if over < -SLACK * self.fill_s:
            return 0
        if self.interval_s <= 0.0:
            return self.n
        return min(self.n, 1 + max(math.floor(over / self.interval_s + SLACK), 0))

    def when(self, count: int) -> float:
        """Seconds from the start of a round until `count` of its micro-batches are through."""
        step, rest = divmod(count, self.n)
        return step * self.step_s + (self.fill_s + (rest - 1) * self.interval_s if rest else 0.0)

    def back_to(self, count: int) -> None:
        """Goes back to the moment at which `count` micro-batches of the round were through."""
        self.at_s = self.when(count) if count else 0.0


class Unit:
    """Something that runs or stands still as a whole: a pipeline, or all of a mesh.

    done = useful + count in this round + lost: micro-batches that went through, each of them once useful, or lost with
    its reason and done again. safe: those that the last checkpoint holds. time_by: seconds by state.
    """

    def __init__(self, key: int, micro_batches: int, steps: int, exchange_s: float) -> None:
        self.key = key
        self.progress = Progress(micro_batches, steps, exchange_s)
        self.running = False
        self.state = "start"
        self.at_s = 0.0
        self.useful = 0
        self.safe = 0
        self.lost: Counter[str] = Counter()
        self.lost_total = 0
        self.time_by: defaultdict[str, float] = defaultdict(float)
        self.rolls = 0
        self.history: list[tuple[float, str]] | None = None

    @property
    def done(self) -> int:
        return self.useful + self.progress.count() + self.lost_total

    def advance(self, now: float) -> None:
        """Brings the counters up to `now`."""
        seconds = now - self.at_s
        if seconds > 0.0:
            self.at_s = now
            self.time_by[self.state] += seconds
            if self.running:
                self.useful += self.progress.advance(seconds) * self.progress.per_round

    def be(self, state: str, now: float) -> None:
        """Enters a state; ``running`` is the one in which work is done."""
        self.advance(now)
        if self.history is not None and state != self.state:
            self.history.append((now, state))
        self.state = state
        self.running = state == "running"

    def drop(self, keep: int, reason: str) -> int:
        """Loses what the round has beyond `keep` micro-batches; how many that is."""
        lost = self.progress.count() - keep
        self.progress.back_to(keep)
        # The inverse may differ from the count by a rounding error; the books follow the count.
        lost -= self.progress.count() - keep
        if lost > 0:
            self.lost[reason] += lost
            self.lost_total += lost
        return lost

    def roll_back(self, reason: str) -> int:
        """Loses everything since the last checkpoint."""
        lost = self.drop(0, reason)
        self.rolls += 1
        gone = self.useful - self.safe
        if gone > 0:
            self.useful = self.safe
            self.lost[reason] += gone
            self.lost_total += gone
        return lost + gone
