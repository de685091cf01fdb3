"""Where answers go: text to standard output, remarks to standard error, pages to files."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any


def emit(text: str) -> None:
    """Writes an answer to standard output, with a line end."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def remark(args: argparse.Namespace, line: str) -> None:
    """Writes a remark to standard error unless --quiet."""
    if not args.quiet:
        sys.stderr.write(line + "\n")


def terminal() -> dict[str, Any]:
    """Width, colour and character set of standard output: {width, color, ascii_only}."""
    tty = sys.stdout.isatty()
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "").replace("_", "")
    columns = shutil.get_terminal_size((80, 24)).columns if tty or os.environ.get("COLUMNS") else 80
    color = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": columns, "color": color, "ascii_only": not encoding.startswith(("utf", "cp65001"))}


def listing(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: tuple[int, ...] = ()) -> str:
    """A table for the terminal."""
    from simkit.render_text import Grid, print_parts

    return print_parts([Grid(heads=heads, rows=rows, right=frozenset(right))], **terminal())


def write_page(args: argparse.Namespace, page: str) -> None:
    """Writes --html FILE as a whole or not at all, and says so."""
    from simkit.spec.files import write_text

    path = write_text(args.html, page)
    remark(args, f"wrote {path}")
