"""YAML (or JSON) of Hugging Face accelerate, with its FSDP, DeepSpeed and Megatron-LM parts, and the keys that a file
of TrainingArguments shares with it.

ZeRO stages of the FSDP strategies: FULL_SHARD = 3, SHARD_GRAD_OP = 2, NO_SHARD = 0, HYBRID_SHARD = 3 within a node,
numbered 1 to 5 in files of old (https://huggingface.co/docs/accelerate/usage_guides/fsdp); version 2 says
reshard_after_forward instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkit.spec.imports import deepspeed
from simkit.spec.imports._common import Document, Draft, Rule, apply, because, later, sets, steps, walk, when, whole

PRIORITY = 20
_SIGNS = frozenset(
    {
        "compute_environment", "distributed_type", "fsdp_config", "deepspeed_config", "megatron_lm_config",
        "num_machines",
        "per_device_train_batch_size", "mixed_precision", "parallelism_config",
    }
)  # fmt: skip
QUIET = (
    "compute_environment", "debug", "main_process_ip", "main_process_port", "main_training_function", "machine_rank",
    "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu", "enable_cpu_affinity",
    "gpu_ids",
    "output_dir", "learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "weight_decay", "logging_steps",
    "save_steps", "save_strategy", "save_total_limit", "eval_steps", "eval_strategy", "evaluation_strategy",
    "report_to",
    "seed", "max_grad_norm", "logging_dir", "run_name", "overwrite_output_dir", "do_train", "do_eval",
    "dataloader_num_workers",
    "per_device_eval_batch_size", "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_sync_module_states",
    "fsdp_config.fsdp_cpu_ram_efficient_loading", "deepspeed_config.gradient_clipping",
    "deepspeed_config.zero3_init_flag",
    "deepspeed_config.zero3_save_16bit_model", "deepspeed_config.deepspeed_multinode_launcher",
    "megatron_lm_config.megatron_lm_gradient_clipping",
)  # fmt: skip
STRATEGIES = {
    "full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2,
    "1": 3, "2": 2, "3": 0, "4": 3, "5": 2,
}  # fmt: skip
HYBRID = frozenset({"hybrid_shard", "hybrid_shard_zero2", "4", "5"})
PRECISIONS = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
    "sgd": "sgd-momentum",
}  # fmt: skip


def matches(document: Document) -> bool:
    return document.data is not None and bool(_SIGNS & set(document.data))


def read(document: Document) -> Draft:
    """The Draft of an accelerate file. Raises InputError for values that their key does not take."""
    data = document.data or {}
    draft = Draft(document.file, "accelerate")
    kind = str(data.get("distributed_type", "")).strip().upper()
    stacks = {"DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron", "FSDP": "pytorch-fsdp"}
    for part, name in (
        ("fsdp_config", "FSDP"),
        ("deepspeed_config", "DEEPSPEED"),
        ("megatron_lm_config", "MEGATRON_LM"),
    ):
        if data.get(part):
            if not isinstance(data[part], Mapping):
                raise draft.error("is no table", part, data[part], f"write the keys of {part} under it")
            kind = kind or name
    if kind in stacks:
        draft.put("stack", stacks[kind], "distributed_type", kind, weak=True)
    elif kind in ("MULTI_GPU", "NO"):
        draft.put("zero", 0, "distributed_type", kind, weak=True)
    elif kind:
        draft.ignore("distributed_type", kind, "not modelled")
    leaves = [(k, v) for k, v in walk(data) if k not in ("num_machines", "num_processes", "distributed_type")]
    _launch(draft, data)
    apply(draft, leaves, RULES, QUIET)
    _hybrid(draft, data)
    _parallel(draft, data)
    return draft


def _launch(draft: Draft, data: Mapping[str, Any]) -> None:
    """num_processes counts all of them, over num_machines."""
    processes, machines = data.get("num_processes"), data.get("num_machines")
    if machines is not None:
        draft.nodes = draft.whole("num_machines", machines)
    if processes is None:
        return
    world, nodes = draft.whole("num_processes", processes), draft.nodes or 1
    if world % nodes:
        raise draft.error(
            f"is no multiple of num_machines = {nodes}", "num_processes", processes, f"for example {nodes * 8}"
        )
    draft.gpus_per_node = world // nodes
    draft.open("num_processes", processes, f"{nodes} x {world // nodes} GPUs, where --cluster is not given")


def _hybrid(draft: Draft, data: Mapping[str, Any]) -> None:
    config = data.get("fsdp_config")
    strategy = str(config.get("fsdp_sharding_strategy", "")).lower() if isinstance(config, Mapping) else ""
    if strategy in HYBRID:
        key = "fsdp_config.fsdp_sharding_strategy"
        if draft.gpus_per_node:
            draft.put("shard_group", draft.gpus_per_node, key, strategy, weak=True)
        else:
            draft.open(key, strategy, "shards within a node: give --shard-group")


def _parallel(draft: Draft, data: Mapping[str, Any]) -> None:
    """Sequence parallelism runs over the tensor ranks; dp = replicas x shards, weights sharded where shards > 1."""
    mega, par = data.get("megatron_lm_config") or {}, data.get("parallelism_config") or {}
    key = "megatron_lm_sequence_parallelism"
    if key in mega and mega[key] is not None:
        if draft.flag(key, mega[key]):
            draft.put("sp", draft.get("tp", 1), f"megatron_lm_config.{key}", mega[key])
        else:
            draft.ignore(f"megatron_lm_config.{key}", mega[key], "off")
    sizes = {}
    for name in ("dp_replicate_size", "dp_shard_size"):
        key = f"parallelism_config_{name}"
        if isinstance(par, Mapping) and par.get(key) is not None:
            sizes[name] = draft.whole(f"parallelism_config.{key}", par[key])
    if sizes:
        replicas, shards = sizes.get("dp_replicate_size", 1), sizes.get("dp_shard_size", 1)
        key = "parallelism_config.parallelism_config_dp_shard_size"
        draft.put("dp", replicas * shards, key, f"{replicas} replicas x {shards} shards")
        if shards > 1:
            draft.put("zero", 3, key, shards, weak=True)
            draft.put("shard_group", shards, key, shards)


def _strategy(draft: Draft, key: str, value: Any) -> None:
    sets("zero", STRATEGIES)(draft, key, value)


def _reshard(draft: Draft, key: str, value: Any) -> None:
    """Version 2: true is a full shard; a strategy of version 1 is understood too."""
    if str(value).strip().lower() in STRATEGIES:
        _strategy(draft, key, value)
    else:
        draft.put("zero", 3 if draft.flag(key, value) else 2, key, value)


def _fsdp_words(draft: Draft, key: str, value: Any) -> None:
    """TrainingArguments: ``fsdp: full_shard auto_wrap offload``."""
    words = value if isinstance(value, list) else str(value).replace(",", " ").split()
    for word in map(str, words):
        if word in STRATEGIES:
            draft.put("zero", STRATEGIES[word], key, value)
            draft.put("stack", "pytorch-fsdp", key, value, weak=True)
        elif word == "offload":
            draft.put("offload", "params", key, value)


def _dynamo(draft: Draft, key: str, value: Any) -> None:
    draft.put("compile", str(value).strip().lower() not in ("no", "false", ""), key, value)


def _file(draft: Draft, key: str, value: Any) -> None:
    draft.ignore(key, value, f"pass that file as well: --from {value}")


def _rules() -> dict[str, Rule]:
    zero, mega, par = "deepspeed_config.", "megatron_lm_config.megatron_lm_", "parallelism_config.parallelism_config_"
    return {
        "mixed_precision": sets("precision", PRECISIONS),
        "bf16": when("precision", "bf16"),
        "fp16": when("precision", "fp16"),
        "gradient_accumulation_steps": whole("grad_accum"),
        "per_device_train_batch_size": whole("micro_batch"),
        "gradient_checkpointing": when("recompute", "full"),
        "torch_compile": when("compile", True, False),
        "optim": sets("optimizer", OPTIMIZERS),
        "fsdp": _fsdp_words,
        "deepspeed": _file,
        "max_steps": steps,
        "num_train_epochs": lambda draft, key, value: draft.put("epochs", value, key),
        "dynamo_config.dynamo_backend": _dynamo,
        "fsdp_config.fsdp_sharding_strategy": _strategy,
        "fsdp_config.fsdp_reshard_after_forward": _reshard,
        "fsdp_config.fsdp_offload_params": when("offload", "params"),
        "fsdp_config.fsdp_activation_checkpointing": when("recompute", "full"),
        **{
            f"fsdp_config.fsdp_{name}": because("how the stack does it is in its profile")
            for name in (
                "auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "backward_prefetch_policy",
                "forward_prefetch", "use_orig_params", "limit_all_gathers", "min_num_params", "version",
            )
        },
        f"{zero}zero_stage": deepspeed.RULES["zero_optimization.stage"],
        f"{zero}offload_optimizer_device": deepspeed.RULES["zero_optimization.offload_optimizer.device"],
        f"{zero}offload_param_device": deepspeed.RULES["zero_optimization.offload_param.device"],
        f"{zero}gradient_accumulation_steps": whole("grad_accum"),
        f"{zero}train_micro_batch_size_per_gpu": whole("micro_batch"),
        f"{zero}deepspeed_config_file": _file,
        f"{mega}tp_degree": whole("tp"),
        f"{mega}pp_degree": whole("pp"),
        f"{mega}num_micro_batches": whole("grad_accum"),
        f"{mega}sequence_parallelism": later,
        f"{mega}recompute_activations": when("recompute", "selective"),
        f"{mega}use_distributed_optimizer": when("zero", 1),
        f"{par}dp_replicate_size": later,
        f"{par}dp_shard_size": later,
        f"{par}tp_size": whole("tp"),
        f"{par}cp_size": whole("cp"),
    }  # fmt: skip


RULES: Mapping[str, Rule] = _rules()
