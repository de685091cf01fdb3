"""What the readers share: a file once opened, what was asked, and what came of it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from simkit.errors import InputError
from simkit.spec import load

HEAD_CHARS = 200_000
"""Characters by which a format is told."""

Row = dict[str, str]


class Source:
    """A file, gzip or not. Raises InputError where it cannot be read, or is no text."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name

    @property
    def stem(self) -> str:
        """The name without its endings: ``all_reduce_perf.log.gz`` -> ``all_reduce_perf``."""
        return self.name.split(".")[0] or self.name

    @cached_property
    def text(self) -> str:
        try:
            raw = self.path.read_bytes()
            if raw[:2] == b"\x1f\x8b":
                raw = gzip.decompress(raw)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            what = "is a damaged or cut off gzip file"
            raise InputError(what, file=self.name, hint="copy it again") from error
        except OSError as error:
            raise InputError(f"cannot be read ({(error.strerror or str(error)).lower()})", file=self.name) from None
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            what = f"is no text (byte {error.start} is not UTF-8)"
            raise InputError(what, file=self.name, hint="give text, JSON or CSV") from None

    @property
    def head(self) -> str:
        return self.text[:HEAD_CHARS]

    @cached_property
    def json(self) -> Any:
        """The document. Raises InputError with the line where it is malformed or cut off."""
        try:
            return json.loads(self.text)
        except json.JSONDecodeError as error:
            cut = " (cut off?)" if error.pos >= len(self.text.rstrip()) - 1 else ""
            what = f"is no valid JSON ({error.msg[:1].lower()}{error.msg[1:]}, column {error.colno}){cut}"
            raise InputError(what, file=f"{self.name}:{error.lineno}", hint="record or copy it again") from None
        except RecursionError:
            raise InputError("is nested too deeply", file=self.name) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the files do not say. device, link: names of profiles; gpus_per_node, nics_per_node: of the machines, where
    several of them took part; profiles: folders of the user's own."""

    device: str = ""
    link: str = ""
    gpus_per_node: int | None = None
    nics_per_node: int | None = None
    profiles: tuple[str, ...] = ()

    def named(self, said: str) -> str:
        """The profile of a device as a file names it; what was asked where it names none or one without a profile."""
        if said:
            try:
                return load.device(said, profiles=self.profiles, calibration=False).name
            except InputError:
                pass
        return self.device


@dataclass(slots=True, kw_only=True)
class Read:
    """What came of a file. unit: what `total` counts (lines or events); used: those that gave a row or what a row
    needed; skipped: {reason: count} of all others; facts: figures that are no rows."""

    file: str
    kind: str
    unit: str
    rows: list[Row] = field(default_factory=list)
    total: int = 0
    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    facts: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Columns that say nothing to any table."""

    def skip(self, reason: str, count: int = 1) -> None:
        if count:
            self.skipped[reason] += count

    def to_dict(self) -> dict[str, Any]:
        reasons = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return {
            "file": self.file, "format": self.kind, "unit": self.unit, "total": self.total, "used": self.used,
            "rows": len(self.rows), "skipped": [{"reason": r, "count": n} for r, n in reasons], "facts": self.facts,
            "columns_left_out": self.left_out,
        }  # fmt: skip


def row(**cells: Any) -> Row:
    """A row of a table, every cell text; what is None is left out."""
    return {k: repr(v) if isinstance(v, float) else str(v) for k, v in cells.items() if v is not None}


__all__ = ["Asked", "Read", "Row", "Source", "row"]
