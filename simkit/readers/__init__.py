"""Measurements that people have, as rows of the operator tables: a file a format, a plug-in with `matches` and `read`.

>>> read("all_reduce_perf.txt", Asked(device="h100"))    # doctest: +SKIP

A plug-in of this folder has

    PRIORITY              formats are tried in this order, the smallest first
    matches(Source)       whether the file is of its format
    read(Source, Asked)   a Read: rows in the columns of the kernel_*, gemm_* and collective_* tables, and for every
                          line or event whether it was read or why it was skipped

Nothing is dropped in silence: `Read.total` = `Read.used` + the counts of `Read.skipped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simkit import plugins
from simkit.errors import InputError
from simkit.readers._common import Asked, Read, Source

PACKAGE = "simkit.readers"
SUFFIXES = (".csv", ".txt", ".log", ".out", ".json", ".json.gz", ".txt.gz", ".log.gz", ".csv.gz")
"""Files of a folder that are looked at; one named outright is read whatever its name."""


def formats() -> list[str]:
    """The keys of the formats, in the order in which they are tried."""
    return sorted(plugins.names(PACKAGE), key=lambda key: plugins.get(PACKAGE, key).PRIORITY)


def detect(source: Source) -> str:
    """The key of the format of a file. Raises InputError where it is none that is known."""
    for key in formats():
        if plugins.get(PACKAGE, key).matches(source):
            return key
    raise InputError("is of no known format", file=source.name, hint=f"known: {', '.join(formats())}")


def read(path: str | Path, asked: Asked) -> Read:
    """The rows of one file. Raises InputError where it cannot be read, is malformed or of no known format."""
    source = Source(Path(path))
    found: Read = plugins.get(PACKAGE, detect(source)).read(source, asked)
    return found


def files(paths: Sequence[str | Path]) -> list[Path]:
    """The files of `paths`, folders opened (not those in them), each once. Raises InputError for what is not there."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(f for f in path.iterdir() if f.is_file() and f.name.lower().endswith(SUFFIXES))
            if not inside:
                hint = f"files that end in {' '.join(SUFFIXES)} are read"
                raise InputError("holds no file of measurements", file=str(path), key="--data", hint=hint)
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise InputError("does not exist", key="--data", value=str(path), hint="give files, or folders of them")
    return list(dict.fromkeys(found))


__all__ = ["Asked", "Read", "Source", "detect", "files", "formats", "read"]
