"""One data-parallel iteration by events (simpy): what `simkit.timeline.schedule` answers in closed form.

Every rank is a process that owns its device; the network is one FIFO channel shared by all ranks. A collective joins
the channel when the slowest rank has issued it. Without jitter all ranks are alike and the answer is `schedule`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError, unknown
from simkit.spans import Span, comm_span, kernel_span, segment_span
from simkit.timeline import (
    OVERLAPS,
    PLACEMENTS,
    Step,
    Timeline,
    closing,
    opening,
)

Array = NDArray[np.float64]
Process = Generator[Any, Any, None]

DECISION_PRIORITY = 9
"""Later than simpy's NORMAL (1): a device decides what to run once all that happens at that moment has happened."""

FROM_NETWORK, FROM_SEGMENT = range(2)


def simulate(
    step: Step, *, jitter: float | None = None, seed: int = 0, ranks: int = 1, spans: bool = False
) -> Timeline:
    """The timeline of one iteration with `ranks` devices.

    jitter: sigma of a lognormal factor of mean 1, exp(sigma z - sigma²/2), drawn for every duration on a device, rank
    by rank (z standard normal; one child of SeedSequence(seed) per rank, drawn in a fixed order, so a rank's times
    depend neither on the order of events nor on how many ranks there are). Collectives take the time given.

    Returns the Timeline of the rank that ends last; comm_end_s and busy_s["comm"] are those of the shared channel.
    exposed_comm_s contains the wait for slower ranks. If ranks issue collectives in different orders the channel serves
    them as they become complete, where a real NCCL communicator would hang.
    Raises InputError for ranks < 1, jitter < 0, an unknown overlap or placement.
    """
    if ranks < 1:
        raise InputError("must be at least 1", key="ranks", value=ranks)
    if jitter is not None and not jitter >= 0.0:
        raise InputError("must not be negative", key="jitter", value=jitter)
    if step.overlap not in OVERLAPS:
        raise unknown("overlap", step.overlap, OVERLAPS)
    if step.placement not in PLACEMENTS:
        raise unknown("placement", step.placement, PLACEMENTS)
    import simpy

    env = simpy.Environment()
    streams = np.random.SeedSequence(seed).spawn(ranks)
    steps = [_jittered(step, jitter, stream) if jitter else step for stream in streams]
    channel = _Channel(env, step, ranks)
    devices = [_Device(env=env, step=s, channel=channel, record=opening(s) if spans else None) for s in steps]
    program = _serial if step.overlap == "none" else _inline if step.placement == "inline" else _hook
    for device in devices:
        env.process(program(device))
    env.process(channel.serve())
    env.run()
    last = max(devices, key=lambda d: d.step.optimizer_s + d.step.host_s + d.finished_s)
    if last.record is not None:
        last.record.extend(channel.record)
    return closing(last.step, exposed_s=last.idle_s, comm_end_s=channel.end_s, record=last.record)


def _jittered(step: Step, sigma: float, stream: np.random.SeedSequence) -> Step:
    draw = np.random.default_rng(stream)

    def factor(shape: tuple[int, ...]) -> Array:
        return np.exp(sigma * draw.standard_normal(shape) - 0.5 * sigma * sigma)

    def one() -> float:
        return float(factor((1,))[0])

    return replace(
        step,
        accumulation_s=step.accumulation_s * one(),
        forward_s=step.forward_s * one(),
        optimizer_s=step.optimizer_s * one(),
        backward_s=step.backward_s * factor(step.backward_s.shape),
        encode_s=step.encode_s * factor(step.encode_s.shape),
        between_s=step.between_s * factor(step.between_s.shape),
        decode_s=step.decode_s * factor(step.decode_s.shape),
    )


class _Channel:
    """The network: collectives one at a time, in the order in which the last rank issued them."""

    def __init__(self, env: Any, step: Step, ranks: int) -> None:
        import simpy

        phases, buckets = step.comm_s.shape
        self.env, self.step, self.ranks = env, step, ranks
        self.waiting = simpy.Store(env)
        self.arrived = np.zeros((phases, buckets), dtype=np.int64)
        self.done = [[env.event() for _ in range(buckets)] for _ in range(phases)]
        self.end_s = np.full(buckets, step.accumulation_s + step.forward_s + float(step.backward_s.sum()))
        self.record: list[Span] = []

    def issue(self, phase: int, bucket: int) -> None:
        """One rank is ready for this collective."""
        self.arrived[phase, bucket] += 1
        if self.arrived[phase, bucket] == self.ranks:
            self.waiting.put((phase, bucket))

    def serve(self) -> Process:
        for _ in range(self.step.comm_s.size):
            phase, bucket = yield self.waiting.get()
            seconds = float(self.step.comm_s[phase, bucket])
            self.record.append(comm_span(self.step, bucket, phase, self.env.now, seconds))
            yield self.env.timeout(seconds)
            self.end_s[bucket] = self.env.now
            self.done[phase][bucket].succeed()


@dataclass(slots=True, kw_only=True)
class _Device:
    """One rank: its durations, its idle time so far, the chain kernels that can run and what has not finished."""

    env: Any
    step: Step
    channel: _Channel
    record: list[Span] | None
    idle_s: float = 0.0
    finished_s: float = 0.0
    runnable: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    arrivals: int = 0
    wake: Any = None

    def kernel(self, bucket: int, phase: int) -> Process:
        """Run the device work of a chain before collective `phase`, and issue that."""
        step, phases = self.step, self.step.comm_s.shape[0]
        row = step.encode_s if phase == 0 else step.decode_s if phase == phases else step.between_s[phase - 1]
        seconds = float(row[bucket])
        if self.record is not None:
            self.record.append(kernel_span(step, bucket, phase, self.env.now, seconds))
        yield self.env.timeout(seconds)
        if phase < phases:
            self.channel.issue(phase, bucket)

    def segment(self, index: int) -> Process:
        seconds = float(self.step.backward_s[index])
        if self.record is not None:
            self.record.append(segment_span(self.step, index, self.env.now, seconds))
        yield self.env.timeout(seconds)

    def wait(self, event: Any) -> Process:
        """Idle until `event`, which only the network can fire."""
        before_s = self.env.now
        yield event
        self.idle_s += self.env.now - before_s

    def decision(self) -> Any:
        """An event of this moment, after everything else that happens at it."""
        event = self.env.event()
        event._ok, event._value = True, None
        self.env.schedule(event, priority=DECISION_PRIORITY)
        return event

    def offer(self, origin: int, bucket: int, phase: int) -> None:
        """A chain kernel can run from now on."""
        self.arrivals += 1
        heapq.heappush(self.runnable, (self.env.now, origin, self.arrivals, bucket, phase))
        if self.wake is not None and not self.wake.triggered:
            self.wake.succeed()

    def follow(self, bucket: int, phase: int) -> Process:
        """Offer what a collective releases once it is over."""
        yield self.channel.done[phase][bucket]
        self.offer(FROM_NETWORK, bucket, phase + 1)


def _begin(device: _Device) -> Process:
    yield device.env.timeout(device.step.accumulation_s + device.step.forward_s)


def _serial(device: _Device) -> Process:
    """Forward, backward, then each chain from its first kernel to its last."""
    phases, buckets = device.step.comm_s.shape
    yield from _begin(device)
    for index in range(len(device.step.backward_s)):
        yield from device.segment(index)
    for bucket in range(buckets):
        for phase in range(phases):
            yield from device.kernel(bucket, phase)
            yield from device.wait(device.channel.done[phase][bucket])
        yield from device.kernel(bucket, phases)
    device.finished_s = device.env.now


def _inline(device: _Device) -> Process:
    """Encode between segments; then phase by phase over the buckets in order; decode after the last collective."""
    step, done = device.step, device.channel.done
    phases, buckets = step.comm_s.shape
    yield from _begin(device)
    bucket = 0
    for index in range(-1, len(step.backward_s)):
        if index >= 0:
            yield from device.segment(index)
        while bucket < buckets and step.ready[bucket] <= index:
            yield from device.kernel(bucket, 0)
            bucket += 1
    for phase in range(1, phases):
        for bucket in range(buckets):
            yield from device.wait(done[phase - 1][bucket])
            yield from device.kernel(bucket, phase)
    for bucket in range(buckets):
        yield from device.wait(done[phases - 1][bucket])
    for bucket in range(buckets):
        yield from device.kernel(bucket, phases)
    device.finished_s = device.env.now


def _hook(device: _Device) -> Process:
    """At every boundary: chain kernels that can run, first come first served, before the next backward segment."""
    step, env = device.step, device.env
    phases, buckets = step.comm_s.shape
    yield from _begin(device)
    segment, offered, decoded, blocked = 0, 0, 0, 0
    while True:
        while offered < buckets and step.ready[offered] < segment:
            device.offer(FROM_SEGMENT, offered, 0)
            offered += 1
        yield device.decision()
        if device.runnable:
            _, _, _, bucket, phase = heapq.heappop(device.runnable)
            yield from device.kernel(bucket, phase)
            if step.blocking:
                blocked += (phase == 0) - (phase == phases)
            if phase < phases:
                env.process(device.follow(bucket, phase))
            decoded += phase == phases
        elif segment < len(step.backward_s) and not blocked:
            yield from device.segment(segment)
            segment += 1
        elif decoded < buckets:
            device.wake = env.event()
            yield from device.wait(device.wake)
        else:
            device.finished_s = env.now
            return
