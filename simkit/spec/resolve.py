"""From what was asked to what will be predicted: every default filled in, and each of them stated.

What a default depends on is looked up in this order: the scenario, the software stack, the device, the network. Choices
that need a prediction (the micro-batch that fits, the method that is fastest) are left to `simkit.planner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkit import plugins
from simkit.errors import InputError, RefusedError, nearest, unknown
from simkit.spec import cluster as clusters
from simkit.spec import convnets
from simkit.spec import models as zoo
from simkit.spec import profiles as store
from simkit.spec.build import build
from simkit.spec.degrees import degrees
from simkit.spec.hardware import Cluster, Device
from simkit.spec.model import ConvSpec, Model, TransformerSpec
from simkit.spec.plan import Plan
from simkit.spec.scenario import Scenario
from simkit.spec.stack import DEFAULT, Stack, known, stack, stack_names
from simkit.units import MIB

DEFAULT_MODEL = "bert-large"
DEFAULT_CLUSTER = "1x8xh100"
MAX_SEQ_LEN = 2048


_ALONE = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "sp": 1, "vpp": 1, "zero": 0, "offload": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A scenario with its model, cluster, stack and plan. open: the fields of the plan that nobody gave and that
    only a prediction can choose well (``micro_batch grad_accum method``)."""

    scenario: Scenario
    model: Model
    cluster: Cluster
    stack: Stack
    plan: Plan
    open: frozenset[str]
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        """The device of the first group."""
        return self.cluster.groups[0].device

    def values(self) -> dict[str, Any]:
        """The resolved scenario in the vocabulary of the design."""
        p, c = self.plan, self.cluster
        out: dict[str, Any] = {
            "model": self.model.name,
            "task": p.task,
            "cluster": c.spec,
            "intra": c.intra.name if c.intra else None,
            "inter": c.inter.name if c.inter else None,
            "nics_per_node": c.nics_per_node,
            "p2p": c.p2p,
            "method": p.method,
            "algorithm": p.algorithm,
            "stack": p.stack,
            "dp": p.dp,
            **{k: getattr(p, k) for k in _ALONE if getattr(p, k) != _ALONE[k]},
            "precision": p.precision,
            "master_dtype": p.master_dtype,
            "reduce_dtype": p.reduce_dtype,
            "recompute": p.recompute,
            "compile": p.compile,
            "micro_batch": p.micro_batch,
            "grad_accum": p.grad_accum,
            "global_batch": p.global_batch,
            "optimizer": p.optimizer,
            "seed": self.scenario.get("seed", 0),
        }
        if p.tp > 1:
            out["tp_overlap"] = p.tp_overlap
        if p.dp > 1:
            out |= {"overlap": p.overlap, "fusion": p.fusion, "bucket_mb": p.bucket_bytes / MIB}
        if p.method in ("power-sgd", "acp-sgd"):
            out["rank"] = p.rank
        if p.method == "topk-sgd":
            out["density"] = p.density
        if isinstance(self.model.spec, TransformerSpec):
            out |= {"seq_len": p.seq_len, "attention": p.attention}
        else:
            out["image_size"] = p.image_size
        return {k: v for k, v in out.items() if v is not None}


@store.remembered
def parse_cluster(roots: tuple[Path, ...], text: str, **given: Any) -> tuple[Cluster, tuple[str, ...]]:
    """One object per cluster, so that what was worked out for it (collective costs) is found again. roots: where
    profiles are looked up, the environment's folders among them; they are part of the question."""
    return clusters.cluster(text, **given)


def resolve(scenario: Scenario) -> Resolved:
    """Fills in the defaults. Raises InputError for a contradiction or an unknown name, RefusedError for what simkit
    does not model."""
    notes: list[str] = []
    warnings: list[str] = []
    net = _model(scenario, notes)
    if scenario.given("image_size"):
        net = at_image_size(net, scenario.get("image_size"))
    spec = scenario.get("cluster", DEFAULT_CLUSTER)
    if not scenario.given("cluster"):
        notes.append(f"cluster = {spec}: none given")
    machines, said = parse_cluster(
        store.roots(scenario.profiles),
        spec,
        gpus_per_node=scenario.get("gpus_per_node"),
        intra=scenario.get("intra"),
        inter=scenario.get("inter"),
        nics_per_node=scenario.get("nics_per_node"),
        p2p=scenario.get("p2p"),
        profiles=scenario.profiles,
        calibration=scenario.get("calibration", True),
    )
    notes += said
    software = _stack(scenario, notes, warnings)
    if scenario.get("task", "pretrain") == "pretrain":
        net = zoo.pretraining_model(net)
    net = _padded(net, scenario.get("tp", 1), software, notes)
    first = machines.groups[0].device
    chosen, reasons = _settled(_settling(scenario), scenario.file, net, first, machines.gpus, software)
    notes += reasons
    micro, accum, undecided = resolve_batch(scenario, chosen["dp"], notes)
    plan = Plan(**chosen, micro_batch=micro, grad_accum=accum)
    return Resolved(
        scenario=scenario,
        model=net,
        cluster=machines,
        stack=software,
        plan=plan,
        open=undecided,
        assumptions=tuple(notes),
        warnings=tuple(warnings),
    )


def _model(scenario: Scenario, notes: list[str]) -> Model:
    name = scenario.get("model", DEFAULT_MODEL)
    if not scenario.given("model"):
        notes.append(
            f"model = {DEFAULT_MODEL}: none given; the largest network of the FusionAI study that trains on 10 GB"
        )
    if scenario.network is not None and name == scenario.network.name:
        return scenario.network
    return zoo.model(name, models_files=scenario.models, seq_len=scenario.get("seq_len"))


def _padded(net: Model, tp: int, software: Stack, notes: list[str]) -> Model:
    """The network with the vocabulary that the stack pads it to."""
    padded = zoo.padded_vocab(net, tp, software.vocab_multiple)
    if padded is not net:
        multiple = f"{software.vocab_multiple} x " if software.vocab_multiple > 1 else ""
        notes.append(f"{padded.notes[-1]}: {software.name} needs a multiple of {multiple}tp = {tp}")
    return padded


def _stack(scenario: Scenario, notes: list[str], warnings: list[str]) -> Stack:
    name = scenario.get("stack", DEFAULT)
    if not scenario.given("stack"):
        notes.append(f"stack = {DEFAULT}: none given")
    if not known(name, scenario.profiles):
        close = nearest(name, stack_names(scenario.profiles))
        hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
        warnings.append(f"stack {name!r} has no profile: priced as {DEFAULT}, with a wider interval{hint}")
        name = DEFAULT
    return stack(name, profiles=scenario.profiles)


_UNSETTLED = frozenset({"inter", "intra", "micro_batch", "grad_accum", "global_batch"})
"""Fields that change from question to question and decide nothing but themselves."""


def _settling(scenario: Scenario) -> tuple[tuple[str, Any], ...]:
    return tuple(item for item in scenario.values.items() if item[0] not in _UNSETTLED)


@lru_cache(maxsize=1024)
def _settled(
    values: tuple[tuple[str, Any], ...], file: str, net: Model, device: Device, gpus: int, software: Stack
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """(fields of the plan but for the batch, the lines that say why), once for all questions that differ in network
    and batch alone."""
    notes: list[str] = []
    return _chosen(Scenario(values=dict(values), file=file), net, device, gpus, software, notes), tuple(notes)


def _chosen(
    scenario: Scenario, net: Model, device: Device, gpus: int, software: Stack, notes: list[str]
) -> dict[str, Any]:
    """The fields of the plan but for the batch."""
    transformer = net.spec if isinstance(net.spec, TransformerSpec) else None
    tell = _Teller(scenario, notes)
    precision = tell("precision", _precision(device), f"the fastest {device.title} trains in")
    mixed = precision in ("fp16", "bf16", "fp8", "int8")
    method = scenario.get("method", "s-sgd")
    methods = plugins.names("simkit.compressors")
    if method not in methods:
        if method in plugins.names("simkit.methods"):
            known = "predict, compare, sweep, whatif, trace, map and validate"
            raise RefusedError(f"method = {method} is answered by {known}")
        methods = (*methods, *plugins.names("simkit.methods"))
        raise unknown("method", method, methods, file=scenario.file, see="simkit methods")
    algorithm = scenario.get("algorithm", "auto")
    if algorithm != "auto" and algorithm not in plugins.names("simkit.collectives"):
        raise unknown("algorithm", algorithm, (*plugins.names("simkit.collectives"), "auto"), file=scenario.file)
    placed = degrees(scenario, net, gpus)
    dp = placed["dp"]
    fields: dict[str, Any] = {
        "task": scenario.get("task", "pretrain"),
        "method": method,
        "stack": software.name,
        **placed,
        "precision": precision,
        "master_dtype": scenario.get("master_dtype", "fp32"),
        "reduce_dtype": scenario.get("reduce_dtype", _reduced(software.reduce_dtype, precision)),
        "recompute": scenario.get("recompute", "none"),
        "compile": scenario.get("compile", software.compiled),
        "tp_overlap": scenario.get("tp_overlap", software.tp_overlap),
        "optimizer": tell(
            "optimizer", "sgd-momentum" if net.input_kind == "images" else "adamw", "usual for such a network"
        ),
        "algorithm": algorithm,
        "fp16_accumulate": scenario.get("fp16_accumulate", False),
        "seq_len": _seq_len(net, scenario, tell),
        "image_size": _image_size(net, scenario),
    }
    if transformer is not None:
        flash = mixed and transformer.kind == "decoder" and device.architecture not in _NO_FLASH
        fields["attention"] = tell(
            "attention", "flash" if flash else "math", "what this stack runs for such a network on this device"
        )
    if dp > 1:
        fields |= _exchange(method, scenario, software, transformer is not None, tell)
    return fields


_NO_FLASH = frozenset({"volta", "turing", "pascal", "maxwell", "kepler"})


def _exchange(method: str, scenario: Scenario, software: Stack, transformer: bool, tell: _Teller) -> dict[str, Any]:
    fields = {
        "overlap": tell("overlap", software.overlap, f"default of {software.name}"),
        "fusion": tell("fusion", software.fusion, f"default of {software.name}"),
        "bucket_bytes": scenario.get("bucket_mb", software.bucket_mb) * MIB,
    }
    if method in ("power-sgd", "acp-sgd"):
        fields["rank"] = tell("rank", 32 if transformer else 4, "as in the ACP-SGD paper")
    if method == "topk-sgd":
        fields["density"] = tell("density", 0.001, "as in the ACP-SGD paper")
    return fields


class _Teller:
    """Takes a field from the scenario, or its default with one line that says why."""

    def __init__(self, scenario: Scenario, notes: list[str]) -> None:
        self._scenario, self._notes = scenario, notes

    def __call__(self, name: str, default: Any, why: str) -> Any:
        if self._scenario.given(name):
            return self._scenario.get(name)
        self._notes.append(f"{name} = {default}: {why}")
        return default


def _reduced(dtype: str, precision: str) -> str:
    """The dtype gradients are exchanged in: ``compute`` = that of the arithmetic, where it has 16 bits; ``main`` = the
    same, but fp32 where it is bf16, in which Megatron-LM adds gradients up in fp32."""
    if dtype == "main":
        return "fp16" if precision == "fp16" else "fp32"
    if dtype != "compute":
        return dtype
    return precision if precision in ("fp16", "bf16") else "bf16" if precision in ("fp8", "int8") else "fp32"


def _precision(device: Device) -> str:
    if "bf16" in device.peak_flops and device.kind == "gpu":
        return "bf16"
    fp32 = device.peak_flops.get("fp32", 0.0)
    return "fp16" if device.peak_flops.get("fp16", 0.0) > 1.5 * fp32 else "fp32"


def _seq_len(net: Model, scenario: Scenario, tell: _Teller) -> int:
    spec = net.spec
    if not isinstance(spec, TransformerSpec):
        return 0
    if spec.kind == "vit":
        side = scenario.get("image_size", spec.image_size)
        return int((side // spec.patch) ** 2 + 1)
    limit = spec.max_positions or MAX_SEQ_LEN
    default = net.default_seq_len or (128 if spec.kind == "encoder" else min(limit, MAX_SEQ_LEN))
    seq_len = tell("seq_len", default, "usual for such a network")
    if spec.positional == "learned" and spec.max_positions and seq_len > spec.max_positions:
        raise InputError(
            f"exceeds the {spec.max_positions} positions of {net.name}",
            file=scenario.file,
            key="seq_len",
            value=seq_len,
            hint=f"at most {spec.max_positions}",
        )
    return int(seq_len)


@lru_cache(maxsize=256)
def at_image_size(net: Model, size: int) -> Model:
    """The same network for square images of another side: feature maps, or patches and position rows, change.

    Raises InputError for a side that the patches of a ViT do not divide, or that is too small.
    """
    spec = net.spec
    if isinstance(spec, ConvSpec):
        return net if size == spec.image_size else convnets.resized(net, size)
    if not isinstance(spec, TransformerSpec) or spec.kind != "vit" or size == spec.image_size:
        return net
    if size < spec.patch or size % spec.patch:
        near = max(round(size / spec.patch), 1) * spec.patch
        raise InputError(
            f"is no multiple of the patch of {net.name}, {spec.patch}",
            key="image_size",
            value=size,
            hint=f"for example {near}",
        )
    rows = (size // spec.patch) ** 2 + 1
    resized = build(
        replace(spec, image_size=size, position_rows=rows, max_positions=0),
        name=net.name,
        source=net.source,
        dtype=net.dtype,
        buffers=net.buffers,
    )
    return replace(resized, notes=(*net.notes, f"position table of {rows} rows for images of {size}"))


def _image_size(net: Model, scenario: Scenario) -> int:
    if isinstance(net.spec, ConvSpec):
        return net.spec.image_size
    return int(scenario.get("image_size", 224))


def resolve_batch(scenario: Scenario, dp: int, notes: list[str]) -> tuple[int, int, frozenset[str]]:
    """(micro_batch, grad_accum, what was left open). micro · accum · dp = global: two give the third, one leaves the
    others to defaults."""
    micro, accum, total = (scenario.get(k) for k in ("micro_batch", "grad_accum", "global_batch"))
    file = scenario.file
    if total is not None and total % dp:
        raise InputError(
            f"is not divisible by the {dp} data ranks",
            file=file,
            key="global_batch",
            value=total,
            hint=f"for example {max(total // dp, 1) * dp}",
        )
    if total is not None and micro is not None and accum is not None and micro * accum * dp != total:
        raise InputError(
            f"contradicts micro_batch {micro} x grad_accum {accum} x dp {dp} = {micro * accum * dp}",
            file=file,
            key="global_batch",
            value=total,
            hint="leave one of the three out",
        )
    if total is not None:
        per_rank = total // dp
        given = micro if micro is not None else accum
        if given is not None and per_rank % given:
            key = "micro_batch" if micro is not None else "grad_accum"
            raise InputError(
                f"does not divide the {per_rank} samples of a data rank",
                file=file,
                key=key,
                value=given,
                hint=f"global_batch {total} over {dp} ranks",
            )
        if micro is None and accum is not None:
            micro = per_rank // accum
        elif micro is not None:
            accum = per_rank // micro
    undecided = set()
    if micro is None:
        undecided.add("micro_batch")
    if accum is None and micro is not None:
        accum = 1
        notes.append("grad_accum = 1: none given")
    if accum is None:
        undecided.add("grad_accum")
    if not scenario.given("method") and dp > 1:
        undecided.add("method")
    return micro or 1, accum or 1, frozenset(undecided)
