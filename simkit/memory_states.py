"""States of sharded training by pipeline stage: weights, gradients, optimizer, what is gathered and exchanged.

Degrees and shard_group may be arrays over sweep points; the last axis is the stage. The formulas are those of
`simkit.memory_sharded`. Sources: Rajbhandari et al. (arXiv 1910.02054, section 3); Shoeybi et al. (arXiv 1909.08053);
Zhao et al. (arXiv 2304.11277, section 3); the distributed optimizer of Megatron-core's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simkit.memory_facts import OPTIMIZER_STATES, MemoryFacts, memory_facts
from simkit.parallel.pipeline import layers_per_stage
from simkit.roofline import Array
from simkit.spec.model import Model, Tensor, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan

Num = Any
Placed = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Elements:
    """Elements by the way they are divided. blocks: shape (3, layers), rows over tp, replicated, routed experts;
    matrices: those that are multiplied with. before, after: (width of vocabulary tables, replicated elements); tied:
    width of the table that a last stage of its own copies; end_matrices: replicated ones before, after the blocks, and
    the width of those with a row a token of the vocabulary."""

    blocks: Array
    matrices: Array
    before: tuple[float, float]
    after: tuple[float, float]
    tied: float
    end_matrices: tuple[float, float, float]


@lru_cache(maxsize=512)
def _elements(model: Model) -> _Elements:
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    layers = max((t.layer for t in model.tensors), default=-1) + 1
    blocks, matrices = np.zeros((3, layers)), np.zeros((3, layers))
    ends, width = {True: [0.0, 0.0, 0.0], False: [0.0, 0.0, 0.0]}, 0.0
    for t in model.tensors:
        if t.layer >= 0:
            blocks[_divided(t, spec), t.layer] += t.numel
            matrices[_divided(t, spec), t.layer] += t.numel if len(t.shape) > 1 and t.role != "embedding" else 0
            continue
        vocab = t.shape[0] == spec.vocab and t.module in ("embedding", "head")
        first = t.module in ("embedding", "conv") or (t.module == "norm" and "embed" in t.name.lower())
        ends[first][0 if vocab else 1] += t.numel / spec.vocab if vocab else t.numel
        multiplied = len(t.shape) > 1 and t.role != "embedding"
        ends[first][2] += t.numel if multiplied and not vocab else 0
        width += t.numel / spec.vocab if multiplied and vocab else 0.0
    tied = float(spec.hidden) if spec.tied and spec.has_vocab_head else 0.0
    return _Elements(
        blocks=blocks,
        matrices=matrices,
        before=(ends[True][0], ends[True][1]),
        after=(ends[False][0], ends[False][1]),
        tied=tied,
        end_matrices=(ends[True][2], ends[False][2], width),
    )


def _divided(t: Tensor, spec: TransformerSpec) -> int:
    """0 = over tensor-parallel ranks, 1 = replicated (norms, routers, biases of row-parallel products, the low-rank
    projections of MLA), 2 = over tensor- and expert-parallel ranks."""
    if t.role == "expert":
        return 2
    if t.module in ("norm", "router") or t.role == "embedding" or "_a_proj" in t.name:
        return 1
    return int(
        len(t.shape) == 1 and (t.module.endswith(".out") or (t.module != "attention.qkv" and t.shape[0] == spec.hidden))
    )


def padded_vocabulary(vocab: int, tp: Num, multiple: int = 128) -> Num:
    """Rows of a vocabulary-parallel table over all ranks: the next multiple of multiple·tp (Megatron-LM).

    >>> int(padded_vocabulary(50257, 1)), int(padded_vocabulary(50257, 8))
    (50304, 51200)
    """
    step = np.maximum(float(multiple), 1.0) * tp
    return np.ceil(vocab / step) * step if multiple else float(vocab) + 0.0 * step


def stage_sums(per_block: Array, placed: Placed) -> Array:
    """Sums of (..., blocks) over the blocks of each stage."""
    ends = np.cumsum(placed)
    running = np.concatenate([np.zeros((*per_block.shape[:-1], 1)), np.cumsum(per_block, axis=-1)], axis=-1)
    sums: Array = running[..., ends] - running[..., ends - np.array(placed)]
    return sums


def stage_params(
    model: Model, plan: Plan, *, facts: MemoryFacts | None = None, held: Sequence[int] | None = None
) -> tuple[Array, Array]:
    """(elements, of which routed experts) that one rank of each stage holds before ZeRO, shape (..., stages)."""
    facts = facts or memory_facts(plan.stack)
    found = _elements(model)
    layers = found.blocks.shape[1]
    placed = tuple(map(int, layers_per_stage(layers, plan.pp) if held is None else held))
    dense, experts = _params(found.blocks, plan, placed)
    return dense + experts + _ends(found, model, plan, facts), experts


def _degrees(plan: Plan) -> tuple[Array, ...]:
    return tuple(np.asarray(n, dtype=float)[..., None] for n in (plan.tp, plan.sp, plan.cp, plan.ep))


def _params(blocks: Array, plan: Plan, placed: Placed) -> tuple[Array, Array]:
    t, _, _, x = _degrees(plan)
    sharded, whole, experts = stage_sums(blocks, placed)
    return sharded / t + whole, experts / t / x


def rows_of(model: Model, plan: Plan, facts: MemoryFacts) -> Num:
    """Rows of a vocabulary table that one rank holds."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    tp = np.asarray(plan.tp, dtype=float)
    return padded_vocabulary(spec.vocab, tp, facts.vocab_multiple) / tp


def _ends(found: _Elements, model: Model, plan: Plan, facts: MemoryFacts) -> Array:
    """Elements outside the blocks, (..., stages)."""
    rows = rows_of(model, plan, facts)
    out = np.zeros((*np.shape(rows), plan.pp))
    out[..., 0] += rows * found.before[0] + found.before[1]
    out[..., -1] += rows * (found.after[0] + (found.tied if plan.pp > 1 else 0.0)) + found.after[1]
    return out


def _states(model: Model, plan: Plan, facts: MemoryFacts, placed: Placed, exchange_bytes: float) -> dict[str, Array]:
    found = _elements(model)
    dense, experts = _params(found.blocks, plan, placed)
    ends = _ends(found, model, plan, facts)
    dense = dense + ends
    e, each = element_bytes(plan), state_bytes(plan, facts)
    ranks = np.asarray(plan.shard_group, dtype=float)[..., None] * np.asarray(plan.cp, dtype=float)[..., None]
    expert_ranks = np.maximum(ranks / np.asarray(plan.ep, dtype=float)[..., None], 1.0)

    def over(stage: int) -> Array:
        """Elements of a state that ZeRO shards from this stage on."""
        return dense / ranks + experts / expert_ranks if plan.zero >= stage else dense + experts

    items = {
        "weights": over(3) * each["weights"],
        "gradients": over(2) * each["gradients"],
        "optimizer": over(1) * each["optimizer"],
    }
    block = _block_elements(found, plan).max(axis=-1, keepdims=True, initial=0.0)
    casts = 0.0 * dense
    if not facts.model_weights and e < DTYPE_BYTES[plan.master_dtype] and plan.zero < 3:
        casts = _multiplied(found, model, plan, facts, placed) * e
    gathered = 0.0 * dense
    if plan.zero >= 3 or plan.offload == "params":
        gathered = gathered + 2.0 * block * e + ends * e + block * max(e, DTYPE_BYTES[plan.reduce_dtype])
        # One rank has all of it: there is nothing to gather.
        gathered = gathered * (ranks > 1.0) if plan.offload != "params" else gathered
    if plan.offload != "none":
        items["optimizer"] = 0.0 * dense
        items["gradients"] = 0.0 * dense if plan.zero else items["gradients"]
    if plan.offload == "params":
        items["weights"] = 0.0 * dense
    return items | {
        "casts": casts,
        "gathered": gathered,
        "buffers": np.full(plan.pp, float(sum(model.buffers.values()))),
        "exchange": _buckets(model, plan, facts, items["gradients"], exchange_bytes),
    }


def fixed(
    model: Model, plan: Plan, facts: MemoryFacts, placed: Placed, exchange_bytes: float, workspace_bytes: float
) -> dict[str, Array]:
    """What does not depend on the batch, and its sum."""
    items = _states(model, plan, facts, placed, exchange_bytes)
    items["workspace"] = np.full(plan.pp, workspace_bytes)
    if facts.overhead_bytes and workspace_bytes:
        items["overhead"] = np.full(plan.pp, facts.overhead_bytes)
    return items | {"sum": sum(items.values(), np.zeros(plan.pp))}


fixed_kept = lru_cache(maxsize=1024)(fixed)


def _block_elements(found: _Elements, plan: Plan) -> Array:
    t, _, _, x = _degrees(plan)
    each: Array = found.blocks[0] / t + found.blocks[1] + found.blocks[2] / t / x
    return each


def _multiplied(found: _Elements, model: Model, plan: Plan, facts: MemoryFacts, placed: Placed) -> Array:
    """Elements of the matrices that autocast copies, (..., stages)."""
    dense, experts = _params(found.matrices, plan, placed)
    out = dense + experts + 0.0 * _ends(found, model, plan, facts)
    out[..., 0] += found.end_matrices[0]
    out[..., -1] += rows_of(model, plan, facts) * (found.end_matrices[2] + found.tied) + found.end_matrices[1]
    return out


def _buckets(model: Model, plan: Plan, facts: MemoryFacts, gradients: Array, exchange_bytes: float) -> Array:
    """Buffers of the gradient exchange: none where gradients lie in one buffer (fusion ``all``), two buckets (one being
    filled, one being sent) where states are sharded or kept by the stack, what the method keeps otherwise."""
    if plan.zero >= 3:
        return 0.0 * gradients
    if plan.method == "s-sgd" and (plan.zero or facts.model_weights):
        bucket = plan.bucket_bytes * DTYPE_BYTES[plan.reduce_dtype] / 4.0 if plan.fusion == "bucket" else 0.0
        kept = np.minimum(2.0 * bucket, gradients)
    else:
        kept = gradients / (DTYPE_BYTES[plan.master_dtype] * float(model.params)) * exchange_bytes
    found: Array = kept * (np.asarray(plan.dp * plan.cp)[..., None] > 1)
    return found


def element_bytes(plan: Plan) -> float:
    """Bytes of an activation or of a weight as it is multiplied; fp8 runs on copies of 16-bit tensors."""
    return max(DTYPE_BYTES[plan.precision], 2.0)


def state_bytes(plan: Plan, facts: MemoryFacts) -> dict[str, float]:
    """Bytes a parameter of weights, gradients and optimizer before anything is sharded; they sum to 16 under Adam in
    most stacks, 18 with fp32 gradients of bf16 weights."""
    e, master = element_bytes(plan), DTYPE_BYTES[plan.master_dtype]
    master = min(master, e) if facts.sixteen_bit else master
    moments = OPTIMIZER_STATES[plan.optimizer] * master
    if not facts.model_weights or e >= master:
        return {"weights": master, "gradients": master, "optimizer": moments}
    widened = facts.accumulates_fp32 and plan.precision not in ("fp16", "fp32", "tf32")
    gradients = 4.0 if widened else e
    copies = master if facts.gradient_copies and gradients < master else 0.0
    return {"weights": e, "gradients": gradients, "optimizer": moments + master + copies}


def deepspeed_zero3_bytes(params: float, largest_layer: float, gpus: int, *, offload: str = "none") -> float:
    """Bytes a GPU as DeepSpeed's estimator of ZeRO-3 states gives them, for comparison: no activations, no buckets.

    4 bytes of the largest layer (16-bit weights and gradients gathered) + 18 N / gpus; with the optimizer on the host
    2 N / gpus; with everything there the layer alone. Source: deepspeed.runtime.zero.stage3,
    estimate_zero3_model_states_mem_needs.
    """
    each = {"none": 18.0, "optimizer": 2.0, "params": 0.0}[offload]
    return 4.0 * largest_layer + each * params / gpus
