"""The one vocabulary: a field has the same name as flag, file key, sweep axis and table column.

`FIELDS` is the table everything else is made from: command-line flags, the keys a scenario file may have, the columns
`validate` understands, and the keyword arguments of `simkit.predict`. A Scenario holds only what was given; what was
not given is filled in by `simkit.spec.resolve`, which lists each default it used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simkit.errors import InputError, unknown

if TYPE_CHECKING:
    from simkit.spec.imports._common import Imported
    from simkit.spec.model import Model

MAX_COUNT = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldSpec:
    """One name of the vocabulary. kind: ``int float bool str choice``; low and high are inclusive bounds."""

    name: str
    kind: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    group: str = "job"


def _count(name: str, help: str, *, low: float = 1, high: float = MAX_COUNT, group: str = "job") -> FieldSpec:
    return FieldSpec(name=name, kind="int", help=help, low=low, high=high, group=group)


PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
OPTIMIZERS = ("adamw", "adam", "lamb", "sgd", "sgd-momentum", "none")

_FIELDS = (
    FieldSpec(name="model", kind="str", help="zoo name, path of a Hugging Face config.json, or module:callable"),
    FieldSpec(name="task", kind="choice", choices=("pretrain", "finetune", "inference"), help="what the job does"),
    FieldSpec(
        name="cluster", kind="str", help="[NODESx]GPUSxDEVICE, joined by +: 50x3080, 8x4x2080ti", group="cluster"
    ),
    _count("gpus_per_node", "GPUs of one node, where the cluster gives one number", high=1e6, group="cluster"),
    FieldSpec(name="intra", kind="str", help="link inside a node, or RATE@LATENCY", group="cluster"),
    FieldSpec(name="inter", kind="str", help="link between nodes, or RATE@LATENCY", group="cluster"),
    _count("nics_per_node", "NICs of the inter link in a node", high=1024, group="cluster"),
    FieldSpec(
        name="p2p", kind="bool", help="GPUs of a node copy to each other without passing host memory", group="cluster"
    ),
    FieldSpec(
        name="method",
        kind="str",
        help="gradient exchange: s-sgd, sign-sgd, topk-sgd, power-sgd, acp-sgd; over peers: decentralized, local-sgd",
        group="method",
    ),
    _count("rank", "rank of Power-SGD and ACP-SGD", high=1e6, group="method"),
    FieldSpec(
        name="density", kind="float", low=1e-9, high=1.0, help="share of the elements Top-k keeps", group="method"
    ),
    FieldSpec(
        name="bucket_mb",
        kind="float",
        low=0.0,
        high=1e9,
        help="fusion threshold, MiB of uncompressed gradients",
        group="method",
    ),
    FieldSpec(
        name="overlap",
        kind="choice",
        choices=("none", "wfbp"),
        help="exchange during back-propagation or after it",
        group="method",
    ),
    FieldSpec(
        name="fusion",
        kind="choice",
        choices=("none", "bucket", "all", "optimal"),
        help="how gradients are merged into buffers",
        group="method",
    ),
    FieldSpec(
        name="algorithm",
        kind="str",
        help="collective algorithm: auto, ring, tree, double-tree, halving-doubling, hierarchical, direct",
        group="method",
    ),
    FieldSpec(name="stack", kind="str", help="software stack", group="method"),
    _count("dp", "data-parallel degree", group="parallel"),
    _count("tp", "tensor-parallel degree", group="parallel"),
    _count("pp", "pipeline-parallel degree", group="parallel"),
    _count("cp", "context-parallel degree", group="parallel"),
    _count("ep", "expert-parallel degree", group="parallel"),
    _count("sp", "sequence-parallel degree", group="parallel"),
    _count("vpp", "virtual pipeline stages a rank", group="parallel"),
    FieldSpec(name="zero", kind="int", low=0, high=3, help="ZeRO stage; FSDP full shard = 3", group="parallel"),
    _count("shard_group", "ranks over which ZeRO shards (HSDP); default all of dp", group="parallel"),
    FieldSpec(
        name="schedule",
        kind="choice",
        choices=("1f1b", "gpipe", "interleaved", "zb"),
        help="pipeline schedule",
        group="parallel",
    ),
    FieldSpec(
        name="tp_overlap",
        kind="choice",
        choices=("none", "backward", "chunks"),
        help="messages of tensor parallelism beside products: none, those of input gradients, or all, in chunks "
        "(asynchronous TP)",
        group="parallel",
    ),
    FieldSpec(
        name="offload",
        kind="choice",
        choices=("none", "optimizer", "params"),
        help="what rests in host memory",
        group="parallel",
    ),
    FieldSpec(
        name="precision", kind="choice", choices=PRECISIONS, help="arithmetic of matrix products", group="numerics"
    ),
    FieldSpec(
        name="master_dtype",
        kind="choice",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the master weights",
        group="numerics",
    ),
    FieldSpec(
        name="reduce_dtype",
        kind="choice",
        choices=("fp32", "bf16", "fp16"),
        help="dtype of the gradient exchange",
        group="numerics",
    ),
    FieldSpec(name="attention", kind="choice", choices=("math", "flash"), help="attention kernel", group="numerics"),
    FieldSpec(
        name="recompute",
        kind="choice",
        choices=("none", "selective", "full"),
        help="activation recomputation",
        group="numerics",
    ),
    FieldSpec(name="compile", kind="bool", help="point-wise operators are fused by a compiler", group="numerics"),
    FieldSpec(
        name="fp16_accumulate", kind="bool", help="use the fp16-accumulate peak of consumer cards", group="numerics"
    ),
    _count("micro_batch", "samples per data rank and micro-batch", group="batch"),
    _count("global_batch", "samples per step, whole job", group="batch"),
    _count("grad_accum", "micro-batches per step", group="batch"),
    _count("seq_len", "tokens per sample", high=1e9, group="batch"),
    _count("image_size", "side of the input image", high=1e5, group="batch"),
    FieldSpec(name="optimizer", kind="choice", choices=OPTIMIZERS, help="optimizer", group="batch"),
    FieldSpec(name="peers", kind="str", help="CSV of peers, each with its own line; or their number", group="peers"),
    FieldSpec(
        name="placement",
        kind="str",
        help="who holds what: exact, op-fence, equal, random, by-speed",
        group="peers",
    ),
    FieldSpec(
        name="wire", kind="str", help="activations between peers: none, int8, top-k, ada-top-k", group="peers"
    ),
    FieldSpec(
        name="exchange", kind="str", help="gradients between replicas: s-sgd, power-sgd, acp-sgd, …", group="peers"
    ),
    FieldSpec(
        name="wiring",
        kind="choice",
        choices=("fixed", "stochastic"),
        help="fixed pipelines, or any peer of the next stage (SWARM)",
        group="peers",
    ),
    _count("staleness", "steps that a gradient may be late; 0 = synchronous", low=0, high=1000, group="peers"),
    _count("inner_steps", "local steps between two averages (local-sgd)", high=10**6, group="peers"),
    FieldSpec(
        name="outer_dtype",
        kind="choice",
        choices=("fp32", "bf16", "fp16", "int8"),
        help="what is averaged (local-sgd)",
        group="peers",
    ),
    _count("fragments", "parts of the network averaged at different times (streaming)", high=10**4, group="peers"),
    _count("overlap_steps", "inner steps that an average may take (streaming)", low=0, high=10**6, group="peers"),
    FieldSpec(
        name="peft", kind="choice", choices=("none", "lora"), help="what trains (with decentralized)", group="peers"
    ),
    _count("lora_rank", "rank of the adapters", high=1e5, group="peers"),
    _count("batch", "sequences generated together", high=1e6, group="inference"),
    _count("prompt_len", "tokens in the cache already", low=0, high=1e9, group="inference"),
    _count("output_len", "tokens to generate", high=1e9, group="inference"),
    FieldSpec(name="engine", kind="str", help="what serves: petals, petals-merged, chain", group="inference"),
    FieldSpec(
        name="quant",
        kind="choice",
        choices=("none", "int8", "nf4", "int4", "fp8"),
        help="dtype of the weights",
        group="inference",
    ),
    FieldSpec(
        name="mtbf_hours",
        kind="float",
        low=1e-6,
        high=1e15,
        help="mean hours between failures of one GPU",
        group="failures",
    ),
    FieldSpec(
        name="checkpoint_interval_s",
        kind="float",
        low=1e-3,
        high=1e12,
        help="seconds of work between checkpoints",
        group="failures",
    ),
    FieldSpec(name="checkpoint_bytes", kind="str", help="size of a checkpoint, as in '2.3 TB'", group="failures"),
    FieldSpec(
        name="checkpoint_bandwidth",
        kind="str",
        help="rate of the whole job to storage, as in '2 GB/s'",
        group="failures",
    ),
    FieldSpec(
        name="restart_s",
        kind="float",
        low=0.0,
        high=1e9,
        help="seconds from a failure to the first new step",
        group="failures",
    ),
    FieldSpec(name="electricity", kind="float", low=0.0, high=1e3, help="electricity price, USD per kWh", group="cost"),
    FieldSpec(name="tokens", kind="float", low=0.0, help="total tokens to train on", group="cost"),
    FieldSpec(name="samples", kind="float", low=0.0, help="total samples to train on", group="cost"),
    FieldSpec(name="epochs", kind="float", low=0.0, help="epochs over dataset_samples", group="cost"),
    FieldSpec(name="dataset_samples", kind="float", low=1.0, help="samples of one epoch", group="cost"),
    FieldSpec(
        name="memory_reserve_gib", kind="float", low=0.0, high=1e6, help="device memory kept free, GiB", group="cost"
    ),
    FieldSpec(
        name="calibration",
        kind="bool",
        help="use the fitted tables of the profiles (false: datasheet and priors)",
        group="cost",
    ),
    _count("seed", "seed of everything random", low=0, high=2**63, group="cost"),
)
FIELDS: Mapping[str, FieldSpec] = {f.name: f for f in _FIELDS}


def clean(name: str, value: Any, *, file: str = "") -> Any:
    """One value of the vocabulary, checked and converted. Raises InputError naming the file, key, value and way out."""
    try:
        return _cleaned(name, value)
    except (InputError, TypeError):  # refused, for the message to name the file; or a value without a hash
        return _clean(name, value, file)


@lru_cache(maxsize=4096, typed=True)
def _cleaned(name: str, value: Any) -> Any:
    return _clean(name, value, "")


def _clean(name: str, value: Any, file: str) -> Any:
    spec = FIELDS.get(name)
    if spec is None:
        raise unknown("key", name, FIELDS, file=file)
    if spec.kind == "bool":
        return _bool(spec, value, file)
    if spec.kind in ("int", "float"):
        return _number(spec, value, file)
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise InputError("is not a name", file=file, key=name, value=value, hint=spec.help)
    text = str(value).strip()
    if spec.kind == "choice":
        folded = text.lower()
        if folded not in spec.choices:
            raise unknown(name, text, spec.choices, file=file)
        return folded
    return text


def _bool(spec: FieldSpec, value: Any, file: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise InputError("is neither true nor false", file=file, key=spec.name, value=value, hint="write true or false")


def _number(spec: FieldSpec, value: Any, file: str) -> float | int:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError("is not a number", file=file, key=spec.name, value=value, hint=spec.help) from None
    if not math.isfinite(number):
        raise InputError("is not finite", file=file, key=spec.name, value=value, hint="write a finite number")
    if spec.kind == "int" and number != int(number):
        raise InputError(
            "is not a whole number", file=file, key=spec.name, value=value, hint=f"for example {math.ceil(number)}"
        )
    if spec.low is not None and number < spec.low:
        raise InputError("is too small", file=file, key=spec.name, value=value, hint=f"at least {spec.low:g}")
    if spec.high is not None and number > spec.high:
        raise InputError("is too large", file=file, key=spec.name, value=value, hint=f"at most {spec.high:g}")
    return int(number) if spec.kind == "int" else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What was asked, and nothing else: {field: checked value}.

    network: an architecture that an imported file spelled out, in force where `model` is its name. imported: what the
    files of other frameworks gave, for the report and for errors that name the file.
    """

    values: Mapping[str, Any]
    profiles: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    file: str = ""
    network: Model | None = None
    imported: Imported | None = None

    @classmethod
    def of(
        cls, fields: Mapping[str, Any], *, file: str = "", profiles: tuple[str, ...] = (), models: tuple[str, ...] = ()
    ) -> Scenario:
        """A Scenario from a mapping; None and the empty string mean absent. Raises InputError on any bad entry."""
        values = {}
        for name, value in fields.items():
            if value is not None and not (isinstance(value, str) and not value.strip()):
                key = str(name).replace("-", "_")
                values[key] = clean(key, value, file=file)
        return cls(values=values, file=file, profiles=tuple(profiles), models=tuple(models))

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def given(self, name: str) -> bool:
        return name in self.values

    def with_(self, **fields: Any) -> Scenario:
        """The same scenario with some fields replaced; None takes a field away."""
        merged = dict(self.values)
        for key, value in fields.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = clean(key, value, file=self.file)
        return replace(self, values=merged)

    def blame(self, error: InputError) -> InputError:
        """The error under the file and key of an imported file where its value came from one."""
        return self.imported.blame(error, self.values) if self.imported is not None else error

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)
