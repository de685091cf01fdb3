"""One step of training under any mix of data, tensor, sequence, context, expert and pipeline parallelism and ZeRO.

    step = pipeline(stages) + exposed exchange + optimizer + host

Terms: forward, backward, recompute and tp_comm of the slowest stage; launch_s: what the device waits for the host;
sharding_s: gathers and reduce-scatters of sharded parameters that stick out, and the accumulation of gradients.

A stage's forward (backward) of one micro-batch is the sum over its blocks of compute and tensor-parallel messages;
sharded parameters (ZeRO-3, FSDP) are gathered block by block beside it:

    block      max(compute + rho · communication, communication)         prefetch of one block
    exposed    the first gather, the gather of the embedding, half of the last reduce-scatter

Compute of a stage and the launches of its host run side by side: t = (gpu^p + host^p)^(1/p) with p =
`price.STEEPNESS`. Every formula takes arrays over sweep points in front of its last axis (blocks or stages).
Sources: Narayanan et al. (arXiv 2104.04473); Rajbhandari et al. (arXiv 1910.02054); Zhao et al., PyTorch FSDP (arXiv
2304.11277).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simkit import roofline, schedules
from simkit.parallel import tensor
from simkit.parallel.pipeline import layers_per_stage
from simkit.price import UNSCALED, Compute, Pricing, Scales, hosted, scaled
from simkit.program import Program
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.spec.stack import Stack
from simkit.train_messages import Lines

Num = Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharded:
    """A priced step. terms: disjoint seconds that sum to end_s; stages: what each stage takes per micro-batch;
    wire_bytes: bytes a rank contributes to the gradient exchange; latency_share: of the exposed exchange."""

    end_s: Num
    terms: dict[str, Num]
    compute: Compute
    forward_s: Array
    backward_s: Array
    wire_bytes: Num
    comm_s: Num
    latency_s: Num


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traits:
    """What the stack does with sharded training: facts of `spec/stacks/*.toml`."""

    overlap: bool
    gather_dtype_bytes: float
    reduce_dtype_bytes: float
    host_kernel_s: float
    step_s: float
    interference: float
    memory_Bps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Blocks:
    """Seconds of one micro-batch on one rank: per block (last axis), and before the first and after the last block.

    forward_s, backward_s, recompute_s (forward work replayed), tp_*_s: of the device; forward_all_s, backward_all_s: of
    a block with its messages, its replay and the host that launches it.
    """

    forward_s: Array
    backward_s: Array
    recompute_s: Array
    forward_all_s: Array
    backward_all_s: Array
    tp_forward_s: Array
    tp_backward_s: Array
    before: tuple[Num, Num]
    after: tuple[Num, Num]


def sharded(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    stack: Stack,
    priced: Pricing,
    traits: Traits,
    cluster: Cluster,
    scales: Scales = UNSCALED,
    optimizer_bytes: float,
) -> Sharded:
    """Prices one step of a transformer under the degrees of the plan."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    law = scaled(priced.law, scales)
    blocks, compute = _blocks(program, spec, plan, law, traits, cluster, scales)
    lines = Lines(plan=plan, cluster=cluster, scales=scales)
    held = layers_per_stage(len(program.blocks.counts), plan.pp)
    params = _Params.of(model, plan, held)
    forward_s, backward_s, fsdp_s = _stages(blocks, held, plan, params, traits, lines)
    schedule = schedules.get(plan.schedule if plan.vpp == 1 else "interleaved")
    pipeline = schedule.seconds(
        forward_s,
        backward_s,
        micro_batches=plan.grad_accum,
        virtual=plan.vpp,
        p2p_s=lines.stage_message(spec.hidden),
    )
    exchange_s, wire, latency_s = _exchange(plan, params, traits, lines)
    hidden = float(backward_s.max()) if traits.overlap and plan.zero < 3 else 0.0
    exposed = max(exchange_s - hidden, 0.0) + traits.interference * min(exchange_s, hidden)
    optimizer_s = params.stage_max * optimizer_bytes / (law.memory_Bps * law.sustained) / _optimizer_shards(plan)
    m = plan.grad_accum
    slowest = int(np.argmax(forward_s + backward_s))
    ideal = m * (forward_s[slowest] + backward_s[slowest])
    share = _shares(blocks, slowest, held, plan)
    terms = {
        "forward_s": share["forward"] * m,
        "backward_s": share["backward"] * m,
        "recompute_s": share["recompute"] * m,
        "tp_comm_s": share["tp"] * m,
        "launch_s": share["launch"] * m,
        "sharding_s": max(ideal - sum(share.values()) * m, 0.0),
        "bubble_s": float(pipeline.end_s) - ideal,
        "exposed_comm_s": exposed,
        "optimizer_s": optimizer_s,
        "host_s": traits.step_s * scales.host_s,
    }
    terms = {k: float(v) for k, v in terms.items() if v or k in ("forward_s", "backward_s", "optimizer_s", "host_s")}
    return Sharded(
        end_s=sum(terms.values()),
        terms=terms,
        compute=compute,
        forward_s=forward_s,
        backward_s=backward_s,
        wire_bytes=wire,
        comm_s=exchange_s + fsdp_s,
        latency_s=latency_s,
    )


def _blocks(
    program: Program, spec: TransformerSpec, plan: Plan, law: Law, traits: Traits, cluster: Cluster, scales: Scales
) -> tuple[_Blocks, Compute]:
    degrees = tensor.Degrees(tp=plan.tp, sp=plan.sp, cp=plan.cp, ep=plan.ep)
    at = tensor.monomials(plan.micro_batch, plan.seq_len, plan.cp)
    forward, kept = tensor.share(program.forward, at, degrees)
    backward, _ = tensor.share(program.backward, at, degrees)
    tf, math_f = roofline.seconds(forward, law)
    tb, math_b = roofline.seconds(backward, law)
    if plan.cp > 1 and spec.causal:
        # Contiguous shards of a causal ring: the last rank attends to everything before it.
        last = 2.0 - 1.0 / plan.cp
        tf = np.where(program.forward.kind == roofline.ATTENTION, tf * last, tf)
        tb = np.where(program.backward.kind == roofline.ATTENTION, tb * last, tb)
    b = program.blocks
    launch = traits.host_kernel_s * scales.host_s
    f, g = b.counts @ tf, b.backward_counts @ tb
    replayed = program.replayed(plan.recompute)
    replay = replayed @ tf
    host_f = b.counts @ program.forward.kernels * launch
    host_g = b.backward_counts @ program.backward.kernels * launch + replayed @ program.forward.kernels * launch
    found = tensor.messages(program, spec.hidden, DTYPE_BYTES[plan.precision])
    lines = Lines(plan=plan, cluster=cluster, scales=scales)
    message_s = lines.tensor_message(found.width)
    ring_f, ring_b = _ring(program, spec, plan, tf, tb, lines)
    moved_s = lines.expert_message(found.width * max(spec.top_k, 1)) * program.blocks_with_experts
    per_block = found.per_block
    regather = 0.5 * per_block * message_s if plan.sp > 1 else 0.0
    replays = per_block * message_s if plan.recompute == "full" else 0.0
    flops = float(tensor.monomials(plan.micro_batch, plan.seq_len) @ program.model_flops) / (
        plan.tp * plan.pp * plan.cp
    )
    counts_f, counts_b = program.forward.counts, program.backward.counts
    total_f, total = float(tf @ counts_f), float(tf @ counts_f + tb @ counts_b)
    bound = float((tf * math_f) @ counts_f + (tb * math_b) @ counts_b)
    compute = Compute(
        forward_s=tf,
        backward_s=tb,
        forward_math=math_f,
        backward_math=math_b,
        saved_bytes=float(kept @ counts_f),
        logits_bytes=float(at @ program.logits) / plan.tp,
        model_flops=flops,
        forward_total_s=total_f,
        backward_total_s=total - total_f,
        math_share=bound / total if total else 0.0,
    )
    tp_f = per_block * message_s + ring_f + 2.0 * moved_s
    tp_b = per_block * message_s + regather + replays + ring_b + (4.0 if plan.recompute == "full" else 2.0) * moved_s
    edge = message_s if plan.tp > 1 else 0.0
    return _Blocks(
        forward_s=f,
        backward_s=g,
        recompute_s=replay,
        forward_all_s=hosted(f + tp_f, host_f),
        backward_all_s=hosted(g + replay + tp_b, host_g),
        tp_forward_s=tp_f,
        tp_backward_s=tp_b,
        before=(float(b.before[0] @ tf) + edge, float(b.before[1] @ tb)),
        after=(float(b.after[0] @ tf), float(b.after[1] @ tb) + edge),
    ), compute


# -- parameters and their exchange -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Params:
    """Parameters of one rank: per block, before the first and after the last, of the fullest stage."""

    block: float
    before: float
    after: float
    stage_max: float

    @classmethod
    def of(cls, model: Model, plan: Plan, held: Any) -> _Params:
        counted = _counted(model)
        layers = max(int(np.sum(held)), 1)
        dense = counted["dense"] / layers / plan.tp + counted["replicated"] / layers
        block = dense + counted["expert"] / layers / plan.tp / plan.ep
        before, after = counted["before"] / plan.tp, counted["after"] / plan.tp
        stages = np.asarray(held, dtype=float) * block
        stages[0] += before
        stages[-1] += after
        return cls(block=block, before=before, after=after, stage_max=float(stages.max()))


@lru_cache(maxsize=512)
def _counted(model: Model) -> dict[str, float]:
    """Elements by the way they are divided: matrices of blocks, norms and routers of blocks, experts, ends."""
    out = {"dense": 0.0, "replicated": 0.0, "expert": 0.0, "before": 0.0, "after": 0.0}
    for t in model.tensors:
        if t.layer >= 0:
            key = "expert" if t.role == "expert" else "replicated" if t.module in ("norm", "router") else "dense"
        else:
            key = "before" if t.module in ("embedding", "conv") else "after"
        out[key] += t.numel
    return out


def _optimizer_shards(plan: Plan) -> int:
    return plan.shard_group if plan.zero >= 1 else 1


def _ring(
    program: Program, spec: TransformerSpec, plan: Plan, tf: Array, tb: Array, lines: Lines
) -> tuple[Array, Array]:
    """What the ring of context parallelism leaves exposed per block: keys and values go round, forward once and
    backward twice (their gradients too), beside the attention of the rank."""
    fused = (program.forward.kind == roofline.ATTENTION, program.backward.kind == roofline.ATTENTION)
    element = DTYPE_BYTES[plan.precision]
    width = spec.kv_heads * (spec.head_dim + spec.value_dim) * element / plan.tp
    ring_s = lines.ring_message(width)
    b = program.blocks
    forward = np.maximum(ring_s - b.counts[:, fused[0]] @ tf[fused[0]], 0.0)
    backward = np.maximum(2.0 * ring_s - b.backward_counts[:, fused[1]] @ tb[fused[1]], 0.0)
    return forward, backward


def _exchange(plan: Plan, params: _Params, traits: Traits, lines: Lines) -> tuple[float, float, float]:
    """(seconds, bytes a rank contributes, seconds without bytes) of the gradient exchange after the last
    micro-batch."""
    replicas = plan.dp * plan.cp
    if replicas <= 1 or plan.zero >= 3:
        return 0.0, 0.0, 0.0
    stride = plan.tp
    grads = params.stage_max * traits.reduce_dtype_bytes
    if plan.zero == 0:
        cost = lines.cost("all_reduce", replicas, stride)
        return float(cost(grads)), grads, float(cost(0.0))
    group = min(plan.shard_group * plan.cp, replicas)
    reduce = lines.cost("reduce_scatter", group, stride)
    gather = lines.cost("all_gather", group, stride)
    weights = params.stage_max * traits.gather_dtype_bytes
    seconds, latency = float(reduce(grads)) + float(gather(weights)), float(reduce(0.0)) + float(gather(0.0))
    if replicas > group:
        across = lines.cost("all_reduce", replicas // group, stride * group)
        seconds, latency = seconds + float(across(grads / group)), latency + float(across(0.0))
    return seconds, grads, latency


def _stages(
    blocks: _Blocks, held: Any, plan: Plan, params: _Params, traits: Traits, lines: Lines
) -> tuple[Array, Array, float]:
    """(forward, backward) seconds of each stage per micro-batch, and the seconds of sharded parameters' collectives."""
    f, g = blocks.forward_all_s, blocks.backward_all_s
    edges = np.cumsum(np.concatenate([[0], held]))
    comm = 0.0
    before, after = list(blocks.before), list(blocks.after)
    if plan.zero >= 3 and plan.dp > 1:
        f, g, before, after, comm = _fsdp(f, g, before, after, plan, params, traits, lines)
    forward = np.add.reduceat(f, edges[:-1]).astype(float)
    # Every micro-batch adds its gradients to those before it: two reads and a write.
    shards = min(plan.shard_group, plan.dp) if plan.zero >= 3 else 1
    accumulated = 3.0 * traits.reduce_dtype_bytes / traits.memory_Bps / shards
    backward = np.add.reduceat(g, edges[:-1]).astype(float) + held * params.block * accumulated
    forward[0] += before[0]
    backward[0] += before[1]
    forward[-1] += after[0]
    backward[-1] += after[1]
    return forward, backward, comm


def _fsdp(
    f: Array,
    g: Array,
    before: list[Num],
    after: list[Num],
    plan: Plan,
    params: _Params,
    traits: Traits,
    lines: Lines,
) -> tuple[Array, Array, list[Num], list[Num], float]:
    """Blocks with their gathers and reduce-scatters beside them, micro-batch by micro-batch."""
    group = min(plan.shard_group, plan.dp)
    gather = lines.cost("all_gather", group, plan.tp)
    reduce = lines.cost("reduce_scatter", group, plan.tp)
    gb = float(gather(params.block * traits.gather_dtype_bytes))
    rb = float(reduce(params.block * traits.reduce_dtype_bytes))
    if plan.dp > group:
        across = lines.cost("all_reduce", plan.dp // group, plan.tp * group)
        rb += float(across(params.block * traits.reduce_dtype_bytes / group))
    ends = params.before + params.after
    ge = float(gather(ends * traits.gather_dtype_bytes))
    re = float(reduce(ends * traits.reduce_dtype_bytes))
    rho = traits.interference
    regather = gb if plan.recompute == "full" or plan.zero >= 3 else 0.0
    f = np.maximum(f + rho * np.minimum(gb, f), gb)
    moved = regather + rb
    g = np.maximum(g + rho * np.minimum(moved, g), moved)
    before = [before[0] + ge + gb, before[1] + 0.5 * re]
    after = [after[0], after[1] + gb]
    return f, g, before, after, (2 * gb + rb) * len(f) + ge + re


def _shares(blocks: _Blocks, stage: int, held: Any, plan: Plan) -> dict[str, float]:
    """Seconds of the slowest stage's micro-batch by kind, before anything waits for sharded parameters."""
    begin = int(np.sum(held[:stage]))
    span = slice(begin, begin + int(held[stage]))
    first, last = stage == 0, stage == plan.pp - 1
    return {
        "forward": float(blocks.forward_s[span].sum())
        + first * float(blocks.before[0])
        + last * float(blocks.after[0]),
        "backward": float(blocks.backward_s[span].sum())
        + first * float(blocks.before[1])
        + last * float(blocks.after[1]),
        "recompute": float(blocks.recompute_s[span].sum()),
        "tp": float(blocks.tp_forward_s[span].sum() + blocks.tp_backward_s[span].sum()),
        "launch": max(
            float(
                sum(
                    (a - b)[span].sum()
                    for a, b in (
                        (blocks.forward_all_s, blocks.forward_s + blocks.tp_forward_s),
                        (blocks.backward_all_s, blocks.backward_s + blocks.recompute_s + blocks.tp_backward_s),
                    )
                )
            ),
            0.0,
        ),
    }


__all__ = ["Sharded", "Traits", "sharded"]
