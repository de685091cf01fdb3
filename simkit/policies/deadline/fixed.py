"""Twice the median of the unit."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

FACTOR = 2.0
"""A choice, not a measurement: late enough that ordinary jitter is no failure."""


def limit_s(times: Sequence[float]) -> float:
    return FACTOR * median(times) if times else 0.0
