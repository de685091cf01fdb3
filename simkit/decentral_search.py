"""What is chosen where nothing was given: how many pipelines, how deep, which micro-batch, recomputation or not.

Numbers of pipelines, depths and micro-batches (powers of two) are placed and timed by the closed forms of
`simkit.chain`, coarsely first, then every micro-batch at the best shape; a shape is left out where its peers could not
beat the best time even if nothing waited. All of it is tried without recomputation and with full, unless the scenario
says which: memory that is freed takes shallower pipelines, whose messages are fewer. The fastest that fits is walked
event by event. Where nothing fits, the answer says what the largest unit needs and what each device offers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from simkit import plugins
from simkit.decentral_job import Job, Kind, devices_of, job, sustained
from simkit.decentral_step import Crew, Rules, Step, copies, problem, step
from simkit.placement import Assignment, Problem
from simkit.spec.peers import Peer
from simkit.spec.plan import Plan
from simkit.spec.resolve import Resolved

TRIED = 10
"""Numbers of pipelines tried where none is given, at most."""
DEPTHS = 4
"""Depths tried for each number of pipelines, at most."""
MANY = 200
"""Peers above which fewer shapes are tried."""
LARGEST = 64
"""The largest micro-batch tried."""
NEAR = 0.9
"""Plans whose estimate is at least this share of the best are walked."""
RECOMPUTES = ("none", "full")
"""Tried where recompute is open. Selective is not: fused attention keeps no scores, so it would free nothing."""
SCORED = ("none", "selective", "full")
"""Tried where attention keeps its scores."""

Cache = dict[tuple[int, bool, str], Crew]
"""Priced jobs by micro-batch, whether there are replicas, and recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """The question: a resolved scenario, its peers and how they work. pipelines, depth, micro_batch, grad_accum,
    recompute: None where open; samples: of a step, whole job."""

    resolved: Resolved
    peers: tuple[Peer, ...]
    rules: Rules
    samples: int
    placement: str = "exact"
    pipelines: int | None = None
    depth: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    recompute: str | None = None
    lora_rank: int = 0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The plan that was chosen, and its step. fits: whether every stage fits its peer; tried: how many plans were
    timed."""

    asked: Asked
    crew: Crew
    problem: Problem
    assignment: Assignment
    step: Step
    micro_batches: int
    """Of the whole step, over all pipelines."""
    fits: bool
    tried: int
    notes: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        return self.crew.job.plan

    @property
    def samples(self) -> int:
        return self.micro_batches * self.plan.micro_batch


def crew_of(asked: Asked, found: Job) -> Crew:
    """The job on its peers."""
    devices = devices_of(asked.peers, asked.resolved)
    rate = sustained(asked.resolved.stack, found.plan.precision, calibration=found.calibrated,
                     fp16_accumulate=found.plan.fp16_accumulate)  # fmt: skip
    names = list(devices)
    kinds: list[Kind] = [found.kind(devices[n]) for n in names]
    nominal = {n: rate(devices[n]) for n in names}
    return Crew(
        job=found, peers=asked.peers, kinds=tuple(kinds),
        kind=np.array([names.index(p.device) for p in asked.peers]),
        slow=np.array([nominal[p.device] / p.flops for p in asked.peers]),
    )  # fmt: skip


def recomputes(asked: Asked) -> tuple[str, ...]:
    """What is tried, the least work first."""
    if asked.recompute is not None:
        return (asked.recompute,)
    return SCORED if asked.resolved.plan.attention == "math" and len(asked.peers) <= MANY else RECOMPUTES


def answer(asked: Asked) -> Answer:
    """The best plan, walked event by event; where nothing fits, the fastest of those of least work as if it did."""
    found = fastest(asked)
    if found is not None:
        return found
    if not all(h["holds"] for h in holds(asked)):
        # No cut helps where a unit alone is too large; times are given all the same.
        asked = replace(asked, micro_batch=asked.micro_batch or 1, pipelines=asked.pipelines or 1)
    best, tried = _search(asked, recomputes(asked)[0], fitting=False)
    assert best is not None
    return replace(_walked(best), tried=tried)


def fastest(asked: Asked, *, floor: float = 0.0) -> Answer | None:
    """The best plan that fits, walked event by event; None where none does. floor: samples a second below which nothing
    is of interest."""
    if not all(h["holds"] for h in holds(asked)):
        asked = replace(asked, micro_batch=asked.micro_batch or 1, pipelines=asked.pipelines or 1)
    several, finalists, tried, bar = recomputes(asked), [], 0, floor
    for recompute in several:
        found, more = _search(asked, recompute, floor=bar)
        tried += more
        if found is not None:
            finalists.append(found)
            bar = max(bar, _rate(found))
    if not finalists:
        return None
    # The closed forms tell plans apart to a few per cent; those that are closer are walked.
    walked = [_walked(f) for f in finalists if _rate(f) >= NEAR * max(map(_rate, finalists))]
    best = max(walked, key=_rate)
    notes = (_why(best, walked, finalists, several),) if len(several) > 1 else ()
    return replace(best, tried=tried, notes=notes)


def _walked(found: Answer) -> Answer:
    return replace(found, step=step(found.crew, found.asked.rules, found.assignment, micro_batches=found.micro_batches))


def _why(best: Answer, walked: list[Answer], finalists: list[Answer], several: tuple[str, ...]) -> str:
    """The line on recomputation."""
    chosen, plain = best.plan.recompute, several[0]
    if chosen == plain:
        return f"recompute = {chosen}: no plan tried with {' or '.join(several[1:])} is faster"
    other = next((f for f in (*walked, *finalists) if f.plan.recompute == plain), None)
    if other is None:
        return f"recompute = {chosen}: no stage holds its activations otherwise"
    return f"recompute = {chosen}: {_rate(best) / _rate(other):.2f}x faster than the best plan tried without; the " \
           "memory it frees holds larger stages and micro-batches"  # fmt: skip


def _rate(found: Answer) -> float:
    return found.samples / found.step.end_s


def _search(asked: Asked, recompute: str, *, floor: float = 0.0, fitting: bool = True) -> tuple[Answer | None, int]:
    """(the best by the closed forms, plans tried). fitting: only of those that fit."""
    every = sizes(asked)
    coarse = every if len(every) <= 3 else [every[i] for i in sorted({0, len(every) // 2, len(every) - 2})]
    cache: Cache = {}
    best: Answer | None = None
    tried = 0
    for pipelines, depth in shapes(asked):
        for micro in coarse:
            if pipelines * micro > max(asked.samples, pipelines) and not asked.grad_accum and micro != coarse[0]:
                continue
            bar = max(floor, 0.0 if best is None else _rate(best))
            if fitting and bar and _hopeless(bar, pipelines * depth, micro, cache):
                continue
            found = attempt(asked, pipelines, depth, micro, recompute, cache, fitting=fitting)
            tried += 1
            if found is not None and (best is None or _better(found, best)):
                best = found
    if best is None:
        return None, tried
    shape = len(best.assignment.pipelines), best.problem.depth
    for micro in every:
        if micro != best.plan.micro_batch and micro not in coarse and shape[0] * micro <= asked.samples:
            found = attempt(asked, *shape, micro, recompute, cache, fitting=fitting)
            tried += 1
            if found is not None and _better(found, best):
                best = found
    return best, tried


def _hopeless(bar: float, used: int, micro: int, cache: Cache) -> bool:
    """Whether so many peers cannot reach `bar` samples a second even if they never wait."""
    crew = next((c for (size, *_), c in cache.items() if size == micro), None)
    if crew is None:
        return False
    whole = np.array([k.forward_s[0, -1] + k.backward_s[0, -1] for k in crew.kinds])
    speed = np.sort(1.0 / (whole[np.asarray(crew.kind, dtype=int)] * crew.slow))[::-1][:used].sum()
    return bool(micro * speed < bar)


def _better(a: Answer, b: Answer) -> bool:
    # Of equally fast plans the first, which has the most pipelines and the smallest micro-batch.
    return _rate(a) > _rate(b) * (1.0 + 1e-9)


def attempt(
    asked: Asked, pipelines: int, depth: int, micro: int, recompute: str, cache: Cache, *, fitting: bool = True
) -> Answer | None:
    """One combination, by the closed forms. fitting: None where it does not fit, else it is timed all the same."""
    base = asked.resolved.plan
    key = micro, pipelines > 1, recompute
    if key not in cache:
        plan = replace(base, micro_batch=micro, grad_accum=1, recompute=recompute, dp=1)
        kept = 0.0 if asked.lora_rank else copies(asked.resolved.model, base, asked.rules, 2 if pipelines > 1 else 1)
        cache[key] = crew_of(asked, job(asked.resolved, plan, lora_rank=asked.lora_rank, exchange_copies=kept))
    crew = cache[key]
    total = asked.grad_accum * pipelines if asked.grad_accum else max(round(asked.samples / micro), 1)
    each = -(-total // pipelines)
    depth = max(min(depth, crew.job.count), 1)
    posed = problem(crew, asked.rules, micro_batches=each, depth=depth, seed=asked.seed,
                    forced=asked.depth is not None)  # fmt: skip
    assigned = plugins.get("simkit.placement", asked.placement).place(posed, pipelines)
    fits = all(assigned.pipelines) and _fits(posed, assigned)
    if fitting and not fits:
        return None
    if not all(assigned.pipelines):
        # Times are given even where nothing fits: the same peers as if memory were ample.
        assigned = plugins.get("simkit.placement", asked.placement).place(_roomy(posed), pipelines)
    timed = step(crew, asked.rules, assigned, micro_batches=total, estimate=True)
    return Answer(asked=asked, crew=crew, problem=posed, assignment=assigned, step=timed, micro_batches=total,
                  fits=fits, tried=1, notes=())  # fmt: skip


def _roomy(posed: Problem) -> Problem:
    return Problem(**{**{n: getattr(posed, n) for n in posed.__dataclass_fields__},
                      "room_bytes": np.full(posed.peers, np.inf)})  # fmt: skip


def needs(posed: Problem, assigned: Assignment) -> list[list[float]]:
    """Bytes that every stage of every pipeline needs of what its peer offers."""
    out = []
    for held in assigned.pipelines:
        row = []
        for r, h in enumerate(held):
            flying = posed.in_flight[min(len(held) - r, len(posed.in_flight) - 1)]
            kind = int(posed.kind[h.peer])
            row.append(float(posed.state_bytes[kind, h.begin, h.end] + flying * posed.kept_bytes[h.begin, h.end]))
        out.append(row)
    return out


def _fits(posed: Problem, assigned: Assignment) -> bool:
    rows = needs(posed, assigned)
    return all(
        need <= posed.room_bytes[h.peer]
        for held, row in zip(assigned.pipelines, rows, strict=True) for h, need in zip(held, row, strict=True)
    )  # fmt: skip


def shapes(asked: Asked) -> list[tuple[int, int]]:
    """(pipelines, depth) to try, those that use most peers first."""
    peers = len(asked.peers)
    if asked.pipelines is not None:
        several = [asked.pipelines]
    elif asked.depth is not None:
        several = [max(peers // asked.depth, 1)]
    else:
        several = _thinned(sorted({peers // depth for depth in range(1, peers + 1)}, reverse=True),
                           TRIED if peers <= MANY else TRIED // 2)  # fmt: skip
    found = []
    for pipelines in several:
        most = max(peers // pipelines, 1)
        if asked.depth is not None:
            depths = [min(asked.depth, most)]
        elif asked.pipelines is not None or peers > MANY:
            depths = [most]
        else:
            depths = _thinned(list(range(most, 0, -1)), DEPTHS)
        found += [(pipelines, depth) for depth in depths]
    return sorted(found, key=lambda shape: (-shape[0] * shape[1], -shape[0]))


def sizes(asked: Asked) -> list[int]:
    """Micro-batches to try, the smallest first."""
    if asked.micro_batch is not None:
        return [asked.micro_batch]
    each = asked.samples // asked.grad_accum if asked.grad_accum else asked.samples
    found = [2**i for i in range(max(each, 1).bit_length()) if 2**i <= LARGEST]
    return found if len(asked.peers) <= MANY else found[::2]


def _thinned(values: list[int], most: int) -> list[int]:
    """At most `most` of the values, the ends among them, evenly by their logarithm."""
    if len(values) <= most:
        return values
    wanted = np.geomspace(values[0], values[-1], most)
    return sorted({min(values, key=partial(_apart, w)) for w in wanted}, reverse=True)


def _apart(wanted: float, value: int) -> float:
    return abs(float(np.log(value / wanted)))


def holds(asked: Asked) -> list[dict[str, float | str | bool]]:
    """For every kind of device: what the largest unit needs at micro-batch 1 with full recomputation, what there is,
    and how many of the leading units of the blocks it could hold: whether a card holds a stage at all."""
    plan = replace(asked.resolved.plan, micro_batch=1, grad_accum=1, dp=1, recompute=asked.recompute or "full")
    crew = crew_of(asked, job(asked.resolved, plan, lora_rank=asked.lora_rank))
    out: list[dict[str, float | str | bool]] = []
    n = crew.job.count
    need = crew.job.state_bytes + crew.job.kept_bytes
    alone = np.array([need[i, i + 1] for i in range(n)])
    for kind in crew.kinds:
        room = kind.room_bytes
        most = max((j - i for i in range(n) for j in range(i + 1, n + 1) if need[i, j] <= room), default=0)
        out.append({
            "device": kind.device.name, "largest_unit": crew.job.units.names[int(alone.argmax())],
            "needs_bytes": float(alone.max()), "room_bytes": float(room), "holds": bool(alone.max() <= room),
            "most_units": float(most), "units": float(n),
        })  # fmt: skip
    return out
