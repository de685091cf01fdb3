"""Memoryless sessions: P(X > t) = e^(-t/mean). The law of failures that strike at a constant rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

PARAMETERS: dict[str, tuple[str, Any]] = {"mean": ("s", 4 * 3600.0)}


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    return float(p["mean"] * rng.standard_exponential())


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    # x e^(-x) is the density of the sum of two exponentials.
    return float(p["mean"] * rng.standard_gamma(2.0))


def mean_session_s(p: Mapping[str, Any]) -> float:
    return float(p["mean"])
