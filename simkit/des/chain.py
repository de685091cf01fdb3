"""A pipeline over peers event by event: every stage, line and latency of its own (`simkit.chain.Chain`).

A pass starts when its stage has ended the pass before it in the order of issue and when its input has arrived; what it
made waits until the stage's line out is free, occupies it, and arrives after the latency:

    end(e)   = max(end(before e on the stage), arrival(input of e)) + seconds(e)
    sent(e)  = max(end(e), sent(before e on the line)) + occupancy(e),      arrival = sent + latency

The line sends in the order in which the stage computes, so the graph of events is fixed and `recurrence` walks it with
(max, +), over numbers or arrays of points. `simulate` lets simpy processes and line resources find the same order in
time. The two agree to 1e-9. Source: Baccelli et al., Synchronization and Linearity (1992), section 2.5.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simkit.chain import Array, Chain, Num
from simkit.des.pipeline import nodes
from simkit.errors import InputError
from simkit.schedules._common import BACKWARD, FORWARD, Order
from simkit.spans import Span

MAX_EVENTS = 150_000
"""Events of one walk; a longer step is extrapolated by its last rounds (`step`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """end_s: of the last pass; stage_end_s: (..., stages); done_s: (..., micro-batches) when each micro-batch's last
    backward pass ended; spans: on request."""

    end_s: Num
    stage_end_s: Array
    done_s: Array
    spans: tuple[Span, ...] = ()


def streaming(stage: int, *, stages: int, micro_batches: int, virtual: int = 1) -> list[tuple[str, int, int]]:
    """The order of a chain that only computes forward (inference, or one direction of training)."""
    return [(FORWARD, i, 0) for i in range(micro_batches)]


@lru_cache(maxsize=32)
def _graph(order: Order, stages: int, micro_batches: int) -> tuple[tuple[bool, int, int, int], ...]:
    """(forward, micro-batch, stage, input) of every event in topological order."""
    found = nodes.__wrapped__(order, stages=stages, micro_batches=micro_batches)
    return tuple((e.kind == FORWARD, e.micro_batch, e.stage, e.input) for e in found)


def recurrence(chain: Chain, order: Order, micro_batches: int) -> Run:
    """The (max, +) walk over all passes. order: of `simkit.schedules` or `streaming`. Raises InputError for an order
    in which stages wait for each other for ever."""
    stages, events = chain.stages, _graph(order, chain.stages, micro_batches)
    shape = np.broadcast_shapes(*(np.shape(getattr(chain, n))[:-1] for n in _FIELDS))
    if not shape:
        return _walk(events, micro_batches, *(getattr(chain, n).tolist() for n in _FIELDS), zero=0.0, later=max)
    columns = [list(np.moveaxis(np.broadcast_to(x, (*shape, stages)), -1, 0)) for x in
               (getattr(chain, n) for n in _FIELDS)]  # fmt: skip
    return _walk(events, micro_batches, *columns, zero=np.zeros(shape), later=np.maximum)


_FIELDS = ("forward_s", "backward_s", "send_s", "back_s", "delay_s", "back_delay_s")


def _walk(
    events: tuple[tuple[bool, int, int, int], ...], micro_batches: int, f: list[Any], b: list[Any], send: list[Any],
    back: list[Any], delay: list[Any], back_delay: list[Any], *, zero: Any, later: Any,
) -> Run:  # fmt: skip
    stages = len(f)
    free, line, done = [zero] * stages, [zero] * stages, [zero] * micro_batches
    arrival: list[Any] = []
    last = stages - 1
    for forward, micro, r, source in events:
        start = free[r]
        if source >= 0:
            start = later(start, arrival[source])
        end = start + (f[r] if forward else b[r])
        free[r] = end
        if forward:
            if r == last:
                done[micro] = end
                arrival.append(end)
                continue
            line[r] = sent = later(end, line[r]) + send[r]
            arrival.append(sent + delay[r])
        elif r == 0:
            done[micro] = end
            arrival.append(end)
        else:
            line[r] = sent = later(end, line[r]) + back[r]
            arrival.append(sent + back_delay[r])
    stage_end = np.stack([np.asarray(x) for x in free], axis=-1)
    return Run(end_s=stage_end.max(axis=-1), stage_end_s=stage_end, done_s=np.stack([np.asarray(x) for x in done], -1))


def step(chain: Chain, order: Order, micro_batches: int) -> tuple[Run, bool]:
    """(run, exact): the recurrence where it has at most `MAX_EVENTS` passes; beyond, the step of as many micro-batches
    as that allows, prolonged by the mean of its second half."""
    most = max(MAX_EVENTS // (2 * chain.stages), 4 * chain.stages, 4)
    if micro_batches <= most:
        return recurrence(chain, order, micro_batches), True
    whole, half = recurrence(chain, order, most), recurrence(chain, order, most // 2)
    each = (whole.end_s - half.end_s) / (most - most // 2)
    rest = (micro_batches - most) * each
    tail = whole.done_s[..., -1:] + np.asarray(each)[..., None] * np.arange(1, micro_batches - most + 1)
    longer = Run(
        end_s=whole.end_s + rest, stage_end_s=whole.stage_end_s + np.asarray(rest)[..., None],
        done_s=np.concatenate([whole.done_s, tail], axis=-1),
    )  # fmt: skip
    return longer, False


def simulate(chain: Chain, order: Order, micro_batches: int, *, spans: bool = False) -> Run:
    """The same as simpy processes: one per stage, and a line out of one unit per stage.

    spans: a Span a pass (stream ``stage r``) and a message (stream ``line r``). Raises InputError for arrays of points
    and where stages wait for each other for ever.
    """
    import simpy

    if chain.forward_s.ndim != 1:
        raise InputError("is an array of points", key="chain", hint="recurrence takes arrays")
    env = simpy.Environment()
    stages = chain.stages
    queues = [order(r, stages=stages, micro_batches=micro_batches) for r in range(stages)]
    turns = any(kind == BACKWARD for kind, _, _ in queues[0])
    keys = [(kind, i, r) for r, queue in enumerate(queues) for kind, i, _ in queue]
    run = _Simulation(
        env=env, chain=chain, lines=[simpy.Resource(env) for _ in range(stages)],
        arrived={key: env.event() for key in keys}, done=[0.0] * micro_batches, turns=turns,
        record=[] if spans else None,
    )  # fmt: skip
    finished = [env.process(run.stage(r, queue)) for r, queue in enumerate(queues)]
    env.run()
    stuck = [r for r, process in enumerate(finished) if process.is_alive]
    if stuck:
        hint = f"stage {stuck[0]} is the first to be stuck"
        raise InputError("lets stages wait for each other for ever", key="schedule", hint=hint)
    ends = np.array([process.value for process in finished])
    seen = tuple(sorted(run.record or (), key=lambda s: (s.start_s, s.end_s, s.stream)))
    return Run(end_s=float(ends.max()), stage_end_s=ends, done_s=np.array(run.done), spans=seen)


@dataclass(slots=True, kw_only=True, eq=False)
class _Simulation:
    env: Any
    chain: Chain
    lines: list[Any]
    arrived: dict[tuple[str, int, int], Any]
    done: list[float]
    turns: bool
    record: list[Span] | None

    def stage(self, r: int, queue: list[tuple[str, int, int]]) -> Generator[Any, Any, float]:
        """The process of one stage; its value is when it ended."""
        env, last = self.env, self.chain.stages - 1
        for kind, i, _ in queue:
            if kind == FORWARD:
                needs = (FORWARD, i, r - 1) if r else None
                took = self.chain.forward_s[r]
            else:
                needs = (BACKWARD, i, r + 1) if r < last else (FORWARD, i, r)
                took = self.chain.backward_s[r]
            if needs is not None:
                yield self.arrived[needs]
            start_s = env.now
            yield env.timeout(float(took))
            self.span(f"{kind}{i}", "forward" if kind == FORWARD else "backward", f"stage {r}", start_s, i)
            env.process(self.message(kind, i, r, last))
        return float(env.now)

    def message(self, kind: str, i: int, r: int, last: int) -> Generator[Any, Any, None]:
        env, forward = self.env, kind == FORWARD
        if (forward and r == last) or (not forward and r == 0):
            self.done[i] = float(env.now)
            self.arrived[kind, i, r].succeed()
            return
        # Whoever computed first asks first, and the resource serves in the order of asking.
        with self.lines[r].request() as turn:
            yield turn
            start_s = env.now
            yield env.timeout(float((self.chain.send_s if forward else self.chain.back_s)[r]))
            self.span(f"send {kind}{i}", "comm", f"line {r}", start_s, i)
        yield env.timeout(float((self.chain.delay_s if forward else self.chain.back_delay_s)[r]))
        self.arrived[kind, i, r].succeed()

    def span(self, name: str, kind: str, stream: str, start_s: float, i: int) -> None:
        end_s = self.env.now
        if self.record is not None and end_s > start_s:
            args = (("micro_batch", float(i)),)
            self.record.append(Span(name=name, stream=stream, start_s=start_s, end_s=end_s, kind=kind, args=args))
