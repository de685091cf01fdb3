"""One step of training under any mix of data, tensor, sequence, context, expert and pipeline parallelism and ZeRO.

    step = pipeline(stages) + exposed exchange + optimizer + host

Terms: forward, backward, recompute and tp_comm (every message inside a block) of the slowest stage; launch_s: what the
device waits for the host; accumulation_s: adding the gradients of a micro-batch to those before; straggler_s: waiting
for the slowest of many nodes; sharding_s: gathers
and reduce-scatters of sharded parameters that stick out; offload_s: copies to and from host memory that stick out.

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

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from simkit import roofline, schedules
from simkit.parallel import tensor
from simkit.parallel.pipeline import layers_per_stage
from simkit.price import UNSCALED, Compute, Pricing, Scales, hosted, scaled
from simkit.program import Program
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster, Device
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.spec.stack import Stack
from simkit.train_messages import Lines
from simkit.train_offload import Offloaded, offloaded
from simkit.train_params import Gathered, Params, exchange, gathered, of_rank, owned, shard_ranks

Num = Any
_ALWAYS = ("forward_s", "backward_s", "optimizer_s", "host_s")
WAITING = ("exposed_comm_s", "tp_comm_s", "bubble_s", "launch_s", "sharding_s", "offload_s")
"""Terms in which the device does not compute."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharded:
    """A priced step. terms: disjoint seconds that sum to end_s; forward_s, backward_s: what each stage takes per
    micro-batch; wire_bytes: bytes a rank contributes to the gradient exchange; latency_s: of it without bytes;
    messages: seconds {kind: (forward, backward)} that the network is busy for one micro-batch (the gradient exchange
    and the gathers of updated weights: once a step)."""

    end_s: Num
    terms: dict[str, Num]
    compute: Compute
    forward_s: Array
    backward_s: Array
    wire_bytes: Num
    comm_s: Num
    latency_s: Num
    messages: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    messages: dict[str, tuple[float, float]]


def sharded(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    stack: Stack,
    priced: Pricing,
    traits: Traits,
    cluster: Cluster,
    device: Device,
    scales: Scales = UNSCALED,
    optimizer_bytes: float,
) -> Sharded:
    """Prices one step of a transformer under the degrees of the plan."""
    at = _micro_batch(
        program, model, _once(plan), stack, scaled(priced.law, scales), traits, cluster, device, scales, optimizer_bytes
    )
    stages, exchange_s, wire, latency_s = at.stages, at.exchange_s, at.wire_bytes, at.latency_s
    pipeline = schedules.get(plan.schedule if plan.vpp == 1 else "interleaved").seconds(
        stages.forward_s, stages.backward_s, micro_batches=plan.grad_accum, virtual=plan.vpp, p2p_s=at.p2p_s
    )
    hidden = min(exchange_s, float(stages.backward_s.max())) if traits.overlap and plan.zero < 3 else 0.0
    m = plan.grad_accum
    terms, ideal = {k: m * v for k, v in at.terms.items()}, m * at.ideal_s
    terms["bubble_s"] = float(pipeline.end_s) - ideal
    terms["straggler_s"] = straggling(cluster.nodes) * ideal
    terms["exposed_comm_s"] = exchange_s - hidden + traits.interference * hidden
    terms["optimizer_s"] = at.optimizer_s
    terms["host_s"] = traits.step_s * scales.host_s
    # What rounding leaves of a term that is not there is no term.
    tiny = 1e-12 * (float(pipeline.end_s) + at.optimizer_s)
    terms = {k: float(v) for k, v in terms.items() if v > tiny or k in _ALWAYS}
    found = stages.gathered
    if found is not None:
        wire, latency_s = m * found.wire_bytes, m * found.latency_s
    return Sharded(
        end_s=sum(terms.values()),
        terms=terms,
        compute=at.compute,
        forward_s=stages.forward_s,
        backward_s=stages.backward_s,
        wire_bytes=wire,
        comm_s=exchange_s + (m * (found.gather_s + found.reduce_s) if found is not None else 0.0),
        latency_s=latency_s,
        messages=dict(at.messages),
    )


@lru_cache(maxsize=4096)
def _once(plan: Plan) -> Plan:
    """The plan with one micro-batch a step, so that plans that differ in their number share what is worked out."""
    return replace(plan, grad_accum=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MicroBatch:
    """All that does not depend on how many micro-batches make a step; ideal_s: the sum of the terms."""

    stages: _Stages
    compute: Compute
    terms: dict[str, Num]
    ideal_s: float
    optimizer_s: float
    p2p_s: float
    exchange_s: float
    wire_bytes: Num
    latency_s: Num
    messages: dict[str, tuple[float, float]]


@lru_cache(maxsize=1024)
def _micro_batch(
    program: Program,
    model: Model,
    plan: Plan,
    stack: Stack,
    law: Law,
    traits: Traits,
    cluster: Cluster,
    device: Device,
    scales: Scales,
    optimizer_bytes: float,
) -> _MicroBatch:
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    lines = Lines(plan=plan, cluster=cluster, scales=scales, scatter_gather=stack.scatter_gather)
    work = _priced(
        program, law, tensor.degrees(plan.tp, plan.sp, plan.cp, plan.ep), stages=plan.pp,
        micro_batch=plan.micro_batch, seq_len=plan.seq_len, recompute=plan.recompute, causal=spec.causal,
    )  # fmt: skip
    blocks = _blocks(work, program, spec, plan, lines, traits.host_kernel_s * scales.host_s)
    held = layers_per_stage(len(program.blocks.counts), plan.pp)
    params = of_rank(model, tp=plan.tp, ep=plan.ep, held=tuple(held.tolist()))
    stages = _stages(blocks, held, plan, params, traits, lines, stack.accumulation_passes)
    host = offloaded(plan, params, held, cluster=cluster, device=device, on_host=stack.host_optimizer, scales=scales)
    optimizer_s = owned(plan, params) * optimizer_bytes / (law.memory_Bps * law.sustained)
    if host is not None:
        stages = stages.streamed(host)
        optimizer_s = host.optimizer_s + (0.0 if stack.host_optimizer else optimizer_s)
    p2p_s = lines.stage_message(spec.hidden)
    exchange_s, wire, latency_s = exchange(
        plan, params, lines, gather_bytes=traits.gather_dtype_bytes, reduce_bytes=traits.reduce_dtype_bytes
    )
    terms, ideal_s = _terms(blocks, held, plan, stages)
    return _MicroBatch(
        stages=stages,
        compute=work.compute,
        terms=terms,
        ideal_s=ideal_s,
        optimizer_s=optimizer_s,
        p2p_s=p2p_s,
        exchange_s=exchange_s,
        wire_bytes=wire,
        latency_s=latency_s,
        messages=_messages(blocks, plan, p2p_s, stages.gathered, exchange_s),
    )


STRAGGLER = 0.01
"""Standard deviation of the speed of one node over that of its fellows: assumed, half of the 2 % by which servers of
one GPU family from several vendors differ in published benchmark rounds."""


def straggling(nodes: int) -> float:
    """How much longer than the mean the slowest of `nodes` normal nodes takes, as a share: sigma · sqrt(2 ln n), the
    leading term of the expected maximum (Cramer 1946, section 28.6); 0 for one node."""
    return STRAGGLER * math.sqrt(2.0 * math.log(max(nodes, 1)))


def _terms(blocks: _Blocks, held: Any, plan: Plan, stages: _Stages) -> tuple[dict[str, Num], float]:
    """(terms of the slowest stage for one micro-batch, their sum)."""
    total = stages.forward_s + stages.backward_s
    slowest = int(np.argmax(total))
    ideal = float(total[slowest])
    share = _shares(blocks, slowest, held, plan)
    share["accumulation"] = float(stages.accumulated_s[slowest])
    share["offload"] = float(stages.offload_s[slowest])
    share["sharding"] = max(ideal - sum(share.values()), 0.0)
    return {f"{name}_s": seconds for name, seconds in share.items()}, ideal


def _messages(
    blocks: _Blocks, plan: Plan, p2p_s: float, found: Gathered | None, exchange_s: float
) -> dict[str, tuple[float, float]]:
    """Seconds of the network by kind of message."""
    messages = dict(blocks.messages)
    if plan.pp > 1:
        messages["pipeline stages"] = (p2p_s * (plan.pp - 1), p2p_s * (plan.pp - 1))
    if found is not None:
        messages["sharded parameters"] = (found.gather_s, found.reduce_s)
    if exchange_s:
        messages["gradient exchange"] = (0.0, exchange_s)
    return messages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Priced:
    """What a rank computes whatever its network: seconds per block (last axis), and of the ends (forward, backward).

    fused_*_s: of fused attention, beside which keys and values go round; launches_*: kernels of a block.
    """

    forward_s: Array
    backward_s: Array
    recompute_s: Array
    fused_forward_s: Array
    fused_backward_s: Array
    launches_forward: Array
    launches_backward: Array
    before: tuple[float, float]
    after: tuple[float, float]
    compute: Compute


@lru_cache(maxsize=1024)
def _priced(
    program: Program,
    law: Law,
    degrees: tensor.Degrees,
    *,
    stages: int,
    micro_batch: int,
    seq_len: int,
    recompute: str,
    causal: bool,
) -> _Priced:
    at = tensor.monomials(micro_batch, seq_len, degrees.cp)
    forward, kept = tensor.share(program.forward, at, degrees)
    backward, _ = tensor.share(program.backward, at, degrees)
    tf, math_f = roofline.seconds(forward, law)
    tb, math_b = roofline.seconds(backward, law)
    fused_f, fused_b = program.forward.kind == roofline.ATTENTION, program.backward.kind == roofline.ATTENTION_GRAD
    if degrees.cp > 1 and causal:
        # Contiguous shards of a causal ring: the last rank attends to everything before it.
        last = 2.0 - 1.0 / degrees.cp
        tf, tb = np.where(fused_f, tf * last, tf), np.where(fused_b, tb * last, tb)
    b, replayed = program.blocks, program.replayed(recompute)
    counts_f, counts_b = program.forward.counts, program.backward.counts
    total_f, total = float(tf @ counts_f), float(tf @ counts_f + tb @ counts_b)
    bound = float((tf * math_f) @ counts_f + (tb * math_b) @ counts_b)
    flops = float(tensor.monomials(micro_batch, seq_len) @ program.model_flops)
    return _Priced(
        forward_s=b.counts @ tf,
        backward_s=b.backward_counts @ tb,
        recompute_s=replayed @ tf,
        fused_forward_s=b.counts[:, fused_f] @ tf[fused_f],
        fused_backward_s=b.backward_counts[:, fused_b] @ tb[fused_b],
        launches_forward=b.counts @ program.forward.kernels,
        launches_backward=b.backward_counts @ program.backward.kernels + replayed @ program.forward.kernels,
        before=(float(b.before[0] @ tf), float(b.before[1] @ tb)),
        after=(float(b.after[0] @ tf), float(b.after[1] @ tb)),
        compute=Compute(
            forward_s=tf,
            backward_s=tb,
            forward_math=math_f,
            backward_math=math_b,
            saved_bytes=float(kept @ counts_f),
            logits_bytes=float(at @ program.logits) / degrees.tp,
            model_flops=flops / (degrees.tp * stages * degrees.cp),
            forward_total_s=total_f,
            backward_total_s=total - total_f,
            math_share=bound / total if total else 0.0,
        ),
    )


def _blocks(
    priced: _Priced, program: Program, spec: TransformerSpec, plan: Plan, lines: Lines, launch_s: float
) -> _Blocks:
    """Blocks with their messages and with the host that launches them (launch_s a kernel)."""
    found = tensor.messages(program, spec.hidden, DTYPE_BYTES[plan.precision])
    message_s = lines.tensor_message(found.width)
    ring_f, ring_b = _ring(priced, spec, plan, lines)
    moved_s = lines.expert_message(found.width * max(spec.top_k, 1)) * found.routed
    per_block = found.per_block
    regather = 0.5 * per_block * message_s if plan.sp > 1 else 0.0
    replays = per_block * message_s if plan.recompute == "full" else 0.0
    back = 4.0 if plan.recompute == "full" else 2.0
    edge = message_s if plan.tp > 1 else 0.0
    kinds = {
        "tensor parallelism": (per_block * message_s, per_block * message_s + regather + replays, edge),
        "ring of keys and values": (ring_f, ring_b, 0.0),
        "expert all-to-all": (2.0 * moved_s, back * moved_s, 0.0),
    }
    tp_f = per_block * message_s + ring_f + 2.0 * moved_s
    tp_b = kinds["tensor parallelism"][1] + ring_b + back * moved_s
    f, g = priced.forward_s, priced.backward_s
    return _Blocks(
        forward_s=f,
        backward_s=g,
        recompute_s=priced.recompute_s,
        forward_all_s=hosted(f + tp_f, priced.launches_forward * launch_s),
        backward_all_s=hosted(g + priced.recompute_s + tp_b, priced.launches_backward * launch_s),
        tp_forward_s=tp_f,
        tp_backward_s=tp_b,
        before=(priced.before[0] + edge, priced.before[1]),
        after=(priced.after[0], priced.after[1] + edge),
        messages={k: (float(np.sum(x)) + e, float(np.sum(y)) + e) for k, (x, y, e) in kinds.items() if np.any(x)},
    )


def _ring(priced: _Priced, spec: TransformerSpec, plan: Plan, lines: Lines) -> tuple[Array, Array]:
    """What the ring of context parallelism leaves exposed per block: keys and values go round, forward once and
    backward twice (their gradients too), beside the attention of the rank."""
    width = spec.kv_heads * (spec.head_dim + spec.value_dim) * DTYPE_BYTES[plan.precision] / plan.tp
    ring_s = lines.ring_message(width)
    forward = np.maximum(ring_s - priced.fused_forward_s, 0.0)
    return forward, np.maximum(2.0 * ring_s - priced.fused_backward_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """Seconds of each stage per micro-batch; accumulated_s: what adding up gradients takes of the backward pass;
    offload_s: what copies to and from the host add; gathered: the collectives of sharded parameters."""

    forward_s: Array
    backward_s: Array
    accumulated_s: Array
    offload_s: Array
    gathered: Gathered | None

    def streamed(self, host: Offloaded) -> _Stages:
        """The stages beside the PCIe slot, which carries both directions at once."""
        forward_s = np.maximum(self.forward_s, host.up_s)
        backward_s = np.maximum(self.backward_s, np.maximum(host.up_s, host.down_s))
        added = forward_s + backward_s - self.forward_s - self.backward_s
        return replace(self, forward_s=forward_s, backward_s=backward_s, offload_s=added)


def _stages(
    blocks: _Blocks, held: Any, plan: Plan, params: Params, traits: Traits, lines: Lines, passes: float
) -> _Stages:
    """The blocks of each stage with its ends, and with the collectives of its parameters where they are sharded."""
    f, g = blocks.forward_all_s, blocks.backward_all_s
    found = None
    before, after = blocks.before, blocks.after
    if plan.zero >= 3 and plan.dp * plan.cp > 1:
        found = gathered(
            f, g, before, after, plan, params, lines,
            gather_bytes=traits.gather_dtype_bytes, reduce_bytes=traits.reduce_dtype_bytes,
            interference=traits.interference,
        )  # fmt: skip
        f, g, before, after = found.forward_s, found.backward_s, found.before, found.after
    edges = np.cumsum(held) - held
    # Every micro-batch adds its gradients to those before it.
    shards = shard_ranks(plan) if plan.zero >= 3 else 1
    accumulated = held * params.block * (passes * traits.reduce_dtype_bytes / traits.memory_Bps / shards)
    forward = np.add.reduceat(f, edges)
    backward = np.add.reduceat(g, edges) + accumulated
    forward[0] += before[0]
    backward[0] += before[1]
    forward[-1] += after[0]
    backward[-1] += after[1]
    return _Stages(
        forward_s=forward, backward_s=backward, accumulated_s=accumulated, offload_s=0.0 * forward, gathered=found
    )


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
        "tp_comm": float(blocks.tp_forward_s[span].sum() + blocks.tp_backward_s[span].sum()),
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


__all__ = ["WAITING", "Sharded", "Traits", "sharded"]
