"""Parameters of one rank, and what data-parallel ranks exchange of them.

With N_r elements on a rank, e_g and e_w bytes of a gradient and of a gathered weight, over R = dp·cp replicas:

    no sharding      all-reduce of e_g N_r after the last micro-batch
    ZeRO-1           reduce-scatter of e_g N_r and all-gather of e_w N_r: the same volume
    ZeRO-2           the same, but a reduce-scatter after every micro-batch: a rank keeps its share of gradients alone
    with owners      whole tensors have one owner each: all-reduce of e_g N_r, and one broadcast from every owner of
                     e_w N_r in all (InternEvo, `HybridZeroOptimizer.broadcast_params`)
    ZeRO-3, FSDP     per micro-batch two all-gathers of e_w N_r and one reduce-scatter of e_g N_r, block by block
    hybrid           the same over the shard group, and an all-reduce of the shards across groups

Sources: Rajbhandari et al. (arXiv 1910.02054), section 7; Zhao et al., PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from simkit.roofline import Array
from simkit.spec.model import Model
from simkit.spec.plan import Plan
from simkit.train_messages import Lines

Num = Any

FP32_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Params:
    """Parameters of one rank: per block, before the first and after the last, of the fullest stage, and how many of
    those are routed experts."""

    block: float
    before: float
    after: float
    stage_max: float
    experts: float
    tensors: float


@lru_cache(maxsize=1024)
def of_rank(model: Model, *, tp: int, ep: int, held: tuple[int, ...]) -> Params:
    """Elements of one rank. Matrices are divided by tp, norms and routers by nothing, routed experts by tp·ep; `held`:
    blocks of each stage."""
    counted = elements(model)
    layers = max(sum(held), 1)
    dense = counted["dense"] / layers / tp + counted["replicated"] / layers
    expert = counted["expert"] / layers / tp / ep
    block = dense + expert
    before, after = counted["before"] / tp, counted["after"] / tp
    stages = np.asarray(held, dtype=float) * block
    stages[0] += before
    stages[-1] += after
    fullest = int(stages.argmax())
    return Params(
        block=block, before=before, after=after, stage_max=float(stages[fullest]), experts=held[fullest] * expert,
        tensors=max(len(model.tensors) / len(held), 1.0),
    )  # fmt: skip


@lru_cache(maxsize=512)
def elements(model: Model) -> dict[str, float]:
    """Elements by the way they are divided: matrices of blocks, norms and routers of blocks, experts, ends."""
    out = {"dense": 0.0, "replicated": 0.0, "expert": 0.0, "before": 0.0, "after": 0.0}
    for t in model.tensors:
        if t.layer >= 0:
            key = "expert" if t.role == "expert" else "replicated" if t.module in ("norm", "router") else "dense"
        else:
            key = "before" if t.module in ("embedding", "conv") else "after"
        out[key] += t.numel
    return out


def shard_ranks(plan: Plan) -> int:
    """Ranks over which ZeRO shards: those of data and context parallelism, within the shard group."""
    return plan.shard_group * plan.cp


def owned(plan: Plan, params: Params) -> float:
    """Elements whose optimizer state a rank holds; routed experts have 1/ep of the replicas to shard over."""
    if plan.zero < 1:
        return params.stage_max
    shards = shard_ranks(plan)
    return (params.stage_max - params.experts) / shards + params.experts / max(shards / plan.ep, 1.0)


def exchange(
    plan: Plan, params: Params, lines: Lines, *, gather_bytes: float, reduce_bytes: float, owners: bool = False
) -> tuple[Num, float, Num]:
    """(seconds, bytes a rank contributes, seconds without bytes) of the exchange after the last micro-batch.

    Gradients (and gathered weights) go buffer by buffer, each with the latency of its collective; owners: updated
    weights owner by owner.
    """
    replicas = plan.dp * plan.cp
    if replicas <= 1 or plan.zero >= 3:
        return 0.0, 0.0, 0.0
    stride = plan.tp
    grads = params.stage_max * reduce_bytes
    whole = plan.fusion == "all" or plan.bucket_bytes <= 0.0
    buffers = 1.0 if whole else max(params.stage_max * FP32_BYTES / plan.bucket_bytes, 1.0)
    if plan.zero == 0:
        cost = lines.cost("all_reduce", replicas, stride)
        once = cost(0.0)
        latency = buffers * once
        return cost(grads) - once + latency, grads, latency
    group = shard_ranks(plan)
    weights = params.stage_max * gather_bytes
    if owners:
        reduce, send = lines.cost("all_reduce", replicas, stride), lines.cost("broadcast", group, stride)
        messages = min(float(group), params.tensors)
        latency = buffers * reduce(0.0) + messages * send(0.0)
        sent_s = reduce(grads / buffers) * buffers + send(weights / messages) * messages
        return sent_s, grads, latency
    gather = lines.cost("all_gather", group, stride)
    # Gradients that are sharded have left with every micro-batch (`scattered`).
    reduce = lines.cost("reduce_scatter", group if plan.zero < 2 else 1, stride)
    each = reduce(0.0) + gather(0.0)
    seconds, latency = reduce(grads) + gather(weights) + (buffers - 1.0) * each, buffers * each
    if replicas > group:
        across = lines.cost("all_reduce", replicas // group, stride * group)
        seconds, latency = seconds + across(grads / group), latency + across(0.0)
    return seconds, grads, latency


def scattered(plan: Plan, params: Params, lines: Lines, held: Any, *, reduce_bytes: float) -> Array:
    """Seconds in which each stage's gradients of one micro-batch are scattered over their shards: ZeRO-2 keeps no more
    than its share between micro-batches (Rajbhandari et al., section 5.2; DeepSpeed and FSDP's SHARD_GRAD_OP alike)."""
    group = shard_ranks(plan)
    if plan.zero != 2 or group <= 1:
        return np.zeros(len(held))
    elements = np.asarray(held, dtype=float) * params.block
    elements[0] += params.before
    elements[-1] += params.after
    cost = lines.cost("reduce_scatter", group, plan.tp)
    whole = plan.fusion == "all" or plan.bucket_bytes <= 0.0
    buffers = 1.0 if whole else np.maximum(elements * FP32_BYTES / plan.bucket_bytes, 1.0)
    each = np.asarray(cost(0.0))[..., None]
    return np.asarray(_each(cost, elements * reduce_bytes) + (buffers - 1.0) * each)


def _each(cost: Any, nbytes: Array) -> Array:
    """Seconds of several sizes (last axis), of links that may be arrays over points."""
    return np.stack([np.asarray(cost(one)) for one in nbytes.tolist()], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """Blocks with the collectives of their parameters beside them. before, after: (forward, backward) of the ends;
    gather_s, reduce_s: the network's seconds of a micro-batch forward and backward; wire_bytes: what a rank
    contributes in a micro-batch, two gathers and one reduce-scatter."""

    forward_s: Array
    backward_s: Array
    before: tuple[Num, Num]
    after: tuple[Num, Num]
    gather_s: Num
    reduce_s: Num
    wire_bytes: float
    latency_s: Num

    def at(self, pair: Any) -> Gathered:
        """The same at some of its points; the blocks and ends are not asked for again."""
        changed = {name: getattr(self, name) for name in ("gather_s", "reduce_s", "latency_s")}
        return replace(self, **{name: value[pair] if np.ndim(value) else value for name, value in changed.items()})


def gathered(
    f: Array,
    g: Array,
    before: tuple[Num, Num],
    after: tuple[Num, Num],
    plan: Plan,
    params: Params,
    lines: Lines,
    *,
    layers: int,
    gather_bytes: float,
    reduce_bytes: float,
    interference: float,
) -> Gathered:
    """Gathers and reduce-scatters beside the blocks, with one block fetched ahead: max(t + rho min(c, t), c).

    f, g: forward and backward seconds by kind of block, of which there are `layers`.
    """
    group, replicas = shard_ranks(plan), plan.dp * plan.cp
    gather = lines.cost("all_gather", group, plan.tp)
    reduce = lines.cost("reduce_scatter", group, plan.tp)
    gb = gather(params.block * gather_bytes)
    rb = reduce(params.block * reduce_bytes)
    if replicas > group:
        across = lines.cost("all_reduce", replicas // group, plan.tp * group)
        rb = rb + across(params.block * reduce_bytes / group)
    ends = params.before + params.after
    ge = gather(ends * gather_bytes)
    re = reduce(ends * reduce_bytes)
    fetched, moved = np.asarray(gb)[..., None], np.asarray(gb + rb)[..., None]
    elements_moved = params.block * layers + ends
    return Gathered(
        forward_s=np.maximum(f + interference * np.minimum(fetched, f), fetched),
        backward_s=np.maximum(g + interference * np.minimum(moved, g), moved),
        before=(before[0] + ge + gb, before[1] + 0.5 * re),
        after=(after[0], after[1] + gb),
        gather_s=gb * layers + ge,
        reduce_s=(gb + rb) * layers + ge + re,
        wire_bytes=elements_moved * (2.0 * gather_bytes + reduce_bytes),
        latency_s=(2.0 * gather(0.0) + reduce(0.0)) * (layers + 1),
    )
