"""What becomes of the blocks of a sweep: rows of a file, written as they come, and the best points so far."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError, unknown
from simkit.goodput import COLUMNS as FAILURES
from simkit.goodput import JOB_COLUMNS as JOB_FAILURES
from simkit.grids import Axis
from simkit.spec.files import whole_file
from simkit.sweep import COUNTS, JOB_MONEY, MONEY, RATES, Sweep

Block = Mapping[str, NDArray[Any]]

LESS = frozenset({"iteration_time_s", "peak_memory_gib", *MONEY, *JOB_MONEY, *JOB_FAILURES})
"""Metrics of which less is better; of the others more is."""
METRICS = (*RATES, *MONEY, *JOB_MONEY, FAILURES[0], *JOB_FAILURES)
SUFFIXES = (".csv", ".parquet")


class Best:
    """The `count` best points by a metric; those that fit come before those that do not, refused ones never.

    Raises InputError for an unknown metric.
    """

    def __init__(self, asked: Sweep, metric: str, count: int) -> None:
        known = [name for name in METRICS if name in asked.columns]
        if metric not in known:
            raise unknown("metric", metric, known, key="--by")
        self.metric, self.count, self.points, self.answered, self.fitting = metric, count, 0, 0, 0
        self._rows: list[tuple[bool, float, int, dict[str, Any]]] = []

    def add(self, block: Block) -> None:
        """Takes the points of the next block into account."""
        value = block[self.metric].astype(float)
        answered = block["refused"] == ""
        usable = np.flatnonzero(answered & np.isfinite(value))
        key = value[usable] if self.metric in LESS else -value[usable]
        chosen = np.lexsort((key, ~block["fits"][usable]))[: self.count]
        for i in chosen.tolist():
            at = int(usable[i])
            self._rows.append((not bool(block["fits"][at]), float(key[i]), self.points + at, row(block, at)))
        self._rows = sorted(self._rows, key=lambda found: found[:3])[: self.count]
        self.points += len(value)
        self.answered += int(answered.sum())
        self.fitting += int(block["fits"].sum())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The best points, best first, each with what is known of it."""
        return [found[3] for found in self._rows]


def row(block: Block, at: int) -> dict[str, Any]:
    """One point as plain values; what it lacks is left out."""
    out: dict[str, Any] = {}
    refused = bool(block["refused"][at])
    for name, values in block.items():
        value = values[at]
        value = value.item() if isinstance(value, np.generic) else value
        if value == "" or value != value or (refused and name in (*COUNTS, "fits") and not value):
            continue
        out[name] = value
    return out


def place(axis: Axis, found: Mapping[str, Any]) -> str:
    """Where a point stands on an axis, for people: links without their last digits."""
    if not axis.described:
        return short(found.get(axis.name))
    return f"{found[f'{axis.name}_Bps'] * 8e-9:.6g}Gb/s@{found[f'{axis.name}_latency_s'] * 1e6:.6g}us"


def short(value: Any) -> str:
    """A figure for people: five digits; nothing where there is none."""
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def rows(block: Block) -> Iterator[dict[str, Any]]:
    """Every point of a block as plain values."""
    for at in range(len(block["refused"])):
        yield row(block, at)


@contextlib.contextmanager
def writing(path: str | Path, columns: Sequence[str]) -> Iterator[Any]:
    """A function that appends a block to a new file, .csv or .parquet, which appears as a whole or not at all.

    An empty cell means that the point has no such figure. Raises InputError for another ending, where the file cannot
    be written, and for .parquet without pyarrow.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError("has no known ending", key="--out", value=str(path), hint="name it .csv or .parquet")
    with whole_file(path) as temporary:
        yield from (_csv if suffix == ".csv" else _parquet)(temporary, columns)


def _csv(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    with open(path, "w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(columns)
        yield lambda block: writer.writerows(zip(*(_cells(block, name) for name in columns), strict=True))


def _cells(block: Block, name: str) -> list[Any]:
    values = block[name]
    if values.dtype == bool:
        texts = np.where(values, "true", "false").astype(object)
        texts[block["refused"] != ""] = ""
        return list(texts)
    cells: list[Any] = values.tolist()
    if values.dtype == float:
        return ["" if cell != cell else cell for cell in cells]
    if name in COUNTS:
        return [cell or "" for cell in cells]
    return cells


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        hint = "pip install 'simkit-perf[fit]', or name the file .csv"
        raise InputError("needs pyarrow, which is not installed", key="--out", hint=hint) from None
    open_writer: list[Any] = []

    def append(block: Block) -> None:
        table = pa.table({name: _arrow(pa, block, name) for name in columns})
        if not open_writer:
            open_writer.append(pq.ParquetWriter(path, table.schema))
        open_writer[0].write_table(table)

    try:
        yield append
    finally:
        for writer in open_writer:
            writer.close()


def _arrow(pa: Any, block: Block, name: str) -> Any:
    values = block[name]
    absent = None
    if values.dtype == float:
        absent = np.isnan(values)
    elif name == "fits":
        absent = block["refused"] != ""
    elif name in COUNTS:
        absent = values == 0
    if values.dtype == object:
        return pa.array([None if v == "" else str(v) for v in values], type=pa.string())
    return pa.array(values, mask=absent)


__all__ = ["Best", "place", "row", "rows", "short", "writing"]
