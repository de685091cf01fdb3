"""Bytes per device by pipeline stage, under tensor, sequence, context, expert and pipeline parallelism and ZeRO.

With t = tp, x = ep, c = cp, d = ranks that ZeRO shards over (shard_group · cp), e bytes of an element in arithmetic:

    parameters    column-, row-, vocabulary-parallel matrices /t, norms, routers and position tables whole,
                  routed experts /(t·x); the token table on the first stage, final norm and head on the last, both ends
                  hold a tied table
    weights       e a parameter (or the master's bytes)      ZeRO-3: /d
    gradients     4 or e a parameter                         ZeRO-2: /d
    optimizer     moments, master copy                       ZeRO-1: /d      (experts: /(d/x) each)
    gathered      ZeRO-3: two blocks (one prefetched) and the ends at e, the gradient of one block
    activations   in flight · (kept by the stage's blocks) + one replayed block; a token's bytes /t, /sp or whole
                  (`simkit.program.DIVIDES`), tokens /c
    transient     the gradients of the largest kept tensor and of the one behind it, where the logits do not exceed them
    logits        /t, on the last stage

Micro-batches in flight on stage r of p with m of them: 1F1B min(m, p - r); GPipe m; interleaved in v chunks
min(m v, 2 (p - r - 1) + (v - 1) p + 1) / v; zero-bubble min(m, p), a bound: inputs of delayed weight gradients stay.
Every quantity may be an array over sweep points: results have shape (..., stages).
Sources: Korthikanti et al. (arXiv 2205.05198, sections 4 and 5); Rajbhandari et al. (arXiv 1910.02054, section 3);
Narayanan et al. (arXiv 2104.04473, section 2.2); Zhao et al. (arXiv 2304.11277, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.memory_facts import MemoryFacts, memory_facts
from simkit.parallel import tensor
from simkit.parallel.pipeline import layers_per_stage
from simkit.program import DIVIDES, SAVED, Program
from simkit.roofline import Array
from simkit.spec.model import Model, Tensor, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.units import MIB

Num = Any
OPTIMIZER_STATES = {"adamw": 2.0, "adam": 2.0, "lamb": 2.0, "sgd-momentum": 1.0, "sgd": 0.0, "none": 0.0}
WORKSPACE_BYTES = 128 * MIB
"""cuBLAS (32 MiB a handle on Hopper, 8 elsewhere) and cuDNN scratch: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes of one rank of each stage; last axis = stage, leading axes = sweep points.

    items_bytes sum to allocated_bytes; reserved_bytes adds fragmentation. in_flight: micro-batches held.
    """

    items_bytes: Mapping[str, Array]
    allocated_bytes: Array
    reserved_bytes: Array
    in_flight: Array

    def stage(self, index: int) -> dict[str, float]:
        """The items of one stage of one point."""
        return {name: float(value[..., index]) for name, value in self.items_bytes.items()}


def memory_of_stages(
    program: Program,
    model: Model,
    plan: Plan,
    *,
    facts: MemoryFacts | None = None,
    held: Sequence[int] | None = None,
    exchange_bytes: float = 0.0,
    workspace_bytes: float = WORKSPACE_BYTES,
) -> StageMemory:
    """Itemised bytes of every stage of a transformer.

    facts: of the plan's stack unless given. held: blocks of each stage, evenly divided unless given. exchange_bytes:
    what the exchange of an unsharded model's gradients keeps. Raises ValueError where `held` does not place every
    block once.
    """
    facts = facts or memory_facts(plan.stack)
    blocks = len(program.blocks.counts)
    placed = np.asarray(layers_per_stage(blocks, plan.pp) if held is None else held, dtype=np.int64)
    if len(placed) != plan.pp or int(placed.sum()) != blocks:
        raise ValueError(f"{placed.tolist()} does not place {blocks} blocks on {plan.pp} stages")
    flights = in_flight(plan.schedule, micro_batches=plan.grad_accum, stages=plan.pp, virtual=plan.vpp)
    items = _states(model, plan, facts, placed, exchange_bytes)
    items |= _activations(program, model, plan, facts, placed, flights)
    items["buffers"] = np.full(plan.pp, float(sum(model.buffers.values())))
    items["workspace"] = np.full(plan.pp, workspace_bytes)
    if facts.overhead_bytes and workspace_bytes:
        items["overhead"] = np.full(plan.pp, facts.overhead_bytes)
    shape = np.broadcast_shapes(*(v.shape for v in items.values()))
    items = {name: np.broadcast_to(value, shape) for name, value in items.items()}
    allocated = np.sum(list(items.values()), axis=0)
    return StageMemory(
        items_bytes=items,
        allocated_bytes=allocated,
        reserved_bytes=allocated * (1.0 + facts.fragmentation),
        in_flight=flights,
    )


def in_flight(schedule: str, *, micro_batches: Num, stages: int, virtual: Num = 1) -> Array:
    """Most micro-batches whose activations a stage holds at once, shape (..., stages).

    >>> in_flight("1f1b", micro_batches=8, stages=4).tolist()
    [4.0, 3.0, 2.0, 1.0]
    """
    m, v = (np.asarray(n, dtype=float)[..., None] for n in (micro_batches, virtual))
    left = np.arange(stages, 0, -1, dtype=float)
    chunks = 2.0 * (left - 1.0) + (v - 1.0) * stages + 1.0
    bound: Num = {"gpipe": m, "zb": float(stages)}.get(schedule, np.where(v > 1.0, chunks / v, left))
    found: Array = np.minimum(m, bound) + 0.0 * left
    return found


# -- parameters and what hangs on them --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Elements:
    """Elements by the way they are divided. blocks: shape (3, layers), rows over tp, replicated, routed experts;
    matrices: those that are multiplied with. before, after: (width of vocabulary tables, replicated elements); tied:
    width of the table that a last stage of its own copies."""

    blocks: Array
    matrices: Array
    before: tuple[float, float]
    after: tuple[float, float]
    tied: float


@lru_cache(maxsize=512)
def _elements(model: Model) -> _Elements:
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    layers = max((t.layer for t in model.tensors), default=-1) + 1
    blocks, matrices = np.zeros((3, layers)), np.zeros((3, layers))
    ends = {True: [0.0, 0.0], False: [0.0, 0.0]}
    for t in model.tensors:
        if t.layer >= 0:
            blocks[_divided(t, spec), t.layer] += t.numel
            matrices[_divided(t, spec), t.layer] += t.numel if len(t.shape) > 1 and t.role != "embedding" else 0
            continue
        vocab = t.shape[0] == spec.vocab and t.module in ("embedding", "head")
        first = t.module in ("embedding", "conv") or (t.module == "norm" and "embed" in t.name.lower())
        ends[first][0 if vocab else 1] += t.numel / spec.vocab if vocab else t.numel
    tied = float(spec.hidden) if spec.tied and spec.has_vocab_head else 0.0
    return _Elements(
        blocks=blocks,
        matrices=matrices,
        before=(ends[True][0], ends[True][1]),
        after=(ends[False][0], ends[False][1]),
        tied=tied,
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


def _stage_sums(per_block: Array, placed: NDArray[np.int64]) -> Array:
    """Sums of (..., blocks) over the blocks of each stage."""
    ends = np.cumsum(placed)
    running = np.concatenate([np.zeros((*per_block.shape[:-1], 1)), np.cumsum(per_block, axis=-1)], axis=-1)
    sums: Array = running[..., ends] - running[..., ends - placed]
    return sums


def stage_params(
    model: Model, plan: Plan, *, facts: MemoryFacts | None = None, held: Sequence[int] | None = None
) -> tuple[Array, Array]:
    """(elements, of which routed experts) that one rank of each stage holds before ZeRO, shape (..., stages)."""
    facts = facts or memory_facts(plan.stack)
    found = _elements(model)
    layers = found.blocks.shape[1]
    placed = np.asarray(layers_per_stage(layers, plan.pp) if held is None else held, dtype=np.int64)
    dense, experts = _params(found.blocks, plan, placed)
    return dense + experts + _ends(found, model, plan, facts), experts


def _degrees(plan: Plan) -> tuple[Array, ...]:
    return tuple(np.asarray(n, dtype=float)[..., None] for n in (plan.tp, plan.sp, plan.cp, plan.ep))


def _params(blocks: Array, plan: Plan, placed: NDArray[np.int64]) -> tuple[Array, Array]:
    t, _, _, x = _degrees(plan)
    sharded, whole, experts = _stage_sums(blocks, placed)
    return sharded / t + whole, experts / t / x


def _rows(model: Model, plan: Plan, facts: MemoryFacts) -> Num:
    """Rows of a vocabulary table that one rank holds."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    tp = np.asarray(plan.tp, dtype=float)
    return padded_vocabulary(spec.vocab, tp, facts.vocab_multiple) / tp


def _ends(found: _Elements, model: Model, plan: Plan, facts: MemoryFacts) -> Array:
    """Elements outside the blocks, (..., stages)."""
    rows = _rows(model, plan, facts)
    out = np.zeros((*np.shape(rows), plan.pp))
    out[..., 0] += rows * found.before[0] + found.before[1]
    out[..., -1] += rows * (found.after[0] + (found.tied if plan.pp > 1 else 0.0)) + found.after[1]
    return out


def _states(
    model: Model, plan: Plan, facts: MemoryFacts, placed: NDArray[np.int64], exchange_bytes: float
) -> dict[str, Array]:
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
    block = float(np.max(_block_elements(found, plan))) if found.blocks.size else 0.0
    casts = 0.0 * dense
    if not facts.model_weights and e < DTYPE_BYTES[plan.master_dtype] and plan.zero < 3:
        casts = _multiplied(found, model, plan, facts, placed) * e
    gathered = 0.0 * dense
    if plan.zero >= 3 or plan.offload == "params":
        gathered = gathered + 2.0 * block * e + ends * e + block * max(e, DTYPE_BYTES[plan.reduce_dtype])
    if plan.offload != "none":
        items["optimizer"] = 0.0 * dense
        items["gradients"] = 0.0 * dense if plan.zero else items["gradients"]
    if plan.offload == "params":
        items["weights"] = 0.0 * dense
    return items | {
        "casts": casts,
        "gathered": gathered,
        "exchange": _buckets(model, plan, facts, items["gradients"], exchange_bytes),
    }


def _block_elements(found: _Elements, plan: Plan) -> Array:
    t, _, _, x = _degrees(plan)
    each: Array = found.blocks[0] / t + found.blocks[1] + found.blocks[2] / t / x
    return each


def _multiplied(found: _Elements, model: Model, plan: Plan, facts: MemoryFacts, placed: NDArray[np.int64]) -> Array:
    """Elements of the matrices that autocast copies, (..., stages)."""
    dense, experts = _params(found.matrices, plan, placed)
    out = dense + experts + 0.0 * _ends(found, model, plan, facts)
    out[..., -1] += _rows(model, plan, facts) * (found.after[0] + found.tied)
    return out


def _buckets(model: Model, plan: Plan, facts: MemoryFacts, gradients: Array, exchange_bytes: float) -> Array:
    """Buffers of the gradient exchange: none where gradients lie in one buffer (fusion ``all``), two buckets (one being
    filled, one being sent) where states are sharded or kept by the stack, what the method keeps otherwise."""
    if plan.dp * plan.cp == 1 or plan.zero >= 3:
        return 0.0 * gradients
    if plan.method == "s-sgd" and (plan.zero or facts.model_weights):
        bucket = plan.bucket_bytes * DTYPE_BYTES[plan.reduce_dtype] / 4.0
        return np.minimum(2.0 * bucket, gradients) if plan.fusion == "bucket" else 0.0 * gradients
    return gradients / (DTYPE_BYTES[plan.master_dtype] * float(model.params)) * exchange_bytes


def element_bytes(plan: Plan) -> float:
    """Bytes of an activation or of a weight as it is multiplied; fp8 runs on copies of 16-bit tensors."""
    return max(DTYPE_BYTES[plan.precision], 2.0)


def state_bytes(plan: Plan, facts: MemoryFacts) -> dict[str, float]:
    """Bytes a parameter of weights, gradients and optimizer before anything is sharded; they sum to 16 under Adam in
    most stacks, 18 with fp32 gradients of bf16 weights."""
    e, master = element_bytes(plan), DTYPE_BYTES[plan.master_dtype]
    moments = OPTIMIZER_STATES[plan.optimizer] * master
    if not facts.model_weights or e >= master:
        return {"weights": master, "gradients": master, "optimizer": moments}
    widened = facts.accumulates_fp32 and plan.precision not in ("fp16", "fp32", "tf32")
    gradients = 4.0 if widened else e
    copies = master if facts.gradient_copies and gradients < master else 0.0
    return {"weights": e, "gradients": gradients, "optimizer": moments + master + copies}


# -- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """Saved bytes as coefficients over BASIS, by divisor (tp, sp, none): blocks and dropped (3, blocks, 5), before and
    after (3, 5), widest (3, rows, 5): the kept tensors of blocks, one by one."""

    blocks: Array
    dropped: Array
    before: Array
    after: Array
    widest: Array


@lru_cache(maxsize=512)
def _kept(program: Program, recompute: str, without: str) -> _Kept:
    """without: name of a forward row that this stack does not keep."""
    ops = program.forward
    saved = ops.coefficients[SAVED]
    if without:
        saved = saved * np.array([name != without for name in ops.names])
    over_t = np.isin(ops.divides, [DIVIDES.index(d) for d in ("k", "batch", "bytes")])
    over_sp = np.isin(ops.divides, [DIVIDES.index(d) for d in ("n", "sequence")])
    masked = np.stack([saved * mask for mask in (over_t, over_sp, ~(over_t | over_sp))])
    counts, replayed = program.blocks.counts, program.replayed(recompute)
    inside = masked[:, :, counts.any(axis=0)] if len(counts) else masked[:, :, :0]
    return _Kept(
        blocks=np.einsum("lr,ckr->clk", counts, masked),
        dropped=np.einsum("lr,ckr->clk", replayed, masked),
        before=masked @ program.blocks.before[0],
        after=masked @ program.blocks.after[0],
        widest=inside.transpose(0, 2, 1),
    )


def _activations(
    program: Program, model: Model, plan: Plan, facts: MemoryFacts, placed: NDArray[np.int64], flights: Array
) -> dict[str, Array]:
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    gate = "activation" if spec.gated_mlp and (facts.fused_gate or plan.compile) else ""
    kept = _kept(program, plan.recompute, gate)
    at = tensor.monomials(plan.micro_batch, plan.seq_len, plan.cp)
    t, sp = (np.asarray(n, dtype=float) for n in (plan.tp, plan.sp))
    shares = (1.0 / t, 1.0 / sp, 1.0)

    def bytes_of(coefficients: Array) -> Array:
        """(..., rows) of coefficients (3, rows, 5)."""
        parts = [np.asarray(w)[..., None] * (at @ c.T) for w, c in zip(shares, coefficients, strict=True)]
        found: Array = parts[0] + parts[1] + parts[2]
        return found

    extra = _extra(spec, plan, facts, at)[..., None]
    blocks, dropped = bytes_of(kept.blocks) + extra, bytes_of(kept.dropped)
    whole = _stage_sums(blocks, placed)
    ends = [bytes_of(c[:, None, :])[..., 0] for c in (kept.before, kept.after)]
    replayed = np.zeros(plan.pp)
    stays = blocks - dropped
    if plan.recompute == "full":
        dropped = dropped + extra
        stays = blocks - dropped + (at @ program.blocks.inputs.T) / sp[..., None]
    if plan.recompute != "none":
        edges = np.cumsum(placed)
        replayed = np.stack(
            [dropped[..., b - n : b].max(axis=-1, initial=0.0) for b, n in zip(edges, placed, strict=True)], axis=-1
        )
    held = np.stack([_stage_sums(stays, placed), whole])
    held[..., 0] += ends[0]
    held[..., -1] += ends[1]
    activations = np.minimum(held[0] * flights + replayed, held[1] * flights)
    logits = np.zeros(np.broadcast_shapes(activations.shape, (*t.shape, 1)))
    logits[..., -1] = _logits(program, spec, plan, facts, at, _rows(model, plan, facts))
    transient = 2.0 * bytes_of(kept.widest).max(axis=-1, initial=0.0)[..., None]
    return {"activations": activations, "logits": logits, "transient": np.maximum(transient - logits, 0.0)}


def _extra(spec: TransformerSpec, plan: Plan, facts: MemoryFacts, at: Array) -> Array:
    """Bytes a block keeps in this stack beside what an eager one keeps."""
    tokens, e = at[..., 3], element_bytes(plan)
    t = np.asarray(plan.tp, dtype=float)
    out: Array = 0.0 * tokens / t
    if facts.separate_inputs:
        copies = 2.0 + (1.0 if spec.gated_mlp and not spec.experts else 0.0)
        out = out + np.where(t > 1.0, copies * e * spec.hidden * tokens, 0.0)
    if facts.query_copy and spec.kv_heads < spec.heads and not spec.mla:
        out = out + e * spec.heads * spec.head_dim * tokens / t
    return out


def _logits(program: Program, spec: TransformerSpec, plan: Plan, facts: MemoryFacts, at: Array, rows: Num) -> Num:
    """Bytes of the logits of one rank: `Program.logits`, or e + 4 bytes each where the loss works in place."""
    if not spec.vocab:
        return 0.0
    nbytes = at @ program.logits
    if facts.loss_in_place and not plan.compile:
        e = element_bytes(plan)
        nbytes = nbytes * (e + (4.0 if e < 4.0 else 0.0)) / (e + 12.0)
    return nbytes * rows / spec.vocab


def deepspeed_zero3_bytes(params: float, largest_layer: float, gpus: int, *, offload: str = "none") -> float:
    """Bytes a GPU as DeepSpeed's estimator of ZeRO-3 states gives them, for comparison: no activations, no buckets.

    4 bytes of the largest layer (16-bit weights and gradients gathered) + 18 N / gpus; with the optimizer on the host
    2 N / gpus; with everything there the layer alone. Source: deepspeed.runtime.zero.stage3,
    estimate_zero3_model_states_mem_needs.
    """
    each = {"none": 18.0, "optimizer": 2.0, "params": 0.0}[offload]
    return 4.0 * largest_layer + each * params / gpus
