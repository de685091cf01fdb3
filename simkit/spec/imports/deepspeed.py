"""DeepSpeed JSON (``ds_config.json``), with the "auto" values that the Hugging Face Trainer fills in.

train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · data ranks
(https://www.deepspeed.ai/docs/config-json/). Numbers may be floats (1.024e3); null and "auto" leave a field open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkit.spec.imports._common import Document, Draft, Rule, apply, because, is_auto, later, sets, walk, whole
from simkit.units import MIB

PRIORITY = 10
BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUM = "gradient_accumulation_steps"
_SIGNS = frozenset({BATCH, MICRO, "zero_optimization", "zero_allow_untested_optimizer", "fp16", "bf16"})
QUIET = (
    "steps_per_print", "wall_clock_breakdown", "scheduler", "gradient_clipping", "prescale_gradients", "dump_state",
    "optimizer.params", "tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "elasticity",
    "autotuning", "checkpoint", "data_efficiency", "curriculum_learning", "memory_breakdown", "seed", "hybrid_engine",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "gradient_predivide_factor",
    "fp16.loss_scale", "fp16.loss_scale_window", "fp16.initial_scale_power", "fp16.hysteresis", "fp16.min_loss_scale",
    "fp16.consecutive_hysteresis", "fp16.auto_cast", "zero_optimization.ignore_unused_parameters",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero_optimization.load_from_fp32_weights",
    "zero_optimization.elastic_checkpoint", "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
)  # fmt: skip
OPTIMIZERS = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "deepspeedcpuadam": "adamw",
    "lamb": "lamb", "fusedlamb": "lamb", "sgd": "sgd", "momentum": "sgd-momentum",
}  # fmt: skip
"""DeepSpeed's Adam decouples the weight decay unless `adam_w_mode` is false; both cost the same."""
DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_STACK = "how the stack does it is in its profile"


def matches(document: Document) -> bool:
    return document.data is not None and bool(_SIGNS & set(document.data))


def read(document: Document) -> Draft:
    """The Draft of a DeepSpeed file. Raises InputError for batch sizes that contradict each other."""
    draft = Draft(document.file, "deepspeed")
    draft.put("stack", "deepspeed", "(a DeepSpeed file)", "", weak=True)
    data = dict(document.data or {})
    read_table(draft, data)
    return draft


def read_table(draft: Draft, data: Mapping[str, Any]) -> None:
    """Puts the keys of a DeepSpeed configuration into `draft`."""
    table = dict(data)
    table.pop("_comment", None)
    if isinstance(table.get("zero_optimization"), bool):
        table["zero_optimization"] = {"stage": int(table["zero_optimization"])}
    zero = table.get("zero_optimization")
    for name in ("zero_optimization", "fp16", "bf16", "bfloat16", "optimizer"):
        if table.get(name) is not None and not isinstance(table[name], Mapping) and not is_auto(table[name]):
            raise draft.error("is no table", name, table[name], f'write "{name}": {{…}}')
    apply(draft, walk(table), RULES, QUIET)
    _precision(draft, table)
    _bucket(draft, zero if isinstance(zero, Mapping) else {})
    check_batch(draft, BATCH, MICRO, ACCUM)


def check_batch(draft: Draft, total: str, micro: str, accum: str) -> None:
    """train batch = micro-batch · accumulation · data ranks, a whole number of them: the names are those of the file.

    Raises InputError where no number of data ranks makes it true.
    """
    batch, small, steps = (draft.get(k) for k in ("global_batch", "micro_batch", "grad_accum"))
    if batch is None:
        return
    parts = [(micro, small), (accum, steps)]
    product = (small or 1) * (steps or 1)
    if batch % product:
        names = " x ".join(f"{name} {value}" for name, value in parts if value is not None)
        what = f"is no multiple of {names} = {product}"
        hint = f"{total} = {micro} x {accum} x data ranks; leave one of the three out"
        raise draft.error(what, total, batch, hint)


def _stage(draft: Draft, key: str, value: Any) -> None:
    stage = draft.whole(key, value, least=0)
    if stage > 3:
        raise draft.error("is no ZeRO stage", key, value, "0 to 3")
    draft.put("zero", stage, key, value)


def _offload(field: str) -> Rule:
    """offload_param implies offload_optimizer in what simkit models."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        device = str(value).strip().lower()
        if device == "cpu":
            if draft.get("offload") != "params":
                draft.put("offload", field, key, value)
        elif device == "nvme":
            draft.ignore(key, value, "offload to NVMe is not modelled; host memory is (cpu)")
        elif device == "none":
            draft.put("offload", "none", key, value, weak=True)
        else:
            raise draft.error("is no device to offload to", key, value, "none, cpu or nvme")

    return rule


def _precision(draft: Draft, table: Mapping[str, Any]) -> None:
    """fp16 and bf16 tables; both at once is a contradiction that DeepSpeed itself refuses."""
    on: list[tuple[str, str]] = []
    for name, dtype in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        part = table.get(name)
        if not isinstance(part, Mapping) or "enabled" not in part or is_auto(part["enabled"]):
            continue
        if draft.flag(f"{name}.enabled", part["enabled"]):
            on.append((name, dtype))
        else:
            draft.ignore(f"{name}.enabled", part["enabled"], "off")
    if len(on) > 1:
        raise draft.error(f"contradicts {on[0][0]}.enabled = true", f"{on[1][0]}.enabled", True, "enable one of them")
    for name, dtype in on:
        draft.put("precision", dtype, f"{name}.enabled", True)


def _bucket(draft: Draft, zero: Mapping[str, Any]) -> None:
    """reduce_bucket_size counts elements; simkit counts MiB of uncompressed (four-byte) gradients."""
    value = zero.get("reduce_bucket_size")
    if value is None or is_auto(value):
        return
    elements = draft.whole("zero_optimization.reduce_bucket_size", value)
    draft.put("bucket_mb", elements * 4 / MIB, "zero_optimization.reduce_bucket_size", value)


def _overlap(draft: Draft, key: str, value: Any) -> None:
    draft.put("overlap", "wfbp" if draft.flag(key, value) else "none", key, value)


def _group(draft: Draft, key: str, value: Any) -> None:
    size = draft.whole(key, value, least=-1)
    if size > 0:
        draft.put("shard_group", size, key, value)
    else:
        draft.ignore(key, value, "off")


def _hpz(draft: Draft, key: str, value: Any) -> None:
    size = draft.whole(key, value)
    draft.ignore(key, value, "off" if size == 1 else "a secondary shard of the weights inside a node is not modelled")


def _tp(draft: Draft, key: str, value: Any) -> None:
    size = draft.whole(key, value, least=0)
    if size:
        draft.put("tp", size, key, value)
    else:
        draft.ignore(key, value, "off")


def _ulysses(draft: Draft, key: str, value: Any) -> None:
    size = draft.whole(key, value)
    draft.ignore(key, value, "off" if size == 1 else "sequence parallelism of the Ulysses kind is not modelled")


RULES: Mapping[str, Rule] = {
    BATCH: whole("global_batch"),
    MICRO: whole("micro_batch"),
    ACCUM: whole("grad_accum"),
    "zero_optimization.stage": _stage,
    "zero_optimization.offload_optimizer.device": _offload("optimizer"),
    "zero_optimization.offload_param.device": _offload("params"),
    "zero_optimization.cpu_offload": lambda draft, key, value: _offload("optimizer")(
        draft, key, "cpu" if draft.flag(key, value) else "none"
    ),
    "zero_optimization.overlap_comm": _overlap,
    "zero_optimization.reduce_bucket_size": later,
    "zero_optimization.mics_shard_size": _group,
    "zero_optimization.zero_hpz_partition_size": _hpz,
    **{
        f"zero_optimization.{name}": because(_STACK)
        for name in (
            "allgather_bucket_size", "allgather_partitions", "reduce_scatter", "contiguous_gradients",
            "round_robin_gradients",
            "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance", "stage3_module_granularity_threshold", "offload_optimizer.buffer_count",
            "offload_optimizer.fast_init", "offload_optimizer.ratio", "offload_param.buffer_count",
            "offload_param.buffer_size",
            "offload_param.max_in_cpu",
        )
    },
    "fp16.enabled": later,
    "bf16.enabled": later,
    "bfloat16.enabled": later,
    "optimizer.type": sets("optimizer", OPTIMIZERS),
    "communication_data_type": sets("reduce_dtype", DTYPES),
    "tensor_parallel.autotp_size": _tp,
    "sequence_parallel_size": _ulysses,
    **{
        f"activation_checkpointing.{name}": because("says how, not whether: give --recompute")
        for name in (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
            "synchronize_checkpoint_boundary", "profile",
        )
    },
}  # fmt: skip
