"""Exponential sessions, and outages that take many peers at once: a region, a provider, a power cut.

Outages come as a Poisson process, one every `every` on average, and last `duration`; each takes every peer of one
region (drawn; all peers where there are none) with probability `share`. Those who were taken come back when it is over:
a join storm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simkit.churn import exponential

PARAMETERS: dict[str, tuple[str, Any]] = {
    "mean": ("s", 4 * 3600.0),
    "every": ("s", 24 * 3600.0),
    "share": ("ratio", 0.3),
    "duration": ("s", 3600.0),
}


def complaint(p: Mapping[str, Any]) -> str:
    if not 0.0 <= p["share"] <= 1.0:
        return "needs a share between 0 and 1"
    return "" if p["every"] > 0.0 else "needs a time between outages above 0"


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return exponential.sample(rng, p)


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return exponential.biased(rng, p)


def mean_session_s(p: Mapping[str, Any]) -> float:
    return float(p["mean"])


def outages_per_s(p: Mapping[str, Any]) -> float:
    return float(1.0 / p["every"])


def outages(rng: np.random.Generator, p: Mapping[str, Any], horizon_s: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    now = 0.0
    while True:
        now += p["every"] * float(rng.standard_exponential())
        if now >= horizon_s:
            return found
        found.append((now, float(p["duration"])))
