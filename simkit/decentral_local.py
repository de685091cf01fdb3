"""Local SGD over access lines: H inner steps, then an average of the parameters' change.

    round       H · t_inner + F · max(0, t_average(N/F) - tau · t_inner),   not less than F · t_average(N/F)
    utilisation H · t_inner / round
    traffic     all-reduce of N fp32 gradients a step, over that of N elements of the outer dtype every H steps:
                H · 4 / bytes(outer dtype)

t_inner: the slowest worker's step, as `simkit predict` prices it on that node alone. t_average: `decentral_lines`
over the workers' lines, host included. F fragments are averaged at different times, each of which may take tau inner
steps before somebody waits; F = 1, tau = 0 is DiLoCo. The outer optimizer's copies rest in host memory, as in PRIME.
Sources: Douillard et al. (arXiv 2311.08105, algorithm 1); Streaming DiLoCo (arXiv 2501.18512, section 3); INTELLECT-1
(arXiv 2412.01152).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from simkit.cost import whole_job
from simkit.decentral import counted, default_cluster, file_of, refuse
from simkit.decentral_lines import ELEMENT_BYTES, all_reduce_s
from simkit.errors import InputError, RefusedError
from simkit.methods import OWN
from simkit.report import Report, Sensitivity, Term
from simkit.spec import profiles as store
from simkit.spec.hardware import IDLE_SHARE
from simkit.spec.peers import Peer, peers_from_cluster, read_peers
from simkit.spec.resolve import parse_cluster
from simkit.spec.scenario import Scenario
from simkit.units import format_bytes, format_s

INNER_STEPS = 500
"""H of the DiLoCo paper's main setting (arXiv 2311.08105, section 3)."""
SPREAD = (0.8, 1.3)
"""90 % interval of the average's time as a factor: assumed."""
_CHOICES = ("placement", "wire", "wiring", "staleness", "peft", "lora_rank", "batch", "prompt_len", "output_len",
            "quant", "engine")  # fmt: skip
_OUTER = frozenset({"method", "cluster", "inter", "nics_per_node", "gpus_per_node", "global_batch", "exchange", "dp",
                    "algorithm", "peers"}) | OWN  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of H inner steps and their average; seconds. inner_s: of one step; average_s: of all fragments on the
    wire and the host; exposed_s: of the round, what the workers wait."""

    steps: int
    inner_s: float
    average_s: float
    exposed_s: float

    @property
    def end_s(self) -> float:
        return self.steps * self.inner_s + self.exposed_s

    @property
    def utilisation(self) -> float:
        return self.steps * self.inner_s / self.end_s


def round_of(steps: int, inner_s: float, fragment_s: float, *, fragments: int = 1, overlap_steps: int = 0) -> Round:
    """The formula above. fragment_s: seconds in which one fragment is averaged.

    >>> round_of(100, 1.0, 25.0).utilisation
    0.8
    """
    waits = fragments * max(fragment_s - overlap_steps * inner_s, 0.0)
    # The line carries the fragments one after the other, however much they are hidden.
    exposed = max(waits, fragments * fragment_s - steps * inner_s, 0.0)
    return Round(steps=steps, inner_s=inner_s, average_s=fragments * fragment_s, exposed_s=exposed)


def traffic_cut(steps: int, outer_dtype: str, *, inner_dtype: str = "fp32") -> float:
    """How many times fewer bytes than averaging gradients every step.

    >>> traffic_cut(100, "int8")
    400.0
    """
    return steps * ELEMENT_BYTES[inner_dtype] / ELEMENT_BYTES[outer_dtype]


def local(scenario: Scenario, *, beside: bool = True) -> Report:
    """The answer for local SGD over peers."""
    refuse(scenario, _CHOICES, "does not belong to method = local-sgd")
    if scenario.get("task") == "inference":
        raise RefusedError("local-sgd trains; take method = decentralized for inference")
    notes: list[str] = []
    workers, islands, gpus = _workers(scenario, notes)
    steps = scenario.get("inner_steps", INNER_STEPS)
    if not scenario.given("inner_steps"):
        notes.append(f"inner_steps = {INNER_STEPS}: the main setting of the DiLoCo paper")
    dtype = scenario.get("outer_dtype", "fp32")
    if not scenario.given("outer_dtype"):
        notes.append("outer_dtype = fp32: none given; int8 sends a quarter")
    reports = [_inner(scenario, text, sum(n for _, n in islands), notes) for text, _ in islands]
    slowest = max(reports, key=lambda r: r.iteration_time_s)
    fragments, overlap = scenario.get("fragments", 1), scenario.get("overlap_steps", 0)
    if fragments > steps or overlap > steps:
        key = "fragments" if fragments > steps else "overlap_steps"
        raise InputError(f"exceeds the {steps} inner steps", key=key, value=max(fragments, overlap))
    params = float(slowest.facts["params"])
    algorithm = scenario.get("algorithm", "butterfly")
    if algorithm not in ("butterfly", "ring"):
        raise RefusedError(f"algorithm = {algorithm}: peers average by butterfly or ring")
    took = all_reduce_s(params / fragments, workers, dtype=dtype, algorithm=algorithm)
    found = round_of(steps, slowest.iteration_time_s, took, fragments=fragments, overlap_steps=overlap)
    report = _report(scenario, slowest, reports, islands, workers, gpus, found, dtype, notes)
    if not beside:
        return report
    from simkit.decentral_report import with_reference

    return with_reference(scenario, report)


def _workers(scenario: Scenario, notes: list[str]) -> tuple[tuple[Peer, ...], list[tuple[str, int]], int]:
    """(the workers' lines, [(cluster text of one, how many)], GPUs in all)."""
    file = file_of(scenario)
    if file is not None:
        if scenario.given("cluster"):
            raise InputError("is given beside peers", key="cluster", value=scenario.get("cluster"),
                             hint="a peers CSV names the devices itself")  # fmt: skip
        peers = read_peers(file, profiles=scenario.profiles)
        alike: dict[str, int] = {}
        for peer in peers:
            alike[f"1x1x{peer.device}"] = alike.get(f"1x1x{peer.device}", 0) + 1
        return peers, list(alike.items()), len(peers)
    text = scenario.get("cluster", default_cluster(scenario))
    if not scenario.given("cluster"):
        notes.append(f"cluster = {text}: none given")
    built, said = parse_cluster(
        store.roots(scenario.profiles), text, gpus_per_node=scenario.get("gpus_per_node"), intra=scenario.get("intra"),
        inter=scenario.get("inter"), nics_per_node=scenario.get("nics_per_node"), p2p=scenario.get("p2p"),
        profiles=scenario.profiles, calibration=scenario.get("calibration", True),
    )  # fmt: skip
    notes += said
    if built.nodes < 2:
        raise InputError("is one worker, which averages with nobody", key="cluster", value=text, hint="give more nodes")
    # A worker is a node: its whole line, which its GPUs share.
    one = replace(built, groups=tuple(replace(g, gpus_per_node=1) for g in built.groups))
    lines = tuple(replace(p, up_Bps=p.up_Bps, down_Bps=p.down_Bps) for p in peers_from_cluster(one))
    counted(scenario, lines)
    islands = [(f"1x{g.gpus_per_node}x{g.device.name}", g.nodes) for g in built.groups]
    return lines, islands, built.gpus


def _inner(scenario: Scenario, island: str, workers: int, notes: list[str]) -> Report:
    """One inner step of one worker, priced as an ordinary job on that node."""
    from simkit.planner import usual_samples
    from simkit.predict import predict_scenario
    from simkit.spec.resolve import resolve

    fields: dict[str, Any] = {k: v for k, v in scenario.values.items() if k not in _OUTER}
    fields["cluster"] = island
    if scenario.given("exchange"):
        fields["method"] = scenario.get("exchange")
    total = scenario.get("global_batch")
    if total is not None and total % workers:
        raise InputError(f"is not divisible by the {workers} workers", file=scenario.file, key="global_batch",
                         value=total, hint=f"for example {max(total // workers, 1) * workers}")  # fmt: skip
    if total is not None:
        fields["global_batch"] = total // workers
    elif not scenario.given("grad_accum"):
        alone = resolve(replace(scenario, values=fields))
        gpus = alone.cluster.gpus
        usual = usual_samples(alone)
        fields["global_batch"] = max(round(usual / workers / gpus), 1) * gpus
        line = f"global_batch = about {usual} over {workers} workers: usual for such a network"
        if line not in notes:
            notes.append(line)
    return predict_scenario(replace(scenario, values=fields), beside=False)


def _report(
    scenario: Scenario, slowest: Report, reports: list[Report], islands: list[tuple[str, int]],
    workers: tuple[Peer, ...], gpus: int, found: Round, dtype: str, notes: list[str],
) -> Report:  # fmt: skip
    """The inner step's report with the average in it."""
    step_s = found.end_s / found.steps
    exposed = found.exposed_s / found.steps
    batches = {text: int(r.scenario["global_batch"]) for (text, _), r in zip(islands, reports, strict=True)}
    samples = float(sum(batches[text] * n for text, n in islands))
    tokens = samples * int(slowest.scenario.get("seq_len", 0)) if slowest.tokens_per_s else 0.0
    terms = dict(slowest.breakdown)
    terms["outer_comm_s"] = exposed
    scale = slowest.iteration_time_s / step_s
    heaviest = max(reports, key=lambda r: r.memory.device_bytes / max(r.memory.room_bytes, 1.0))
    low, high = slowest.interval_90["iteration_time_s"]
    span = (low + exposed * SPREAD[0], high + exposed * SPREAD[1])
    rate = samples / step_s
    metrics = {"samples_per_s": rate}
    if tokens:
        metrics |= {"tokens_per_s": tokens / step_s, "tokens_per_s_per_gpu": tokens / step_s / gpus}
    cut = traffic_cut(found.steps, dtype)
    bound = _bound(slowest, found, workers)
    values = dict(slowest.scenario) | {
        "method": "local-sgd", "cluster": "+".join(f"{n}{t[1:]}" for t, n in islands), "inner_steps": found.steps,
        "outer_dtype": dtype, "global_batch": int(samples),
    }  # fmt: skip
    values |= {k: v for k, v in scenario.values.items() if k in ("inter", "peers", "fragments", "overlap_steps")}
    return replace(
        slowest,
        scenario=values,
        iteration_time_s=step_s,
        samples_per_s=rate,
        tokens_per_s=metrics.get("tokens_per_s"),
        tokens_per_s_per_gpu=metrics.get("tokens_per_s_per_gpu"),
        mfu=None if slowest.mfu is None else slowest.mfu * scale,
        hfu=None if slowest.hfu is None else slowest.hfu * scale,
        breakdown=terms,
        ledger=(*slowest.ledger, Term(name="outer_comm_s", seconds=exposed, bound="line", evidence="assumed")),
        memory=heaviest.memory,
        interval_90={"iteration_time_s": span} | {n: (v * step_s / span[1], v * step_s / span[0])
                                                  for n, v in metrics.items()},
        bottleneck=bound,
        cost=_cost(slowest, reports, islands, found, scenario, samples, tokens),
        assumptions=(*notes, *slowest.assumptions, "the outer optimizer's copies rest in host memory",
                     "workers wait for each other at every average", "no churn: that is `simkit swarm`'s question"),
        warnings=(*slowest.warnings, "averaging every so many steps changes what is learned; "
                  "whether the network learns as much is not predicted"),
        facts=dict(slowest.facts) | {"gpus": gpus, "workers": len(workers), "traffic_cut": cut},
        sections=(("Rounds", _lines(found, workers, cut, slowest)),),
        extras=_extras(found, workers, rate, cut),
        sensitivities_fn=lambda: _sensitivities(found),
    )  # fmt: skip


def _bound(slowest: Report, found: Round, workers: tuple[Peer, ...]) -> str:
    """What bounds the step that is shown: the average where no part of an inner step is longer; else the words of the
    inner step, with shares of the step shown."""
    computing = ("forward_s", "backward_s", "recompute_s")
    terms, share = slowest.breakdown, found.exposed_s / found.end_s
    compute = sum(terms.get(k, 0.0) for k in computing)
    longest = max(compute, *(v for k, v in terms.items() if k not in (*computing, "compute_s")))
    if found.exposed_s / found.steps >= longest:
        return f"averaging among {len(workers)} workers: {share:.0%} of the step waits for it"
    if not found.exposed_s:
        return slowest.bottleneck
    words = re.sub(r"\d+% of the step", f"{longest * found.steps / found.end_s:.0%} of the step", slowest.bottleneck)
    return f"{words}; averaging among workers is {share:.0%}"


def _cost(slowest: Report, reports: list[Report], islands: list[tuple[str, int]], found: Round, scenario: Scenario,
          samples: float, tokens: float) -> dict[str, float]:  # fmt: skip
    """The islands' figures added up; waiting draws what an idle card draws, told by the energy of a busy step."""
    out: dict[str, float] = {}
    share = found.utilisation
    step_s = found.end_s / found.steps

    def total(key: str) -> float | None:
        each = [r.cost.get(key) for r in reports]
        if any(v is None for v in each):
            return None
        return sum(float(v or 0.0) * n for v, (_, n) in zip(each, islands, strict=True))

    rental, power, price = total("cost_usd_per_hour"), total("power_w"), total("hardware_price_usd")
    if rental is not None:
        out |= {"cost_usd_per_hour": rental, "usd_per_step": rental * step_s / 3600.0}
    if price is not None:
        out["hardware_price_usd"] = price
    if power is not None:
        mean = power * (share + IDLE_SHARE * (1.0 - share))
        out |= {"power_w": mean, "energy_j_per_step": mean * step_s}
    return out | whole_job(out, scenario, step_s=step_s, samples=samples, tokens=tokens)[0]


def _lines(found: Round, workers: tuple[Peer, ...], cut: float, slowest: Report) -> tuple[tuple[str, str], ...]:
    return (
        ("A round", f"{found.steps} inner steps of {format_s(found.inner_s)}, then {format_s(found.average_s)} to "
         f"average among {len(workers)} workers, {format_s(found.exposed_s)} of it waited for"),
        ("Busy", f"{found.utilisation:.1%} of the time"),
        ("Traffic", f"{cut:,.0f} times less than fp32 gradients every step"),
        ("Host memory", f"{format_bytes(8.0 * float(slowest.facts['params']))} a worker for the outer optimizer"),
    )  # fmt: skip


def _extras(found: Round, workers: tuple[Peer, ...], rate: float, cut: float) -> Mapping[str, Any]:
    inner = found.steps * found.inner_s
    timeline = [{"time_s": inner, "samples_per_s": rate / found.utilisation}]
    if found.exposed_s > 0.0:
        timeline.append({"time_s": found.end_s, "samples_per_s": 0.0})
    return {
        "throughput_timeline": timeline,
        "goodput": {"goodput": 1.0, "samples_per_s": rate},
        "lost_work_fraction": 0.0,
        "recoveries": 0,
        "utilisation": {"mean": found.utilisation},
        "round": {"inner_steps": found.steps, "inner_s": found.inner_s, "average_s": found.average_s,
                  "exposed_s": found.exposed_s, "round_s": found.end_s, "workers": len(workers)},
        "traffic_cut": cut,
    }  # fmt: skip


def _sensitivities(found: Round) -> list[Sensitivity]:
    waits = found.exposed_s / found.end_s
    return [
        Sensitivity(name="inner step", elasticity=1.0 - waits, value=format_s(found.inner_s)),
        Sensitivity(name="network bandwidth", elasticity=-waits, value=format_s(found.average_s), note="of an average"),
        Sensitivity(name="inner_steps", elasticity=-waits, value=str(found.steps)),
    ]
