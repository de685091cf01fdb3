"""What a planner would choose where nothing was said about parallelism and plain data parallelism does not fit.

Plain data parallelism stays the answer wherever it fits with one sample a micro-batch. Elsewhere the fastest plan with
a tenth of the memory left over is taken (`simkit.search`: tensor parallelism within a node, pipelines, ZeRO, then
recomputation, last offload), and every choice is stated with what the next best would cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simkit.evaluate import evaluate, is_sharded
from simkit.search import Candidate, Found, explore
from simkit.search_space import PARALLEL
from simkit.spec.model import TransformerSpec
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import Scenario
from simkit.units import format_bytes, format_s

CHOSEN = ("tp", "pp", "zero", "offload", "recompute", "micro_batch")
_PLAIN = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "offload": "none", "recompute": "none"}
_WHY = {
    "tp": "tensor parallelism stays within a node",
    "pp": "stages of a pipeline over the GPUs",
    "zero": "states sharded over the data ranks",
    "offload": "nothing fits on the devices alone; host memory is assumed to be there",
    "recompute": "the least that fits",
    "micro_batch": "what fits with a tenth of the memory free",
}


def open_degrees(resolved: Resolved) -> bool:
    """Whether the degrees are ours to choose: a transformer over several GPUs, and nothing was given about parallelism
    nor all of what a data rank does in a step."""
    scenario, spec = resolved.scenario, resolved.model.spec
    return (
        resolved.cluster.gpus > 1
        and isinstance(spec, TransformerSpec)
        and spec.kind in ("decoder", "encoder")
        and PARALLEL.isdisjoint(scenario)
        and not (scenario.given("micro_batch") and scenario.given("grad_accum"))
        and scenario.get("method", "s-sgd") == "s-sgd"
        and not is_sharded(resolved.plan)
    )


def never_fits(resolved: Resolved) -> bool:
    """Whether plain data parallelism does not fit even with one sample a micro-batch."""
    plan = replace(resolved.plan, micro_batch=1, grad_accum=1)
    return not evaluate(replace(resolved, plan=plan), advise=False).memory.fits


def placed(resolved: Resolved) -> Resolved:
    """The plan to answer with: `resolved` itself where its degrees were given or fit, else the one a search finds.

    Where nothing fits it is the plan of least memory, which is an answer with a reason too."""
    if not open_degrees(resolved) or not never_fits(resolved):
        return resolved
    found = explore(resolved.scenario, chunks=False)
    best = found.candidates[0] if found.candidates else found.leanest
    if best is None:
        return resolved
    # Once more without the plan in the scenario: the notes of what nobody gave, less those of the plan left behind.
    plain = [note for note in resolve(resolved.scenario).assumptions if not note.startswith("grad_accum = ")]
    notes = _notes(resolved.scenario, found, best)
    return replace(best.resolved, scenario=resolved.scenario, open=frozenset(), assumptions=(*plain, *notes))


def _notes(scenario: Scenario, found: Found, best: Candidate) -> list[str]:
    """One line a choice, with its reason; then the runner-up."""
    notes = []
    for name in CHOSEN:
        value = getattr(best.plan, name)
        if scenario.given(name) or (value == _PLAIN.get(name) and name == "offload"):
            continue
        why = _WHY[name] if value != _PLAIN.get(name, object()) else _unused(name)
        notes.append(f"{name} = {value}: {why}{_beside(found.candidates, best, name)}")
    if best.plan.sp > 1:
        notes.append(f"sp = {best.plan.sp}: sequence parallelism moves what tp moves and divides the activations")
    if not scenario.given("grad_accum"):
        why = "" if scenario.given("global_batch") else ", usual for such a network"
        why = ", as plain data parallelism would have without accumulation" if scenario.given("micro_batch") else why
        batch = f"a global batch of {best.plan.global_batch} samples{why}"
        notes.append(f"grad_accum = {best.plan.grad_accum}: {batch}")
    if not scenario.given("method"):
        notes.append("method = s-sgd: the only exchange under model parallelism and sharded states")
    return [*notes, _runner_up(found, best)]


def _unused(name: str) -> str:
    return {
        "tp": "not needed",
        "pp": "no pipeline needed",
        "zero": "no sharding needed",
        "recompute": "none needed",
    }.get(name, "")


def _beside(candidates: Sequence[Candidate], best: Candidate, name: str) -> str:
    """What the best plan with another value of this field would cost."""
    value = getattr(best.plan, name)
    other = next((c for c in candidates if getattr(c.plan, name) != value), None)
    if other is None:
        return "; nothing else fits" if candidates else ""
    slower = other.figure("time") / best.figure("time") - 1.0
    much = f"{slower:.0%} slower" if slower >= 0.005 else "as fast"
    return f"; the best with {name} = {getattr(other.plan, name)} is {much}"


def _runner_up(found: Found, best: Candidate) -> str:
    """The next best plan with other degrees."""
    if not found.candidates:
        needed = format_bytes(best.peak_memory_gib * 2.0**30)
        return f"no plan of {found.asked:,} fits: shown is the one that needs least, {needed} a GPU"
    degrees = ("tp", "pp", "zero", "offload")
    mine = [getattr(best.plan, name) for name in degrees]
    other = next((c for c in found.candidates if [getattr(c.plan, name) for name in degrees] != mine), None)
    if other is None:
        return f"runner-up: none; no other degrees fit ({found.asked:,} plans tried)"
    plan = other.plan
    said = [f"{k} = {getattr(plan, k)}" for k in ("dp", *degrees) if getattr(plan, k) != _PLAIN.get(k)]
    said += [f"recompute = {plan.recompute}", f"micro_batch = {plan.micro_batch}"]
    slower = other.figure("time") / best.figure("time") - 1.0
    return (
        f"runner-up of {found.asked:,} plans: {', '.join(said)}; {format_s(other.iteration_time_s)} a step "
        f"({slower:+.1%}), {other.peak_memory_gib:.3g} GiB a GPU; `simkit search` lists more"
    )


__all__ = ["never_fits", "open_degrees", "placed"]
