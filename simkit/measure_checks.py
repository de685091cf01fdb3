"""What is refused before `simkit measure` starts: options of another suite, names that are no files, folders that
cannot be written. A run takes minutes, so nothing that can be known at its begin may fail at its end."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from simkit.errors import InputError

if TYPE_CHECKING:
    from simkit.measure import Options

STEM = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""A name that is the file of a profile, the same as of `simkit calibrate --link NAME=…`."""
OF_SUITES = ("ranks", "link", "rate", "launch", "address", "model", "batch", "seq_len")
"""Options that a suite names in its TAKES where it reads them."""
COUNTS = ("batch", "seq_len")
FOLDERS = ("tables", "devices", "links", "compute", "models")
"""Folders of a run in --out."""


def check(options: Options, *, suite: str, takes: Collection[str]) -> None:
    """Raises InputError for an option that the suite does not read, a count below 1, or a name that is no file."""
    for name in OF_SUITES:
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if name not in takes:
            raise InputError("is not for this suite", key=flag, value=value, hint=f"leave it out of suite {suite}")
        if name in COUNTS and value < 1:
            raise InputError("is out of range", key=flag, value=value, hint="1 or more")
        if value == "":
            raise InputError("is empty", key=flag, value=value, hint="give one, or leave the flag out")
    for flag, text in (("--name", options.name), ("--link", options.link)):
        if text is not None and not STEM.fullmatch(text):
            hint = "use lower-case letters, digits, dots and dashes, 64 at most"
            raise InputError("is no profile name", key=flag, value=text, hint=hint)


@contextlib.contextmanager
def writable(out: Path) -> Iterator[Path]:
    """The folder of the tables, made and tried by a file that goes again; the block within prepares the run, and where
    it fails the folders that were made here go too.

    Raises InputError where `out`, or what a former run left in it, cannot be written."""
    tables = out / "tables"
    new = [folder for folder in (tables, *tables.parents) if not folder.exists()]
    try:
        try:
            tables.mkdir(parents=True, exist_ok=True)
            for folder in (out, *(out / name for name in FOLDERS)):
                if folder.is_symlink() or folder.exists():
                    with tempfile.TemporaryFile(dir=folder):
                        pass
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(
                f"cannot be written ({reason})", key="--out", value=str(out), hint="give a folder"
            ) from None
        yield tables
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
