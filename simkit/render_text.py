"""The answer for a terminal: plain tables that fit 80 columns, without colour where nobody sees it.

Only rich's table, console and text are imported, and only here: the command's cold time is mostly imports.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simkit.render_tables import BESIDE, beside_row, headline, label, money_lines, terms, verdict
from simkit.units import format_bytes, format_s

if TYPE_CHECKING:
    from rich.table import Table

    from simkit.report import Report

BAR = 24
PROSE = 30
MIN_WIDTH, MAX_WIDTH = 60, 110
_ASCII = str.maketrans(
    {"█": "#", "·": "-", "─": "-", "×": "x", "…": "...", "µ": "u", "–": "-", "≥": ">=", "α": "alpha", "β": "beta"}
)


def to_text(
    report: Report, *, width: int = 80, color: bool = False, ascii_only: bool = False, brief: bool = False
) -> str:
    """The report as text of at most `width` columns (numbers are never cut: a table that needs more takes it).

    brief: the head lines and the verdict only. color: ANSI colours. ascii_only: for terminals without UTF-8.
    """
    width = max(MIN_WIDTH, min(width, MAX_WIDTH))
    parts: list[Any] = [_title(label(report))]
    parts.append(_pairs(headline(report), width, report.fits))
    if not brief:
        parts += _body(report, width)
    parts += [f"! {line}" for line in report.warnings]
    return _print(parts, width=width, color=color, ascii_only=ascii_only)


def _body(report: Report, width: int) -> list[Any]:
    parts: list[Any] = ["", _title("Where the time goes"), _bars(report)]
    items = [
        (name.removesuffix("_bytes"), format_bytes(size)) for name, size in report.memory.items_bytes.items() if size
    ]
    if items:
        parts += ["", _title("Memory per GPU"), _table(("item", "size"), items, ("left", "right"))]
    money = money_lines(report)
    if money:
        parts += ["", _title("Money and energy"), _pairs(money, width)]
    groups = list(report.groups.items())
    if groups:
        parts += ["", _title("Who talks over what"), _pairs(groups, width)]
    changes = [(s.name, s.value, f"{s.elasticity:+.2f}", s.note) for s in report.sensitivities]
    if changes:
        heads = ("1 % more of", "now", "time a sample, %", "")
        parts += ["", _title("What would change it most"), _table(heads, changes, ("left", "right", "right", "left"))]
    if report.beside:
        parts += ["", _title("The same job elsewhere"), side_by_side(report, report.beside)]
        parts += [verdict(report, other) for other in report.beside]
    if report.assumptions:
        parts += ["", _title("Assumed (not given)"), *(f"- {line}" for line in report.assumptions)]
    if report.warnings:
        parts.append("")
    return parts


def side_by_side(base: Report, others: Iterable[Report]) -> Table:
    """Clusters as columns, figures as rows; ratios are to `base`."""
    columns = [beside_row(base, r) for r in (base, *others)]
    rows = [(head, *(column[i + 1] for column in columns)) for i, head in enumerate(BESIDE)]
    heads = ("", *(column[0] for column in columns))
    return _table(heads, [row for row in rows if any(row[1:])], ("left", *["right"] * len(columns)))


def comparison_table(base: Report, reports: Sequence[tuple[str, Report]]) -> Table:
    """Cases as rows: step, throughput, ratio to `base`, price and energy ratios, fits."""
    rows = []
    for name, report in reports:
        _, step, rate, fast, _, dear, energy = beside_row(base, report)
        rows.append((name, step, rate, fast, dear, energy, "yes" if report.fits else "NO"))
    heads = ("case", "step", "samples/s", "speed", "price", "energy", "fits")
    return _table(heads, rows, ("left", *["right"] * 5, "left"))


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """A table for listings; columns whose index is in `right` hold numbers."""
    return _table(heads, list(rows), tuple("right" if i in right else "left" for i in range(len(heads))))


def _print(parts: Iterable[Any], *, width: int = 80, color: bool = False, ascii_only: bool = False) -> str:
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for part in parts:
        if isinstance(part, str):
            indent = "  " if part.startswith(("- ", "! ")) else ""
            out.write(
                textwrap.fill(part, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
                + "\n"
            )
        else:
            # A table that needs more columns than the terminal has is printed whole: a cut number is a wrong number.
            needed = console.measure(part).minimum
            console.print(part, width=max(width, needed), overflow="ignore", crop=False)
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


print_parts = _print


def _title(text: str) -> Any:
    from rich.text import Text

    return Text(text, style="bold")


def _pairs(lines: Sequence[tuple[str, str]], width: int, good: bool = True) -> Table:
    left = max(len(name) for name, _ in lines) + 2
    rows = []
    for name, text in lines:
        wrapped = textwrap.wrap(text, width - left, break_long_words=False, break_on_hyphens=False) or [""]
        rows += [(name if i == 0 else "", line) for i, line in enumerate(wrapped)]
    table = _bare()
    table.add_column(no_wrap=True, style="cyan", min_width=left - 2)
    table.add_column(no_wrap=True)
    for name, line in rows:
        table.add_row(name, line, style="red" if name == "Fits" and not good else None)
    return table


def _bars(report: Report) -> Table:
    step = report.iteration_time_s or 1.0
    rows = [
        (n.replace("_", " "), format_s(v), f"{v / step:.1%}", "█" * max(1, round(BAR * v / step)))
        for n, v in terms(report)
    ]
    table = _bare()
    for justify in ("left", "right", "right"):
        table.add_column(no_wrap=True, justify=justify)
    table.add_column(no_wrap=True, style="blue")
    for row in rows:
        table.add_row(*row)
    return table


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], justify: Sequence[str]) -> Table:
    table = _bare(head=True)
    for index, (head, side) in enumerate(zip(heads, justify, strict=True)):
        widest = max([len(head), *(len(row[index]) for row in rows)])
        # Short cells are figures and keep their width; long ones are prose and may wrap.
        prose = widest > PROSE
        least = (
            min(PROSE, max((len(word) for row in rows for word in row[index].split()), default=0)) if prose else widest
        )
        table.add_column(head, justify=side, no_wrap=not prose, overflow="fold", min_width=least)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def _bare(*, head: bool = False) -> Table:
    from rich.table import Table

    return Table(box=None, show_header=head, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


__all__ = ["comparison_table", "plain_table", "print_parts", "side_by_side", "to_text"]
