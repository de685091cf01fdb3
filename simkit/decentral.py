"""From a scenario of peers to its answer: what was asked, the best plan, and the report.

Fields that a pipeline over peers has no use for (tensor parallelism, ZeRO, offloading …) are refused. What is left open
is chosen by `simkit.decentral_search`, and each choice is stated.
"""

from __future__ import annotations

from dataclasses import replace

from simkit import plugins
from simkit.decentral_job import sustained
from simkit.decentral_search import Answer, Asked, answer, fastest
from simkit.decentral_step import Rules
from simkit.errors import InputError, RefusedError
from simkit.planner import usual_samples
from simkit.report import Report
from simkit.spec.model import TransformerSpec
from simkit.spec.peers import Peer, peers_from_cluster, read_peers
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import FIELDS, Scenario

DEFAULT_CLUSTER = "50x3080"
GAIN = 1.10
"""Compressed gradients are chosen unasked where they make a step this much faster."""
DENSITY = 0.01
"""Share of the elements that Top-k keeps on the wire: the ratio of 100 of the FusionLLM study."""
_SETTLED_HERE = frozenset(
    {"method", "dp", "pp", "schedule", "micro_batch", "grad_accum", "global_batch", "recompute", "algorithm", "task"}
) | {name for name, spec in FIELDS.items() if spec.group in ("peers", "inference")}
_NO_USE = ("tp", "cp", "ep", "sp", "vpp", "zero", "shard_group", "offload", "overlap", "fusion", "bucket_mb")
MAX_COUNT = 65_536
"""Micro-batches of a pipeline and step, at most: beyond it fill and drain are nothing, and a step is hours long."""
_UNSAID = ("grad_accum", "micro_batch", "overlap", "fusion", "nics_per_node", "method")
"""Assumptions about an ordinary job that say nothing about peers."""
_LOCAL_ONLY = ("inner_steps", "outer_dtype", "fragments", "overlap_steps")


def refuse(scenario: Scenario, names: tuple[str, ...], why: str) -> None:
    """Raises RefusedError where one of these fields is given and does not have its neutral value."""
    for name in names:
        if scenario.given(name) and scenario.get(name) not in (1, 0, "none"):
            raise RefusedError(f"{name} = {scenario.get(name)}: {why}")


def base(scenario: Scenario) -> tuple[Resolved, tuple[Peer, ...], list[str]]:
    """(the job as one peer would run it, the peers, assumptions) of a scenario of peers."""
    notes: list[str] = []
    kept = {k: v for k, v in scenario.values.items() if k not in _SETTLED_HERE}
    task = "finetune" if scenario.get("task") in ("finetune", "inference") else "pretrain"
    kept |= {"micro_batch": 1, "grad_accum": 1, "task": task}
    file = file_of(scenario)
    if file is not None:
        if scenario.given("cluster"):
            raise InputError("is given beside peers", key="cluster", value=scenario.get("cluster"),
                             hint="a peers CSV names the devices itself")  # fmt: skip
        devices: dict[str, int] = {}
        for peer in read_peers(file, profiles=scenario.profiles):
            devices[peer.device] = devices.get(peer.device, 0) + 1
        kept["cluster"] = "+".join(f"{n}x1x{device}" for device, n in devices.items())
    elif not scenario.given("cluster"):
        kept["cluster"] = default_cluster(scenario)
        notes.append(f"cluster = {kept['cluster']}: none given")
    resolved = resolve(replace(scenario, values=kept))
    calibrated = bool(scenario.get("calibration", True))
    rate = sustained(resolved.stack, resolved.plan.precision, calibration=calibrated,
                     fp16_accumulate=resolved.plan.fp16_accumulate)  # fmt: skip
    if file is not None:
        peers = read_peers(file, rate=rate, profiles=scenario.profiles, calibration=calibrated)
        notes += [n for n in resolved.assumptions if not n.startswith(("cluster", "inter", "nics"))]
    else:
        peers = peers_from_cluster(resolved.cluster, rate=rate, profiles=scenario.profiles, calibration=calibrated)
        notes += resolved.assumptions
    counted(scenario, peers)
    return resolved, peers, [n for n in notes if not n.startswith(_UNSAID)]


def default_cluster(scenario: Scenario) -> str:
    """`DEFAULT_CLUSTER`, with as many peers as `peers` says where that is a number. Raises InputError for none."""
    text = str(scenario.get("peers", ""))
    if not text.isdigit():
        return DEFAULT_CLUSTER
    if not int(text):
        raise InputError("is nobody", file=scenario.file, key="peers", value=text, hint="give at least one peer")
    return f"{int(text)}x{DEFAULT_CLUSTER.partition('x')[2]}"


def file_of(scenario: Scenario) -> str | None:
    """The peers CSV; a bare number says how many peers there are."""
    text = scenario.get("peers")
    return None if text is None or str(text).isdigit() else str(text)


def counted(scenario: Scenario, peers: tuple[Peer, ...]) -> None:
    """Raises InputError where `peers` is a number and another one than that of the cluster."""
    text = str(scenario.get("peers", ""))
    if text.isdigit() and int(text) != len(peers):
        raise InputError(f"is not the {len(peers)} of the cluster", file=scenario.file, key="peers", value=text,
                         hint="leave it out, or give a peers CSV")  # fmt: skip


def rules_of(scenario: Scenario, notes: list[str]) -> Rules:
    """How the peers work together. Raises InputError for an unknown format, schedule or compressor."""
    schedule = scenario.get("schedule", "1f1b")
    if schedule not in ("1f1b", "gpipe"):
        raise RefusedError(f"schedule = {schedule}: over peers there are 1f1b and gpipe")
    wire = scenario.get("wire", "none")
    plugins.get("simkit.wire", wire)
    exchange = scenario.get("exchange", "s-sgd")
    plugins.get("simkit.compressors", exchange)
    algorithm = scenario.get("algorithm", "butterfly")
    if algorithm == "auto":
        algorithm = "butterfly"
    if algorithm not in ("butterfly", "ring"):
        raise RefusedError(f"algorithm = {algorithm}: peers average by butterfly or ring")
    if not scenario.given("algorithm"):
        notes.append("algorithm = butterfly: every peer averages a share of the vector that suits its line")
    if not scenario.given("schedule"):
        notes.append("schedule = 1f1b: holds fewest activations")
    if wire.endswith("top-k") and not scenario.given("density"):
        notes.append(f"density = {DENSITY}: the ratio of 100 of the FusionLLM study")
    return Rules(
        schedule=schedule, wire=wire, density=scenario.get("density", DENSITY), exchange=exchange, algorithm=algorithm,
        staleness=scenario.get("staleness", 0),
    )  # fmt: skip


def asked(scenario: Scenario) -> tuple[Asked, list[str]]:
    """(the question, assumptions) of a training scenario."""
    refuse(scenario, _NO_USE, "a pipeline over peers has no use for it, leave it out")
    refuse(scenario, _LOCAL_ONLY, "belongs to method = local-sgd")
    resolved, peers, notes = base(scenario)
    rules = rules_of(scenario, notes)
    lora = _lora(scenario, resolved, notes)
    dp, pp = scenario.get("dp"), scenario.get("pp")
    if (dp or 1) * (pp or 1) > len(peers):
        raise InputError(f"x pp {pp or 1} exceeds the {len(peers)} peers", file=scenario.file, key="dp", value=dp or 1)
    samples = scenario.get("global_batch") or usual_samples(resolved)
    if not scenario.given("global_batch") and not scenario.given("grad_accum"):
        notes.append(f"global_batch = about {samples}: usual for such a network")
    if scenario.given("global_batch") and scenario.given("grad_accum"):
        raise InputError("and grad_accum are both given", file=scenario.file, key="global_batch", value=samples,
                         hint="over peers grad_accum counts micro-batches of a pipeline; give one of them")  # fmt: skip
    if scenario.get("grad_accum", 1) > MAX_COUNT:
        raise InputError("is too many", file=scenario.file, key="grad_accum", value=scenario.get("grad_accum"),
                         hint=f"at most {MAX_COUNT} micro-batches of a pipeline over peers")  # fmt: skip
    plan = replace(resolved.plan, rank=scenario.get("rank", 32 if resolved.plan.seq_len else 4))
    question = Asked(
        resolved=replace(resolved, plan=plan), peers=peers, rules=rules, samples=int(samples),
        placement=scenario.get("placement", "exact"), pipelines=dp, depth=pp, micro_batch=scenario.get("micro_batch"),
        grad_accum=scenario.get("grad_accum"), recompute=scenario.get("recompute"), lora_rank=lora,
        seed=scenario.get("seed", 0),
    )  # fmt: skip
    plugins.get("simkit.placement", question.placement)
    return question, notes


def _lora(scenario: Scenario, resolved: Resolved, notes: list[str]) -> int:
    """Rank of the adapters; 0 where everything trains."""
    if scenario.get("peft", "none") == "none":
        if scenario.given("lora_rank"):
            given = scenario.get("lora_rank")
            raise InputError("has no adapters", key="lora_rank", value=given, hint="add peft = lora")
        return 0
    if not isinstance(resolved.model.spec, TransformerSpec):
        raise RefusedError(f"peft = lora is priced for transformers; {resolved.model.name} is none")
    if scenario.get("exchange", "s-sgd") != "s-sgd":
        raise RefusedError("adapters are exchanged as they are; leave exchange out")
    rank = int(scenario.get("lora_rank", 16))
    if not scenario.given("lora_rank"):
        notes.append("lora_rank = 16: usual; adapters on every matrix of the blocks")
    return rank


def best(question: Asked, scenario: Scenario, notes: list[str]) -> Answer:
    """The best answer; gradients are compressed unasked where that gains `GAIN`."""
    plain = answer(question)
    open_ = not scenario.given("exchange") and not question.lora_rank
    if not open_ or len(question.peers) < 2 or not plain.fits:
        notes += plain.notes
        return plain
    # Compression makes replicas pay, and with them other micro-batches and less recomputation: all is looked for again.
    speed = plain.samples / plain.step.end_s
    rival = fastest(replace(question, rules=replace(question.rules, exchange="acp-sgd")), floor=GAIN * speed)
    other = 0.0 if rival is None else rival.samples / rival.step.end_s
    if rival is not None and len(rival.step.pipes) > 1 and other > GAIN * speed:
        notes += rival.notes
        notes.append(f"exchange = acp-sgd, rank {question.resolved.plan.rank}: {other / speed:.1f}x faster than s-sgd "
                     "here; it changes the gradient, see `simkit methods`")  # fmt: skip
        return rival
    notes += plain.notes
    if len(plain.step.pipes) > 1:
        notes.append("exchange = s-sgd: none given; compression gains less than 10 % here")
    return plain


def training(scenario: Scenario, *, beside: bool = True, spans: bool = False) -> Report:
    """The answer for a training job over peers. spans: keep those of the pipelines, for traces; a stochastic wiring and
    late gradients have none."""
    from simkit.decentral_report import report_of, with_reference

    try:
        question, notes = asked(scenario)
    except InputError as error:
        raise scenario.blame(error) from None
    if scenario.get("wiring") == "stochastic":
        from simkit.decentral_wiring import wired

        found = wired(question, scenario, notes)
    else:
        chosen = best(question, scenario, notes)
        found = report_of(chosen, scenario, notes)
        if spans and not question.rules.staleness:
            from simkit.decentral_trace import traced

            found = replace(found, timeline=traced(chosen))
    return with_reference(scenario, found) if beside else found
