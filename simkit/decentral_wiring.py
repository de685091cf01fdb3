"""Stochastic wiring: a micro-batch goes to any peer that holds the next stage, more often to faster ones (SWARM).

    rate of a peer     1 / max(compute of its stage, bytes in and out over its line)
    interval           max over stages of 1 / (sum of the rates of its peers)
    step               fill + (M - 1) · interval, then every stage's peers average their gradients

in the fluid limit: M micro-batches are shared in proportion to the rates, and nobody waits for a certain peer. Stages
are cut for the peer with least memory; peers go to the stage that has least rate, the fastest first, then one at a time
to where the interval falls. Source: M. Ryabinin et al., SWARM Parallelism (arXiv 2301.11913, section 3.2: interleaved
weighted round-robin and adaptive rebalancing).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simkit.chain import Chain, fill_s
from simkit.decentral_job import job
from simkit.decentral_lines import HOST_S, line_of, lines
from simkit.decentral_report import elasticities, report_of
from simkit.decentral_search import Answer, Asked, crew_of, recomputes
from simkit.decentral_step import Crew, Pipe, Step, problem
from simkit.errors import InputError, RefusedError
from simkit.placement import Assignment, Held, Problem, solve_chain
from simkit.report import Report, Sensitivity
from simkit.roofline import Array
from simkit.spec.peers import Peer
from simkit.spec.plan import DTYPE_BYTES
from simkit.spec.scenario import Scenario

Ints = NDArray[np.int64]
DEPTHS = 10
SIZES = (1, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wired:
    """Cuts, the stage of each peer (-1: spare), rates (micro-batches a second) of each peer at its stage."""

    cuts: tuple[tuple[int, int], ...]
    stage: Ints
    rate: Array
    interval_s: float


def rates(posed: Problem, cuts: tuple[tuple[int, int], ...]) -> Array:
    """(peers, stages) micro-batches a second; 0 where the memory does not suffice."""
    out = np.zeros((posed.peers, len(cuts)))
    for s, (i, j) in enumerate(cuts):
        work = posed.compute_s[posed.kind, i, j] * posed.slow
        line = (posed.cut_bytes[i] + posed.cut_bytes[j]) / posed.line_Bps
        held = posed.state_bytes[posed.kind, i, j] + posed.in_flight[len(cuts) - s] * posed.kept_bytes[i, j]
        out[:, s] = np.where(held <= posed.room_bytes, 1.0 / np.maximum(work, line), 0.0)
    return out


def assigned(each: Array) -> Ints:
    """The stage of every peer, -1 where it can serve none; `each`: (peers, stages) rates."""
    peers, stages = each.shape
    total = np.zeros(stages)
    found = np.full(peers, -1)
    for p in np.argsort(-each.max(axis=1), kind="stable"):
        able = each[p] > 0.0
        if able.any():
            s = int(np.argmin(np.where(able, total, np.inf)))
            found[p], total[s] = s, total[s] + each[p, s]
    for _ in range(4 * peers):
        # Take a peer from where there is most to where there is least, while that helps.
        low = int(total.argmin())
        moves = [(min(total[s] - each[p, s], total[low] + each[p, low]), p, s)
                 for p, s in enumerate(found) if s >= 0 and s != low and each[p, low] > 0.0]  # fmt: skip
        gain = max(moves, default=(-1.0, -1, -1))
        if gain[0] <= total[low] * (1.0 + 1e-12):
            break
        _, p, s = gain
        total[s] -= each[p, s]
        total[low] += each[p, low]
        found[p] = low
    return found


def wire(posed: Problem, depth: int) -> Wired | None:
    """The best wiring of `depth` stages; None where a stage has nobody."""
    least = int(np.argmin(posed.room_bytes))
    _, chain = solve_chain(posed, [least] * depth)
    if len(chain) != depth:
        return None
    cuts = tuple((h.begin, h.end) for h in chain)
    each = rates(posed, cuts)
    stage = assigned(each)
    total = np.array([each[stage == s, s].sum() for s in range(depth)])
    if (total <= 0.0).any():
        return None
    own = np.array([each[p, s] if s >= 0 else 0.0 for p, s in enumerate(stage)])
    return Wired(cuts=cuts, stage=stage, rate=own, interval_s=float((1.0 / total).max()))


def wired(question: Asked, scenario: Scenario, notes: list[str]) -> Report:
    """The report of the best stochastic wiring."""
    if question.pipelines is not None or question.rules.staleness:
        name = "dp" if question.pipelines is not None else "staleness"
        raise InputError("has no meaning where any peer serves any micro-batch", key=name, hint="leave it out")
    if question.rules.exchange != "s-sgd":
        raise RefusedError("stochastic wiring averages gradients as they are; leave exchange out")
    best: tuple[Answer, Wired] | None = None
    tried = 0
    several = recomputes(question)
    for recompute in several:
        for depth in _depths(question):
            for micro in (question.micro_batch,) if question.micro_batch else SIZES:
                found = attempt(question, depth, micro, recompute)
                tried += 1
                if found and (best is None or _rate(found[0]) > _rate(best[0])):
                    best = found
    if best is None:
        raise RefusedError(f"no cut of {question.resolved.model.name} gives every stage a peer that holds it; "
                           "take wiring = fixed, larger cards or peft = lora")  # fmt: skip
    answer, wires = best
    if len(several) > 1:
        notes = [*notes, f"recompute = {answer.plan.recompute}: the fastest plan tried of {' and '.join(several)}"]
    notes = [*notes, "wiring = stochastic: micro-batches go to any peer of the next stage, in proportion to its rate"]
    report = report_of(replace(answer, tried=tried), scenario, notes)
    sizes = np.bincount(wires.stage[wires.stage >= 0], minlength=len(wires.cuts))
    spare = int((wires.stage < 0).sum())
    rows = (("Stages", f"{len(wires.cuts)}, held by {sizes.min()} to {sizes.max()} peers each"),
            ("Spare", f"{spare} of {len(question.peers)} peers: the backup pool"), *report.sections[0][1][2:])
    assumed = (*report.assumptions, "stochastic wiring in the fluid limit: nobody waits for a certain peer")
    return replace(
        report, assumptions=assumed, sensitivities_fn=partial(_sensitivities, answer, wires),
        scenario=dict(report.scenario) | {"wiring": "stochastic", "dp": 1, "pp": len(wires.cuts)},
        sections=(("Peers", rows), *report.sections[1:]),
        groups={"pp": f"{len(wires.cuts)} stages, any peer of the next one", "dp": "the peers of a stage average"},
    )  # fmt: skip


def _sensitivities(answer: Answer, wires: Wired) -> list[Sensitivity]:
    """As `simkit.decentral_report.sensitivities`, with the wiring kept."""

    def timed(peers: tuple[Peer, ...], total: int) -> float:
        asked = replace(answer.asked, peers=peers)
        crew = crew_of(asked, answer.crew.job)
        posed = problem(crew, asked.rules, micro_batches=total, depth=len(wires.cuts), seed=asked.seed)
        return timed_step(crew, asked, posed, rewired(posed, wires), total)[0].end_s

    return elasticities(answer, timed)


def rewired(posed: Problem, found: Wired) -> Wired:
    """The same cuts and stages on other peers."""
    each = rates(posed, found.cuts)
    own = np.array([each[p, s] if s >= 0 else 0.0 for p, s in enumerate(found.stage)])
    total = np.array([own[found.stage == s].sum() for s in range(len(found.cuts))])
    return replace(found, rate=own, interval_s=float((1.0 / total).max()))


def _rate(found: Answer) -> float:
    return found.samples / found.step.end_s


def _depths(question: Asked) -> list[int]:
    peers = len(question.peers)
    if question.depth is not None:
        return [question.depth]
    return sorted({max(1, round(float(x))) for x in np.geomspace(1, peers, DEPTHS)}, reverse=True)


def attempt(question: Asked, depth: int, micro: int, recompute: str) -> tuple[Answer, Wired] | None:
    """One depth and micro-batch; None where a stage has nobody."""
    plan = replace(question.resolved.plan, micro_batch=micro, grad_accum=1, dp=1, recompute=recompute)
    crew = crew_of(question, job(question.resolved, plan, lora_rank=question.lora_rank,
                                 exchange_copies=0.0 if question.lora_rank else DTYPE_BYTES[plan.reduce_dtype]))
    depth = min(depth, crew.job.count, len(question.peers))
    total = question.grad_accum or max(round(question.samples / micro), 1)
    posed = problem(crew, question.rules, micro_batches=total, depth=depth, seed=question.seed)
    found = wire(posed, depth)
    if found is None:
        return None
    timed, assignment = timed_step(crew, question, posed, found, total)
    return Answer(asked=question, crew=crew, problem=posed, assignment=assignment, step=timed, micro_batches=total,
                  fits=True, tried=1, notes=()), found  # fmt: skip


def timed_step(crew: Crew, question: Asked, posed: Problem, found: Wired, total: int) -> tuple[Step, Assignment]:
    """(the step, the slowest peer of every stage as a chain)."""
    depth, peers = len(found.cuts), crew.peers
    share = np.zeros(len(peers))
    for s in range(depth):
        mine = found.stage == s
        share[mine] = found.rate[mine] / found.rate[mine].sum()
    slowest = [int(np.flatnonzero(found.stage == s)[found.rate[found.stage == s].argmin()]) for s in range(depth)]
    held = tuple(Held(p, i, j) for p, (i, j) in zip(slowest, found.cuts, strict=True))
    forward, backward = crew.compute_s(question.rules)
    kind = np.asarray(crew.kind, dtype=int)
    chain, sent = _chain(crew, posed, found, held, forward, backward)
    exchange, sent_most = _exchange(crew, question, found)
    optimizer, busy = np.zeros(len(peers)), np.zeros(len(peers))
    for p, s in enumerate(found.stage):
        if s >= 0:
            i, j = found.cuts[s]
            optimizer[p] = crew.kinds[kind[p]].optimizer_s[i, j] * crew.slow[p]
            each = (forward[kind[p], i, j] + backward[kind[p], i, j]) * crew.slow[p]
            busy[p] = total * share[p] * each + optimizer[p]
    way = float(fill_s(chain)) + float(fill_s(chain, backward=True))
    flow = way + (total - 1) * found.interval_s
    last = np.array([max(float((exchange + optimizer)[found.stage == s].max()), 0.0) for s in range(depth)])
    at = int(last.argmax())
    n = max(round(total * float(share[slowest[at]])), 1)
    done = np.asarray(way + found.interval_s * np.arange(total), dtype=np.float64)
    pipe = Pipe(held=held, chain=chain, micro_batches=n, end_s=flow, stage_end_s=np.full(depth, flow), done_s=done,
                sent_bytes=sent, exact=True)  # fmt: skip
    timed = Step(end_s=flow + float(last.max()), pipes=(pipe,), exchange_s=exchange, optimizer_s=optimizer, busy_s=busy,
                 wire_bytes=sent_most, critical=(0, at), exact=True)  # fmt: skip
    spare = tuple(int(p) for p in np.flatnonzero(found.stage < 0))
    return timed, Assignment(pipelines=(held,), spare=spare)


def _chain(crew: Crew, posed: Problem, found: Wired, held: tuple[Held, ...], forward: Array, backward: Array
           ) -> tuple[Chain, Array]:  # fmt: skip
    """The mean way of a micro-batch: the mean times of each stage's peers, by their shares."""
    depth = len(held)
    f, b, up, down, way = (np.zeros(depth) for _ in range(5))
    latency = np.array([p.latency_s for p in crew.peers])
    for s in range(depth):
        mine = np.flatnonzero(found.stage == s)
        weight = found.rate[mine] / found.rate[mine].sum()
        i, j = found.cuts[s]
        kind, slow = np.asarray(crew.kind, dtype=int)[mine], np.asarray(crew.slow)[mine]
        f[s], b[s] = weight @ (forward[kind, i, j] * slow), weight @ (backward[kind, i, j] * slow)
        up[s], down[s] = weight @ (1.0 / posed.up_Bps[mine]), weight @ (1.0 / posed.down_Bps[mine])
        way[s] = weight @ latency[mine]
    cut = np.array([posed.cut_bytes[j] for _, j in found.cuts])
    there = cut[:-1] * np.maximum(up[:-1], down[1:])
    back = cut[:-1] * np.maximum(up[1:], down[:-1])
    hop = way[:-1] + way[1:]
    zero = np.zeros(1)
    chain = Chain(
        forward_s=f, backward_s=b, send_s=np.concatenate([there, zero]), back_s=np.concatenate([zero, back]),
        delay_s=np.concatenate([hop, zero]), back_delay_s=np.concatenate([zero, hop]),
    )  # fmt: skip
    return chain, np.concatenate([cut[:-1], zero])


def _exchange(crew: Crew, question: Asked, found: Wired) -> tuple[Array, float]:
    """(seconds by peer, bytes the busiest sends) of averaging the gradients of every stage among its peers."""
    rate, latency, relay = lines(crew.peers)
    seconds, sent = np.zeros(len(crew.peers)), 0.0
    plan = crew.job.plan
    for s, (i, j) in enumerate(found.cuts):
        mine = np.flatnonzero(found.stage == s)
        elements, n = float(crew.job.trained[i, j]), len(mine)
        if n > 1:
            each, fixed = line_of("all_reduce", rate[mine], latency[mine], relay[mine], question.rules.algorithm)
            nbytes = elements * DTYPE_BYTES[plan.reduce_dtype]
            moved = 2.0 * (n - 1.0) / n
            seconds[mine] = nbytes * each + fixed + elements * moved * HOST_S["fp32"]
            sent = max(sent, moved * nbytes)
    return seconds, sent
