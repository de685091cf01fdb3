"""The whole line for one scenario: resolve, plan, price, arrange, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import log, log1p, log2
from typing import Any

from simkit.cost import cost
from simkit.errors import InputError
from simkit.evaluate import Evaluation, evaluate
from simkit.goodput import asked, failures
from simkit.intervals import interval
from simkit.methods import path
from simkit.planner import planned
from simkit.predict_words import bottleneck, groups, ledger
from simkit.predict_words import network_bound as exchange_bound
from simkit.price import Scales, peak
from simkit.report import Report, Sensitivity
from simkit.spec.model import TransformerSpec
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import Scenario
from simkit.units import format_bits, format_Bps, format_flops, format_s

REFERENCE_CLUSTER = "4xh100-pcie-80gb"
"""What 50 RTX 3080 are compared with in FusionAI (arXiv 2309.01172)."""
_CLUSTER_FIELDS = frozenset(
    {"cluster", "intra", "inter", "gpus_per_node", "nics_per_node", "p2p", "seed", "electricity", "calibration"}
)
STEP = 0.01
TOP = 5


def predict(*, profiles: tuple[str, ...] = (), models: tuple[str, ...] = (), **fields: Any) -> Report:
    """Predicts one job; keywords are the fields of the vocabulary (`simkit.spec.scenario.FIELDS`).

    >>> predict(model="resnet-50", cluster="8x4x2080ti", inter="10gbe", micro_batch=64, precision="fp32").fits
    True

    Raises InputError for malformed input and RefusedError for what simkit does not model; a job that does not fit is an
    answer (`Report.fits`, with times all the same).
    """
    return predict_scenario(Scenario.of(fields, profiles=tuple(map(str, profiles)), models=tuple(map(str, models))))


def predict_scenario(
    scenario: Scenario, *, spans: bool = False, beside: bool = True, as_ran: bool = False
) -> Report:
    """Predicts a Scenario. spans: keep the spans of the simulated step (for traces); beside: where nothing but a
    cluster was given, the same job on `REFERENCE_CLUSTER` too; as_ran: degrees that were not given are 1, also where
    that does not fit and a planner would choose others."""
    own = path(scenario)
    if own is not None:
        answer: Report = own.report(scenario, spans=spans, beside=beside)
        return answer
    try:
        resolved = planned(resolve(scenario))
        found = evaluate(resolved, spans=spans)
        if not found.memory.fits and not as_ran:
            resolved, found = _placed(resolved, found, spans)
    except InputError as error:
        raise scenario.blame(error) from None
    report = _completed(_report(resolved, found), resolved)
    if beside and _cluster_alone(scenario) and resolved.cluster.gpus > 1:
        return replace(report, beside=(_elsewhere(scenario, report, resolved),))
    return report


def _placed(resolved: Resolved, found: Evaluation, spans: bool) -> tuple[Resolved, Evaluation]:
    """The plan that a planner would choose instead of one that never fits."""
    from simkit.planner_degrees import placed

    chosen = placed(resolved)
    return (resolved, found) if chosen is resolved else (chosen, evaluate(chosen, spans=spans))


def _completed(report: Report, resolved: Resolved) -> Report:
    """`report` with what imported files gave and, where asked for, with failures and goodput."""
    scenario, plan, gpus = resolved.scenario, resolved.plan, resolved.cluster.gpus
    if scenario.imported is not None:
        report = replace(report, imported=scenario.imported.to_dict(scenario.values))
    if not asked(scenario):
        return report
    software = resolved.stack
    figures, notes, warnings = failures(
        scenario,
        plan=plan,
        params=float(resolved.model.params),
        gpus=gpus,
        autocast=software.autocast,
        figures=report.cost,
    )
    assumptions, remarks = (*report.assumptions, *notes), (*report.warnings, *warnings)
    return replace(report, goodput=figures, assumptions=assumptions, warnings=remarks)


def _cluster_alone(scenario: Scenario) -> bool:
    return scenario.given("cluster") and _CLUSTER_FIELDS.issuperset(scenario.values)


def _elsewhere(scenario: Scenario, report: Report, resolved: Resolved) -> Report:
    """The same job on the reference cluster: same network, precision, optimizer and batch; its own links and method."""
    plan = resolved.plan
    fields = {
        "cluster": REFERENCE_CLUSTER,
        "model": report.scenario["model"],
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "global_batch": plan.global_batch,
    }
    if plan.seq_len:
        fields |= {"seq_len": plan.seq_len, "attention": plan.attention}
    kept = {k: scenario.get(k) for k in ("electricity", "calibration") if scenario.given(k)}
    return predict_scenario(replace(scenario, values=Scenario.of(fields | kept).values), beside=False)


def _report(resolved: Resolved, found: Evaluation) -> Report:
    """The figures now, the words about them when somebody reads them."""
    end_s = found.end_s
    metrics = _metrics(resolved, found)
    model_flops, peak_flops = _flops(resolved, found)
    done = model_flops * (4.0 / 3.0 if resolved.plan.recompute == "full" else 1.0)
    return Report.deferred(
        partial(_later, resolved, found),
        _LATER_NAMES,
        iteration_time_s=end_s,
        samples_per_s=metrics["samples_per_s"],
        tokens_per_s=metrics.get("tokens_per_s"),
        tokens_per_s_per_gpu=metrics.get("tokens_per_s_per_gpu"),
        mfu=model_flops / (end_s * peak_flops),
        hfu=done / (end_s * peak_flops),
        breakdown=found.breakdown,
        memory=found.memory,
        timeline=found.timelines[0],
        sensitivities_fn=partial(sensitivities, resolved, found),
        parts_fn=partial(_parts, found),
    )


def _parts(found: Evaluation, by: str) -> Any:
    from simkit import breakdown

    return {"layers": breakdown.layers, "modules": breakdown.modules, "operators": breakdown.operators}[by](found)


def _later(resolved: Resolved, found: Evaluation, name: str) -> Any:
    return _LATER[name](resolved, found)


def _metrics(resolved: Resolved, found: Evaluation) -> dict[str, float]:
    samples, end_s = resolved.plan.global_batch, found.end_s
    metrics = {"iteration_time_s": end_s, "samples_per_s": samples / end_s}
    tokens = _tokens(resolved)
    if tokens:
        metrics["tokens_per_s"] = tokens / end_s
        metrics["tokens_per_s_per_gpu"] = tokens / end_s / resolved.cluster.gpus
    return metrics


def _tokens(resolved: Resolved) -> int:
    """Tokens of a step; 0 where samples are no tokens."""
    model = resolved.model
    if not isinstance(model.spec, TransformerSpec) or model.input_kind != "tokens":
        return 0
    return resolved.plan.global_batch * resolved.plan.seq_len


def _flops(resolved: Resolved, found: Evaluation) -> tuple[float, float]:
    """(FLOPs of the model a device and step, dense peak of the device)."""
    plan = resolved.plan
    peak_flops, _ = peak(found.device, plan.precision, fp16_accumulate=plan.fp16_accumulate)
    return 3.0 * float(found.compute.model_flops) * plan.grad_accum, peak_flops


def _costs(resolved: Resolved, found: Evaluation) -> tuple[dict[str, float], list[str], list[str]]:
    busy = min(found.timelines[0].busy_s.get("compute", found.end_s) / found.end_s, 1.0)
    return cost(
        resolved.cluster,
        resolved.scenario,
        step_s=found.end_s,
        busy=busy,
        samples_per_step=resolved.plan.global_batch,
        tokens_per_step=_tokens(resolved),
    )


def _rates_of_host(resolved: Resolved) -> list[str]:
    """What an answer with offload assumes of the host; without it nothing, and nothing is imported."""
    if resolved.plan.offload == "none":
        return []
    from simkit.train_offload import assumptions

    on_host = resolved.stack.host_optimizer
    return assumptions(resolved.plan, cluster=resolved.cluster, device=resolved.device, on_host=on_host)


def _conventions(resolved: Resolved) -> tuple[str, ...]:
    said = [
        "dense peaks with fp32 accumulation"
        if not resolved.plan.fp16_accumulate
        else "peak with fp16 accumulation (asked for)"
    ]
    if isinstance(resolved.model.spec, TransformerSpec):
        said.append(
            "MFU counts matrix products once forward and twice backward, attention in full "
            "(not halved for a causal mask), the head, no look-up, no recomputation"
        )
        if "mlm" in resolved.model.spec.heads_list:
            said.append(
                f"masked-LM head over {resolved.stack.mlm_positions:.0%} of the positions ({resolved.stack.name})"
            )
    else:
        said.append(
            "MFU counts convolutions and linear layers once forward and twice backward, one multiply-add = 2 FLOP"
        )
    return tuple(said)


def _facts(resolved: Resolved, found: Evaluation) -> dict[str, Any]:
    wire = found.exchange.wire_bytes
    model_flops, peak_flops = _flops(resolved, found)
    facts: dict[str, Any] = {
        "params": resolved.model.params,
        "gpus": resolved.cluster.gpus,
        "model_flops_per_gpu_step": model_flops,
        "peak_flops_per_gpu": peak_flops,
        "gradient_bytes": 4.0 * resolved.model.params,
        "wire_bytes_per_rank": wire,
        "buckets": found.exchange.buckets,
    }
    if wire:
        facts["compression_ratio"] = 4.0 * resolved.model.params / wire
    return facts


def _math_share(found: Evaluation) -> float:
    """Share of forward and backward time that arithmetic rather than memory bounds."""
    return float(found.compute.math_share)


_LATER: Mapping[str, Callable[[Resolved, Evaluation], Any]] = {
    "scenario": lambda resolved, found: resolved.values(),
    "ledger": lambda resolved, found: ledger(found, resolved, _math_share(found), exchange_bound(found, resolved)),
    "interval_90": lambda resolved, found: interval(_metrics(resolved, found), resolved, found),
    "bottleneck": lambda resolved, found: bottleneck(
        found, resolved, _math_share(found), exchange_bound(found, resolved)
    ),
    "cost": lambda resolved, found: _costs(resolved, found)[0],
    "groups": lambda resolved, found: groups(resolved),
    "assumptions": lambda resolved, found: (
        *resolved.assumptions,
        *_rates_of_host(resolved),
        *_costs(resolved, found)[1],
        *_conventions(resolved),
    ),
    "warnings": lambda resolved, found: (*resolved.warnings, *found.pricing.warnings, *_costs(resolved, found)[2]),
    "facts": lambda resolved, found: _facts(resolved, found),
    "device_names": lambda resolved, found: tuple(
        f"{g.nodes}x{g.gpus_per_node} {g.device.title}" for g in resolved.cluster.groups
    ),
}
"""What a Report says when it is read."""
_LATER_NAMES = frozenset(_LATER)


def sensitivities(resolved: Resolved, found: Evaluation) -> list[Sensitivity]:
    """d ln(time per sample) / d ln(input) by a 1 % change of each input; the five largest, in order of size."""
    device, cluster = found.device, resolved.cluster
    law = found.pricing.law
    link = cluster.inter if cluster.nodes > 1 else cluster.intra
    rate = (format_bits(link.Bps) if link.scope != "gpu" else format_Bps(link.Bps)) if link is not None else ""
    host_s = found.breakdown.get("host_s") or found.pricing.host_s
    offloaded = ", with the optimizer" if resolved.plan.offload != "none" else ""
    questions: list[tuple[str, str, str, Callable[[], float]]] = [
        (
            "peak arithmetic rate",
            format_flops(law.peak_flops),
            device.title,
            lambda: _per_sample(resolved, Scales(flops=1 + STEP)),
        ),
        (
            "memory bandwidth",
            format_Bps(device.memory_Bps),
            device.title,
            lambda: _per_sample(resolved, Scales(memory_Bps=1 + STEP)),
        ),
        (
            "kernel launch time",
            format_s(law.kernel_s),
            device.title,
            lambda: _per_sample(resolved, Scales(kernel_s=1 + STEP)),
        ),
        (
            "host time per step",
            format_s(host_s) if host_s else "",
            resolved.stack.name + offloaded,
            lambda: _per_sample(resolved, Scales(host_s=1 + STEP)),
        ),
    ]
    if cluster.gpus > 1 and link is not None:
        questions += [
            ("network bandwidth", rate, link.title, lambda: _per_sample(resolved, Scales(network_Bps=1 + STEP))),
            (
                "network latency",
                format_s(link.latency_s),
                link.title,
                lambda: _per_sample(resolved, Scales(network_latency=1 + STEP)),
            ),
        ]
    base = found.end_s / resolved.plan.global_batch
    answers = [
        Sensitivity(name=n, value=v, note=w, elasticity=log(f() / base) / log1p(STEP)) for n, v, w, f in questions
    ]
    # Batches come in whole samples, and tiles make them uneven on a small scale: their elasticity is taken over a
    # doubling.
    for name in ("micro_batch", "grad_accum"):
        plan = replace(resolved.plan, **{name: 2 * getattr(resolved.plan, name)})
        doubled = evaluate(replace(resolved, plan=plan)).end_s / plan.global_batch
        note = "elasticity over a doubling"
        answers.append(
            Sensitivity(name=name, value=str(getattr(resolved.plan, name)), note=note, elasticity=log2(doubled / base))
        )
    return sorted(answers, key=lambda s: -abs(s.elasticity))[:TOP]


def _per_sample(resolved: Resolved, scales: Scales) -> float:
    return evaluate(resolved, scales=scales).end_s / resolved.plan.global_batch


__all__ = ["predict", "predict_scenario", "sensitivities"]
