"""Nobody comes or goes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

PARAMETERS: dict[str, tuple[str, Any]] = {}


def sample(rng: np.random.Generator, p: Any) -> float:
    return math.inf


def biased(rng: np.random.Generator, p: Any) -> float:
    return math.inf


def mean_session_s(p: Any) -> float:
    return math.inf
