"""Stays as they were: a CSV with ``join_s`` and ``leave_s``, and where known ``peer`` (a name) and ``device``.

Cells are seconds since the start or carry a unit. An empty ``leave_s`` means to the end. Nothing is drawn.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from simkit.churn._common import Visit
from simkit.errors import InputError
from simkit.units import parse

PARAMETERS: dict[str, tuple[str, Any]] = {"file": ("text", "")}


def complaint(p: Mapping[str, Any]) -> str:
    return "" if p["file"] else "names no file"


def rows(file: str) -> list[tuple[int, dict[str, str]]]:
    """(line, {column: cell}) of a CSV. Raises InputError where it is none."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            found = []
            for row in reader:
                if None in row or None in row.values():
                    raise InputError("has another number of cells than the header", file=f"{file}:{reader.line_num}",
                                     hint="one cell a column in every row")  # fmt: skip
                found.append((reader.line_num, {k.strip(): (v or "").strip() for k, v in row.items()}))
            return found
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file, hint="give a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"is no CSV: {error}", file=file, hint="give a CSV file in UTF-8") from None


@lru_cache(maxsize=16)
def _visits(file: str) -> tuple[Visit, ...]:
    found = []
    for line, row in rows(file):
        where = f"{file}:{line}"
        if "join_s" not in row or "leave_s" not in row:
            raise InputError("lacks the columns join_s and leave_s", file=file, hint="one row a stay, in seconds")
        join_s = parse(row["join_s"], "s", key="join_s", file=where)
        leave_s = parse(row["leave_s"], "s", key="leave_s", file=where) if row["leave_s"] else math.inf
        if not 0.0 <= join_s < leave_s:
            raise InputError("leaves before it joins, or joins before the start", file=where, key="leave_s",
                             value=row["leave_s"], hint="give 0 <= join_s < leave_s")  # fmt: skip
        name = row.get("peer") or f"visit-{line}"
        found.append(Visit(name=name, join_s=join_s, leave_s=leave_s, device=row.get("device", "")))
    if not found:
        raise InputError("holds no stay", file=file, hint="columns join_s, leave_s; one row a stay")
    return tuple(sorted(found, key=lambda v: (v.join_s, v.name)))


def visits(p: Mapping[str, Any]) -> tuple[Visit, ...]:
    return _visits(p["file"])


def mean_session_s(p: Mapping[str, Any]) -> float:
    stays = [v.leave_s - v.join_s for v in _visits(p["file"])]
    return float(np.mean(stays))


def sample(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    """One of the stays."""
    stays = _visits(p["file"])
    one = stays[int(rng.random() * len(stays))]
    return one.leave_s - one.join_s


def biased(rng: np.random.Generator, p: Mapping[str, Any]) -> float:
    """One of the stays, with a chance in proportion to its length; the longest where some never end."""
    lengths = np.array([v.leave_s - v.join_s for v in _visits(p["file"])])
    if not np.all(np.isfinite(lengths)):
        return math.inf
    return float(rng.choice(lengths, p=lengths / lengths.sum()))
