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
`price.STEEPNESS`. Every formula takes arrays over sweep points in front of its last axis (kinds of blocks, or stages):
`sharded_points` asks them for a whole grid at once.
Sources: Narayanan et al. (arXiv 2104.04473); Rajbhandari et al. (arXiv 1910.02054); Zhao et al., PyTorch FSDP (arXiv
2304.11277).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from simkit import schedules
from simkit.parallel import tensor
from simkit.parallel.pipeline import layers_per_stage
from simkit.price import UNSCALED, Compute, Pricing, Scales, scaled
from simkit.program import Program, kinds
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster, Device
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import Plan
from simkit.spec.stack import Stack
from simkit.train_blocks import Blocks, Priced, blocks, column, exposed, price, priced, taken
from simkit.train_messages import Lines
from simkit.train_offload import Offloaded, offloaded
from simkit.train_params import Gathered, Params, exchange, gathered, of_rank, owned, scattered, shard_ranks

Num = Any
ALWAYS = ("forward_s", "backward_s", "optimizer_s", "host_s")
"""Terms that are shown where they are zero, too."""
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
    messages_fn: Callable[[], dict[str, tuple[Num, Num]]]

    @property
    def messages(self) -> dict[str, tuple[Num, Num]]:
        return self.messages_fn()

    @property
    def busy_s(self) -> Num:
        """Seconds in which the device computes."""
        return self.end_s - sum(self.terms.get(k, 0.0) for k in WAITING)


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
    return _step(at, plan, traits, cluster.nodes, scales)


def work_of_sizes(program: Program, model: Model, plan: Plan, law: Law, sizes: Array) -> Priced:
    """What a rank computes at many micro-batches."""
    return _work(program, model, of_points(_once(plan), micro_batch=sizes), law, price)


def sharded_points(
    work: Priced,
    program: Program,
    model: Model,
    *,
    plan: Plan,
    stack: Stack,
    priced: Pricing,
    traits: Traits,
    cluster: Cluster,
    device: Device,
    optimizer_bytes: float,
    sizes: Array,
    size: Any,
    pair: Any,
    accum: Array,
) -> Sharded:
    """`sharded` at many points of one plan at once: every figure is an array over the points, or one for all of them.

    Points differ in micro-batch, links and micro-batches a step; pairs are the points with the last left out. work: at
    `sizes`, the micro-batches that occur; size: of each pair, its place among them; cluster: its links are numbers, or
    arrays over the pairs; pair: of each point, its place among the pairs; accum: micro-batches a step of each point.
    """
    once = of_points(_once(plan), micro_batch=sizes[size])
    at = _arranged(
        work.at(size), program, model, once, stack, priced.law, traits, cluster, device, UNSCALED, optimizer_bytes
    )
    return _step(at.at(pair), of_points(plan, grad_accum=accum), traits, cluster.nodes)


def of_points(plan: Plan, **columns: Any) -> Plan:
    """The plan of many points: some of its numbers are arrays over them. It has no hash."""
    return replace(plan, **columns)


def _step(at: _MicroBatch, plan: Plan, traits: Traits, nodes: int, scales: Scales = UNSCALED) -> Sharded:
    """A step of `plan.grad_accum` micro-batches."""
    stages, exchange_s, wire, latency_s = at.stages, at.exchange_s, at.wire_bytes, at.latency_s
    pipeline = schedules.get(plan.schedule if plan.vpp == 1 else "interleaved").seconds(
        stages.forward_s, stages.backward_s, micro_batches=plan.grad_accum, virtual=plan.vpp, p2p_s=at.p2p_s
    )
    hidden: Num = 0.0
    # What is left of ZeRO-2 gathers updated weights, when there is nothing to hide behind.
    if traits.overlap and plan.zero < 2:
        hidden = np.minimum(exchange_s, stages.backward_s.max(axis=-1))
    m = plan.grad_accum
    terms, ideal = {k: m * v for k, v in at.terms.items()}, m * at.ideal_s
    terms["bubble_s"] = pipeline.end_s - ideal
    terms["straggler_s"] = straggling(nodes) * ideal
    terms["exposed_comm_s"] = terms["exposed_comm_s"] + exchange_s - hidden + traits.interference * hidden
    terms["optimizer_s"] = at.optimizer_s
    terms["host_s"] = traits.step_s * scales.host_s
    terms = _rounded(terms, 1e-12 * (pipeline.end_s + at.optimizer_s))
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
        messages_fn=at.messages_fn,
    )


def _rounded(terms: dict[str, Num], tiny: Num) -> dict[str, Num]:
    """The terms without those that are nothing but rounding; of many points they are zero there."""
    if np.ndim(tiny):
        return {k: v if k in ALWAYS else np.where(v > tiny, v, 0.0) for k, v in terms.items()}
    return {k: float(v) for k, v in terms.items() if v > tiny or k in ALWAYS}


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
    ideal_s: Num
    optimizer_s: float
    p2p_s: Num
    exchange_s: Num
    wire_bytes: Num
    latency_s: Num
    messages_fn: Callable[[], dict[str, tuple[Num, Num]]]

    def at(self, pair: Any) -> _MicroBatch:
        """The same at some of its points, but for `compute` and messages."""
        plain = ("ideal_s", "p2p_s", "exchange_s", "wire_bytes", "latency_s")
        changed: dict[str, Any] = {name: taken(getattr(self, name), pair, 0) for name in plain}
        changed["terms"] = {name: taken(value, pair, 0) for name, value in self.terms.items()}
        return replace(self, stages=self.stages.at(pair), **changed)


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
    work = _work(program, model, plan, law, priced)
    return _arranged(work, program, model, plan, stack, law, traits, cluster, device, scales, optimizer_bytes)


def _work(program: Program, model: Model, plan: Plan, law: Law, by: Any) -> Priced:
    """What a rank computes, by `price` or from its memory."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    found: Priced = by(
        program, law, tensor.degrees(plan.tp, plan.sp, plan.cp, plan.ep), stages=plan.pp,
        micro_batch=plan.micro_batch, seq_len=plan.seq_len, recompute=plan.recompute, causal=spec.causal,
    )  # fmt: skip
    return found


def _arranged(
    work: Priced,
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
    """One micro-batch with its messages on its stages, and the exchange after the last."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    lines = Lines(plan=plan, cluster=cluster, scales=scales, scatter_gather=stack.scatter_gather)
    each = blocks(
        work, program, spec, plan, lines, traits.host_kernel_s * scales.host_s, rho=traits.interference
    )  # fmt: skip
    held = layers_per_stage(len(program.blocks.counts), plan.pp)
    placed = _placed(program, plan.pp)
    params = of_rank(model, tp=plan.tp, ep=plan.ep, held=tuple(held.tolist()))
    stages = _stages(each, placed, held, plan, params, traits, lines, stack.accumulation_passes)
    host = offloaded(plan, params, held, cluster=cluster, device=device, on_host=stack.host_optimizer, scales=scales)
    optimizer_s = owned(plan, params) * optimizer_bytes / (law.memory_Bps * law.sustained)
    if host is not None:
        stages = stages.streamed(host)
        optimizer_s = host.optimizer_s + (0.0 if stack.host_optimizer else optimizer_s)
    p2p_s = lines.stage_message(spec.hidden)
    exchange_s, wire, latency_s = exchange(
        plan, params, lines, gather_bytes=traits.gather_dtype_bytes, reduce_bytes=traits.reduce_dtype_bytes,
        owners=stack.zero_owners,
    )  # fmt: skip
    terms, ideal_s = _terms(each, placed, plan, stages)
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
        messages_fn=partial(_messages, each, program, plan, p2p_s, stages.gathered, exchange_s),
    )


@lru_cache(maxsize=1024)
def _placed(program: Program, stages: int) -> Array:
    """Blocks of each kind on each stage, shape (stages, kinds)."""
    return kinds(program).held(layers_per_stage(len(program.blocks.counts), stages).tolist())


STRAGGLER = 0.01
"""Standard deviation of the speed of one node over that of its fellows: assumed, half of the 2 % by which servers of
one GPU family from several vendors differ in published benchmark rounds."""


def straggling(nodes: int) -> float:
    """How much longer than the mean the slowest of `nodes` normal nodes takes, as a share: sigma · sqrt(2 ln n), the
    leading term of the expected maximum (Cramer 1946, section 28.6); 0 for one node."""
    return STRAGGLER * math.sqrt(2.0 * math.log(max(nodes, 1)))


def _terms(each: Blocks, placed: Array, plan: Plan, stages: _Stages) -> tuple[dict[str, Num], Num]:
    """(terms of the slowest stage for one micro-batch, their sum)."""
    total = stages.forward_s + stages.backward_s
    slowest = total.argmax(axis=-1)
    ideal = _of_stage(total, slowest)
    share = _shares(each, slowest, placed[slowest], plan)
    share["accumulation"] = _of_stage(stages.accumulated_s, slowest)
    share["exposed_comm"] = _of_stage(stages.scattered_s, slowest)
    share["offload"] = _of_stage(stages.offload_s, slowest)
    share["sharding"] = np.maximum(ideal - sum(share.values()), 0.0)
    return {f"{name}_s": seconds for name, seconds in share.items()}, ideal


def _of_stage(values: Array, stage: Any) -> Num:
    """The values of one stage, of each point its own."""
    if values.ndim == 1:
        return values[stage]
    return np.take_along_axis(values, stage[..., None], axis=-1)[..., 0]


def _messages(
    each: Blocks, program: Program, plan: Plan, p2p_s: Num, found: Gathered | None, exchange_s: Num
) -> dict[str, tuple[Num, Num]]:
    """Seconds of the network by kind of message."""
    messages = each.messages(program)
    if plan.pp > 1:
        messages["pipeline stages"] = (p2p_s * (plan.pp - 1), p2p_s * (plan.pp - 1))
    if found is not None:
        messages["sharded parameters"] = (found.gather_s, found.reduce_s)
    if np.any(exchange_s):
        messages["gradient exchange"] = (0.0, exchange_s)
    return messages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stages:
    """Seconds of each stage per micro-batch; accumulated_s: what adding up gradients takes of the backward pass;
    scattered_s: what scattering them adds, where they are sharded; offload_s: what copies to and from the host add;
    gathered: the collectives of sharded parameters."""

    forward_s: Array
    backward_s: Array
    accumulated_s: Array
    scattered_s: Array
    offload_s: Array
    gathered: Gathered | None

    def at(self, pair: Any) -> _Stages:
        """The same at some of its points."""
        return _Stages(
            forward_s=taken(self.forward_s, pair, 1),
            backward_s=taken(self.backward_s, pair, 1),
            accumulated_s=self.accumulated_s,
            scattered_s=taken(self.scattered_s, pair, 1),
            offload_s=taken(self.offload_s, pair, 1),
            gathered=None if self.gathered is None else self.gathered.at(pair),
        )

    def streamed(self, host: Offloaded) -> _Stages:
        """The stages beside the PCIe slot, which carries both directions at once."""
        forward_s = host.passed(self.forward_s)
        backward_s = np.maximum(host.passed(self.backward_s), host.down_s)
        added = forward_s + backward_s - self.forward_s - self.backward_s
        return replace(self, forward_s=forward_s, backward_s=backward_s, offload_s=added)


def _stages(
    each: Blocks,
    placed: Array,
    held: Any,
    plan: Plan,
    params: Params,
    traits: Traits,
    lines: Lines,
    passes: float,
) -> _Stages:
    """The blocks of each stage with its ends, and with the collectives of its parameters where they are sharded."""
    f, g = each.forward_all_s, each.backward_all_s
    found = None
    before, after = each.before, each.after
    if plan.zero >= 3 and plan.dp * plan.cp > 1:
        found = gathered(
            f, g, before, after, plan, params, lines, layers=int(held.sum()),
            gather_bytes=traits.gather_dtype_bytes, reduce_bytes=traits.reduce_dtype_bytes,
            interference=traits.interference,
        )  # fmt: skip
        f, g, before, after = found.forward_s, found.backward_s, found.before, found.after
    # Every micro-batch adds its gradients, or its share of them, to those before it.
    shards = shard_ranks(plan) if plan.zero >= 2 else 1
    accumulated = held * params.block * (passes * traits.reduce_dtype_bytes / traits.memory_Bps / shards)
    first, last = _ends(plan.pp)
    forward = f @ placed.T + column(before[0]) * first + column(after[0]) * last
    backward = g @ placed.T + accumulated + column(before[1]) * first + column(after[1]) * last
    sent_s = scattered(plan, params, lines, held, reduce_bytes=traits.reduce_dtype_bytes)
    if traits.overlap:
        sent_s = exposed(sent_s, backward, 0, traits.interference)
    return _Stages(
        forward_s=forward, backward_s=backward + sent_s, accumulated_s=accumulated, scattered_s=sent_s,
        offload_s=0.0 * forward, gathered=found,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _ends(stages: int) -> tuple[Array, Array]:
    """1 for the first stage, and for the last."""
    places = np.eye(stages)
    return places[0], places[-1]


def _shares(each: Blocks, stage: Any, held: Array, plan: Plan) -> dict[str, Num]:
    """Seconds of the slowest stage's micro-batch by kind, before anything waits for sharded parameters. held: its
    blocks of each kind."""
    first, last = stage == 0, stage == plan.pp - 1

    def of(seconds: Num) -> Num:
        if held.ndim == 1 and np.ndim(seconds):
            return seconds @ held
        return (seconds * held).sum(axis=-1)

    forward, backward, recompute = of(each.forward_s), of(each.backward_s), of(each.recompute_s)
    sent = of(each.tp_forward_s + each.tp_backward_s)
    launched = of(each.forward_all_s + each.backward_all_s) - forward - backward - recompute - sent
    return {
        "forward": forward + first * each.before[0] + last * each.after[0],
        "backward": backward + first * each.before[1] + last * each.after[1],
        "recompute": recompute,
        "tp_comm": sent,
        "launch": np.maximum(launched, 0.0),
    }


__all__ = ["ALWAYS", "WAITING", "Sharded", "Traits", "of_points", "sharded", "sharded_points", "work_of_sizes"]
