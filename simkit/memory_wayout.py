"""The knob that brings a job under the capacity at the same global batch, and what it costs in time.

Tried family by family: a smaller micro-batch, recomputation, more ZeRO, more tensor parallelism (fewer data ranks, more
accumulation), then everything at once. Each family offers its mildest member that fits; where the step can be priced
the cheapest of them is named, else the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from simkit.program import RECOMPUTE
from simkit.spec.model import TransformerSpec
from simkit.spec.plan import Plan

MOST_TP = 8
"""Tensor parallelism beyond a usual node is no way out."""


def way_out(
    plan: Plan,
    spec: object,
    *,
    fits: Callable[[Plan], bool],
    added_share: Callable[[str], float],
    step_s: Callable[[Plan], float] | None = None,
) -> str:
    """One sentence, empty where nothing fits. fits: whether a plan does; added_share(recompute): what recomputation
    adds to the compute; step_s: seconds of a step, where the caller can price one."""
    found = [p for family in _families(plan, spec) if (p := next((q for q in family if fits(q)), None)) is not None]
    found = found or [p for p in _together(plan, spec) if fits(p)][:1]
    if not found:
        return ""
    if step_s is None:
        best = found[0]
        sentence = f"{_named(plan, best)} fits"
        extra = added_share(best.recompute) - added_share(plan.recompute)
        return (
            f"{sentence}; recomputation adds {extra:.0%} to the compute"
            if best.recompute != plan.recompute
            else sentence
        )
    seconds = {i: step_s(p) for i, p in enumerate(found)}
    best_index = min(seconds, key=lambda i: seconds[i])
    change = seconds[best_index] / step_s(plan) - 1.0
    said = (
        f"takes {change:.0%} longer"
        if change >= 0.005
        else f"takes {-change:.0%} less"
        if change <= -0.005
        else "takes as long"
    )
    return f"{_named(plan, found[best_index])} fits; the step {said}"


def _families(plan: Plan, spec: object) -> Iterator[list[Plan]]:
    yield _smaller(plan)
    yield [replace(plan, recompute=r) for r in stronger(plan)[1:]]
    yield _more_zero(plan, spec)
    yield _more_tensor(plan, spec)


def _together(plan: Plan, spec: object) -> Iterator[Plan]:
    """Recomputation with a smaller micro-batch; then those with more ZeRO and more tensor parallelism."""
    for recompute in stronger(plan)[1:]:
        yield from _smaller(replace(plan, recompute=recompute))
    least = replace(([*_smaller(plan)] or [plan])[-1], recompute="full")
    yield from _more_zero(least, spec)
    for wider in _more_tensor(least, spec):
        yield wider
        yield from _more_zero(wider, spec)


def _smaller(plan: Plan) -> list[Plan]:
    samples = int(plan.micro_batch * plan.grad_accum)
    sizes = [d for d in divisors(samples) if d < plan.micro_batch]
    return [replace(plan, micro_batch=d, grad_accum=samples // d) for d in sizes]


def _more_zero(plan: Plan, spec: object) -> list[Plan]:
    """Stages that the plan can run: gradients stay whole where a pipeline accumulates them."""
    if plan.dp * plan.cp == 1 or not _divisible(spec) or plan.method != "s-sgd":
        return []
    group = plan.shard_group if plan.zero else plan.dp
    return [replace(plan, zero=z, shard_group=group) for z in range(plan.zero + 1, 2 if plan.pp > 1 else 4)]


def _more_tensor(plan: Plan, spec: object) -> list[Plan]:
    out: list[Plan] = []
    if not _divisible(spec) or not isinstance(spec, TransformerSpec):
        return out
    for factor in (2, 4, 8):
        tp, dp = plan.tp * factor, plan.dp // factor
        if tp > MOST_TP or plan.dp % factor or spec.heads % tp or dp % plan.ep or plan.shard_group not in (1, plan.dp):
            continue
        group = dp if plan.shard_group == plan.dp else 1
        sp = tp if plan.sp == plan.tp and plan.tp > 1 else 1
        out.append(replace(plan, tp=tp, dp=dp, sp=sp, shard_group=group, grad_accum=plan.grad_accum * factor))
    return out


def _divisible(spec: object) -> bool:
    return isinstance(spec, TransformerSpec) and spec.kind in ("decoder", "encoder")


def _named(before: Plan, after: Plan) -> str:
    """``micro_batch=2 with grad_accum=16 and recompute=full``: what changes."""
    parts = []
    if after.tp != before.tp:
        parts.append(f"tp={after.tp} with dp={after.dp}")
    if after.micro_batch != before.micro_batch:
        parts.append(f"micro_batch={after.micro_batch}")
    if after.grad_accum != before.grad_accum and parts:
        parts[-1] += (
            f" with grad_accum={after.grad_accum}"
            if len(parts) == 1 and after.tp == before.tp
            else f" and grad_accum={after.grad_accum}"
        )
    parts += [f"{k}={getattr(after, k)}" for k in ("zero", "recompute") if getattr(after, k) != getattr(before, k)]
    return " and ".join(parts)


def stronger(plan: Plan) -> tuple[str, ...]:
    """The recomputation of the plan and every stronger one."""
    return RECOMPUTE[RECOMPUTE.index(plan.recompute) :]


@lru_cache(maxsize=256)
def divisors(samples: int) -> tuple[int, ...]:
    """Divisors, largest first; of a huge number those up to 1000 and their partners."""
    small = [d for d in range(1, min(math.isqrt(samples), 1000) + 1) if samples % d == 0]
    return tuple(sorted({*small, *(samples // d for d in small)}, reverse=True))
