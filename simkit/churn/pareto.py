"""Pareto sessions: P(X > t) = (least/t)^alpha for t >= least, least = mean (alpha - 1)/alpha.

Heavy tails: a few peers stay for ever, most are gone soon. Needs alpha > 1 for a mean; below 2 the variance is
infinite. The length-biased session is Pareto with alpha - 1 and the same least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PARAMETERS: dict[str, tuple[str, Any]] = {"mean": ("s", 4 * 3600.0), "alpha": ("ratio", 1.5)}


def complaint(p: Mapping[str, Any]) -> str:
    return "" if 1.0 < p["alpha"] <= 100.0 else "needs an alpha above 1 and up to 100"


def _least(p: Mapping[str, Any]) -> float:
    return float(p["mean"] * (p["alpha"] - 1.0) / p["alpha"])


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return float(_least(p) * (1.0 - rng.random()) ** (-1.0 / p["alpha"]))


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return float(_least(p) * (1.0 - rng.random()) ** (-1.0 / (p["alpha"] - 1.0)))


def mean_session_s(p: Mapping[str, Any]) -> float:
    return float(p["mean"])
