"""The table that a run of `simkit measure` fills: read back when it is continued, on disk after every case."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simkit.errors import InputError
from simkit.validate import quantile, read_table

ORDER = ("id", "source", "where")
LAST = ("metric", "value", "p10", "p90", "repeats", "date", "software", "load", "notes")


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, 10th, 90th percentile), linear between order statistics. Raises ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no samples")
    found = [quantile(ordered, q) for q in (0.5, 0.1, 0.9)]
    middle, low, high = (float(v) for v in found if v is not None)
    return middle, low, high


class Store:
    """Rows of one CSV by id, in the order in which they were measured. A file that exists is continued.

    Raises InputError where it is no measured table.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = read_table(path) if path.exists() else []
        # A case of several metrics has rows id/metric.
        self._ids = {form for row in self.rows for form in (row["id"], row["id"].rpartition("/")[0])}

    def __len__(self) -> int:
        return len(self.rows)

    def has(self, case: str) -> bool:
        return case in self._ids

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes the rows of a case and writes the file anew: it is whole at every moment."""
        for row in rows:
            self.rows.append({key: _cell(value) for key, value in row.items() if value is not None})
            self._ids |= {str(row["id"]), str(row["id"]).rpartition("/")[0]}
        write_text(self.path, self._text())

    def _text(self) -> str:
        middle = [key for row in self.rows for key in row if key not in ORDER + LAST]
        header = [*ORDER, *dict.fromkeys(middle), *LAST]
        stream = io.StringIO()
        writer = csv.DictWriter(stream, header, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return stream.getvalue()


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_text(path: Path, text: str) -> None:
    """The file appears whole or not at all. Raises InputError where it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot be written ({reason})", file=str(path), hint="give another --out") from None
