"""A pipeline of stages by events: the exact answer for any schedule and any stages.

An event is one pass of a micro-batch through a chunk of a stage. It starts when its stage has ended the event before it
in the order of issue and when its input has arrived:

    F(micro-batch i, virtual stage g)  after  F(i, g-1)
    B(i, g)                            after  B(i, g+1), and F(i, g) on the last
    W(i, g)                            after  B(i, g)

with g = chunk · p + stage. `recurrence` walks the events in topological order with (max, +) over arrays of sweep
points; `simulate` lets simpy processes find the same order in time and records spans. The two agree to 1e-9.
Source of the dependencies: Narayanan et al. (arXiv 2104.04473), section 2.2; max-plus: Baccelli et al., Synchronization
and Linearity (1992), section 2.5.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError
from simkit.schedules._common import BACKWARD, FORWARD, WEIGHT, Event, Num, Order
from simkit.spans import Span

Array = NDArray[np.float64]
KINDS = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An event with its place: `input` is the number of the node it waits for (-1: none), `message` whether that stands
    on another stage."""

    kind: str
    micro_batch: int
    chunk: int
    stage: int
    input: int
    message: bool


@lru_cache(maxsize=64)
def nodes(order: Order, *, stages: int, micro_batches: int, virtual: int = 1) -> tuple[Node, ...]:
    """All events in a topological order. Raises InputError where the orders of the stages wait for each other."""
    queues = [order(r, stages=stages, micro_batches=micro_batches, virtual=virtual) for r in range(stages)]
    last = stages * virtual - 1
    done: dict[tuple[str, int, int], int] = {}
    out: list[Node] = []
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for r, queue in enumerate(queues):
            while at[r] < len(queue):
                kind, i, chunk = queue[at[r]]
                needs = _input(kind, i, chunk * stages + r, last)
                if needs is not None and needs not in done:
                    break
                message = needs is not None and needs[2] % stages != r
                done[kind, i, chunk * stages + r] = len(out)
                source = -1 if needs is None else done[needs]
                out.append(Node(kind=kind, micro_batch=i, chunk=chunk, stage=r, input=source, message=message))
                at[r] += 1
                moved = True
    _refuse([r for r, queue in enumerate(queues) if at[r] < len(queue)])
    return tuple(out)


def _refuse(stuck: list[int]) -> None:
    if stuck:
        hint = f"stage {stuck[0]} is the first to be stuck"
        raise InputError("lets stages wait for each other for ever", key="schedule", hint=hint)


def _input(kind: str, i: int, g: int, last: int) -> tuple[str, int, int] | None:
    if kind == FORWARD:
        return (FORWARD, i, g - 1) if g else None
    if kind == WEIGHT:
        return BACKWARD, i, g
    return (BACKWARD, i, g + 1) if g < last else (FORWARD, i, g)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """end_s: of the last event, over points; stage_end_s and busy_s: (..., stages); spans: on request, one stream a
    stage."""

    end_s: Num
    stage_end_s: Array
    busy_s: Array
    spans: tuple[Span, ...] = ()


def durations(forward_s: Num, backward_s: Num, weight_s: Num, *, split: bool, virtual: int) -> dict[str, Array]:
    """{kind: seconds of one chunk, stages first}; `backward_s` is the whole backward pass, half of it W unless
    weight_s is given."""
    f, b = np.asarray(forward_s, dtype=float), np.asarray(backward_s, dtype=float)
    w = 0.5 * b if weight_s is None else np.asarray(weight_s, dtype=float)
    w = w if split else 0.0 * b
    f, b, w = np.broadcast_arrays(f, b - w, w)
    return {kind: np.moveaxis(x, -1, 0) / virtual for kind, x in ((FORWARD, f), (BACKWARD, b), (WEIGHT, w))}


def recurrence(
    order: Order, forward_s: Num, backward_s: Num, *, micro_batches: int, virtual: int = 1, p2p_s: Num = 0.0,
    weight_s: Num = None, overlap_p2p: bool = False,
) -> Result:
    """end = max(end of the event before on the stage, end of the input + message) + duration, for every event.

    forward_s, backward_s, weight_s: (..., stages); p2p_s: number or (...). Leading axes are sweep points; the number of
    micro-batches and chunks is one, since it decides the events. Raises InputError for an order that cannot end.
    """
    stages = np.asarray(forward_s).shape[-1]
    events = nodes(order, stages=stages, micro_batches=micro_batches, virtual=virtual)
    split = any(e.kind == WEIGHT for e in events)
    took = durations(forward_s, backward_s, weight_s, split=split, virtual=virtual)
    p2p = np.asarray(p2p_s, dtype=float)
    # Numbers are ten times faster than arrays of one number.
    single = took[FORWARD].ndim == 1 and p2p.ndim == 0
    by_kind: dict[str, Any] = {k: x.tolist() if single else list(x) for k, x in took.items()}
    lag: Any = p2p.item() if single else p2p
    later: Any = max if single else np.maximum
    zero: Any = 0.0 if single else np.zeros(np.broadcast_shapes(p2p.shape, took[FORWARD].shape[1:]))
    end: list[Any] = []
    free: list[Any] = [zero] * stages
    busy: list[Any] = [zero] * stages
    for e in events:
        start = free[e.stage]
        if e.input >= 0:
            arrived = end[e.input]
            if e.message and overlap_p2p:
                arrived = arrived + lag
            start = later(start, arrived)
            if e.message and not overlap_p2p:
                start = start + lag
        seconds = by_kind[e.kind][e.stage]
        free[e.stage] = start + seconds
        busy[e.stage] = busy[e.stage] + seconds
        end.append(free[e.stage])
    stage_end_s = np.stack([np.asarray(x) for x in free], axis=-1)
    busy_s = np.stack([np.asarray(x) for x in busy], axis=-1)
    return Result(end_s=stage_end_s.max(axis=-1), stage_end_s=stage_end_s, busy_s=busy_s)


def simulate(
    order: Order, forward_s: Num, backward_s: Num, *, micro_batches: int, virtual: int = 1, p2p_s: float = 0.0,
    weight_s: Num = None, overlap_p2p: bool = False, spans: bool = False,
) -> Result:
    """The same pipeline as simpy processes, one per stage, one point (forward_s, backward_s: one number a stage).

    spans: a Span per event, stream ``stage r``, kind ``forward backward weight`` and ``comm`` for a receive that
    blocks. Raises InputError for arrays of points and for an order in which stages wait for each other.
    """
    import simpy

    stages = len(np.atleast_1d(forward_s))
    queues = [order(r, stages=stages, micro_batches=micro_batches, virtual=virtual) for r in range(stages)]
    split = any(kind == WEIGHT for kind, _, _ in queues[0])
    took = {k: x.tolist() for k, x in durations(forward_s, backward_s, weight_s, split=split, virtual=virtual).items()}
    if np.ndim(took[FORWARD]) != 1:
        raise InputError("is an array of points", key="forward_s", hint="recurrence takes arrays")
    env = simpy.Environment()
    ended: dict[tuple[str, int, int], Any] = {
        (kind, i, chunk * stages + r): env.event() for r, queue in enumerate(queues) for kind, i, chunk in queue
    }
    run = _Run(
        env=env, stages=stages, virtual=virtual, took=took, p2p_s=float(p2p_s), overlap=overlap_p2p, ended=ended,
        record=[] if spans else None,
    )
    finished = [env.process(run.stage(r, queue)) for r, queue in enumerate(queues)]
    env.run()
    _refuse([r for r, process in enumerate(finished) if process.is_alive])
    stage_end_s = np.array([process.value for process in finished])
    busy = [sum(took[kind][r] for kind, _, _ in queue) for r, queue in enumerate(queues)]
    seen = tuple(sorted(run.record or (), key=lambda s: (s.start_s, s.end_s, s.stream)))
    return Result(end_s=float(stage_end_s.max()), stage_end_s=stage_end_s, busy_s=np.array(busy), spans=seen)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    env: Any
    stages: int
    virtual: int
    took: dict[str, list[float]]
    p2p_s: float
    overlap: bool
    ended: dict[tuple[str, int, int], Any]
    record: list[Span] | None

    def stage(self, r: int, queue: list[Event]) -> Generator[Any, Any, float]:
        """The process of one stage; its value is when it ended."""
        env = self.env
        for kind, i, chunk in queue:
            g = chunk * self.stages + r
            needs = _input(kind, i, g, self.stages * self.virtual - 1)
            if needs is not None:
                yield self.ended[needs]
                if needs[2] % self.stages != r:
                    yield from self.receive(self.ended[needs].value, r, i, chunk)
            start_s = env.now
            yield env.timeout(self.took[kind][r])
            self.span(f"{kind}{i}" + f".{chunk}" * (self.virtual > 1), KINDS[kind], r, start_s, i, chunk)
            self.ended[kind, i, g].succeed(env.now)
        return float(env.now)

    def receive(self, sent_s: float, r: int, i: int, chunk: int) -> Generator[Any, Any, None]:
        start_s = self.env.now
        if not self.overlap:
            yield self.env.timeout(self.p2p_s)
            self.span("receive", "comm", r, start_s, i, chunk)
        elif sent_s + self.p2p_s > start_s:
            yield self.env.timeout(sent_s + self.p2p_s - start_s)

    def span(self, name: str, kind: str, r: int, start_s: float, i: int, chunk: int) -> None:
        end_s = self.env.now
        if self.record is not None and end_s > start_s:
            args = (("micro_batch", float(i)), ("chunk", float(chunk)))
            self.record.append(Span(name=name, stream=f"stage {r}", start_s=start_s, end_s=end_s, kind=kind, args=args))
