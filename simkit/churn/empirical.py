"""Sessions drawn with replacement from measured ones: a CSV with a column ``session_s``.

Cells are seconds or carry a unit (``3.5h``). `scale` stretches them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError
from simkit.units import parse

PARAMETERS: dict[str, tuple[str, Any]] = {"file": ("text", ""), "scale": ("ratio", 1.0)}


def complaint(p: Mapping[str, Any]) -> str:
    if not p["file"]:
        return "names no file"
    return "" if p["scale"] > 0.0 else "needs a scale above 0"


@lru_cache(maxsize=16)
def _sessions(file: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(sessions, cumulative share of their lengths)."""
    from simkit.churn.trace import rows

    found = []
    for line, row in rows(file):
        if "session_s" not in row:
            raise InputError("lacks the column session_s", file=file, hint="a column session_s, one row a session")
        text = row["session_s"]
        value = parse(text, "s", key="session_s", file=f"{file}:{line}")
        if value <= 0.0:
            raise InputError("is not positive", file=f"{file}:{line}", key="session_s", value=text,
                             hint="give seconds above 0, or a time such as 3.5h")  # fmt: skip
        found.append(value)
    if not found:
        raise InputError("holds no session", file=file, hint="a column session_s, one row a session")
    values = np.array(found)
    return values, np.cumsum(values) / values.sum()


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    values, _ = _sessions(p["file"])
    return float(p["scale"] * values[int(rng.random() * len(values))])


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    values, shares = _sessions(p["file"])
    return float(p["scale"] * values[min(int(np.searchsorted(shares, rng.random(), side="right")), len(values) - 1)])


def mean_session_s(p: Mapping[str, Any]) -> float:
    return float(p["scale"] * _sessions(p["file"])[0].mean())
