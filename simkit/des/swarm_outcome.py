"""What one simulated run of a swarm says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A stretch in which no work was done at all, with its reason. end_s is the horizon where it did not end."""

    start_s: float
    end_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """From start_s on peer `node` did `what` (kind: ``joining spare load working gone``)."""

    start_s: float
    node: int
    name: str
    what: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Counts are micro-batches: done = useful + lost, useful counts those of the rounds under way at the end.

    ideal_hz: micro-batches/s with every place of the start filled and nobody leaving; goodput = useful/(ideal_hz ·
    horizon). samples: arrays of equal length by name, at times ``t_s``: online, spares, running, done, useful, lost
    (running totals). time_by: seconds of all units by state. peers: arrays over all stays: online_s, working_s, busy_s.
    """

    horizon_s: float
    ideal_hz: float
    done: int
    useful: int
    lost: Mapping[str, int]
    open: int
    joins: int
    leaves: int
    outages: int
    counts: Mapping[str, int]
    time_by: Mapping[str, float]
    units: int
    stalls: tuple[Stall, ...]
    samples: Mapping[str, Array]
    peers: Mapping[str, Array]
    detection_s: float
    recovery_s: float
    takeover_s: float
    moved_bytes: float
    broker_response_s: float
    broker_longest_s: float
    cost_usd: float
    energy_j: float
    events: int
    happened: tuple[tuple[float, str, str, float], ...]
    marks: tuple[Mark, ...] = ()

    @property
    def goodput(self) -> float:
        return self.useful / (self.ideal_hz * self.horizon_s) if self.ideal_hz > 0.0 else 0.0

    @property
    def useful_hz(self) -> float:
        return self.useful / self.horizon_s

    @property
    def lost_fraction(self) -> float:
        return sum(self.lost.values()) / self.done if self.done else 0.0

    @property
    def utilisation(self) -> float:
        """Busy seconds over seconds there, all peers together."""
        online = float(self.peers["online_s"].sum())
        return float(self.peers["busy_s"].sum()) / online if online else 0.0
