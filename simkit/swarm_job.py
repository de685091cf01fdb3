"""From the plan of a decentralized job to the swarm that is to run it: stages, who holds them, and their pace.

`simkit.decentral` chooses pipelines, depth and micro-batch and walks one step event by event. A swarm needs the same
cuts in every pipeline, so that any peer can take any replica's place: where the placement cuts pipelines differently,
equal shares are taken instead, and that is said. `stretch` makes the step without churn that of the walk, to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simkit.decentral import asked, best
from simkit.decentral_lines import PAYLOAD
from simkit.decentral_search import Answer, answer
from simkit.des.swarm import Swarm, SwarmConfig
from simkit.errors import InputError, RefusedError
from simkit.memory_facts import OPTIMIZER_STATES
from simkit.spec.peers import Peer
from simkit.spec.plan import DTYPE_BYTES
from simkit.spec.scenario import Scenario
from simkit.spec.stage import StageCost

FROZEN_BYTES = 2.0
"""Bytes of a frozen weight that a newcomer fetches (16 bits)."""
_OWN = ("wiring", "inner_steps", "checkpoint_interval_s", "method")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A plan ready to be simulated. samples, tokens: of one micro-batch; step_s: of one step with everybody there."""

    config: SwarmConfig
    answer: Answer
    samples: float
    tokens: float
    step_s: float
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def job(scenario: Scenario, **knobs: Any) -> Job:
    """The swarm of a scenario; knobs: fields of `SwarmConfig` beyond what the plan gives.

    Raises InputError for a malformed scenario and RefusedError where no plan fits its peers.
    """
    if scenario.get("task") == "inference":
        raise RefusedError("a swarm is simulated for training; `simkit predict --task inference` prices a chain")
    method = scenario.get("method", "decentralized")
    if method != "decentralized":
        raise InputError("is not simulated under churn", file=scenario.file, key="method", value=method,
                         hint="leave it out: a swarm runs decentralized pipelines; `simkit predict` prices the others"
                         )  # fmt: skip
    values = {k: v for k, v in scenario.values.items() if k not in _OWN}
    notes: list[str] = []
    plain = replace(scenario, values=values | {"method": "decentralized"})
    question, notes = asked(plain)
    found = best(question, plain, notes)
    if not found.fits:
        raise RefusedError("no plan fits these peers; `simkit predict --method decentralized` says what is missing")
    found = _alike(found, notes)
    config = _config(found, scenario, knobs)
    plan = found.plan
    tokens = float(plan.micro_batch * plan.seq_len) if found.asked.resolved.model.input_kind == "tokens" else 0.0
    return Job(config=config, answer=found, samples=float(plan.micro_batch), tokens=tokens,
               step_s=found.step.end_s, assumptions=tuple(notes), warnings=())  # fmt: skip


def _cuts(found: Answer) -> set[tuple[tuple[int, int], ...]]:
    return {tuple((h.begin, h.end) for h in held) for held in found.assignment.pipelines}


def _alike(found: Answer, notes: list[str]) -> Answer:
    """The same plan with the same cuts in every pipeline."""
    if len(_cuts(found)) == 1:
        return found
    depth = min(len(held) for held in found.assignment.pipelines)
    question = replace(
        found.asked, placement="equal", pipelines=len(found.assignment.pipelines), depth=depth,
        micro_batch=found.plan.micro_batch, recompute=found.plan.recompute,
    )  # fmt: skip
    again = answer(question)
    if len(_cuts(again)) != 1 or not again.fits:
        raise RefusedError("pipelines with the same cuts do not fit these peers; give dp and pp, or likelier peers")
    notes.append("placement = equal: under churn every pipeline needs the same cuts, so that replicas can replace "
                 "each other")  # fmt: skip
    return again


def costs(found: Answer) -> StageCost:
    """The stages of the first pipeline on the first kind of device."""
    crew, problem = found.crew, found.problem
    job, plan, held = crew.job, crew.job.plan, found.assignment.pipelines[0]
    forward, backward = crew.compute_s(found.asked.rules)
    pipe = found.step.pipes[0]
    begin, end = np.array([h.begin for h in held]), np.array([h.end for h in held])
    behind = np.arange(len(held), 0, -1)
    flight = problem.in_flight[np.minimum(behind, len(problem.in_flight) - 1)]
    kind = crew.kinds[0]
    taken = kind.device.memory_bytes - kind.room_bytes
    master = DTYPE_BYTES[plan.master_dtype]
    states = job.trained[begin, end] * master * (1.0 + OPTIMIZER_STATES[plan.optimizer])
    if job.lora_rank:
        elements = np.concatenate([[0.0], np.cumsum(job.units.elements)])
        states = states + FROZEN_BYTES * (elements[end] - elements[begin])
    sent = np.asarray(pipe.sent_bytes, dtype=float)
    return StageCost(
        forward_s=forward[0, begin, end], backward_s=backward[0, begin, end], activation_bytes=sent,
        gradient_bytes=np.concatenate([[0.0], sent[:-1]]), state_bytes=states,
        memory_bytes=taken + problem.state_bytes[0][begin, end] + flight * problem.kept_bytes[begin, end],
        exchange_bytes=job.trained[begin, end] * DTYPE_BYTES[plan.reduce_dtype],
        flops=np.full(len(held), _reference(found)),
    )  # fmt: skip


def _reference(found: Answer) -> float:
    """Sustained FLOP/s of the first kind of device."""
    crew = found.crew
    first = next(i for i, k in enumerate(np.asarray(crew.kind).tolist()) if k == 0)
    return float(crew.peers[first].flops * crew.slow[first])


def peers(found: Answer) -> tuple[Peer, ...]:
    """The peers with the rate that this job reaches on them, and what TCP leaves of their lines."""
    crew, reference = found.crew, _reference(found)
    forward, backward = crew.compute_s(found.asked.rules)
    whole = (forward + backward)[:, 0, -1]
    out = []
    for peer, kind, slow in zip(crew.peers, np.asarray(crew.kind, dtype=int).tolist(), crew.slow, strict=True):
        flops = reference * float(whole[0] / whole[kind]) / float(slow)
        out.append(replace(peer, flops=flops, up_Bps=peer.up_Bps * PAYLOAD, down_Bps=peer.down_Bps * PAYLOAD))
    return tuple(out)


def _config(found: Answer, scenario: Scenario, knobs: dict[str, Any]) -> SwarmConfig:
    step, pipelines = found.step, len(found.assignment.pipelines)
    ends = [pipe.end_s for pipe in step.pipes]
    stochastic = scenario.get("wiring", "fixed") == "stochastic"
    endless = stochastic or found.asked.rules.staleness > 0 or found.asked.rules.schedule != "1f1b"
    given: dict[str, Any] = {
        "stages": costs(found), "peers": peers(found), "pipelines": pipelines,
        "micro_batches": max(1, round(found.micro_batches / pipelines)),
        "steps_per_round": scenario.get("inner_steps", 1), "exchange_s": max(step.end_s - max(ends), 0.0),
        "holders": tuple(tuple(h.peer for h in held) for held in found.assignment.pipelines),
        "wiring": scenario.get("wiring", "fixed"), "schedule": "endless" if endless else "1f1b",
        "seed": scenario.get("seed", 0),
    }  # fmt: skip
    if scenario.given("checkpoint_interval_s"):
        given["checkpoint_interval_s"] = scenario.get("checkpoint_interval_s")
    known = set(given) & set(knobs)
    if known:
        raise InputError("follows from the plan", key=", ".join(sorted(known)))
    config = SwarmConfig(**(given | knobs))
    if stochastic:
        return config
    unit = begun(config).wiring.units[0]
    exact, n = ends[0], step.pipes[0].micro_batches
    closed = unit.progress.fill_s + (n - 1) * unit.progress.interval_s
    return replace(config, stretch=exact / closed) if n and np.isfinite(closed) else config


def begun(config: SwarmConfig) -> Swarm:
    """A swarm with its first peers placed, at time 0."""
    swarm = Swarm(config)
    swarm.wiring.start(swarm.population.start())
    return swarm
