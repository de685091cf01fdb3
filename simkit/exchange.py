"""The gradient exchange of data-parallel training, priced: from a Program and a plan to the `Step` that is scheduled.

Tensors are taken in the order in which back-propagation completes them, merged into buffers by the plan's rule, and
each buffer becomes a chain of device work and collectives as its compressor describes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit import network, plugins, roofline
from simkit.price import UNSCALED, Compute, Scales
from simkit.program import Program
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster
from simkit.spec.model import Model
from simkit.spec.plan import Plan
from simkit.timeline import Step

Shapes = tuple[tuple[int, ...], ...]
Cost = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """What one step exchanges. steps: one per variant of the compressor (two for ACP-SGD), to be averaged.
    wire_bytes: bytes a rank contributes per step (mean over variants); buckets: buffers per step (mean)."""

    steps: tuple[Step, ...]
    wire_bytes: float
    buckets: float
    collectives: tuple[str, ...]


@lru_cache(maxsize=256)
def ordered_shapes(program: Program, model: Model) -> Shapes:
    """Shapes in the order of readiness; equal experts stand as one tall matrix."""
    tensors = [model.tensors[i] for i in program.tensor_index]
    return tuple((t.shape[0] * t.repeat, *t.shape[1:]) for t in tensors)


@lru_cache(maxsize=1024)
def collective_cost(op: str, cluster: Cluster, algorithm: str) -> Cost:
    """Seconds of a collective over all ranks, as a function of bytes (nccl-tests convention)."""
    return network.seconds_fn(op, cluster=cluster, algorithm=None if algorithm == "auto" else algorithm)


def scaled_cost(cost: Cost, scales: Scales) -> Cost:
    """The same cost with bandwidth and latency multiplied: t(n) = t(0)·latency + (t(n) - t(0)) / bandwidth."""
    if scales.network_Bps == 1.0 and scales.network_latency == 1.0:
        return cost
    latency_s = float(cost(0.0))

    def changed(nbytes: Any) -> Any:
        return latency_s * scales.network_latency + (cost(nbytes) - latency_s) / scales.network_Bps

    return changed


@lru_cache(maxsize=1024)
def _work(key: str, shapes: Shapes, plan: Plan, stage: str, variant: int, phase: int | None, ranks: int) -> Any:
    module = plugins.get("simkit.compressors", key)
    return module.work(shapes, plan=plan, stage=stage, variant=variant, ranks=ranks, phase=phase)


@lru_cache(maxsize=1024)
def _wire(key: str, shapes: Shapes, plan: Plan, phase: int, variant: int) -> Array:
    module = plugins.get("simkit.compressors", key)
    return np.asarray(module.wire_bytes(shapes, plan=plan, phase=phase, variant=variant))


def _relevant(plan: Plan) -> Plan:
    """The part of a plan that compressors read, so that their results are shared between scenarios."""
    return Plan(method=plan.method, rank=plan.rank, density=plan.density, bucket_bytes=plan.bucket_bytes, fusion=plan.fusion, reduce_dtype=plan.reduce_dtype)


def exchange(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    compute: Compute,
    law: Law,
    cluster: Cluster,
    optimizer_s: float,
    host_s: float,
    message_s: float,
    scales: Scales = UNSCALED,
) -> Exchange:
    """The priced step of every variant of the plan's compressor.

    law: that of fp32 arithmetic, in which gradients are compressed. message_s: what the stack adds per buffer.
    """
    backward_s = compute.backward_s[program.backward.order]
    forward_s = compute.total(program.forward, backward=False)
    if plan.recompute != "none":
        # A block is replayed right before its own backward pass.
        backward_s[program.blocks.starts] += program.replayed(plan.recompute) @ compute.forward_s
    base = Step(
        forward_s=forward_s,
        backward_s=backward_s,
        ready=np.zeros(0, dtype=np.int64),
        encode_s=np.zeros(0),
        comm_s=np.zeros((1, 0)),
        between_s=np.zeros((0, 0)),
        decode_s=np.zeros(0),
        optimizer_s=optimizer_s,
        accumulation_s=(plan.grad_accum - 1) * (forward_s + float(backward_s.sum())),
        host_s=host_s,
        overlap=plan.overlap,
    )
    if plan.dp <= 1:
        return Exchange(steps=(base,), wire_bytes=0.0, buckets=0.0, collectives=())
    module = plugins.get("simkit.compressors", plan.method)
    shapes = ordered_shapes(program, model)
    built = [
        _variant(base, module, v, shapes=shapes, program=program, plan=plan, law=law, cluster=cluster, message_s=message_s, scales=scales)
        for v in range(module.variants(plan))
    ]
    return Exchange(
        steps=tuple(step for step, _ in built),
        wire_bytes=float(np.mean([wire for _, wire in built])),
        buckets=float(np.mean([len(step.ready) for step, _ in built])),
        collectives=tuple(dict.fromkeys(module.OP)),
    )


def _variant(
    base: Step,
    module: ModuleType,
    variant: int,
    *,
    shapes: Shapes,
    program: Program,
    plan: Plan,
    law: Law,
    cluster: Cluster,
    message_s: float,
    scales: Scales,
) -> tuple[Step, float]:
    relevant = _relevant(plan)
    wires = [_wire(plan.method, shapes, relevant, phase, variant) for phase in range(module.PHASES)]
    costs = [scaled_cost(collective_cost(op, cluster, plan.algorithm), scales) for op in module.OP]
    # All-gather counts the gathered size, all-reduce the buffer.
    shares = [float(plan.dp) if op == "all_gather" else 1.0 for op in module.OP]
    group = groups(module, variant, shapes=shapes, program=program, plan=relevant, base=base, cost=lambda b: costs[0](b * shares[0]) + message_s)
    count = int(group[-1]) + 1 if len(group) else 0
    last = np.flatnonzero(np.diff(group, append=count)) if count else np.zeros(0, dtype=np.int64)

    def per_bucket(values: Array) -> Array:
        return np.bincount(group, weights=values, minlength=count)

    def device(stage: str, phase: int | None = None) -> Array:
        work = _work(plan.method, shapes, relevant, stage, variant, phase, plan.dp)
        return per_bucket(work.per_tensor(roofline.seconds(work.columns, law)[0]))

    sent = [per_bucket(w) for w in wires]
    comm_s = [np.where(b > 0, cost(b * share) + message_s, 0.0) for cost, share, b in zip(costs, shares, sent, strict=True)]
    between = [device("between", phase) for phase in range(1, module.PHASES)]
    step = replace(
        base,
        ready=program.ready[last],
        encode_s=device("encode"),
        comm_s=np.array(comm_s).reshape(module.PHASES, count),
        between_s=np.array(between).reshape(module.PHASES - 1, count),
        decode_s=device("decode"),
        placement=module.PLACEMENT,
        blocking=module.BLOCKING,
        bucket_bytes=np.sum(sent, axis=0),
    )
    return step, float(sum(w.sum() for w in wires))


def groups(module: ModuleType, variant: int, *, shapes: Shapes, program: Program, plan: Plan, base: Step, cost: Cost) -> NDArray[np.int64]:
    """Which buffer each tensor rides in, in the order of readiness."""
    sizes, threshold = module.fusing(shapes, plan=plan, variant=variant)
    key = module.BUCKETS if plan.fusion == "bucket" else plan.fusion
    if key != "optimal":
        return _groups(key, shapes, plan, variant)
    ready_s = base.forward_s + np.cumsum(base.backward_s)[program.ready]
    rule = plugins.get("simkit.fusion", key)
    return np.asarray(rule.groups(sizes, threshold_bytes=threshold, ready_s=ready_s, seconds=cost))


@lru_cache(maxsize=1024)
def _groups(key: str, shapes: Shapes, plan: Plan, variant: int) -> NDArray[np.int64]:
    """Rules that look at sizes alone give the same answer whatever the seconds are."""
    sizes, threshold = plugins.get("simkit.compressors", plan.method).fusing(shapes, plan=plan, variant=variant)
    rule = plugins.get("simkit.fusion", key)
    return np.asarray(rule.groups(sizes, threshold_bytes=threshold, ready_s=np.arange(len(sizes), dtype=float), seconds=None))
