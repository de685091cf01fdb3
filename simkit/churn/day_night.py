"""Exponential sessions whose arrivals follow the clock: rate(t) = mean rate · (1 + amplitude cos(2 pi (t - peak)/day)).

Home machines are idle at night. With exponential sessions of mean m the expected number of peers is that of M(t)/G/inf:
N (1 + amplitude (cos x + w m sin x)/(1 + w^2 m^2)), x = w (t - peak), w = 2 pi/day (S. Eick, W. Massey, W. Whitt,
"The physics of the M(t)/G/inf queue", Operations Research 41 (1993) 731-742).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from simkit.churn import exponential

DAY_S = 86400.0
PARAMETERS: dict[str, tuple[str, Any]] = {
    "mean": ("s", 4 * 3600.0),
    "amplitude": ("ratio", 0.5),
    "peak": ("clock", 2 * 3600.0),
}


def complaint(p: Mapping[str, Any]) -> str:
    if p["amplitude"] > 1.0:
        return "needs an amplitude of at most 1"
    return "" if p["peak"] <= DAY_S else "needs a peak within the day, 0 to 24h"


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return exponential.sample(rng, p)


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return exponential.biased(rng, p)


def mean_session_s(p: Mapping[str, Any]) -> float:
    return float(p["mean"])


def intensity(t_s: float, p: Mapping[str, Any]) -> float:
    return float(1.0 + p["amplitude"] * math.cos(2.0 * math.pi * (t_s - p["peak"]) / DAY_S))


def peak(p: Mapping[str, Any]) -> float:
    return float(1.0 + p["amplitude"])


def expected(t_s: float, p: Mapping[str, Any]) -> float:
    """Expected number of peers relative to its mean, long after the start."""
    w = 2.0 * math.pi / DAY_S
    x, wm = w * (t_s - p["peak"]), w * p["mean"]
    return float(1.0 + p["amplitude"] * (math.cos(x) + wm * math.sin(x)) / (1.0 + wm * wm))
