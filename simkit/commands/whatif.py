"""One scenario before and after a change: every term of the step, the memory, throughput and money.

Each --change is a case of its own (several fields in one, joined by commas, change together); several of them are also
shown all together. What was chosen for the base is held; --replan chooses anew. Examples:

  simkit whatif --cluster 8x4x2080ti --inter 10gbe --model bert-large --change inter=100gbe --change method=acp-sgd
  simkit whatif --cluster 2x8xa100 --model llama-2-7b --zero 3 --change tp=2,zero=1 --change recompute=full --json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from simkit.commands import _flags, _output
from simkit.errors import InputError

if TYPE_CHECKING:
    from simkit.report import Report
    from simkit.whatif import WhatIf


def configure(parser: _flags.Parser) -> None:
    parser.add_argument(
        "--change", action="append", default=[], metavar="FIELD=VALUE[,…]", help="what to change; repeatable"
    )
    parser.add_argument("--replan", action="store_true", help="choose micro-batch, method and degrees anew")
    _flags.add_scenario(parser)
    _flags.add_forms(parser, "json", "csv")


def run(args: argparse.Namespace) -> int:
    from simkit.whatif import whatif

    found = whatif(_flags.scenario(args), [_change(text) for text in args.change], replan=args.replan)
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(found.to_dict()))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv(found.rows()))
    else:
        _text(args, found)
    return 0


def _change(text: str) -> dict[str, str]:
    """``tp=4,sp=4`` as {field: text}; a part without ``=`` belongs to the value before it."""
    out: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        key = name.strip().replace("-", "_")
        if not equals or not key or not value.strip():
            raise InputError("is no FIELD=VALUE", key="--change", value=text, hint="as in --change inter=100gbe")
        if key in out:
            raise InputError("is given twice", key="--change", value=key, hint="give each case its own --change")
        out[key] = value.strip()
    return out


def _text(args: argparse.Namespace, found: WhatIf) -> None:
    from simkit.render_tables import label
    from simkit.units import format_s

    answered = [(case, case.report) for case in found.cases if case.report is not None]
    _output.emit(label(found.base))
    heads = ("", "before", *(case.label for case, _ in answered))
    lines: list[tuple[str, ...]] = []
    for row in found.rows():
        before = row["before"]
        # Terms and items that nothing moves are left to --csv and --json.
        after = [row[case.label] for case, _ in answered]
        if row["kind"] == "figure" or any(_moves(before, value) for value in after):
            lines.append((_name(row), _cell(row, before), *(_beside(row, before, value) for value in after)))
    _output.emit(_output.listing(heads, lines, right=tuple(range(1, len(heads)))))
    for case in found.cases:
        if case.report is None:
            _output.emit(f"! {case.label}: {case.reason}")
        elif case.note:
            _output.emit(f"! {case.label}: {case.note}")
    if not args.quiet:
        _output.emit("\nBound by")
        _output.emit(f"before: {found.base.bottleneck}")
        for case, report in answered:
            _output.emit(f"{case.label}: {report.bottleneck}{_verdict(report)}")
        _output.emit("\nStep time in 90 % of cases")
        for name, report in (("before", found.base), *((case.label, report) for case, report in answered)):
            low, high = report.interval_90["iteration_time_s"]
            _output.emit(f"{name}: {format_s(low)} to {format_s(high)}")
        _output.emit("\nAssumed (not given)")
        for note in found.base.assumptions:
            _output.emit(f"- {note}")


def _verdict(report: Report) -> str:
    return "" if report.fits else f"; does not fit: {report.memory.why_not}"


def _moves(before: Any, after: Any) -> bool:
    one, two = float(before or 0.0), float(after or 0.0)
    return abs(one - two) > 0.001 * max(abs(one), abs(two))


def _name(row: dict[str, Any]) -> str:
    names = {
        "iteration_time_s": "step time", "samples_per_s": "samples/s", "tokens_per_s_per_gpu": "tokens/s/GPU",
        "mfu": "MFU", "peak_memory_gib": "memory", "memory_capacity_gib": "of", "usd_per_million_samples":
        "USD/1M samples", "kwh_per_million_samples": "kWh/1M samples",
    }  # fmt: skip
    name = str(row["name"])
    if row["kind"] == "memory_gib":
        return f"{name.replace('_', ' ')} memory" if name not in ("context", "fragmentation") else name
    return names.get(name, name.removesuffix("_s").replace("_", " "))


def _cell(row: dict[str, Any], value: Any) -> str:
    from simkit.units import format_s

    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    name = str(row["name"])
    if row["kind"] == "term_s" or name == "iteration_time_s":
        return format_s(value)
    if name == "mfu":
        return f"{value:.1%}"
    if row["kind"] == "memory_gib" or name.endswith("_gib"):
        return f"{value:.2f} GiB"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _beside(row: dict[str, Any], before: Any, value: Any) -> str:
    text = _cell(row, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isinstance(before, (int, float)):
        return text
    if not before or not _moves(before, value):
        return text
    return f"{text} ({value / before - 1.0:+.0%})" if value / before < 10.0 else f"{text} ({value / before:.0f}x)"
