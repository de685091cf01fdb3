"""The broker as a queue: requests one at a time in order of arrival, and the time until a silent peer is missed.

A single server with Poisson requests is M/G/1: mean response E[S] + lambda E[S^2]/(2 (1 - rho)) (Pollaczek-Khinchine;
L. Kleinrock, "Queueing Systems" I (1975), section 5.6); with an exponential service M/M/1: 1/(mu - lambda).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from simkit.des.clock import Clock
from simkit.des.swarm_parts import Node

Law = Callable[[np.random.Generator, float], float]
LAWS: dict[str, Law] = {
    "deterministic": lambda rng, mean: mean,
    "exponential": lambda rng, mean: mean * float(rng.standard_exponential()),
    "uniform": lambda rng, mean: 2.0 * mean * float(rng.random()),
}


class Broker:
    """A first-come first-served server."""

    def __init__(self, clock: Clock, *, mean_s: float, law: str, rng: np.random.Generator) -> None:
        self.clock, self.mean_s, self.law, self.rng = clock, mean_s, LAWS[law], rng
        self.free_s = 0.0
        self.requests = 0
        self.response_s = 0.0
        self.longest_s = 0.0

    def ask(self, call: Callable[..., None], *args: Any) -> None:
        """Calls when the request has been served."""
        now = self.clock.now
        self.free_s = max(self.free_s, now) + self.law(self.rng, self.mean_s)
        response = self.free_s - now
        self.requests += 1
        self.response_s += response
        self.longest_s = max(self.longest_s, response)
        self.clock.at(self.free_s, call, *args)


def detection_s(node: Node, now: float, *, heartbeat_s: float, misses: int) -> float:
    """Seconds until the broker misses a peer that fell silent now: its last heartbeat was sent at join + phase + k h,
    and it is given up `misses` intervals after that. Between (misses - 1) h and misses h."""
    since = now - node.joined_s - node.phase_s
    last = math.floor(since / heartbeat_s) * heartbeat_s
    return last + misses * heartbeat_s - since
