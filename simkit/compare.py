"""Several scenarios side by side: every case predicted, with ratios to the first.

>>> simkit.compare(cluster=["50x3080", "4xH100-PCIe"], model="bert-large")
>>> simkit.compare(cluster="8x4x2080ti", inter="10gbe", method=["s-sgd", "power-sgd", "acp-sgd"])
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simkit.errors import InputError, RefusedError, unknown
from simkit.render import plain, rows_to_csv
from simkit.render_tables import beside_row, html_table, label, markdown_table, ratios
from simkit.spec.scenario import FIELDS, Scenario

if TYPE_CHECKING:
    from simkit.report import Report

MAX_CASES = 1000
HEADS = ("case", "step", "samples/s", "throughput", "USD/h", "price a sample", "energy a sample", "fits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One column of the comparison: what was varied, and the answer or the reason why there is none."""

    label: str
    values: Mapping[str, Any]
    report: Report | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` returns. `varied`: the fields in which the cases differ; ratios are to the first answered case."""

    cases: tuple[Case, ...]
    varied: tuple[str, ...] = ()

    @property
    def reports(self) -> tuple[Report, ...]:
        """The answers, in the order of the cases that have one."""
        return tuple(case.report for case in self.cases if case.report is not None)

    @property
    def base(self) -> Report:
        """The first answered case. Raises InputError where no case could be predicted."""
        if not self.reports:
            raise InputError(
                "has no case that can be predicted", key="compare", hint=self.cases[0].reason if self.cases else ""
            )
        return self.reports[0]

    def to_dict(self) -> dict[str, Any]:
        """{varied, cases: [{label, values, report | refused, ratios}]}; ratios: other / first."""
        base = self.base
        cases = []
        for case in self.cases:
            entry: dict[str, Any] = {"label": case.label, "values": dict(case.values)}
            if case.report is None:
                entry["refused"] = case.reason
            else:
                entry |= {"report": case.report.to_dict(), "ratios": ratios(base, case.report)}
            cases.append(entry)
        answer: dict[str, Any] = plain({"varied": list(self.varied), "cases": cases})
        return answer

    def rows(self) -> list[tuple[str, ...]]:
        """The table, one tuple a case under `HEADS`."""
        rows: list[tuple[str, ...]] = []
        for case in self.cases:
            if case.report is None:
                rows.append((case.label, f"refused: {case.reason}", *[""] * (len(HEADS) - 2)))
            else:
                _, *cells = beside_row(self.base, case.report)
                rows.append((case.label, *cells, "yes" if case.report.fits else "NO"))
        return rows

    def to_markdown(self) -> str:
        """The table as GitHub-flavoured Markdown; ratios are to the first case."""
        return markdown_table(HEADS, self.rows()) + "\n"

    def to_csv(self) -> str:
        """One row a case: label, the varied fields, the flattened keys of the report, the ratios."""
        rows = []
        for entry in self.to_dict()["cases"]:
            report = {k: v for k, v in entry.get("report", {}).items() if k not in ("ledger", "beside", "per_stage")}
            rest = {k: v for k, v in entry.items() if k in ("refused", "ratios")}
            rows.append({"label": entry["label"], **rest, **report})
        return rows_to_csv(rows)

    def to_text(self, **options: Any) -> str:
        """The table for a terminal, with one sentence a case; options as of `simkit.render_text.to_text`."""
        from simkit.render_tables import verdict
        from simkit.render_text import Line, comparison_table, print_parts

        answered = [(case.label, case.report) for case in self.cases if case.report is not None]
        lines = ["", *(f"! {case.label}: {case.reason}" for case in self.cases if case.report is None)]
        if len(answered) <= 8:
            lines[1:1] = [verdict(self.base, report, name=name) for name, report in answered[1:]]
        lines += dict.fromkeys(f"! {line}" for report in self.reports for line in report.warnings)
        return print_parts([comparison_table(self.base, answered), *(Line(text=text) for text in lines)], **options)

    def __str__(self) -> str:
        return self.to_text(width=80)

    def _repr_html_(self) -> str:
        return html_table("Side by side; ratios are to the first case", HEADS, self.rows())


def compare(scenarios: Sequence[Scenario | Mapping[str, Any]] = (), /, **fields: Any) -> Comparison:
    """Predicts several scenarios and sets them side by side.

    scenarios: Scenario objects or mappings of fields. fields: keywords of `simkit.predict`; a list or tuple as value is
    varied, several of them as their Cartesian product. With both, `fields` are put into each of `scenarios`.
    Raises InputError on bad input, on more than MAX_CASES cases, and where nothing is to be compared.
    """
    bases = [s if isinstance(s, Scenario) else Scenario.of(s) for s in scenarios] or [Scenario.of({})]
    cases = variations(fields)
    if len(bases) * len(cases) > MAX_CASES:
        raise InputError("are too many", key="cases", value=len(bases) * len(cases), hint=f"at most {MAX_CASES}")
    many = [base.with_(**case) for base in bases for case in cases]
    varied = _differing(many)
    return Comparison(cases=tuple(_case(scenario, varied) for scenario in many), varied=varied)


def variations(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The Cartesian product over the fields whose value is a list or tuple, the last field varying fastest.

    Raises InputError for an unknown field, an empty list, or a product of more than MAX_CASES.
    """
    axes: list[list[Any]] = []
    total = 1
    for name, value in fields.items():
        if name not in FIELDS:
            raise unknown("key", name, FIELDS)
        values = list(dict.fromkeys(value)) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise InputError("is an empty list", key=name, hint="give at least one value")
        total *= len(values)
        if total > MAX_CASES:
            raise InputError("are too many", key="cases", value=total, hint=f"at most {MAX_CASES}")
        axes.append(values)
    return [dict(zip(fields, point, strict=True)) for point in itertools.product(*axes)]


def _differing(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    names = dict.fromkeys(name for s in scenarios for name in s)
    return tuple(n for n in names if len({s.get(n) for s in scenarios}) > 1)


def _case(scenario: Scenario, varied: tuple[str, ...]) -> Case:
    from simkit.predict import predict_scenario

    values = {name: scenario.get(name) for name in varied}
    name = ", ".join(
        str(v) if FIELDS[k].kind in ("str", "choice") else f"{k}={v}" for k, v in values.items() if v is not None
    )
    try:
        report = predict_scenario(scenario, beside=False)
    except RefusedError as error:
        return Case(label=name or "scenario", values=values, reason=str(error))
    return Case(label=name or label(report), values=values, report=report)
