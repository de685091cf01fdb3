"""Every plan of a job on a cluster, weighed and priced by the line of `predict`, ranked by time, cost or memory.

>>> found = search(model="llama-3.1-70b", cluster="16x8xh100", global_batch=1024)
>>> found.ranked[0].fields

A plan is struck out by rule (`simkit.search_space`), because it does not fit with the share `free` of the memory left
over, or because the same plan with less recomputation fits, which is never slower. What was struck out is counted by
reason. Each plan that is left has the figures of `predict` for the same fields.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from simkit.cost import cost
from simkit.errors import InputError, RefusedError, unknown
from simkit.evaluate import Evaluation, evaluate, weigh, workload
from simkit.memory import staged
from simkit.methods import path
from simkit.planner import HEADROOM, planned, usual_samples
from simkit.price import Compute
from simkit.report import Memory
from simkit.search_space import SEARCHED, Space, space
from simkit.spec.model import TransformerSpec
from simkit.spec.plan import Plan
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import Scenario, clean
from simkit.units import GIB

BY = ("time", "cost", "memory")
FREE = 1.0 - HEADROOM
MAX_PLANS = 5_000_000
MAX_CASES = 100
SHOWN = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "offload", "recompute", "micro_batch", "grad_accum")
_DEFAULTS = {n: Plan.__dataclass_fields__[n].default for n in (*SEARCHED, "sp") if n != "micro_batch"}
UNFIT = "does not fit into memory"
OFFLOADS = ("optimizer", "params")
OFFLOADED = "offload: no plan fits on the devices alone; the host memory that it takes is assumed to be there"
DOMINATED = "slower than the same plan with less recomputation, which fits"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One plan with its figures. fields: what to give to `predict` beside what was asked; varied: the case, where
    several clusters (or links …) were asked for; used: share of the memory taken; usd: per million samples."""

    fields: Mapping[str, Any]
    varied: Mapping[str, Any]
    resolved: Resolved
    iteration_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    peak_memory_gib: float
    used: float
    fits: bool
    usd: float | None

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    def figure(self, by: str) -> float:
        """What is ranked, less is better: seconds a sample, USD a million samples, share of the memory taken."""
        if by == "time":
            return 1.0 / self.samples_per_s
        if by == "memory":
            return self.peak_memory_gib
        return self.usd if self.usd is not None else float("inf")

    def order(self, by: str) -> tuple[Any, ...]:
        """The key of a ranking, the same every time: the figure, then memory, then the simpler plan."""
        simple = tuple(str(self.fields.get(name, "")) for name in SEARCHED)
        return (self.figure(by), self.iteration_time_s, self.peak_memory_gib, self.plan.tp * self.plan.pp, simple)

    def row(self) -> dict[str, Any]:
        """The plan and its figures as one flat dictionary, keys with their unit."""
        plan = self.plan
        out: dict[str, Any] = dict(self.varied) | {name: getattr(plan, name) for name in SHOWN}
        out |= {"sp": plan.sp, "global_batch": plan.global_batch, "method": plan.method}
        out |= {"iteration_time_s": self.iteration_time_s, "samples_per_s": self.samples_per_s}
        if self.tokens_per_s is not None:
            out["tokens_per_s"] = self.tokens_per_s
            out["tokens_per_s_per_gpu"] = self.tokens_per_s / self.resolved.cluster.gpus
        out |= {"peak_memory_gib": self.peak_memory_gib, "memory_used": self.used, "fits": self.fits}
        return out if self.usd is None else out | {"usd_per_million_samples": self.usd}

    def flags(self) -> str:
        """The flags that make `simkit predict` answer for this plan."""
        said = {**self.varied, **{k: v for k, v in self.fields.items() if v != _DEFAULTS.get(k, object())}}
        if not any(k in said for k in ("tp", "pp", "cp", "zero", "offload")):
            said |= {"zero": 0} if self.resolved.scenario.get("method", "s-sgd") == "s-sgd" else {}
            said |= {"method": self.plan.method} if self.plan.dp > 1 else {}
        return " ".join(f"--{k.replace('_', '-')} {v}" for k, v in said.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found. candidates: every plan that was priced, best first; asked: combinations; pruned: {reason:
    combinations struck out}; assumptions: of the best plan."""

    by: str
    free: float
    candidates: tuple[Candidate, ...]
    asked: int
    pruned: Mapping[str, int]
    leanest: Candidate | None = None
    """The plan of least memory, where none fits."""
    assumptions: tuple[str, ...] = field(default=())

    def top(self, count: int) -> tuple[Candidate, ...]:
        return self.candidates[:count]

    def to_dict(self, count: int) -> dict[str, Any]:
        """The object of `simkit search --json`."""
        plans = [{"rank": i} | c.row() | {"flags": c.flags()} for i, c in enumerate(self.top(count), start=1)]
        out: dict[str, Any] = {"by": self.by, "memory_free": self.free, "asked": self.asked}
        out |= {"fitting": len(self.candidates), "plans": plans}
        if self.leanest is not None:
            out["leanest"] = self.leanest.row() | {"flags": self.leanest.flags()}
        return out | {
            "pruned": [{"reason": reason, "plans": n} for reason, n in ordered(self.pruned)],
            "assumptions": list(self.assumptions),
        }


def ordered(pruned: Mapping[str, int]) -> list[tuple[str, int]]:
    """Reasons, the most frequent first."""
    return sorted(pruned.items(), key=lambda item: (-item[1], item[0]))


def search(
    *, by: str = "time", free: float = FREE, profiles: Sequence[str] = (), models: Sequence[str] = (), **given: Any
) -> Found:
    """Every plan of a job, best first.

    given: fields of the vocabulary; a list as value is what to try (of a degree, the micro-batch or the recomputation),
    or several cases (of any other field, such as ``cluster``), whose plans are ranked together. by: ``time`` (seconds a
    sample), ``cost`` (USD a sample) or ``memory``. free: share of the memory that a plan leaves over.
    Raises InputError for bad input, RefusedError where simkit has no answer for the job under any plan.
    """
    if by not in BY:
        raise unknown("ranking", by, BY, key="by")
    if not 0.0 <= free < 1.0:
        raise InputError("is no share", key="free", value=free, hint="0 to 0.99")
    single = {k: v for k, v in given.items() if not isinstance(v, (list, tuple))}
    several = {k: [clean(k, x) for x in v] for k, v in given.items() if isinstance(v, (list, tuple))}
    base = Scenario.of(single, profiles=tuple(map(str, profiles)), models=tuple(map(str, models)))
    return search_scenario(base, several, by=by, free=free)


def search_scenario(base: Scenario, lists: Mapping[str, Sequence[Any]], *, by: str, free: float = FREE) -> Found:
    """`search` of a scenario. lists: checked values of the fields that have several."""
    for name, values in lists.items():
        if not values:
            raise InputError("is an empty list", key=name, hint="give at least one value")
    outer = {k: tuple(v) for k, v in lists.items() if k not in SEARCHED}
    inner = {k: tuple(dict.fromkeys(v)) for k, v in lists.items() if k in SEARCHED}
    cases = [dict(zip(outer, values, strict=True)) for values in itertools.product(*outer.values())]
    if len(cases) > MAX_CASES:
        raise InputError("are too many", key="cases", value=len(cases), hint=f"at most {MAX_CASES}")
    parts = [explore(base.with_(**case), inner, by=by, free=free, varied=case) for case in cases]
    every = sorted((c for part in parts for c in part.candidates), key=lambda c: c.order(by))
    pruned: Counter[str] = Counter()
    for part in parts:
        pruned.update(part.pruned)
    lean = [part.leanest for part in parts if part.leanest is not None]
    leanest = min(lean, key=lambda c: c.order("memory")) if lean and not every else None
    best = every[0] if every else leanest
    if best is None:
        raise RefusedError(f"no plan can be priced: {'; '.join(reason for reason, _ in ordered(pruned)[:3])}")
    return Found(
        by=by,
        free=free,
        candidates=tuple(every),
        asked=sum(part.asked for part in parts),
        pruned=dict(pruned),
        leanest=leanest,
        assumptions=_shared(parts, best),
    )


def _shared(parts: Sequence[Found], best: Candidate) -> tuple[str, ...]:
    notes = list(next(p.assumptions for p in parts if best in p.candidates or best is p.leanest))
    return tuple(dict.fromkeys(notes))


def explore(
    scenario: Scenario,
    lists: Mapping[str, Sequence[Any]] | None = None,
    *,
    by: str = "time",
    free: float = FREE,
    chunks: bool = True,
    varied: Mapping[str, Any] | None = None,
) -> Found:
    """The plans of one scenario; where none fits and nobody said where states rest, those with states in host memory.
    chunks: try interleaved schedules too."""
    lists = dict(lists or {})
    found = _explored(scenario, lists, by, free, chunks, varied or {})
    if found.candidates or "offload" in lists or scenario.given("offload") or found.leanest is None:
        return found
    if found.leanest.resolved.device.kind != "gpu":
        return found
    moved = _explored(scenario, lists | {"offload": OFFLOADS}, by, free, chunks, varied or {})
    return replace(
        moved,
        asked=found.asked + moved.asked,
        pruned=dict(Counter(found.pruned) + Counter(moved.pruned)),
        leanest=moved.leanest if moved.leanest is None else min(found.leanest, moved.leanest, key=_memory),
        assumptions=(*moved.assumptions, *([OFFLOADED] if moved.candidates else [])),
    )


def _memory(one: Candidate) -> tuple[Any, ...]:
    return one.order("memory")


def _explored(
    scenario: Scenario,
    lists: Mapping[str, Sequence[Any]],
    by: str,
    free: float,
    chunks: bool,
    varied: Mapping[str, Any],
) -> Found:
    if path(scenario) is not None:
        raise RefusedError("work over peers has no degrees to search; `simkit sweep` tries its fields")
    bare = scenario.with_(**{name: None for name in SEARCHED if name in lists})
    resolved = resolve(bare)
    asked = space(resolved, lists, usual=usual_samples(resolved), chunks=chunks)
    if asked.size > MAX_PLANS:
        hint = f"at most {MAX_PLANS:,}; fix a field"
        raise InputError("has too many plans", key="search", value=asked.size, hint=hint)
    pruned: Counter[str] = Counter()
    candidates: list[Candidate] = []
    leanest: Candidate | None = None
    lean = _Leanest()
    for fields, one, found in _fitting(bare, asked, free, pruned, lean, all_recompute=by == "memory"):
        candidates.append(candidate(fields, one, found, varied))
    if not candidates and lean.resolved is not None:
        leanest = candidate(lean.fields, lean.resolved, evaluate(lean.resolved, advise=False), varied)
    best = min(candidates, key=lambda c: c.order(by)) if candidates else leanest
    return Found(
        by=by,
        free=free,
        candidates=tuple(sorted(candidates, key=lambda c: c.order(by))),
        asked=asked.size,
        pruned=dict(pruned),
        leanest=leanest,
        assumptions=(*(best.resolved.assumptions if best else ()), *_said(asked, resolved)),
    )


def _said(asked: Space, resolved: Resolved) -> list[str]:
    notes = []
    if asked.total is not None and not resolved.scenario.given("global_batch"):
        notes.append(f"global_batch = {asked.total}: usual for such a network, a multiple of the GPUs")
    if asked.sp is None and any(tp > 1 for tp in asked.axes["tp"]):
        notes.append("sp = tp: sequence parallelism moves what tensor parallelism moves and divides the activations")
    return notes


class _Leanest:
    """The plan of least memory among those that do not fit; the first of several."""

    def __init__(self) -> None:
        self.nbytes = float("inf")
        self.fields: dict[str, Any] = {}
        self.resolved: Resolved | None = None

    def take(self, nbytes: float, fields: dict[str, Any], resolved: Resolved) -> None:
        if nbytes < self.nbytes:
            self.nbytes, self.fields, self.resolved = nbytes, fields, resolved


def _fitting(
    scenario: Scenario,
    asked: Space,
    free: float,
    pruned: Counter[str],
    lean: _Leanest,
    *,
    all_recompute: bool,
) -> Iterator[tuple[dict[str, Any], Resolved, Evaluation]]:
    """(fields, resolved, priced) of every plan that fits; `lean` keeps the leanest of those that do not."""
    for degrees in asked.degrees(pruned):
        sizes = asked.samples(degrees)
        pruned["the micro-batch does not divide what a data rank takes"] += (
            len(asked.axes["micro_batch"]) - len(sizes)
        ) * len(asked.axes["recompute"])
        for i, micro in enumerate(sizes):
            fitted = False
            for k, recompute in enumerate(asked.axes["recompute"]):
                fields = asked.fields(degrees, micro, recompute)
                try:
                    resolved = planned(resolve(scenario.with_(**_open(fields, scenario))))
                    memory, found = _weighed(resolved)
                except (InputError, RefusedError) as error:
                    pruned[str(error)] += 1
                    continue
                if memory.reserved_bytes > (1.0 - free) * memory.capacity_bytes:
                    pruned[UNFIT] += 1
                    lean.take(memory.device_bytes, fields, resolved)
                    continue
                fitted = True
                yield fields, resolved, found or evaluate(resolved, advise=False)
                if not all_recompute:
                    pruned[DOMINATED] += len(asked.axes["recompute"]) - k - 1
                    break
            if not fitted:
                pruned[UNFIT] += (len(sizes) - i - 1) * len(asked.axes["recompute"])
                break


def _open(fields: Mapping[str, Any], scenario: Scenario) -> dict[str, Any]:
    """What the scenario is given: the plan, and S-SGD where no method was asked for."""
    return dict(fields) if scenario.given("method") else {**fields, "method": "s-sgd"}


def _weighed(resolved: Resolved) -> tuple[Memory, Evaluation | None]:
    """The memory of a plan; its price too where it cannot be weighed without."""
    if staged(resolved.plan, resolved.model):
        work = workload(resolved.model, resolved.plan, resolved.stack)
        # Only the way out of what does not fit reads the price of compute.
        unpriced = cast(Compute, None)
        return weigh(resolved, work, resolved.model, resolved.plan, unpriced, advise=False), None
    found = evaluate(resolved, advise=False)
    return found.memory, found


def candidate(fields: dict[str, Any], resolved: Resolved, found: Evaluation, varied: Mapping[str, Any]) -> Candidate:
    """The figures of one plan, as `predict` has them."""
    plan, cluster = resolved.plan, resolved.cluster
    spec = resolved.model.spec
    tokens = plan.seq_len if isinstance(spec, TransformerSpec) and resolved.model.input_kind == "tokens" else 0
    samples = plan.global_batch
    busy = min(found.timelines[0].busy_s.get("compute", found.end_s) / found.end_s, 1.0)
    money, _, _ = cost(
        cluster, resolved.scenario, step_s=found.end_s, busy=busy, samples_per_step=samples,
        tokens_per_step=samples * tokens,
    )  # fmt: skip
    usd = money.get("usd_per_step")
    memory = found.memory
    return Candidate(
        fields=fields,
        varied=dict(varied),
        resolved=resolved,
        iteration_time_s=found.end_s,
        samples_per_s=samples / found.end_s,
        tokens_per_s=samples * tokens / found.end_s if tokens else None,
        peak_memory_gib=memory.device_bytes / GIB,
        used=memory.reserved_bytes / memory.capacity_bytes,
        fits=memory.fits,
        usd=usd / samples * 1e6 if usd is not None else None,
    )


__all__ = ["BY", "FREE", "Candidate", "Found", "explore", "search", "search_scenario"]
