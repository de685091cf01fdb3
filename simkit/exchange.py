"""The gradient exchange of data-parallel training, priced: from a Program and a plan to the `Step` that is scheduled.

Tensors are taken in the order in which back-propagation completes them, merged into buffers by the plan's rule, and
each buffer becomes a chain of device work and collectives as its compressor describes it. What does not depend on the
batch (bytes, buffers, compression work) is worked out once per network, method and device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simkit import network, plugins, roofline
from simkit.price import UNSCALED, Compute, Scales, hosted, plain
from simkit.program import Program
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster
from simkit.spec.model import Model
from simkit.spec.plan import Plan
from simkit.timeline import Step, Sums

Shapes = tuple[tuple[int, ...], ...]
Cost = Callable[[Any], Any]
Ints = NDArray[np.int64]


class Method(NamedTuple):
    """The part of a plan that decides what is exchanged; scenarios that share it share the work."""

    method: str
    rank: int
    density: float
    bucket_bytes: float
    fusion: str
    reduce_dtype: str
    ranks: int

    @classmethod
    def of(cls, plan: Plan) -> Method:
        return cls(plan.method, plan.rank, plan.density, plan.bucket_bytes, plan.fusion, plan.reduce_dtype, plan.dp)

    def plan(self) -> Plan:
        """A plan with these fields, for the compressors to read."""
        return Plan(
            method=self.method,
            rank=self.rank,
            density=self.density,
            bucket_bytes=self.bucket_bytes,
            fusion=self.fusion,
            reduce_dtype=self.reduce_dtype,
            dp=self.ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """What one step exchanges. steps: one per variant of the compressor (two for ACP-SGD), to be averaged.
    sums: the running sums of each. wire_bytes: bytes a rank contributes per step (mean over variants); buckets: buffers
    per step (mean); latency_s: what the collectives of a step would take without any bytes; comm_s: what they take
    (means)."""

    steps: tuple[Step, ...]
    wire_bytes: float
    buckets: float
    latency_s: float
    comm_s: float
    collectives: tuple[str, ...]
    sums: tuple[Sums, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tensors:
    """Per tensor, in the order of readiness: bytes on the wire by phase, device seconds by stage. shares: what a byte
    counts in its collective (all-gather: the gathered size, all-reduce: the buffer)."""

    module: ModuleType
    sizes: Array
    threshold: float
    wires: tuple[Array, ...]
    encode_s: Array
    between_s: tuple[Array, ...]
    decode_s: Array
    plain_bytes: Array
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buckets:
    """The same summed over the members of each buffer; ready: the backward segment that completes it."""

    ready: Ints
    sent: tuple[Array, ...]
    encode_s: Array
    between_s: Array
    decode_s: Array
    plain_bytes: Array
    wire: Array
    wire_bytes: float
    encoded_s: Array
    compression_s: float
    messages: tuple[int, ...]
    """Buffers with any bytes in them, phase by phase."""


class _Sent(NamedTuple):
    """Seconds of each collective, shape (phases, buckets), their running sums (`Sums`), and what they take without
    any bytes."""

    comm_s: Array
    served_s: Array
    merged_s: Array
    busy_s: float
    latency_s: float


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


@lru_cache(maxsize=512)
def _tensors(program: Program, model: Model, method: Method, variant: int, law: Law) -> _Tensors:
    module = plugins.get("simkit.compressors", method.method)
    shapes, plan = ordered_shapes(program, model), method.plan()
    sizes, threshold = module.fusing(shapes, plan=plan, variant=variant)
    factor = dict(law.compress).get(method.method, 1.0)

    def device(stage: str, phase: int | None = None) -> Array:
        work = module.work(shapes, plan=plan, stage=stage, variant=variant, ranks=method.ranks, phase=phase)
        summed: Array = work.per_tensor(roofline.seconds(work.columns, law)[0]) * factor
        return summed

    phases = range(module.PHASES)
    return _Tensors(
        module=module,
        sizes=np.asarray(sizes),
        threshold=threshold,
        wires=tuple(np.asarray(module.wire_bytes(shapes, plan=plan, phase=p, variant=variant)) for p in phases),
        encode_s=device("encode"),
        between_s=tuple(device("between", p) for p in phases[1:]),
        decode_s=device("decode"),
        plain_bytes=_plain_bytes(shapes),
        shares=tuple(float(method.ranks) if op == "all_gather" else 1.0 for op in module.OP),
    )


@lru_cache(maxsize=64)
def _plain_bytes(shapes: Shapes) -> Array:
    return np.array([4.0 * prod(s) for s in shapes])


@lru_cache(maxsize=512)
def _static_buckets(program: Program, tensors: _Tensors, rule: str) -> _Buckets:
    """Rules that look at sizes alone give the same buffers whatever the seconds are."""
    order = np.arange(len(tensors.sizes), dtype=float)
    group = plugins.get("simkit.fusion", rule).groups(
        tensors.sizes, threshold_bytes=tensors.threshold, ready_s=order, seconds=None
    )
    return _summed(program, tensors, np.asarray(group))


def _summed(program: Program, tensors: _Tensors, group: Ints) -> _Buckets:
    count = int(group[-1]) + 1 if len(group) else 0
    last = np.flatnonzero(np.diff(group, append=count)) if count else np.zeros(0, dtype=np.int64)

    def per_bucket(values: Array) -> Array:
        return np.bincount(group, weights=values, minlength=count).astype(np.float64)

    between_s = np.array([per_bucket(v) for v in tensors.between_s]).reshape(len(tensors.between_s), count)
    encode_s, decode_s = per_bucket(tensors.encode_s), per_bucket(tensors.decode_s)
    sent = tuple(per_bucket(w) for w in tensors.wires)
    wire = np.array(sent)
    return _Buckets(
        ready=program.ready[last],
        sent=sent,
        encode_s=encode_s,
        between_s=between_s,
        decode_s=decode_s,
        plain_bytes=per_bucket(tensors.plain_bytes),
        wire=wire,
        wire_bytes=float(wire.sum()),
        encoded_s=encode_s.cumsum(),
        compression_s=float(encode_s.sum() + between_s.sum() + decode_s.sum()),
        messages=tuple(int(np.count_nonzero(w > 0)) for w in sent),
    )


def message_seconds(cost: Cost, sent_bytes: Array, share: float, message_s: float, *, every: bool = False) -> Array:
    """Seconds of the collectives that carry these bytes of every buffer; no bytes is no message. every: there is no
    such buffer."""
    if every:
        return np.asarray(cost(sent_bytes * share) + message_s)
    return np.where(sent_bytes > 0, cost(sent_bytes * share) + message_s, 0.0)


@lru_cache(maxsize=512)
def _messages(
    buckets: _Buckets,
    tensors: _Tensors,
    cluster: Cluster,
    algorithm: str,
    message_s: float,
    network_Bps: float,
    network_latency: float,
) -> _Sent:
    scales = Scales(network_Bps=network_Bps, network_latency=network_latency)
    count, latency_s = len(buckets.ready), 0.0
    comm_s = np.empty((len(buckets.sent), count))
    for phase, (op, share, sent) in enumerate(zip(tensors.module.OP, tensors.shares, buckets.sent, strict=True)):
        cost = scaled_cost(collective_cost(op, cluster, algorithm), scales)
        comm_s[phase] = message_seconds(cost, sent, share, message_s, every=buckets.messages[phase] == count)
        latency_s += buckets.messages[phase] * (float(cost(0.0)) + message_s)
    served_s = comm_s.cumsum(axis=1)
    merged_s = served_s[0] if len(comm_s) == 1 else comm_s.sum(axis=0).cumsum()
    busy_s = float(merged_s[-1]) if count else 0.0
    return _Sent(comm_s=comm_s, served_s=served_s, merged_s=merged_s, busy_s=busy_s, latency_s=latency_s)


def buffers(program: Program, model: Model, *, plan: Plan, law: Law) -> list[tuple[_Tensors, _Buckets]]:
    """What every variant of the plan's compressor exchanges, under a rule that looks at sizes alone."""
    module, method = plugins.get("simkit.compressors", plan.method), Method.of(plan)
    rule = module.BUCKETS if plan.fusion == "bucket" else plan.fusion
    found = [_tensors(program, model, method, variant, law) for variant in range(module.variants(plan))]
    return [(tensors, _static_buckets(program, tensors, rule)) for tensors in found]


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
    host_kernel_s: float = 0.0,
) -> Exchange:
    """The priced step of every variant of the plan's compressor.

    law: that of fp32 arithmetic, in which gradients are compressed. message_s: what the stack adds per buffer;
    host_kernel_s: what the host takes to launch a kernel (`hosted`).
    """
    passes = _passes(program, compute, host_kernel_s, plan.recompute)
    base = _alone(passes, plan, optimizer_s, host_s)
    if plan.dp <= 1:
        sums = _sums(passes, _EMPTY, 0.0, _NOTHING)
        return Exchange(
            steps=(base,), wire_bytes=0.0, buckets=0.0, latency_s=0.0, comm_s=0.0, collectives=(), sums=(sums,)
        )
    method = Method.of(plan)
    module = plugins.get("simkit.compressors", plan.method)
    rule = module.BUCKETS if plan.fusion == "bucket" else plan.fusion
    steps, every, wire, buckets, latency_s, busy_s = [], [], 0.0, 0, 0.0, 0.0
    variants = module.variants(plan)
    for variant in range(variants):
        tensors = _tensors(program, model, method, variant, law)
        if rule == "optimal":
            group = _optimal(program, tensors, base, cluster, plan, message_s, scales)
            merged = _summed(program, tensors, group)
        else:
            merged = _static_buckets(program, tensors, rule)
        sent = _messages(
            merged, tensors, cluster, plan.algorithm, message_s, scales.network_Bps, scales.network_latency
        )
        steps.append(_chained(base, module, merged, sent.comm_s))
        every.append(_sums(passes, merged.encoded_s, merged.compression_s, sent))
        wire += merged.wire_bytes
        buckets += len(merged.ready)
        latency_s += sent.latency_s
        busy_s += sent.busy_s
    return Exchange(
        steps=tuple(steps),
        wire_bytes=wire / variants,
        buckets=buckets / variants,
        latency_s=latency_s / variants,
        comm_s=busy_s / variants,
        collectives=tuple(dict.fromkeys(module.OP)),
        sums=tuple(every),
    )


def alone(
    program: Program, plan: Plan, compute: Compute, optimizer_s: float, host_s: float, host_kernel_s: float
) -> Step:
    """The step of a rank that exchanges nothing; forward and backward wait for their launches where the host is
    slower. Leading axes of `compute` (points of a sweep) are kept."""
    points = isinstance(compute.backward_total_s, np.ndarray)
    passes = (_passed if points else _passes)(program, compute, host_kernel_s, plan.recompute)
    return _alone(passes, plan, optimizer_s, host_s)


class _Passes(NamedTuple):
    """Forward and backward pass of a micro-batch: seconds, of every backward segment, of all of them, and when each
    ends (`Sums.done_s`; None where they are of many points)."""

    forward_s: Any
    backward_s: Array
    total_s: Any
    done_s: Any = None


@lru_cache(maxsize=1024)
def _passes(program: Program, compute: Compute, host_kernel_s: float, recompute: str) -> _Passes:
    found = _passed(program, compute, host_kernel_s, recompute)
    done_s = np.zeros(len(found.backward_s) + 1)
    found.backward_s.cumsum(out=done_s[1:])
    return found._replace(done_s=done_s)


def _passed(program: Program, compute: Compute, host_kernel_s: float, recompute: str) -> _Passes:
    device_f, device_b = compute.forward_total_s, compute.backward_total_s
    forward_s = hosted(device_f, program.forward.launches * host_kernel_s)
    backward_s = compute.backward_s[..., program.backward.order]
    backward_s = backward_s * _waiting(device_b, program.backward.launches * host_kernel_s)
    if recompute != "none":
        # A block is replayed right before its own backward pass, by the same host.
        replayed = program.replayed(recompute)
        replays_s = compute.forward_s @ replayed.T
        launched_s = float((replayed @ program.forward.kernels).sum()) * host_kernel_s
        backward_s[..., program.blocks.starts] += replays_s * _waiting(plain(replays_s.sum(axis=-1)), launched_s)
    total_s = backward_s.sum(axis=-1) if backward_s.ndim > 1 else float(backward_s.sum())
    return _Passes(forward_s, backward_s, total_s)


def _waiting(device_s: Any, host_s: float) -> Any:
    """How much longer a pass takes because the host launches it; ready to meet an axis of segments."""
    if isinstance(device_s, np.ndarray):
        launched_s = hosted(device_s, host_s)
        return np.divide(launched_s, device_s, out=np.ones_like(device_s), where=device_s > 0.0)[..., None]
    return hosted(device_s, host_s) / device_s if device_s > 0.0 else 1.0


def _alone(passes: _Passes, plan: Plan, optimizer_s: float, host_s: float) -> Step:
    return Step(
        forward_s=passes.forward_s,
        backward_s=passes.backward_s,
        ready=_NONE,
        encode_s=_EMPTY,
        comm_s=_NO_MESSAGES,
        between_s=_NO_PHASES,
        decode_s=_EMPTY,
        optimizer_s=optimizer_s,
        accumulation_s=(plan.grad_accum - 1) * (passes.forward_s + passes.total_s),
        host_s=host_s,
        overlap=plan.overlap,
    )


def _sums(passes: _Passes, encoded_s: Array, compression_s: float, sent: _Sent) -> Sums:
    return Sums(passes.done_s, encoded_s, compression_s, sent.served_s, sent.merged_s, sent.busy_s)


_EMPTY: Array = np.zeros(0)
_NONE: Ints = np.zeros(0, dtype=np.int64)
_NO_MESSAGES: Array = np.zeros((1, 0))
_NO_PHASES: Array = np.zeros((0, 0))
_NOTHING = _Sent(comm_s=_NO_MESSAGES, served_s=_NO_MESSAGES, merged_s=_EMPTY, busy_s=0.0, latency_s=0.0)


def _chained(base: Step, module: ModuleType, merged: _Buckets, comm_s: Array) -> Step:
    return Step(
        forward_s=base.forward_s,
        backward_s=base.backward_s,
        optimizer_s=base.optimizer_s,
        accumulation_s=base.accumulation_s,
        host_s=base.host_s,
        overlap=base.overlap,
        ready=merged.ready,
        encode_s=merged.encode_s,
        comm_s=comm_s,
        between_s=merged.between_s,
        decode_s=merged.decode_s,
        placement=module.PLACEMENT,
        blocking=module.BLOCKING,
        bucket_bytes=merged.plain_bytes,
        wire_bytes=merged.wire,
    )


def _optimal(
    program: Program, tensors: _Tensors, base: Step, cluster: Cluster, plan: Plan, message_s: float, scales: Scales
) -> Ints:
    """MG-WFBP's grouping, for the cost of the first phase's collective."""
    cost = scaled_cost(collective_cost(tensors.module.OP[0], cluster, plan.algorithm), scales)
    ready_s = base.forward_s + np.cumsum(base.backward_s)[program.ready]
    rule = plugins.get("simkit.fusion", "optimal")
    group = rule.groups(
        tensors.sizes,
        threshold_bytes=tensors.threshold,
        ready_s=ready_s,
        seconds=lambda b: cost(b * tensors.shares[0]) + message_s,
    )
    return np.asarray(group)
