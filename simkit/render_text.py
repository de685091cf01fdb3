"""The answer for a terminal: tables that fit 80 columns, without colour where nobody sees it.

The layout is computed here; rich draws it where the output is a terminal with colour, and is imported only then: the
cold time of the command is mostly imports, and a pipe needs none of rich.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simkit.render_tables import (
    BESIDE,
    beside_row,
    failure_lines,
    headline,
    imported_lines,
    label,
    money_lines,
    part_tables,
    terms,
    verdict,
)
from simkit.units import format_bytes, format_s

if TYPE_CHECKING:
    from simkit.report import Report

BAR = 24
PROSE = 30
"""A column wider than this is prose and may wrap; a narrower one holds figures and names, which are never cut."""
GAP = 2
MIN_WIDTH, MAX_WIDTH = 60, 110
_ASCII = str.maketrans(
    {"█": "#", "·": "-", "×": "x", "…": "...", "µ": "u", "–": "-", "≥": ">=", "α": "alpha", "β": "beta"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table to be drawn. `heads` may be empty; right: indices of columns set right; styles: rich's, a column."""

    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    styles: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of text that is wrapped; a heading is bold."""

    text: str
    style: str = field(default="")


Part = Grid | Line


def to_text(
    report: Report, *, width: int = 80, color: bool = False, ascii_only: bool = False, brief: bool = False
) -> str:
    """The report as text of at most `width` columns (numbers are never cut: a table that needs more takes it).

    brief: the head lines and the warnings only. color: ANSI colours. ascii_only: for terminals without UTF-8.
    """
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    head = Grid(rows=headline(report), styles=("cyan", "" if report.fits else "red"))
    parts: list[Part] = [_heading(label(report)), head]
    if not brief:
        parts += _body(report)
    parts += [Line(text=f"! {line}", style="yellow") for line in report.warnings]
    return print_parts(parts, width=width, color=color, ascii_only=ascii_only)


def _body(report: Report) -> list[Part]:
    parts: list[Part] = []
    if report.imported:
        parts += [Line(text=""), _heading("Read from files")]
        parts += [Line(text=f"- {line}") for line in imported_lines(report)]
    parts += _section("Where the time goes", _bars(report))
    for title, heads, rows in part_tables(report):
        parts += _section(title, Grid(heads=heads, rows=rows, right=frozenset({1, 2, 3, 4})))
    items = [(n.removesuffix("_bytes"), format_bytes(size)) for n, size in report.memory.items_bytes.items() if size]
    parts += _section("Memory per GPU", Grid(heads=("item", "size"), rows=items, right=frozenset({1})))
    parts += _section("Money and energy", Grid(rows=money_lines(report), styles=("cyan",)))
    for title, lines in report.sections:
        parts += _section(title, Grid(rows=lines, styles=("cyan",)))
    parts += _section("Failures and checkpoints", Grid(rows=failure_lines(report), styles=("cyan",)))
    parts += _section("Who talks over what", Grid(rows=list(report.groups.items()), styles=("cyan",)))
    changes = [(s.name, s.value, f"{s.elasticity:+.2f}", s.note) for s in report.sensitivities]
    heads = ("1 % more of", "now", "time a sample, %", "")
    parts += _section("What would change it most", Grid(heads=heads, rows=changes, right=frozenset({1, 2})))
    if report.beside:
        parts += _section("The same job elsewhere", side_by_side(report, report.beside))
        parts += [Line(text=verdict(report, other)) for other in report.beside]
    if report.assumptions:
        parts += [Line(text=""), _heading("Assumed (not given)")]
        parts += [Line(text=f"- {line}") for line in report.assumptions]
    if report.warnings:
        parts.append(Line(text=""))
    return parts


def _section(title: str, grid: Grid) -> list[Part]:
    return [Line(text=""), _heading(title), grid] if grid.rows else []


def _heading(text: str) -> Line:
    return Line(text=text, style="bold")


def _bars(report: Report) -> Grid:
    step = report.iteration_time_s or 1.0
    rows = [
        (name.replace("_", " "), format_s(seconds), f"{seconds / step:.1%}", "█" * max(1, round(BAR * seconds / step)))
        for name, seconds in terms(report)
    ]
    return Grid(rows=rows, right=frozenset({1, 2}), styles=("", "", "", "blue"))


def side_by_side(base: Report, others: Iterable[Report]) -> Grid:
    """Clusters as columns, figures as rows; ratios are to `base`."""
    columns = [beside_row(base, r) for r in (base, *others)]
    rows = [(head, *(column[i + 1] for column in columns)) for i, head in enumerate(BESIDE)]
    heads = ("", *(column[0] for column in columns))
    return Grid(heads=heads, rows=[row for row in rows if any(row[1:])], right=frozenset(range(1, len(heads))))


def comparison_table(base: Report, reports: Sequence[tuple[str, Report]]) -> Grid:
    """Cases as rows: step, throughput, ratio to `base`, price and energy ratios, fits."""
    rows = []
    for name, report in reports:
        _, step, rate, fast, _, dear, energy = beside_row(base, report)
        rows.append((name, step, rate, fast, dear, energy, "yes" if report.fits else "NO"))
    heads = ("case", "step", "samples/s", "speed", "price", "energy", "fits")
    return Grid(heads=heads, rows=rows, right=frozenset(range(1, 6)))


def print_parts(parts: Iterable[Part], *, width: int = 80, color: bool = False, ascii_only: bool = False) -> str:
    """The text of `parts`, one below the other."""
    text = _colored(parts, width) if color else "".join(f"{line}\n" for part in parts for line in _plain(part, width))
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def _plain(part: Part, width: int) -> Iterator[str]:
    if isinstance(part, Line):
        yield from _wrapped(part, width)
        return
    widths, lines = layout(part, width)
    for cells in lines:
        sides = (
            c.rjust(w) if i in part.right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        yield (" " * GAP).join(sides).rstrip()


def _wrapped(line: Line, width: int) -> list[str]:
    indent = "  " if line.text.startswith(("- ", "! ")) else ""
    return textwrap.wrap(
        line.text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def layout(grid: Grid, width: int) -> tuple[list[int], list[list[str]]]:
    """Column widths, and the lines of cells (the head first); prose columns share what the others leave of `width`.

    Where there is no prose and too little room, the widest column of names wraps at its spaces.
    """
    table = [list(map(str, row)) for row in ([grid.heads] if grid.heads else []) + list(grid.rows)]
    natural = [max(map(len, column)) for column in zip(*table, strict=True)]
    prose = [i for i, n in enumerate(natural) if n > PROSE]
    room = width - GAP * (len(natural) - 1)
    names = sorted((i for i in range(len(natural)) if i not in prose and i not in grid.right), key=lambda i: natural[i])
    while sum(natural) > room and not prose and names:
        prose.append(names.pop())
    spare = room - sum(n for i, n in enumerate(natural) if i not in prose)
    wanted = sum(natural[i] for i in prose)
    widths = list(natural)
    for i in prose:
        longest = max(len(word) for row in table for word in (row[i].split() or [""]))
        widths[i] = min(natural[i], max(spare * natural[i] // wanted, min(longest, PROSE), 1))
    lines = []
    for row in table:
        cells = [textwrap.wrap(c, widths[i], break_on_hyphens=False) if i in prose else [c] for i, c in enumerate(row)]
        for k in range(max(1, *map(len, cells))):
            lines.append([cell[k] if k < len(cell) else "" for cell in cells])
    return widths, lines


def _colored(parts: Iterable[Part], width: int) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=True, color_system="standard", highlight=False, markup=False, emoji=False,
        legacy_windows=False,
    )  # fmt: skip
    for part in parts:
        if isinstance(part, Line):
            for line in _wrapped(part, width):
                console.print(Text(line, style=part.style))
            continue
        widths, lines = layout(part, width)
        table = Table(
            box=None, show_header=bool(part.heads), pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold"
        )
        head, body = (lines[0], lines[1:]) if part.heads else ([""] * len(widths), lines)
        for i, name in enumerate(head):
            style = part.styles[i] if i < len(part.styles) else ""
            side = "right" if i in part.right else "left"
            table.add_column(name, width=widths[i], justify=side, style=style, no_wrap=True)  # type: ignore[arg-type]
        for cells in body:
            table.add_row(*cells)
        # A table that needs more columns than the terminal has is printed whole: a cut number is a wrong number.
        console.print(table, width=max(width, sum(widths) + GAP * len(widths)), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
