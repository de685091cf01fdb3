"""One scenario, and what a change of some fields does to every term of the step and every item of the memory.

>>> found = whatif({"model": "bert-large", "cluster": "8x4x2080ti"}, [{"inter": "100gbe"}])
>>> found.cases[0].ratio

What the planner chose for the base (micro-batch, method, degrees) is held, so that a difference is that of the change
alone; `replan` lets it choose anew. The global batch is held where the changed plan can keep it, else the accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from simkit.errors import InputError, RefusedError
from simkit.render_tables import per_sample, ratios, terms
from simkit.spec.scenario import Scenario, clean
from simkit.units import GIB

if TYPE_CHECKING:
    from simkit.report import Report

MAX_CHANGES = 20
HELD = (
    "method", "rank", "density", "tp", "pp", "cp", "ep", "sp", "vpp", "zero", "offload", "recompute", "micro_batch",
)  # fmt: skip
"""What a planner chooses, and so is held."""
_BATCH = frozenset({"micro_batch", "grad_accum", "global_batch"})
_DEGREES = frozenset({"dp", "tp", "pp", "cp"})
TOGETHER = "all together"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One change. report: the answer under it, or `reason` why there is none; note: what could not be held."""

    label: str
    change: Mapping[str, Any]
    report: Report | None = None
    reason: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What `whatif` returns: the base and one case a change, in order, all together last where there are several."""

    base: Report
    cases: tuple[Case, ...]

    def differences(self, case: Case) -> list[dict[str, Any]]:
        """{term, before_s, after_s, change_s} of every term of either step, those of the base first."""
        if case.report is None:
            return []
        before, after = dict(terms(self.base)), dict(terms(case.report))
        return [
            {"term": name, "before_s": before.get(name, 0.0), "after_s": after.get(name, 0.0),
             "change_s": after.get(name, 0.0) - before.get(name, 0.0)}
            for name in dict.fromkeys([*before, *after])
        ]  # fmt: skip

    def memory(self, case: Case) -> list[dict[str, Any]]:
        """{item, before_gib, after_gib} of every item of either memory."""
        if case.report is None:
            return []
        before, after = self.base.memory.items_bytes, case.report.memory.items_bytes
        return [
            {"item": name, "before_gib": before.get(name, 0.0) / GIB, "after_gib": after.get(name, 0.0) / GIB}
            for name in dict.fromkeys([*before, *after])
            if before.get(name, 0.0) or after.get(name, 0.0)
        ]

    def to_dict(self) -> dict[str, Any]:
        """The object of `simkit whatif --json`."""
        from simkit.render import plain

        cases = []
        for case in self.cases:
            entry: dict[str, Any] = {"label": case.label, "change": dict(case.change)}
            if case.report is None:
                entry["refused"] = case.reason
            else:
                entry |= {"note": case.note or None, "terms": self.differences(case), "memory": self.memory(case)}
                entry |= {"ratios": ratios(self.base, case.report), "report": case.report.to_dict()}
            cases.append(entry)
        answer: dict[str, Any] = plain({"base": self.base.to_dict(), "cases": cases})
        return answer

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a figure: kind, name, before, and after by label; for CSV."""
        out: list[dict[str, Any]] = []
        answered = [(case.label, case.report) for case in self.cases if case.report is not None]
        for kind, pick in (("figure", _figures), ("term_s", _terms), ("memory_gib", _items)):
            found = [pick(self.base), *(pick(report) for _, report in answered)]
            for name in dict.fromkeys(key for one in found for key in one):
                labels = ("before", *(label for label, _ in answered))
                values = {label: one.get(name) for label, one in zip(labels, found, strict=True)}
                out.append({"kind": kind, "name": name, **values})
        return out


def _figures(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {"iteration_time_s": report.iteration_time_s, "samples_per_s": report.samples_per_s}
    if report.tokens_per_s_per_gpu is not None:
        found["tokens_per_s_per_gpu"] = report.tokens_per_s_per_gpu
    if report.mfu is not None:
        found["mfu"] = report.mfu
    memory = report.memory
    found |= {"peak_memory_gib": memory.device_bytes / GIB, "memory_capacity_gib": memory.room_bytes / GIB}
    return found | {"fits": report.fits} | per_sample(report)


def _terms(report: Report) -> dict[str, Any]:
    return dict(terms(report))


def _items(report: Report) -> dict[str, Any]:
    return {name: value / GIB for name, value in report.memory.items_bytes.items() if value}


def whatif(
    scenario: Scenario | Mapping[str, Any], changes: Sequence[Mapping[str, Any]], *, replan: bool = False
) -> WhatIf:
    """Predicts a scenario, then under each of `changes` ({field: value}), then under all of them together.

    A change that simkit refuses is a case with its reason beside those that it answers. Raises InputError for an
    unknown field, a bad value, no change or more than `MAX_CHANGES`; and InputError or RefusedError where the base
    cannot be predicted, or no change can.
    """
    from simkit.predict import predict_scenario

    base = scenario if isinstance(scenario, Scenario) else Scenario.of(scenario)
    if not changes:
        raise InputError("is missing", key="--change", hint="write what to change, as in --change inter=100gbe")
    if len(changes) > MAX_CHANGES:
        raise InputError("are too many", key="changes", value=len(changes), hint=f"at most {MAX_CHANGES}")
    checked = [{name: clean(name, value) for name, value in change.items()} for change in changes]
    report = predict_scenario(base, beside=False)
    answered = [_case(base, report, change, label_of(change), replan) for change in checked]
    faults = [fault for _, fault in answered if fault is not None]
    if len(faults) == len(answered):
        raise faults[0]
    cases = [case for case, _ in answered]
    if len(checked) > 1:
        cases.append(_together(base, report, checked, replan))
    return WhatIf(base=report, cases=tuple(cases))


def _together(base: Scenario, report: Report, changes: Sequence[Mapping[str, Any]], replan: bool) -> Case:
    merged = {name: value for change in changes for name, value in change.items()}
    twice = [name for name in merged if len({str(change[name]) for change in changes if name in change}) > 1]
    if twice:
        reason = f"the changes exclude each other: {', '.join(twice)}"
        return Case(label=TOGETHER, change=merged, reason=reason)
    return _case(base, report, merged, TOGETHER, replan)[0]


def label_of(change: Mapping[str, Any]) -> str:
    """``inter = 100gbe, micro_batch = 4``."""
    return ", ".join(f"{name} = {value}" for name, value in change.items())


def _case(
    base: Scenario, report: Report, change: Mapping[str, Any], label: str, replan: bool
) -> tuple[Case, InputError | RefusedError | None]:
    from simkit.predict import predict_scenario

    error: InputError | RefusedError | None = None
    for fields, note in _trials(base, report, change, replan):
        try:
            found = predict_scenario(base.with_(**fields), beside=False, as_ran=not replan)
        except (InputError, RefusedError) as fault:
            error = error or fault
            continue
        return Case(label=label, change=dict(change), report=found, note=note(found)), None
    return Case(label=label, change=dict(change), reason=str(error)), error


Trial = tuple[dict[str, Any], Any]


def _trials(base: Scenario, report: Report, change: Mapping[str, Any], replan: bool) -> list[Trial]:
    """(fields to put into the base, what to say of it): the global batch kept, else the accumulation, else as given."""
    was = report.scenario
    if replan or not was.keys() >= _BATCH:
        return [(dict(change), lambda found: "")]
    held: dict[str, Any] = {name: was[name] for name in HELD if name in was}
    if "tp" in change and held.get("sp", 1) > 1:
        held["sp"] = change["tp"]
    if was.get("method") == change.get("method", was.get("method")):
        held |= {name: was[name] for name in ("rank", "density") if name in was}
    else:
        held = {k: v for k, v in held.items() if k not in ("rank", "density")}
    if change.keys() & _DEGREES:
        held["dp"] = None
    batch = dict.fromkeys(_BATCH)
    if "global_batch" in change and "micro_batch" not in change:
        # A given global batch may not divide by the micro-batch that was chosen for another one.
        free = {k: v for k, v in held.items() if k != "micro_batch"}
        return [({**batch, **held, **change}, lambda found: ""), ({**batch, **free, **change}, _micro)]
    if "grad_accum" in change:
        return [({**batch, **held, **change}, lambda found: "")]
    kept = {"global_batch": was["global_batch"], "micro_batch": was["micro_batch"]}
    same = {"grad_accum": was["grad_accum"], "micro_batch": was["micro_batch"]}
    return [
        ({**batch, **held, **kept, **change}, lambda found: ""),
        ({**batch, **held, **same, **change}, _global),
    ]


def _global(found: Report) -> str:
    return f"the global batch is {found.scenario['global_batch']}: the one before does not divide"


def _micro(found: Report) -> str:
    return f"micro_batch is {found.scenario['micro_batch']}: the one before does not divide the global batch"


__all__ = ["Case", "WhatIf", "whatif"]
