"""One point of the line: a resolved scenario priced, arranged in time and weighed in memory; no defaults, no prose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simkit.exchange import Exchange, Method, exchange
from simkit.memory import exchange_bytes, memory, staged, verdicts
from simkit.memory_facts import memory_facts
from simkit.price import UNSCALED, Compute, Pricing, Scales, compute, optimizer_seconds, pricing, scaled
from simkit.program import Program
from simkit.report import Memory
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster, Device
from simkit.spec.model import Model
from simkit.spec.plan import DTYPE_BYTES, Plan, once
from simkit.spec.priors import prior
from simkit.spec.resolve import Resolved
from simkit.spec.stack import Stack
from simkit.timeline import Step, Sums, Timeline, schedule, stretch, stretched
from simkit.units import GIB
from simkit.workloads import Numerics, program

if TYPE_CHECKING:
    from simkit import train

CAST_BYTES = 6.0
"""Autocast reads the fp32 weight and writes its 16-bit copy (4 + 2 bytes) forward, and the reverse for its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """Everything one prediction rests on. timelines: one per variant of the compressor; end_s and breakdown: their
    mean. device: the slowest device of the cluster, which sets the pace of synchronous training."""

    end_s: float
    breakdown: Mapping[str, float]
    timelines: tuple[Timeline, ...]
    exchange: Exchange
    compute: Compute
    program: Program
    memory: Memory
    device: Device
    pricing: Pricing
    messages_fn: Callable[[], Mapping[str, tuple[float, float]]] = dict

    @property
    def messages(self) -> Mapping[str, tuple[float, float]]:
        """Seconds that the network is busy for one micro-batch {kind: (forward, backward)}, see `train.Sharded`."""
        return self.messages_fn()


@lru_cache(maxsize=512)
def numerics(
    precision: str,
    master_dtype: str,
    attention: str,
    compiled: bool,
    head_share: float,
    windowed: bool,
    fused: frozenset[str],
    autocast: bool,
    plain_softmax: bool = False,
    selective: str = "scores",
) -> Numerics:
    """What the workload must know of a plan. windowed: sequences exceed the sliding window of the network."""
    element = DTYPE_BYTES[precision]
    return Numerics(
        element_bytes=max(element, 2.0),
        cast_bytes=CAST_BYTES if autocast and element < DTYPE_BYTES[master_dtype] else 0.0,
        attention=attention,
        compiled=compiled,
        head_share=head_share,
        windowed=windowed,
        fused=fused,
        plain_softmax=plain_softmax,
        selective=selective,
    )


def workload(model: Model, plan: Plan, stack: Stack) -> Program:
    """What one micro-batch of that model computes under the numerics of the plan, on that stack."""
    window = getattr(model.spec, "window", None)
    windowed = window is not None and plan.seq_len > window
    return program(
        model,
        numerics(
            plan.precision,
            plan.master_dtype,
            plan.attention,
            plan.compile,
            stack.mlm_positions,
            windowed,
            stack.fused,
            stack.autocast,
            bool(plain_softmax(model, plan, stack, plan.micro_batch)),
            memory_facts(stack.name).selective,
        ),
    )


def plain_softmax(model: Model, plan: Plan, stack: Stack, micro_batch: Any) -> Any:
    """Whether a rank's score matrices are no multiple of what the fused masked softmax of the stack takes; an array
    where the micro-batch is one."""
    heads = getattr(model.spec, "heads", 0)
    return (micro_batch * heads // plan.tp % stack.softmax_batches > 0) & (plan.attention == "math")


def evaluate(
    resolved: Resolved, *, scales: Scales = UNSCALED, spans: bool = False, advise: bool = True
) -> Evaluation:
    """Prices and arranges one step of a resolved scenario. advise: look for a way out where it does not fit."""
    plan, model, stack = resolved.plan, resolved.model, resolved.stack
    work = workload(model, plan, stack)
    per_device = [
        (
            device,
            priced,
            compute(work, micro_batch=plan.micro_batch, seq_len=plan.seq_len, law=scaled(priced.law, scales)),
        )
        for device, priced in priced_devices(resolved)
    ]
    each = [_paced(resolved, work, *on, scales, spans, advise) for on in per_device]
    # Synchronous training runs at the pace of the slowest device, never at the mean.
    return max(each, key=lambda found: found.end_s)


def _paced(
    resolved: Resolved,
    work: Program,
    device: Device,
    priced: Pricing,
    cost: Compute,
    scales: Scales,
    spans: bool,
    advise: bool,
) -> Evaluation:
    """The step when every rank computes at the pace of `device`."""
    plan, model = resolved.plan, resolved.model
    if is_sharded(plan):
        calibrated = bool(resolved.scenario.get("calibration", True))
        return _sharded(resolved, work, device, priced, calibrated, scales, advise)
    known = constants(resolved, device, priced, scales)
    traded = exchange(
        work, model, plan=plan, compute=cost, law=known.law, cluster=resolved.cluster, optimizer_s=known.optimizer_s,
        host_s=known.host_s, message_s=known.message_s, scales=scales, host_kernel_s=known.host_kernel_s,
    )  # fmt: skip
    steps = tuple(_named(step, work, cost) for step in traded.steps) if spans else traded.steps
    timelines = tuple(
        schedule(step, spans=spans, interference=known.interference, sums=sums)
        for step, sums in zip(steps, traded.sums, strict=True)
    )
    end_s, breakdown = _averaged(timelines)
    return Evaluation(
        end_s=end_s,
        breakdown=breakdown,
        timelines=timelines,
        exchange=traded,
        compute=cost,
        program=work,
        memory=weigh(resolved, work, model, plan, cost, advise=advise),
        device=device,
        pricing=priced,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """What a step costs whatever its batch and its network. law: of the fp32 arithmetic that compresses gradients;
    message_s: what the stack adds per buffer; host_kernel_s: what the host takes to launch a kernel; interference:
    seconds of compute that a second of hidden communication costs."""

    law: Law
    optimizer_s: float
    host_s: float
    message_s: float
    host_kernel_s: float
    interference: float


def constants(resolved: Resolved, device: Device, priced: Pricing, scales: Scales = UNSCALED) -> Constants:
    """The constants of a data-parallel step on one device."""
    plan, model, stack = resolved.plan, resolved.model, resolved.stack
    calibrated = bool(resolved.scenario.get("calibration", True))
    message = stack.calibration.get("message") if calibrated else None
    return Constants(
        law=scaled(pricing(device, "fp32", stack, fp16_accumulate=False, calibration=calibrated).law, scales),
        optimizer_s=optimizer_seconds(model.params, len(model.tensors), plan, stack, scaled(priced.law, scales)),
        host_s=priced.host_s * scales.host_s,
        message_s=(message["seconds"] if message is not None else 0.0) * scales.host_s,
        host_kernel_s=_host_kernel_s(stack, calibrated, device) * scales.host_s,
        interference=_interference(device, resolved.cluster, calibrated, stack),
    )


def is_sharded(plan: Plan) -> bool:
    """Whether the step goes through `simkit.train` (model parallelism, sharded or offloaded states) rather than buffer
    by buffer."""
    return plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.zero > 0 or plan.offload != "none"


def traits(resolved: Resolved, priced: Pricing, calibrated: bool, scales: Scales = UNSCALED) -> train.Traits:
    """What the stack does with sharded training, on one device."""
    # Most questions need none of it, and a cold command should not pay for what it does not use.
    from simkit import train

    plan, stack = resolved.plan, resolved.stack
    eager = stack.calibration.get("eager") if calibrated else None
    return train.Traits(
        overlap=plan.overlap != "none",
        gather_dtype_bytes=max(DTYPE_BYTES[plan.precision], 2.0),
        reduce_dtype_bytes=DTYPE_BYTES[plan.reduce_dtype],
        host_kernel_s=_host_kernel_s(stack, calibrated, resolved.device),
        step_s=eager.get("step_s", 0.0) if eager is not None else 0.0,
        interference=_interference(resolved.device, resolved.cluster, calibrated, stack),
        memory_Bps=priced.law.memory_Bps * priced.law.sustained * scales.memory_Bps,
    )


def _sharded(
    resolved: Resolved,
    work: Program,
    device: Device,
    priced: Pricing,
    calibrated: bool,
    scales: Scales,
    advise: bool,
) -> Evaluation:
    from simkit import train

    plan, stack = resolved.plan, resolved.stack
    found = train.sharded(
        work,
        resolved.model,
        plan=plan,
        stack=stack,
        priced=priced,
        traits=traits(resolved, priced, calibrated, scales),
        cluster=resolved.cluster,
        device=device,
        scales=scales,
        optimizer_bytes=stack.optimizer_bytes[plan.optimizer],
    )
    terms = found.terms
    line = Timeline(
        end_s=found.end_s,
        breakdown=terms,
        busy_s={"compute": found.busy_s, "comm": found.comm_s},
        comm_end_s=np.zeros(0),
    )
    return Evaluation(
        end_s=found.end_s,
        breakdown=terms,
        timelines=(line,),
        exchange=Exchange(
            steps=(),
            wire_bytes=found.wire_bytes,
            buckets=0.0,
            latency_s=found.latency_s,
            comm_s=found.comm_s,
            collectives=(),
        ),
        compute=found.compute,
        program=work,
        memory=weigh(resolved, work, resolved.model, plan, found.compute, advise=advise),
        device=device,
        pricing=priced,
        messages_fn=found.messages_fn,
    )


def _interference(device: Device, cluster: Cluster, calibrated: bool, stack: Stack) -> float:
    """Seconds of compute that a second of hidden communication costs: of the device, or measured with the link, else
    fitted with the stack, else pooled over GPUs, whose NCCL kernels run beside back-propagation. A CPU on a link nobody
    measured pays nothing."""
    link = cluster.inter if cluster.nodes > 1 else cluster.intra
    measured = (device.calibration, link.calibration if link is not None else {})
    for fits in measured if calibrated else ():
        if "interference" in fits:
            # Processor seconds of a benchmark that had the processor to itself.
            slowed = device.calibration["sustained"]["factor"] if "sustained" in device.calibration else 1.0
            return fits["interference"]["seconds_per_second"] / slowed
    if not calibrated or device.kind == "cpu":
        return 0.0
    eager, pooled = stack.calibration.get("eager"), prior("interference", "seconds_per_second", 0.0)
    return eager.get("interference", pooled) if eager is not None else pooled


def _host_kernel_s(stack: Stack, calibrated: bool, device: Device) -> float:
    """A CPU is its own host: what a launch costs it is in the time of its operators."""
    if device.kind == "cpu":
        return 0.0
    eager = stack.calibration.get("eager") if calibrated else None
    return eager.get("host_kernel_s", HOST_KERNEL_S) if eager is not None else HOST_KERNEL_S


HOST_KERNEL_S = 5e-6
"""Time in which an eager framework launches one kernel: assumed, PyTorch's dispatch and cudaLaunchKernel together."""


def interfered(step: Step, rho: float) -> Step:
    """The step with back-propagation slowed by the collectives that run beside it (`simkit.timeline.stretch`)."""
    factor = stretch(step, Sums.of(step), rho)
    return step if factor == 1.0 else stretched(step, factor)


def _named(step: Step, work: Program, cost: Compute) -> Step:
    """The step with names and bounds of its backward segments, for traces."""
    order = work.backward.order
    names = tuple(work.backward.names[row] for row in order)
    bounds = tuple("arithmetic" if cost.backward_math[row] else "memory" for row in order)
    return replace(step, segment_names=names, segment_bounds=bounds)


def _averaged(timelines: tuple[Timeline, ...]) -> tuple[float, Mapping[str, float]]:
    """(end, breakdown): the mean over the variants of the compressor."""
    first, count = timelines[0], len(timelines)
    if count == 1:
        return first.end_s, first.breakdown
    breakdown = {k: sum(t.breakdown[k] for t in timelines) / count for k in first.breakdown}
    return sum(t.end_s for t in timelines) / count, breakdown


def priced_devices(resolved: Resolved) -> list[tuple[Device, Pricing]]:
    """Every kind of device of the cluster with its pricing under the plan."""
    plan, stack = resolved.plan, resolved.stack
    calibrated = bool(resolved.scenario.get("calibration", True))
    half = plan.fp16_accumulate
    return [
        (device, pricing(device, plan.precision, stack, fp16_accumulate=half, calibration=calibrated))
        for device in dict.fromkeys(resolved.cluster.devices)
    ]


def weigh(
    resolved: Resolved, work: Program, model: Model, plan: Plan, cost: Compute, *, advise: bool = True
) -> Memory:
    """The memory verdict on the device that has the least of it. advise: look for a way out of what does not fit."""
    smallest, reserve, exchanged = _room(resolved, model, plan)
    # A job weighs the same however many micro-batches a step has, once it holds all that it will ever hold; only the
    # way out reads their number.
    accum = 1
    if staged(plan, model):
        from simkit.memory_sharded import most_in_flight

        accum = min(plan.grad_accum, most_in_flight(plan.schedule, plan.pp, plan.vpp))
    found = _weighed(accum, once(plan), work, model, smallest, cost, exchanged, reserve)
    if found.fits or not advise:
        return found
    asked = partial(
        memory, work, model, plan=plan, device=smallest, compute=cost, exchange_bytes=exchanged, reserve_bytes=reserve
    )
    return replace(found, advice=cache(lambda: asked().way_out))


def weigh_points(resolved: Resolved, work: Program, plan: Plan) -> tuple[Array, NDArray[np.bool_], list[str]]:
    """(device_bytes, fits, why_not) at many points of a sharded plan, whose batches are arrays."""
    smallest, reserve, exchanged = _room(resolved, resolved.model, resolved.plan)
    return verdicts(
        work, resolved.model, plan=plan, device=smallest, exchange_bytes=exchanged, reserve_bytes=reserve
    )  # fmt: skip


def _room(resolved: Resolved, model: Model, plan: Plan) -> tuple[Device, float, float]:
    """(the device that has the least memory, bytes of it to keep free, bytes that the exchange of gradients keeps)."""
    smallest = min(resolved.cluster.devices, key=lambda d: d.memory_bytes)
    reserve = float(resolved.scenario.get("memory_reserve_gib", 0.0)) * GIB
    return smallest, reserve, _exchange_bytes(model, Method.of(plan))


@lru_cache(maxsize=1024)
def _weighed(
    accum: int,
    plan: Plan,
    work: Program,
    model: Model,
    device: Device,
    cost: Compute,
    exchanged: float,
    reserve: float,
) -> Memory:
    return memory(
        work, model, plan=replace(plan, grad_accum=accum), device=device, compute=cost,
        exchange_bytes=exchanged, reserve_bytes=reserve,
        advise=False,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _exchange_bytes(model: Model, method: Method) -> float:
    return exchange_bytes(model, method.plan())
