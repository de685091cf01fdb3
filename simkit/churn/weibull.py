"""Weibull sessions: P(X > t) = e^(-(t/scale)^shape), scale = mean / Gamma(1 + 1/shape).

Shape below 1: who has stayed long will stay longer, as measured for volunteers (SETI@home: D. Kondo et al.,
"Discovering statistical models of availability in large distributed systems", MASCOTS 2009; fitted shapes lie
between 0.3 and 0.7 there). Shape 1 is the exponential law. The length-biased session is scale G^(1/shape) with
G ~ Gamma(1 + 1/shape).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

PARAMETERS: dict[str, tuple[str, Any]] = {"mean": ("s", 4 * 3600.0), "shape": ("ratio", 0.6)}


def complaint(p: Mapping[str, Any]) -> str:
    return "" if 0.05 <= p["shape"] <= 50.0 else "needs a shape from 0.05 to 50"


def _scale(p: Mapping[str, Any]) -> float:
    return float(p["mean"] / math.gamma(1.0 + 1.0 / p["shape"]))


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return float(_scale(p) * rng.standard_exponential() ** (1.0 / p["shape"]))


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return float(_scale(p) * rng.standard_gamma(1.0 + 1.0 / p["shape"]) ** (1.0 / p["shape"]))


def mean_session_s(p: Mapping[str, Any]) -> float:
    return float(p["mean"])
