"""TOML of torchtitan (``[model] [training] [parallelism] [activation_checkpoint]``, older spellings too).

Tensor parallelism of torchtitan always runs with sequence parallelism; sharding over data ranks is FSDP2 with
reshard_after_forward by default, thus ZeRO-3 (https://github.com/pytorch/torchtitan, torchtitan/config). A degree of -1
takes the ranks that are left; a local batch is cut into micro-batches only where there is a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkit.errors import InputError
from simkit.spec import models as zoo
from simkit.spec.imports._common import (
    NO_EFFECT,
    Document,
    Draft,
    Rule,
    apply,
    because,
    later,
    sets,
    steps,
    walk,
    when,
    whole,
)

PRIORITY = 30
_SIGNS = frozenset({"training", "parallelism", "activation_checkpoint", "job", "lr_scheduler", "metrics"})
QUIET = (
    "job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "validation", "experimental",
    "fault_tolerance",
    "optimizer.lr", "optimizer.eps", "optimizer.beta1", "optimizer.beta2", "optimizer.weight_decay",
    "optimizer.implementation",
    "optimizer.early_step_in_backward", "optimizer.fused", "training.max_norm", "training.dataset",
    "training.dataset_path",
    "training.warmup_steps", "training.data_parallel_type", "training.gc_freq", "training.seed",
    "training.deterministic",
    "model.tokenizer_path", "model.hf_assets_path", "model.tokenizer_type", "model.norm_type",
    "model.print_after_conversion",
    "debug", "memory_estimation",
)  # fmt: skip
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "sgd": "sgd"}
SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "interleavedzerobubble": "zb",
    "zbvzerobubble": "zb",
}  # fmt: skip
_STACK = "how the stack does it is in its profile"
REPLICATE, SHARD = "data_parallel_replicate_degree", "data_parallel_shard_degree"


def matches(document: Document) -> bool:
    data = document.data or {}
    model = data.get("model")
    return bool(_SIGNS & set(data)) or (isinstance(model, Mapping) and "flavor" in model)


def read(document: Document) -> Draft:
    """The Draft of a torchtitan file. Raises InputError for values that their key does not take."""
    draft = Draft(document.file, "torchtitan")
    draft.put("stack", "torchtitan", "(a torchtitan file)", "", weak=True)
    data = document.data or {}
    for name, table in data.items():
        if not isinstance(table, Mapping):
            raise draft.error("is no table", name, table, f"write [{name}] and its keys below")
    apply(draft, walk(data), RULES, QUIET)
    found = dict(walk(data))
    _model(draft, found)
    _sharding(draft, found)
    _batch(draft, found)
    if draft.get("tp", 1) > 1:
        draft.put("sp", draft.get("tp"), "parallelism.tensor_parallel_degree", draft.get("tp"), weak=True)
    if not draft.get("precision"):
        draft.put("precision", "bf16", "training.mixed_precision_param", "(absent: bfloat16)", weak=True)
    return draft


def _model(draft: Draft, found: Mapping[str, Any]) -> None:
    name, flavor = found.get("model.name"), found.get("model.flavor")
    if name is None and flavor is None:
        return
    asked = f"{name}-{flavor}" if flavor is not None else str(name)
    key = "model.flavor" if flavor is not None else "model.name"
    for text in (asked, str(name)) if flavor in ("671B", "671b") else (asked,):
        try:
            draft.put("model", zoo.model(text).name, key, asked)
            return
        except InputError as error:
            draft.incomplete = draft.error("is no model that simkit knows", key, asked, f"{error.hint}; give --model")


def _degree(draft: Draft, found: Mapping[str, Any], name: str, default: int) -> tuple[str, int]:
    for prefix in ("parallelism", "training", "experimental"):
        key = f"{prefix}.{name}"
        if found.get(key) is not None:
            return key, draft.whole(key, found[key], least=-1)
    return f"parallelism.{name}", default


def _sharding(draft: Draft, found: Mapping[str, Any]) -> None:
    """Replicas and shards -> dp, zero, shard_group; -1 = what is left."""
    replicate_key, replicas = _degree(draft, found, REPLICATE, 1)
    shard_key, shards = _degree(draft, found, SHARD, -1)
    if 0 in (replicas, shards) or replicas < 0:
        raise draft.error(
            "is no degree", replicate_key if replicas < 1 else shard_key, min(replicas, shards), "1 or more"
        )
    if shards == 1:
        draft.put("zero", 0, shard_key, shards)
        if replicate_key in found:
            draft.put("dp", replicas, replicate_key, replicas)
        return
    reshard = str(found.get("parallelism.fsdp_reshard_after_forward", "default")).lower()
    draft.put("zero", 2 if reshard == "never" else 3, shard_key, shards)
    if shards > 1:
        draft.put("dp", replicas * shards, shard_key, f"{replicas} x {shards}")
        draft.put("shard_group", shards, shard_key, shards)
    elif replicas > 1:
        draft.open(shard_key, shards, f"the shards of {replicas} replicas: give --shard-group where there are several")
    else:
        draft.open(shard_key, shards, "the ranks that are left")


def _batch(draft: Draft, found: Mapping[str, Any]) -> None:
    """Local batch: one micro-batch, or with a pipeline cut into pieces of pipeline_parallel_microbatch_size (1)."""
    key = next((k for k in ("training.local_batch_size", "training.batch_size") if found.get(k) is not None), "")
    piece_key = "parallelism.pipeline_parallel_microbatch_size"
    total = found.get("training.global_batch_size")
    if total is not None and draft.whole("training.global_batch_size", total, least=-1) > 0:
        draft.put("global_batch", draft.whole("training.global_batch_size", total), "training.global_batch_size", total)
    if not key:
        return
    local = draft.whole(key, found[key])
    if draft.get("pp", 1) == 1:
        draft.put("micro_batch", local, key, found[key])
        if not draft.get("global_batch"):
            draft.put("grad_accum", 1, "training.global_batch_size", "(absent: one local batch a rank)", weak=True)
        return
    piece = draft.whole(piece_key, found.get(piece_key, 1))
    if local % piece:
        raise draft.error(f"is no multiple of {piece_key} = {piece}", key, found[key], "change one of the two")
    draft.put("micro_batch", piece, piece_key, found.get(piece_key, "(absent: 1)"))
    if not draft.get("global_batch"):
        draft.put("grad_accum", local // piece, key, found[key])


def _async_tp(draft: Draft, key: str, value: Any) -> None:
    draft.ignore(key, value, "asynchronous tensor parallelism is not priced yet" if draft.flag(key, value) else "off")


def _converters(draft: Draft, key: str, value: Any) -> None:
    names = [str(v) for v in value] if isinstance(value, list) else []
    if any("float8" in n for n in names):
        draft.put("precision", "fp8", key, value)
    else:
        draft.ignore(key, value, "none that changes the arithmetic" if names else NO_EFFECT)


def _float8(draft: Draft, key: str, value: Any) -> None:
    if draft.flag(key, value):
        draft.put("precision", "fp8", key, value)
    else:
        draft.ignore(key, value, "off")


def _param(draft: Draft, key: str, value: Any) -> None:
    if draft.get("precision") != "fp8":
        sets("precision", DTYPES)(draft, key, value)
    else:
        draft.ignore(key, value, "matrix products run in fp8")


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "model.name": later, "model.flavor": later, "model.converters": _converters,
        "optimizer.name": sets("optimizer", OPTIMIZERS),
        "training.seq_len": whole("seq_len"),
        "training.local_batch_size": later, "training.batch_size": later, "training.global_batch_size": later,
        "training.steps": steps,
        "training.compile": when("compile", True, False), "compile.enable": when("compile", True, False),
        "compile.components": because("all of the model is taken as compiled"),
        "training.mixed_precision_param": _param,
        "training.mixed_precision_reduce": sets("reduce_dtype", DTYPES),
        "training.enable_cpu_offload": when("offload", "params"),
        "training.enable_fsdp_cpu_offload": when("offload", "params"),
        "float8.enable_float8_linear": _float8, "float8.enable_fsdp_float8_all_gather": because(_STACK),
        "activation_checkpoint.mode": sets("recompute", {"none": "none", "selective": "selective", "full": "full"}),
        "activation_checkpoint.selective_ac_option": because("selective means what the workload recomputes"),
        "activation_checkpoint.selective_ac_type": because("selective means what the workload recomputes"),
    }  # fmt: skip
    for table in ("parallelism", "training", "experimental"):
        rules |= {f"{table}.{name}": later for name in (REPLICATE, SHARD, "pipeline_parallel_microbatch_size")}
        rules |= {
            f"{table}.tensor_parallel_degree": whole("tp"),
            f"{table}.pipeline_parallel_degree": whole("pp"),
            f"{table}.context_parallel_degree": whole("cp"),
            f"{table}.expert_parallel_degree": whole("ep"),
            f"{table}.pipeline_parallel_schedule": sets("schedule", SCHEDULES),
            f"{table}.fsdp_reshard_after_forward": later,
            f"{table}.enable_async_tensor_parallel": _async_tp,
            f"{table}.enable_loss_parallel": because(_STACK),
            f"{table}.disable_loss_parallel": because(_STACK),
            f"{table}.context_parallel_rotate_method": because(_STACK),
            f"{table}.enable_compiled_autograd": because(_STACK),
        }
    return rules


RULES: Mapping[str, Rule] = _rules()
