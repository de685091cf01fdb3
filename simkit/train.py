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
from simkit.price import UNSCALED, Compute, Pricing, Scales, scaled
from simkit.program import Program
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster, Device
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import Plan, once
from simkit.spec.stack import Stack
from simkit.train_blocks import Blocks, Priced, price, priced, taken
from simkit.train_messages import Lines
from simkit.train_params import Gathered, exchange
from simkit.train_stages import Laid, Stages, Traits, home, laid_near, laid_out

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
        program, model, once(plan), stack, scaled(priced.law, scales), traits, cluster, device, scales, optimizer_bytes
    )
    return _step(at, plan, traits, cluster.nodes, scales)


def work_of_sizes(program: Program, model: Model, plan: Plan, law: Law, sizes: Array) -> Priced:
    """What a rank computes at many micro-batches."""
    return _work(program, model, of_points(once(plan), micro_batch=sizes), law, price)


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
    first = of_points(once(plan), micro_batch=sizes[size])
    law, some = priced.law, work.at(size)
    laid = laid_out(some, program, model, first, stack, law, traits, cluster, device, UNSCALED, optimizer_bytes)
    at = _arranged(some, laid, program, model, first, stack, traits, cluster, UNSCALED)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MicroBatch:
    """All that does not depend on how many micro-batches make a step; ideal_s: the sum of the terms."""

    stages: Stages
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
    near = home(cluster, plan)
    if near is not None:
        laid = laid_near(work, program, model, plan, stack, law, traits, near, device, scales, optimizer_bytes)
    else:
        laid = laid_out(work, program, model, plan, stack, law, traits, cluster, device, scales, optimizer_bytes)
    return _arranged(work, laid, program, model, plan, stack, traits, cluster, scales)


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
    laid: Laid,
    program: Program,
    model: Model,
    plan: Plan,
    stack: Stack,
    traits: Traits,
    cluster: Cluster,
    scales: Scales,
) -> _MicroBatch:
    """One micro-batch with its messages on its stages, and the exchange after the last."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    lines = Lines(plan=plan, cluster=cluster, scales=scales, scatter_gather=stack.scatter_gather)
    each, stages, params = laid.each, laid.stages, laid.params
    p2p_s = lines.stage_message(spec.hidden)
    exchange_s, wire, latency_s = exchange(
        plan, params, lines, gather_bytes=traits.gather_dtype_bytes, reduce_bytes=traits.reduce_dtype_bytes,
        owners=stack.zero_owners,
    )  # fmt: skip
    return _MicroBatch(
        stages=stages,
        compute=work.compute,
        terms=laid.terms,
        ideal_s=laid.ideal_s,
        optimizer_s=laid.optimizer_s,
        p2p_s=p2p_s,
        exchange_s=exchange_s,
        wire_bytes=wire,
        latency_s=latency_s,
        messages_fn=partial(_messages, each, program, plan, p2p_s, stages.gathered, exchange_s),
    )


STRAGGLER = 0.01
"""Standard deviation of the speed of one node over that of its fellows: assumed, half of the 2 % by which servers of
one GPU family from several vendors differ in published benchmark rounds."""


def straggling(nodes: int) -> float:
    """How much longer than the mean the slowest of `nodes` normal nodes takes, as a share: sigma · sqrt(2 ln n), the
    leading term of the expected maximum (Cramer 1946, section 28.6); 0 for one node."""
    return STRAGGLER * math.sqrt(2.0 * math.log(max(nodes, 1)))


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


__all__ = ["ALWAYS", "WAITING", "Sharded", "Traits", "of_points", "sharded", "sharded_points", "work_of_sizes"]
