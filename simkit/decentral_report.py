"""The report of a step over peers: terms that sum to the step, memory of the heaviest stage, who is busy, money."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log, log1p
from typing import Any

import numpy as np

from simkit.cost import ELECTRICITY_USD_PER_KWH, whole_job
from simkit.decentral_memory import memory_of
from simkit.decentral_search import Answer, crew_of, holds, needs
from simkit.decentral_step import Pipe, Rules, step
from simkit.des.chain import step as walk
from simkit.methods import OWN
from simkit.price import peak
from simkit.program import basis
from simkit.report import Report, Sensitivity, Term
from simkit.roofline import Array
from simkit.schedules import get as schedule_of
from simkit.spec.hardware import IDLE_SHARE
from simkit.spec.model import TransformerSpec
from simkit.spec.peers import Peer
from simkit.spec.scenario import Scenario
from simkit.timeline import Timeline
from simkit.units import GIB, format_bits, format_bytes, format_s

SPREAD = (0.75, 1.35)
"""90 % interval of a step over peers as a factor of the prediction: assumed; hardly any decentralised run is published
in a form from which residuals could be learned."""
BINS = 20
FROM = ("cluster", "inter", "peers")
CONVENTIONS = (
    "dense peaks with fp32 accumulation",
    "lines carry 95.6 % of their rate (TCP over Ethernet); latency = both peers' ways to the backbone",
    "gradients are averaged after a stage's last backward pass, not during it",
    "no churn: what fails or leaves is `simkit swarm`'s question",
)
"""What holds of every training step over peers."""


def report_of(found: Answer, scenario: Scenario, notes: list[str]) -> Report:
    """The report of a training answer."""
    plan, timed = found.plan, found.step
    end_s, samples = timed.end_s, found.samples
    tokens = samples * plan.seq_len if _counts_tokens(found) else 0
    metrics = {"iteration_time_s": end_s, "samples_per_s": samples / end_s}
    if tokens:
        metrics |= {"tokens_per_s": tokens / end_s, "tokens_per_s_per_gpu": tokens / end_s / len(found.asked.peers)}
    model_flops, peak_flops = _flops(found)
    terms = breakdown(found)
    figures, said = money(found.asked.peers, found.crew, timed.busy_s / end_s, scenario, end_s, samples, tokens)
    memory = memory_of(found)
    busy = dict.fromkeys(("compute", "comm"), 0.0)
    busy["compute"] = float(timed.busy_s.max(initial=0.0))
    return Report(
        scenario=_values(found, scenario),
        iteration_time_s=end_s,
        samples_per_s=metrics["samples_per_s"],
        tokens_per_s=metrics.get("tokens_per_s"),
        tokens_per_s_per_gpu=metrics.get("tokens_per_s_per_gpu"),
        mfu=model_flops * found.micro_batches / (end_s * peak_flops),
        hfu=model_flops * found.micro_batches * (4 / 3 if plan.recompute == "full" else 1.0) / (end_s * peak_flops),
        breakdown=terms,
        ledger=_ledger(found, terms),
        memory=memory,
        interval_90={n: (v * SPREAD[0], v * SPREAD[1]) if n == "iteration_time_s" else (v / SPREAD[1], v / SPREAD[0])
                     for n, v in metrics.items()},
        bottleneck=_bound(found, terms),
        cost=figures,
        groups=_groups(found),
        assumptions=(*notes, *said, *_conventions(found)),
        warnings=_warnings(found),
        facts=_facts(found, model_flops, peak_flops),
        timeline=Timeline(end_s=end_s, breakdown=terms, busy_s=busy, comm_end_s=np.zeros(0)),
        device_names=tuple(dict.fromkeys(k.device.title for k in found.crew.kinds)),
        sections=(("Peers", _peer_lines(found)), ("Does a card hold a stage", _hold_lines(found))),
        extras=_extras(found, metrics["samples_per_s"]),
        sensitivities_fn=partial(sensitivities, found),
    )  # fmt: skip


def _counts_tokens(found: Answer) -> bool:
    model = found.crew.job.model
    return isinstance(model.spec, TransformerSpec) and model.input_kind == "tokens"


def _flops(found: Answer) -> tuple[float, float]:
    """(FLOPs of the model a micro-batch, forward and backward; dense peak of all peers together)."""
    job, plan = found.crew.job, found.plan
    flops = 3.0 * float(basis(plan.micro_batch, plan.seq_len) @ job.program.model_flops)
    total = 0.0
    for kind in found.crew.kind:
        device = found.crew.kinds[int(kind)].device
        total += peak(device, plan.precision, fp16_accumulate=plan.fp16_accumulate)[0]
    return flops, total


def breakdown(found: Answer) -> dict[str, float]:
    """Terms of the stage that computes longest in the pipeline that ends last; they sum to the step.

    exposed_comm_s: what averaging adds to that pipeline's end; link_s: what messages between stages add to it;
    bubble_s: what is left, fill, drain and waits for other stages. Each is the step less the step without it, in this
    order, so that none is counted twice.
    """
    timed, rules = found.step, found.asked.rules
    pipe, r = _critical(found)
    n, chain = pipe.micro_batches, pipe.chain
    forward, backward = n * float(chain.forward_s[r]), n * float(chain.backward_s[r])
    own = np.array([timed.optimizer_s[h.peer] for h in pipe.held])
    optimizer = float(own[r])
    least = forward + backward + optimizer
    averaged = min(max(float((pipe.stage_end_s + own).max()), least), timed.end_s)
    free = min(max(float((_stage_ends(pipe, rules) + own).max()), least), averaged)
    return {"forward_s": forward, "backward_s": backward, "bubble_s": free - least, "link_s": averaged - free,
            "exposed_comm_s": timed.end_s - averaged, "optimizer_s": optimizer}  # fmt: skip


def _stage_ends(pipe: Pipe, rules: Rules) -> Array:
    """When every stage would end if messages cost nothing."""
    free = pipe.chain.without_messages()
    if rules.staleness:
        return np.full(free.stages, pipe.micro_batches * float(free.busy_s.max()))
    return walk(free, schedule_of(rules.schedule).order, pipe.micro_batches)[0].stage_end_s


def _critical(found: Answer) -> tuple[Pipe, int]:
    """(the pipeline that ends last, its stage that computes longest)."""
    pipe = found.step.pipes[found.step.critical[0]]
    return pipe, int(np.argmax(pipe.chain.busy_s))


def _ledger(found: Answer, terms: Mapping[str, float]) -> tuple[Term, ...]:
    evidence = found.crew.kinds[0].priced.evidence.get("ceiling", "assumed")
    bounds = {"forward_s": "compute", "backward_s": "compute", "optimizer_s": "memory", "link_s": "line",
              "exposed_comm_s": "line", "bubble_s": "waiting"}  # fmt: skip
    return tuple(
        Term(name=n, seconds=v, bound=bounds[n], evidence=evidence if bounds[n] == "compute" else "assumed")
        for n, v in terms.items()
    )


def _bound(found: Answer, terms: Mapping[str, float]) -> str:
    pipe, r = _critical(found)
    peers, end_s = found.asked.peers, found.step.end_s
    who = peers[pipe.held[r].peer]
    compute = terms["forward_s"] + terms["backward_s"]
    worst = max(("exposed_comm_s", "link_s", "bubble_s"), key=lambda n: terms[n])
    share = f"{max(terms[worst], compute) / end_s:.0%} of the step"
    if compute >= terms[worst]:
        return f"compute of stage {r} on {who.device}: {share}"
    if worst == "exposed_comm_s":
        who = peers[pipe.held[found.step.critical[1]].peer]
        n = len(found.step.pipes)
        what = f"of {n} replicas" if n > 1 else "among those that hold the same"
        return f"averaging gradients {what} over lines of {_line(who)}: {share}"
    if worst == "link_s":
        slow = int(np.argmax(np.maximum(pipe.chain.send_s, pipe.chain.back_s)))
        return f"messages between {len(pipe.held)} stages, slowest from {peers[pipe.held[slow].peer].name}: {share}"
    return f"fill and drain of {len(pipe.held)} stages with {pipe.micro_batches} micro-batches: {share}"


def _line(peer: Peer) -> str:
    return f"{format_bits(peer.up_Bps)} up, {format_bits(peer.down_Bps)} down"


def _groups(found: Answer) -> dict[str, str]:
    pipes = found.step.pipes
    deep = sorted({len(p.held) for p in pipes})
    depth = f"{deep[0]}" if len(deep) == 1 else f"{deep[0]} to {deep[-1]}"
    rate = [min(p.up_Bps, p.down_Bps) for p in found.asked.peers]
    low, high = format_bits(min(rate)), format_bits(max(rate))
    lines = low if low == high else f"{low} to {high}"
    out = {"pp": f"{depth} stages a pipeline over access lines of {lines}"}
    if len(pipes) > 1:
        out["dp"] = f"{len(pipes)} pipelines; replicas of a stage average over the same lines"
    return out


def _conventions(found: Answer) -> tuple[str, ...]:
    said = [
        CONVENTIONS[0],
        "MFU counts all peers, spare ones included, and no recomputation",
        *CONVENTIONS[1:],
        f"90 % interval = {SPREAD[0]:g} to {SPREAD[1]:g} times the figure: assumed, few such runs are published",
    ]
    if not found.step.exact:
        said.append("the step has too many passes to walk: prolonged by the mean of its second half")
    return tuple(said)


def _warnings(found: Answer) -> tuple[str, ...]:
    said = []
    asked, rules = found.asked, found.asked.rules
    for kind in found.crew.kinds:
        said += list(kind.priced.warnings)
    used = len(asked.peers) - len(found.assignment.spare)
    if found.assignment.spare and asked.depth is None and asked.pipelines is None:
        said.append(f"{used} of {len(asked.peers)} peers are used: more would make this step slower, or no faster; "
                    "the others are spare. dp and pp say otherwise")  # fmt: skip
    if rules.wire != "none":
        said.append(f"wire = {rules.wire} changes activations and their gradients: whether the network still learns "
                    "is not predicted")  # fmt: skip
    if rules.staleness:
        said.append(f"gradients are up to {rules.staleness} steps late: whether more steps are needed is not predicted")
    return tuple(dict.fromkeys(said))


def _facts(found: Answer, model_flops: float, peak_flops: float) -> dict[str, Any]:
    timed = found.step
    return {
        "params": found.crew.job.model.params,
        "trained_params": float(found.crew.job.trained[0, -1]),
        "gpus": len(found.asked.peers),
        "model_flops_per_micro_batch": model_flops,
        "peak_flops_all_peers": peak_flops,
        "wire_bytes_per_rank": timed.wire_bytes,
        "activation_bytes_per_cut": float(max((p.sent_bytes.max(initial=0.0) for p in timed.pipes), default=0.0)),
        "plans_tried": found.tried,
        "step_exact": timed.exact,
    }


def _values(found: Answer, scenario: Scenario) -> dict[str, Any]:
    values = dict(found.asked.resolved.values())
    asked, plan, rules = found.asked, found.plan, found.asked.rules
    for name in ("overlap", "fusion", "bucket_mb", "stack_notes", "dp", "algorithm"):
        values.pop(name, None)
    values |= {
        "method": "decentralized", "schedule": rules.schedule, "algorithm": rules.algorithm, "wire": rules.wire,
        "exchange": rules.exchange, "placement": asked.placement, "staleness": rules.staleness,
        "dp": len(found.step.pipes), "pp": max(len(p.held) for p in found.step.pipes),
        "micro_batch": plan.micro_batch, "grad_accum": max(p.micro_batches for p in found.step.pipes),
        "global_batch": found.samples, "recompute": plan.recompute, "task": scenario.get("task", "pretrain"),
    }  # fmt: skip
    values |= {k: v for k, v in scenario.values.items() if k in OWN and k not in values}
    if rules.wire.endswith("top-k"):
        values["density"] = rules.density
    if rules.exchange in ("power-sgd", "acp-sgd"):
        values["rank"] = asked.resolved.plan.rank
    if asked.lora_rank:
        values |= {"peft": "lora", "lora_rank": asked.lora_rank}
    return values


# -- money and energy --------------------------------------------------------------------------------------------------


def money(peers: tuple[Peer, ...], crew: Any, busy: Array, scenario: Scenario, step_s: float, samples: float,
          tokens: float) -> tuple[dict[str, float], list[str]]:  # fmt: skip
    """(figures as of `simkit.cost`, assumptions) from each peer's own price and power. busy: share of the step."""
    notes: list[str] = []
    figures: dict[str, float] = {}
    rental = sum(p.price_usd_per_hour for p in peers)
    if all(p.price_usd_per_hour > 0.0 for p in peers):
        figures |= {"cost_usd_per_hour": rental, "usd_per_step": rental * step_s / 3600.0}
        notes.append("rental = marketplace prices of such cards, or those of the peers file; spare peers are paid too")
    prices = [crew.kinds[int(k)].device.launch_price_usd for k in crew.kind]
    if all(p is not None for p in prices):
        figures["hardware_price_usd"] = float(sum(prices))
    if all(p.power_w > 0.0 for p in peers):
        power = 0.0
        for p, k, share in zip(peers, crew.kind, busy, strict=True):
            idle = crew.kinds[int(k)].device.idle_power_w
            idle = IDLE_SHARE * p.power_w if idle is None else idle
            power += idle + (p.power_w - idle) * min(float(share), 1.0)
        price = scenario.get("electricity", ELECTRICITY_USD_PER_KWH)
        if not scenario.given("electricity"):
            notes.append(f"electricity = {price} USD/kWh: about the average retail price of the United States")
        figures |= {"power_w": power, "energy_j_per_step": power * step_s,
                    "electricity_usd_per_hour": power / 1000.0 * price}  # fmt: skip
    whole, said = whole_job(figures, scenario, step_s=step_s, samples=samples, tokens=tokens)
    return figures | whole, [*notes, *said]


# -- what is said of peers ---------------------------------------------------------------------------------------------


def limit_samples_per_s(found: Answer) -> float:
    """What the peers would do together if nothing waited and every cut were even: the compute-bound limit."""
    whole = np.array([k.forward_s[0, -1] + k.backward_s[0, -1] for k in found.crew.kinds])
    each = whole[np.asarray(found.crew.kind, dtype=int)] * np.asarray(found.crew.slow)
    return float(found.plan.micro_batch * (1.0 / each).sum())


def _peer_lines(found: Answer) -> tuple[tuple[str, str], ...]:
    timed = found.step
    used = [h.peer for p in timed.pipes for h in p.held]
    share = timed.busy_s / timed.end_s
    sizes = sorted({h.end - h.begin for p in timed.pipes for h in p.held})
    sent = max((float(p.sent_bytes.max(initial=0.0)) for p in timed.pipes), default=0.0)
    reach = found.samples / timed.end_s / limit_samples_per_s(found)
    rows = [
        ("Pipelines", f"{len(timed.pipes)} of {max(len(p.held) for p in timed.pipes)} stages, "
         f"{found.crew.job.count} units, {sizes[0]} to {sizes[-1]} a peer, placed by {found.asked.placement}"),
        ("Spare", f"{len(found.assignment.spare)} of {len(found.asked.peers)} peers: the backup pool"),
        ("Busy", f"{share.mean():.1%} of the time in the mean over all peers, {share[used].min():.1%} to "
         f"{share[used].max():.1%} of those used"),
        ("Of the limit", f"{reach:.1%} of what the peers compute where nothing waits"),
        ("Sent a step", f"{format_bytes(timed.wire_bytes)} of gradients by a peer, "
         f"{format_bytes(sent)} of activations a cut and micro-batch"),
    ]  # fmt: skip
    return tuple(rows)


def _hold_lines(found: Answer) -> tuple[tuple[str, str], ...]:
    return tuple(
        (str(h["device"]), f"{'yes' if h['holds'] else 'NO'}: the largest unit ({h['largest_unit']}) needs "
         f"{format_bytes(float(h['needs_bytes']))} of {format_bytes(float(h['room_bytes']))}; up to "
         f"{h['most_units']:.0f} of {h['units']:.0f} units at micro_batch 1")
        for h in holds(found.asked)
    )  # fmt: skip


def _extras(found: Answer, rate: float) -> dict[str, Any]:
    timed, peers = found.step, found.asked.peers
    share = timed.busy_s / timed.end_s
    rows = needs(found.problem, found.assignment)
    stages = []
    for d, pipe in enumerate(timed.pipes):
        for r, h in enumerate(pipe.held):
            names = found.crew.job.units.names
            stages.append({
                "pipeline": d, "stage": r, "peer": peers[h.peer].name, "device": peers[h.peer].device,
                "units": f"{names[h.begin]} to {names[h.end - 1]}", "unit_count": h.end - h.begin,
                "compute_s": float(pipe.chain.busy_s[r]), "line_s": float(pipe.chain.line_s[r]),
                "micro_batches": pipe.micro_batches, "exchange_s": float(timed.exchange_s[h.peer]),
                "peak_memory_gib": (rows[d][r] + _outside(found, h.peer)) / GIB,
            })  # fmt: skip
    return {
        "per_stage": stages,
        "throughput_timeline": throughput_timeline(found),
        "goodput": {"goodput": 1.0, "samples_per_s": rate},
        "lost_work_fraction": 0.0,
        "recoveries": 0,
        "utilisation": {"mean": float(share.mean()), "min": float(share.min()), "max": float(share.max()),
                        "by_peer": {p.name: float(s) for p, s in zip(peers, share, strict=True)}},
        "compute_bound_samples_per_s": limit_samples_per_s(found),
        "spare_peers": [peers[i].name for i in found.assignment.spare],
        "holds": holds(found.asked),
    }  # fmt: skip


def _outside(found: Answer, peer: int) -> float:
    """What a peer's memory holds besides its stage: context, workspace, what is replayed."""
    return float(found.asked.peers[peer].memory_bytes - found.problem.room_bytes[peer])


def throughput_timeline(found: Answer) -> list[dict[str, float]]:
    """Samples a second whose last backward pass ended, in `BINS` equal parts of a step; its mean is that of the
    step."""
    done = np.concatenate([p.done_s for p in found.step.pipes])
    edges = np.linspace(0.0, found.step.end_s, BINS + 1)
    counts, _ = np.histogram(np.minimum(done, found.step.end_s), bins=edges)
    width = found.step.end_s / BINS
    return [{"time_s": float(t), "samples_per_s": float(c * found.plan.micro_batch / width)}
            for t, c in zip(edges[1:], counts, strict=True)]  # fmt: skip


def sensitivities(found: Answer) -> list[Sensitivity]:
    """Elasticities at the plan that was chosen."""

    def timed(peers: tuple[Peer, ...], total: int) -> float:
        crew = crew_of(replace(found.asked, peers=peers), found.crew.job)
        return step(crew, found.asked.rules, found.assignment, micro_batches=total).end_s

    return elasticities(found, timed)


def elasticities(found: Answer, timed: Callable[[tuple[Peer, ...], int], float]) -> list[Sensitivity]:
    """d ln(time of a sample) / d ln(input) by a 1 % change (a doubling of the micro-batches); the largest first.
    timed: seconds of a step on these peers with so many micro-batches."""
    small, base, total = 0.01, found.step.end_s, found.micro_batches
    peers = found.asked.peers

    def changed(*names: str) -> float:
        more = tuple(replace(p, **{k: getattr(p, k) * (1.0 + small) for k in names}) for p in peers)
        return log(timed(more, total) / base) / log1p(small)

    line = peers[0]
    out = [
        Sensitivity(name="network bandwidth", value=format_bits(min(line.up_Bps, line.down_Bps)),
                    note="lines of all peers", elasticity=changed("up_Bps", "down_Bps")),
        Sensitivity(name="network latency", value=format_s(2 * line.latency_s), note="between two peers",
                    elasticity=changed("latency_s")),
        Sensitivity(name="speed of the cards", value=line.device, note="compute of all peers",
                    elasticity=changed("flops")),
        Sensitivity(name="grad_accum", value=str(max(p.micro_batches for p in found.step.pipes)),
                    note="elasticity over a doubling",
                    elasticity=log(timed(peers, 2 * total) / 2.0 / base) / log(2.0)),
    ]  # fmt: skip
    return sorted(out, key=lambda s: -abs(s.elasticity))


# -- the same job in a data centre -------------------------------------------------------------------------------------


def with_reference(scenario: Scenario, report: Report) -> Report:
    """The report beside the same job in a data centre; adapters alone are not compared."""
    if report.scenario.get("peft") == "lora":
        return report
    return replace(report, beside=(reference(scenario, report.scenario),))


def reference(scenario: Scenario, values: Mapping[str, Any], cluster: str = "") -> Report:
    """The same job on `simkit.predict.REFERENCE_CLUSTER` (or `cluster`): same network, precision, optimizer and batch,
    as a planner would run it there. values: of the resolved job over peers."""
    from simkit.predict import REFERENCE_CLUSTER, predict_scenario
    from simkit.spec import profiles as store
    from simkit.spec.resolve import parse_cluster

    cluster = cluster or REFERENCE_CLUSTER
    fields: dict[str, Any] = {"cluster": cluster} | {k: values[k] for k in ("model", "precision", "optimizer")}
    if "global_batch" in values:
        calibrated = bool(scenario.get("calibration", True))
        gpus = parse_cluster(store.roots(scenario.profiles), cluster, gpus_per_node=None, intra=None, inter=None,
                             nics_per_node=None, p2p=None, profiles=scenario.profiles, calibration=calibrated)[0].gpus
        fields["global_batch"] = max(round(int(values["global_batch"]) / gpus), 1) * gpus
    fields |= {k: values[k] for k in ("seq_len", "attention") if k in values}
    fields |= {k: scenario.get(k) for k in ("electricity", "calibration", "tokens", "samples") if scenario.given(k)}
    asked = Scenario.of(fields, profiles=scenario.profiles, models=scenario.models)
    return predict_scenario(replace(scenario, values=asked.values), beside=False)
