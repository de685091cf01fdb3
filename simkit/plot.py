"""Self-contained HTML pages: of one answer, a trace, a comparison, a validation, a model's parameters.

plotly (extra ``plot``) is imported only here; where it is missing, InputError names the command that installs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simkit import plot_figures as figures
from simkit.plot_page import Picture, Sheet, page
from simkit.render_tables import label, sections, trace_note, verdict

if TYPE_CHECKING:
    from simkit.compare import Comparison
    from simkit.report import Report

__all__ = ["Picture", "Sheet", "comparison_page", "count_page", "page", "report_page", "trace_page", "validation_page"]


def report_page(report: Report) -> str:
    """One answer: timeline (where the report holds spans), breakdown, memory, and every table of the report."""
    beside = [(str(r.scenario.get("cluster", "other")), r) for r in report.beside]
    named = [(str(report.scenario.get("cluster", "this")), report), *beside]
    pictures = _timeline(report)
    pictures += [figures.breakdown(named), figures.memory(named)]
    tables = _sheets(report)
    tables.append(
        Sheet(
            title="Assumed (not given)",
            heads=("assumption",),
            rows=[(line,) for line in report.assumptions],
            words=True,
        )
    )
    intro = " ".join(f"{verdict(report, other)}." for other in report.beside)
    return page(label(report), pictures, tables[1:], intro=intro, notes=report.warnings, lead=tables[:1])


def trace_page(report: Report) -> str:
    """The timeline of one step, and its breakdown."""
    pictures = [*_timeline(report), figures.breakdown([(label(report), report)])]
    tables = _sheets(report)
    return page(f"Trace of {label(report)}", pictures, tables[1:2], notes=report.warnings, lead=tables[:1])


def comparison_page(found: Comparison) -> str:
    """Every case: throughput, breakdown, memory, and the table with ratios to the first case."""
    from simkit.compare import HEADS

    named = [(case.label, case.report) for case in found.cases if case.report is not None]
    pictures = [figures.throughput(named), figures.breakdown(named), figures.memory(named)]
    sheet = Sheet(title="Side by side (ratios to the first case)", heads=HEADS, rows=found.rows())
    base = found.base
    intro = " ".join(f"{verdict(base, r, name=name)}." for name, r in named[1:5])
    varied = ", ".join(found.varied) or "scenarios"
    notes = list(dict.fromkeys(line for r in found.reports for line in r.warnings))
    return page(f"Comparison of {len(found.cases)} cases by {varied}", pictures, intro=intro, notes=notes, lead=[sheet])


def validation_page(result: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> str:
    """Parity plots, one a metric, and the scores by source, device and file.

    result: what `simkit.validate` returns. points: {id, source, metric, measured, predicted} of the scored rows.
    """
    pictures = []
    for metric in dict.fromkeys(str(p["metric"]) for p in points):
        mine = [p for p in points if p["metric"] == metric]
        picture = figures.parity(mine)
        pictures.append(
            Picture(
                figure=picture.figure,
                title=f"Predicted and measured: {metric}",
                alt=picture.alt,
                caption=picture.caption,
            )
        )
    heads = ("", "rows", "MAPE", "median", "90th pct", "bias", "in 90 % interval")
    tables = [Sheet(title="All rows", heads=heads, rows=[_score("all", result)])]
    for key in ("by_metric", "by_source", "by_device", "by_file"):
        rows = [_score(name, entry) for name, entry in dict(result.get(key) or {}).items()]
        tables.append(Sheet(title=key.replace("_", " ").capitalize(), heads=heads, rows=rows))
    refused = [(entry["id"], entry["reason"]) for entry in result.get("refused", ())]
    tables.append(Sheet(title="Refused", heads=("row", "reason"), rows=refused, words=True))
    intro = f"{result.get('predicted', 0)} of {result.get('rows', 0)} rows predicted."
    return page("Validation", pictures, tables[1:], intro=intro, lead=tables[:1])


def count_page(name: str, found: Mapping[str, Any]) -> str:
    """Parameters by module as a treemap, and every count."""
    rows = [
        (k.replace("_", " "), f"{v:,.6g}" if isinstance(v, float) and v != int(v) else f"{v:,.0f}")
        for k, v in found.items()
        if isinstance(v, (int, float))
    ]
    by_module = {str(k): float(v) for k, v in dict(found.get("by_module") or {}).items()}
    table = [(k, f"{v:,.0f}") for k, v in sorted(by_module.items(), key=lambda kv: -kv[1])]
    tables = [
        Sheet(title="Counts", heads=("", name), rows=rows),
        Sheet(title="Parameters by module", heads=("module", "parameters"), rows=table),
    ]
    return page(f"Counts of {name}", [figures.modules(name, by_module)], tables)


def _sheets(report: Report) -> list[Sheet]:
    words = ("", "Money and energy", "Who talks over what")
    return [
        Sheet(title=title or "Answer", heads=heads, rows=rows, words=title in words)
        for title, heads, rows in sections(report)
    ]


def _timeline(report: Report) -> list[Picture]:
    line = report.timeline
    return [figures.timeline(line, note=trace_note(report))] if line is not None and line.spans else []


def _score(name: str, entry: Mapping[str, Any]) -> tuple[Any, ...]:
    def percent(key: str) -> str:
        value = entry.get(key)
        return "" if value is None else f"{value:.1%}"

    return (
        name,
        entry.get("rows", ""),
        *(percent(k) for k in ("mape", "median_ape", "p90_ape", "bias", "coverage_90")),
    )
