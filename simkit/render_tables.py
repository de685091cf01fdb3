"""The answer as tables and sentences: what terminal, Markdown, notebook and pages have in common.

Ratios are always of the other scenario to the base; money and energy are compared for the same work, a million samples.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from simkit.units import GIB, format_bytes, format_s

if TYPE_CHECKING:
    from simkit.report import Report


def terms(report: Report) -> list[tuple[str, float]]:
    """The disjoint terms of the step, in the order of the report, without those that would print as nothing: (name
    without unit, seconds)."""
    least = 1e-6 * report.iteration_time_s
    return [(k.removesuffix("_s"), v) for k, v in report.breakdown.items() if v > least and k != "compute_s"]


def label(report: Report) -> str:
    """What was asked in a few words: model, cluster, method, precision."""
    parts = [str(report.scenario[k]) for k in ("model", "cluster", "method", "precision") if report.scenario.get(k)]
    return " · ".join(parts) or "scenario"


def per_sample(report: Report) -> dict[str, float]:
    """Money and energy for a million samples: {usd_per_million_samples, kwh_per_million_samples}, where known."""
    found: dict[str, float] = {}
    if not report.samples_per_s > 0:
        return found
    price = report.cost.get("cost_usd_per_hour")
    power = report.cost.get("power_w")
    energy = report.cost.get("energy_j_per_step")
    if price is not None:
        found["usd_per_million_samples"] = price / 3600 / report.samples_per_s * 1e6
    if energy is None and power is not None:
        energy = power * report.iteration_time_s
    if energy is not None and report.iteration_time_s > 0:
        found["kwh_per_million_samples"] = energy / (report.samples_per_s * report.iteration_time_s) * 1e6 / 3.6e6
    return found


def ratios(base: Report, other: Report) -> dict[str, float]:
    """`other` over `base`: iteration_time, throughput, price_per_hour, price_per_sample, energy_per_sample."""
    ours, theirs = per_sample(base), per_sample(other)
    pairs = {
        "iteration_time": (other.iteration_time_s, base.iteration_time_s),
        "throughput": (other.samples_per_s, base.samples_per_s),
        "price_per_hour": (other.cost.get("cost_usd_per_hour"), base.cost.get("cost_usd_per_hour")),
        "price_per_sample": (theirs.get("usd_per_million_samples"), ours.get("usd_per_million_samples")),
        "energy_per_sample": (theirs.get("kwh_per_million_samples"), ours.get("kwh_per_million_samples")),
    }
    return {k: a / b for k, (a, b) in pairs.items() if a is not None and b is not None and b > 0}


def verdict(base: Report, other: Report, *, name: str = "") -> str:
    """One sentence: how `other` (called `name`) compares with `base` in speed, money and energy for the same work."""
    found = ratios(base, other)
    words = []
    if "throughput" in found:
        words.append(f"{found['throughput']:.3g} times the throughput")
    if "price_per_sample" in found:
        words.append(
            _words(found["price_per_sample"], "the same price", "cheaper", "times as dear") + " for the same work"
        )
    if "energy_per_sample" in found:
        words.append(_words(found["energy_per_sample"], "the same energy", "less energy", "times the energy"))
    if not other.fits:
        words.append("does not fit")
    if not base.fits:
        words.append("against one that does not fit")
    return f"{name or other.scenario.get('cluster', 'the other')}: {', '.join(words)}"


def _words(ratio: float, same: str, less: str, more: str) -> str:
    if 0.995 <= ratio <= 1.005:
        return same
    return f"{1 - ratio:.0%} {less}" if ratio < 1 else f"{ratio:.3g} {more}"


def headline(report: Report) -> list[tuple[str, str]]:
    """The first lines of every form of the answer: (name, text)."""
    low_high = report.interval_90.get("iteration_time_s")
    spread = f" (90 %: {format_s(low_high[0])} to {format_s(low_high[1])})" if low_high else ""
    lines = [("Step time", format_s(report.iteration_time_s) + spread)]
    rate = f"{number(report.samples_per_s)} samples/s"
    if report.tokens_per_s is not None:
        rate += f", {number(report.tokens_per_s)} tokens/s"
    if report.tokens_per_s_per_gpu is not None:
        rate += f" ({number(report.tokens_per_s_per_gpu)} per GPU)"
    lines.append(("Throughput", rate))
    if report.mfu is not None:
        hfu = f", HFU {report.hfu:.1%}" if report.hfu is not None and report.hfu != report.mfu else ""
        lines.append(("MFU", f"{report.mfu:.1%}{hfu}"))
    lines.append(("Fits", fits_line(report)))
    if report.bottleneck:
        lines.append(("Bound by", report.bottleneck))
    return lines


def fits_line(report: Report) -> str:
    """The verdict on memory with the figures and, where it does not fit, the reason and the knob."""
    memory = report.memory
    room = f"{memory.device_bytes / GIB:.2f} GiB per GPU"
    if memory.capacity_bytes:
        room += f" of {memory.room_bytes / GIB:.2f}"
    if memory.fits:
        return f"yes, {room}"
    return ". ".join(x.rstrip(".") for x in (f"NO, {memory.why_not or room}", memory.way_out) if x)


def money_lines(report: Report) -> list[tuple[str, str]]:
    """Money and energy per hour, per step, for a million samples and the whole job, where the profiles know them."""
    cost, each = report.cost, per_sample(report)
    power = cost.get("power_w")
    job = cost.get("energy_j")
    parts = {
        "Per hour": (_usd(cost.get("cost_usd_per_hour")), None if power is None else f"{number(power / 1e3)} kWh"),
        "Per step": (_usd(cost.get("usd_per_step")), _joules(cost.get("energy_j_per_step"))),
        "Per 1M samples": (_usd(each.get("usd_per_million_samples")), _kwh(each.get("kwh_per_million_samples"))),
        "Whole job": (
            None if "duration_s" not in cost else format_s(cost["duration_s"]),
            _usd(cost.get("cost_usd")),
            None if job is None else _kwh(job / 3.6e6),
        ),
    }
    return [(name, ", ".join(x for x in found if x)) for name, found in parts.items() if any(found)]


def failure_lines(report: Report) -> list[tuple[str, str]]:
    """Failures, checkpoints and what they leave of the time, for a person."""
    found = report.goodput
    if not found:
        return []
    lines = [
        ("Goodput", f"{found['goodput']:.1%} of the time is useful work"),
        (
            "Lost to",
            f"checkpoints {found['checkpoint_fraction']:.1%}, work done twice {found['lost_work_fraction']:.1%}, "
            f"restarts {found['restart_fraction']:.1%}",
        ),
        ("Failures", f"one in {format_s(found['system_mtbf_s'])}, {number(found['failures_per_day'])} a day"),
        (
            "Checkpoint",
            f"{format_bytes(found['checkpoint_bytes'])} in {format_s(found['checkpoint_s'])}, "
            f"every {format_s(found['checkpoint_interval_s'])} (best: {format_s(found['optimal_interval_s'])})",
        ),
    ]
    if "expected_duration_s" in found:
        spent = [format_s(found["expected_duration_s"]), _usd(found.get("expected_cost_usd"))]
        spent += [f"{number(found['expected_failures'])} failures"]
        lines.append(("Whole job", ", ".join(x for x in spent if x)))
    return lines


def imported_lines(report: Report) -> list[str]:
    """What became of the keys of the imported files, a line each; those that change nothing share one."""
    lines, without = [], []
    for key, value, became in imported_rows(report):
        if became.endswith("does not change the time or memory of a step"):
            without.append(key)
        else:
            lines.append(f"{key} {value}".rstrip() + f": {became}")
    if without:
        lines.append(f"without effect on a step: {', '.join(without)}")
    return lines


def imported_rows(report: Report) -> list[tuple[str, str, str]]:
    """(key of the file, its value, what became of it) for every key of the imported files."""
    rows = [(x["key"], x["value"], f"{x['field']} = {x['set']}") for x in report.imported.get("mapped", ())]
    rows += [(x["key"], x["value"], f"left open: {x['reason']}") for x in report.imported.get("auto", ())]
    rows += [(x["key"], x["value"], f"not used: {x['reason']}") for x in report.imported.get("ignored", ())]
    return rows


PART_HEADS = ("forward", "backward", "share", "runs", "kind")


def part_tables(report: Report) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The breakdowns asked for, as tables: (title, column heads, rows); what carries no time is left out."""
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    for by in report.shown:
        rows: list[tuple[str, ...]] = []
        for part in report.parts(by):
            if not part.seconds > 0.0:
                continue
            seconds = (format_s(part.forward_s), format_s(part.backward_s))
            once = " (a step)" if part.per == "step" else ""
            # The shares of messages are of the busy network, not of the compute above them.
            share = "" if part.kind == "communication" else f"{part.share:.1%}"
            rows.append((part.name + once, *seconds, share, number(part.count), part.kind))
        tables.append((f"Where a micro-batch goes, by {by}", (by.removesuffix("s"), *PART_HEADS), rows))
    return tables


def _usd(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.2f} USD" if value >= 0.1 or value == 0 else f"{value:.3g} USD"


def _kwh(value: float | None) -> str | None:
    return None if value is None else f"{number(value)} kWh"


def _joules(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{number(value / 1e3)} kJ" if value >= 1e3 else f"{number(value)} J"


def trace_note(report: Report) -> str:
    """What a timeline leaves out: of alternating kinds of step (ACP-SGD) it shows the first."""
    line = report.timeline
    if line is None or abs(line.end_s - report.iteration_time_s) <= 1e-9 * report.iteration_time_s:
        return ""
    mean = format_s(report.iteration_time_s)
    return f"Shown is the first of the alternating kinds of step, {format_s(line.end_s)}; the mean step takes {mean}."


def number(value: float) -> str:
    """Four significant digits as people read them: 1234.5 -> 1,234; 0.001234 stays."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def sections(report: Report) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The answer as tables: (title, column heads, rows). Markdown and HTML are made from it."""
    step = report.iteration_time_s or 1.0
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [("", ("", "answer"), list(headline(report)))]
    tables.append(
        (
            "Where the time goes",
            ("term", "time", "share"),
            [(n, format_s(v), f"{v / step:.1%}") for n, v in terms(report)],
        )
    )
    tables += part_tables(report)
    tables.insert(1, ("Read from files", ("key", "value", "became"), list(imported_rows(report))))
    rows: list[tuple[str, ...]] = [(stem(n), format_bytes(v)) for n, v in report.memory.items_bytes.items() if v]
    tables.append(("Memory per GPU", ("item", "size"), rows))
    tables.append(("Money and energy", ("", "figure"), list(money_lines(report))))
    tables += [(title, ("", "figure"), list(rows)) for title, rows in report.sections]
    tables.append(("Failures and checkpoints", ("", "figure"), list(failure_lines(report))))
    tables.append(
        (
            "What would change it most",
            ("input", "now", "elasticity"),
            [(s.name, s.value, f"{s.elasticity:+.2f}") for s in report.sensitivities],
        )
    )
    tables.append(
        (
            "The same job elsewhere",
            ("cluster", *BESIDE),
            [beside_row(report, r) for r in (report, *report.beside)] if report.beside else [],
        )
    )
    tables.append(("Who talks over what", ("group", "link"), list(report.groups.items())))
    return [table for table in tables if table[2]]


BESIDE = ("step", "samples/s", "throughput", "USD/h", "price a sample", "energy a sample")


def beside_row(base: Report, other: Report) -> tuple[str, ...]:
    """One row of the side-by-side table; the ratios are to `base`."""
    found = ratios(base, other)
    price = other.cost.get("cost_usd_per_hour")
    shown = [f"{found[k]:.3g}×" if k in found else "" for k in ("throughput", "price_per_sample", "energy_per_sample")]
    name = str(other.scenario.get("cluster", "")) + ("" if other.fits else " (does not fit)")
    return (
        name,
        format_s(other.iteration_time_s),
        number(other.samples_per_s),
        shown[0],
        "" if price is None else f"{price:,.2f}",
        *shown[1:],
    )


def to_markdown(report: Report) -> str:
    """The whole answer as GitHub-flavoured Markdown."""
    parts = [f"## {_escape_md(label(report))}", ""]
    for title, heads, rows in sections(report):
        if title:
            parts += [f"### {title}", ""]
        parts += [markdown_table(heads, rows), ""]
    parts += [_escape_md(verdict(report, other)) + "\n" for other in report.beside]
    for title, lines in (("Assumptions", report.assumptions), ("Warnings", report.warnings)):
        if lines:
            parts += [f"### {title}", "", *(f"- {_escape_md(line)}" for line in lines), ""]
    return "\n".join(parts).rstrip() + "\n"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_escape_md(str(cell)) for cell in line) + " |" for line in lines)


def to_html_fragment(report: Report) -> str:
    """The answer as HTML tables for a notebook: no script, every text escaped."""
    parts = [f"<div class='simkit'><h4>{html.escape(label(report))}</h4>"]
    for title, heads, rows in sections(report):
        parts.append(html_table(title, heads, rows))
    parts += [f"<p>{html.escape(verdict(report, other))}</p>" for other in report.beside]
    for title, lines in (("Assumptions", report.assumptions), ("Warnings", report.warnings)):
        if lines:
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            parts.append(f"<details><summary>{title} ({len(lines)})</summary><ul>{items}</ul></details>")
    return "\n".join(parts) + "</div>\n"


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table with a caption; the first cell of a row is its heading."""
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    head = "".join(f"<th scope='col'>{html.escape(h)}</th>" for h in heads)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{html.escape(str(c))}</td>" for c in rest)
        body.append(f"<tr><th scope='row'>{html.escape(str(first))}</th>{cells}</tr>")
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def stem(name: str) -> str:
    """The name of an item without its unit."""
    return name.removesuffix("_bytes").removesuffix("_gib")


def _escape_md(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
