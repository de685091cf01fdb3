"""Megatron-LM (and Megatron-DeepSpeed) arguments in a shell script or any text that holds them.

Architecture flags spell out a network, which becomes the model ``megatron-24l-1024h-16a``; absent ones have the
defaults of Megatron-LM's arguments.py: four times the width in the MLP (with a gate two thirds of that, in multiples of
64), biases unless --disable-bias-linear, a tied head unless --untie-embeddings-and-output-weights, and a vocabulary
padded to a multiple of 128 · tp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simkit.spec.imports import _megatron_model as networks
from simkit.spec.imports import _shell
from simkit.spec.imports._common import NO_EFFECT, Document, Draft, Rule, because, later, sets, steps, whole
from simkit.spec.imports.deepspeed import check_batch

PRIORITY = 90
_SIGN = re.compile(
    r"--(?:num[-_]layers|hidden[-_]size|tensor[-_]model[-_]parallel[-_]size|pipeline[-_]model[-_]parallel[-_]size"
    r"|micro[-_]batch[-_]size|global[-_]batch[-_]size|use[-_]mcore[-_]models|sequence[-_]parallel)\b"
)
_SBATCH = re.compile(r"^\s*#SBATCH\s+(--[\w-]+)[=\s]+(\S+)", re.MULTILINE)
_STACK = "how the stack does it is in its profile"
STACK_FLAGS = (
    "tp-comm", "no-masked-softmax-fusion", "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion",
    "no-gradient-accumulation-fusion", "transformer-impl", "use-mcore-models", "use-legacy-models",
    "no-persist-layer-norm",
    "attention-softmax-in-fp32", "no-async-tensor-model-parallel-allreduce", "cross-entropy-loss-fusion",
    "moe-grouped-gemm",
    "moe-token-dispatcher-type", "moe-permute-fusion", "overlap-param-gather", "delay-param-gather",
    "align-param-gather",
    "no-scatter-gather-tensors", "apply-layernorm-1p", "fp8-", "cp-comm-type", "ddp-", "use-tp-pp-dp-mapping",
    "distribute-saved-activations", "bias-gelu-fusion", "no-rope-fusion", "enable-cuda-graph", "external-cuda-graph",
    "cuda-graph", "te-rng-tracker", "empty-unused-memory-level", "manual-gc", "overlap-p2p", "no-overlap-p2p",
    "account-for-embedding", "account-for-loss", "high-priority-stream", "defer-embedding-wgrad", "moe-router-dtype",
    "moe-router-load-balancing", "moe-aux-loss", "moe-z-loss", "moe-router-enable", "moe-router-score",
    "moe-router-topk-scaling",
    "moe-router-pre-softmax", "moe-router-num-groups", "moe-router-group-topk", "moe-router-bias",
    "moe-expert-capacity-factor",
    "moe-pad-expert", "moe-layer-recompute", "qk-clip", "no-create-attention-mask", "use-distributed-optimizer-",
)  # fmt: skip
QUIET = (
    "lr", "min-lr", "weight-decay", "start-weight-decay", "end-weight-decay", "clip-grad", "adam-", "init-method",
    "log-", "save",
    "load", "data-", "split", "vocab-file", "merge-file", "tokenizer", "eval-", "seed", "tensorboard", "wandb",
    "distributed-",
    "exit-", "master-", "node-rank", "rdzv", "no-load", "no-save", "ckpt", "use-checkpoint", "use-dist-ckpt",
    "dist-ckpt",
    "async-save", "timing-log", "num-workers", "min-loss-scale", "initial-loss-scale", "loss-scale", "override-opt",
    "hysteresis",
    "norm-epsilon", "layernorm-epsilon", "rotary-", "mock-data", "train-data", "valid-data", "test-data", "dataloader",
    "num-dataset", "finetune", "override", "no-query-key-layer-scaling", "apply-query-key-layer-scaling", "reset-",
    "eod-mask",
    "hf-", "rerun", "check-for-nan", "no-check-for-nan", "non-persistent", "auto-detect-ckpt", "no-initialization",
    "rank", "local-rank", "world-size", "max-restarts", "monitor-interval", "tee", "log", "job-name", "account",
    "partition",
    "time", "output", "error", "exclusive", "mem", "cpus-per-task", "mpi", "container", "cpu-bind", "bert-no-binary",
    "no-mmap", "s3-", "enable-experimental", "profile", "deepspeed", "no-pipeline-parallel", "module",
)  # fmt: skip
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def matches(document: Document) -> bool:
    return document.data is None and bool(_SIGN.search(document.text))


def read(document: Document) -> Draft:
    """The Draft of a script. Raises InputError for values that their flag does not take."""
    draft = Draft(document.file, "megatron")
    draft.put("stack", "megatron", "(Megatron-LM flags)", "", weak=True)
    found = _shell.arguments(document.text)
    for flag in found.unsure:
        draft.ignore(flag, found.flags.pop(flag) or "", "has different values in the branches of the script")
    for flag, value in found.flags.items():
        _flag(draft, flag, value)
    used = {e.key for e in draft.mapped} | set(networks.FLAGS)
    for flag in sorted(found.branched & used & set(found.flags)):
        draft.open(flag, found.flags[flag] or "", "stands in a branch of the script: taken as if it runs")
    for name in found.open:
        shown = any(name in (e.value or "") for e in draft.ignored)
        if not shown and not name.startswith(("$@", "$*", "$#", "$?", "$!", "$(")):
            draft.ignore(name, name, "not set in the file")
    flags = {f: v for f, v in found.flags.items() if v is None or "$" not in v}
    _cluster(draft, flags, document.text)
    _together(draft, flags, closed=not found.open)
    networks.network(draft, flags, document.text)
    _pipeline(draft, flags)
    check_batch(draft, "--global-batch-size", "--micro-batch-size", "gradient accumulation")
    return draft


def _flag(draft: Draft, flag: str, value: str | None) -> None:
    name = flag[2:]
    if value is not None and "$" in value:
        draft.ignore(flag, value, f"{value} is not set in the file")
    elif flag in RULES:
        if value is None and flag not in SWITCHES:
            raise draft.error("has no value", flag, hint=f"write {flag} VALUE")
        RULES[flag](draft, flag, value)
    elif flag in networks.FLAGS:
        if value is None and flag not in networks.SWITCHES:
            raise draft.error("has no value", flag, hint=f"write {flag} VALUE")
    elif name.startswith(STACK_FLAGS):
        draft.ignore(flag, value or "", _STACK)
    elif any(name == q or name.startswith(q if q.endswith("-") else f"{q}-") for q in QUIET):
        draft.ignore(flag, value or "", NO_EFFECT)
    else:
        draft.ignore(flag, value or "", "not known to simkit")


def _cluster(draft: Draft, flags: Mapping[str, str | None], text: str) -> None:
    """The shape of the cluster from the launcher's flags, or from #SBATCH lines."""
    batch = {k: v for k, v in _SBATCH.findall(text) if "$" not in v}
    gres = re.fullmatch(r"gpu:(?:\w+:)?(\d+)", batch.get("--gres", ""))
    nodes = flags.get("--nnodes") or flags.get("--nodes") or batch.get("--nodes")
    each = (
        flags.get("--nproc-per-node")
        or flags.get("--gpus-per-node")
        or batch.get("--gpus-per-node")
        or (gres and gres[1])
    )
    if nodes is not None and re.fullmatch(r"\d+", nodes):
        draft.nodes = draft.whole("--nnodes", nodes)
    if each is not None and re.fullmatch(r"\d+", each) and draft.nodes is not None:
        draft.gpus_per_node = draft.whole("--nproc-per-node", each)
        shape = f"{draft.nodes} x {draft.gpus_per_node}"
        draft.open("--nnodes, --nproc-per-node", shape, "the shape of the cluster, where --cluster is not given")
    else:
        for key in ("--nnodes", "--nodes", "--nproc-per-node", "--gpus-per-node"):
            if flags.get(key) is not None:
                draft.ignore(key, flags[key], "the shape of the cluster is not complete: give --cluster")


def _together(draft: Draft, flags: Mapping[str, str | None], *, closed: bool) -> None:
    """Flags that mean something only beside others."""
    if "--sequence-parallel" in flags:
        draft.put("sp", draft.get("tp", 1), "--sequence-parallel", True)
    if not draft.get("precision") and "--num-layers" in flags and closed:
        draft.put("precision", "fp32", "(neither --bf16 nor --fp16)", "", weak=True)
    granularity = flags.get("--recompute-granularity")
    layers = flags.get("--recompute-num-layers")
    if granularity == "full" and flags.get("--recompute-method") == "block" and layers != flags.get("--num-layers"):
        draft.ignore(
            "--recompute-method", "block", f"recomputing {layers} layers alone is not modelled: all are recomputed"
        )
    elif "--recompute-method" in flags:
        draft.ignore("--recompute-method", flags["--recompute-method"], "every layer is recomputed by itself")
    if layers is not None:
        draft.ignore("--recompute-num-layers", layers, "see --recompute-method")
    shard = flags.get("--data-parallel-sharding-strategy")
    if shard is not None:
        sets("zero", SHARDING)(draft, "--data-parallel-sharding-strategy", shard)


def _pipeline(draft: Draft, flags: Mapping[str, str | None]) -> None:
    """Virtual stages: chunks a rank = layers / (pp · layers of a chunk)."""
    key = "--num-layers-per-virtual-pipeline-stage"
    each, total = flags.get(key), flags.get("--num-layers")
    if each is None:
        return
    if total is None:
        draft.ignore(key, each, "needs --num-layers: give --vpp")
        return
    stages = draft.get("pp", 1) * draft.whole(key, each)
    layers = draft.whole("--num-layers", total)
    if layers % stages:
        what = f"x --pipeline-model-parallel-size {draft.get('pp', 1)} does not divide the {layers} layers"
        raise draft.error(what, key, each, "change one of them")
    draft.put("vpp", layers // stages, key, each)


def _on(field: str, value: Any, *, weak: bool = False) -> Rule:
    """A switch: its presence sets the field."""
    return lambda draft, key, _: draft.put(field, value, key, True, weak=weak)


def _ramp(draft: Draft, key: str, value: Any) -> None:
    draft.ignore(key, value or "", "the step after the ramp is predicted")


def _optimizer(draft: Draft, key: str, value: Any) -> None:
    draft.put("optimizer", {"adam": "adamw", "sgd": "sgd-momentum"}.get(str(value).lower(), value), key, value)


def _experts(draft: Draft, key: str, value: Any) -> None:
    size = draft.whole(key, value)
    same = size == draft.get("tp", 1)
    draft.ignore(key, value, "as --tensor-model-parallel-size" if same else "experts are cut like the rest: over tp")


SWITCHES = frozenset(
    {
        "--bf16", "--fp16", "--sequence-parallel", "--use-distributed-optimizer", "--overlap-grad-reduce",
        "--use-flash-attn",
        "--use-flash-attn-v1", "--use-flash-attn-v2", "--recompute-activations", "--checkpoint-activations",
        "--deepspeed-activation-checkpointing", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16",
        "--optimizer-cpu-offload", "--cpu-optimizer", "--cpu-offload", "--use-torch-fsdp2", "--use-custom-fsdp",
        "--use-megatron-fsdp", "--rampup-batch-size",
    }
)  # fmt: skip
RULES: Mapping[str, Rule] = {
    "--tensor-model-parallel-size": whole("tp"),
    "--pipeline-model-parallel-size": whole("pp"),
    "--context-parallel-size": whole("cp"),
    "--expert-model-parallel-size": whole("ep"),
    "--expert-tensor-parallel-size": _experts,
    "--num-virtual-stages-per-pipeline-rank": whole("vpp"),
    "--num-layers-per-virtual-pipeline-stage": later,
    "--sequence-parallel": later,
    "--micro-batch-size": whole("micro_batch"),
    "--global-batch-size": whole("global_batch"),
    "--rampup-batch-size": _ramp,
    "--seq-length": whole("seq_len"),
    "--encoder-seq-length": whole("seq_len"),
    "--train-samples": whole("samples"),
    "--train-iters": steps,
    "--bf16": _on("precision", "bf16"),
    "--fp16": _on("precision", "fp16"),
    "--fp8-format": lambda draft, key, value: draft.put("precision", "fp8", key, value),
    "--use-flash-attn": _on("attention", "flash"),
    "--use-flash-attn-v1": _on("attention", "flash"),
    "--use-flash-attn-v2": _on("attention", "flash"),
    "--attention-backend": sets("attention", {"flash": "flash", "fused": "flash", "unfused": "math", "local": "math"}),
    "--recompute-activations": _on("recompute", "selective"),
    "--checkpoint-activations": _on("recompute", "full"),
    "--deepspeed-activation-checkpointing": because("says how; --checkpoint-activations says whether"),
    "--recompute-granularity": sets("recompute", {"full": "full", "selective": "selective"}),
    "--recompute-method": later,
    "--recompute-num-layers": later,
    "--recompute-modules": because("selective means what the workload recomputes"),
    "--use-distributed-optimizer": _on("zero", 1, weak=True),
    "--zero-stage": whole("zero"),
    "--data-parallel-sharding-strategy": later,
    "--use-torch-fsdp2": _on("zero", 3),
    "--use-custom-fsdp": _on("zero", 3, weak=True),
    "--use-megatron-fsdp": _on("zero", 3, weak=True),
    "--overlap-grad-reduce": _on("overlap", "wfbp"),
    "--accumulate-allreduce-grads-in-fp32": _on("reduce_dtype", "fp32"),
    "--grad-reduce-in-bf16": _on("reduce_dtype", "bf16"),
    "--optimizer-cpu-offload": _on("offload", "optimizer"),
    "--cpu-optimizer": _on("offload", "optimizer"),
    "--cpu-offload": _on("offload", "optimizer"),
    "--optimizer": _optimizer,
    "--nnodes": later,
    "--nodes": later,
    "--nproc-per-node": later,
    "--gpus-per-node": later,
    "--num-gpus": because("give --cluster"),
    "--deepspeed-config": lambda draft, key, value: draft.ignore(key, value, f"pass that file as well: --from {value}"),
}
