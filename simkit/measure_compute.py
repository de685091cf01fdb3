"""The compute of a training step on this machine, part by part: what a profiled model (`simkit.spec.profiled`) holds.

A hook at every parameter notes when its gradient is complete, in processor time of the thread that runs
back-propagation (on a CPU the thread that calls ``backward``), so that other jobs on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from simkit.spec.profiled import KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of the steps that were watched. forward_s, backward_s, optimizer_s: one figure a step; ready_s:
    {parameter: seconds from the begin of back-propagation to its gradient, one a step}, in the order of readiness."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    optimizer_s: Sequence[float]
    ready_s: Mapping[str, Sequence[float]]


class Watch:
    """Notes where the time of training steps of a module goes. Use `step` for every step, then `close`.

    clock: processor time of the calling thread, which on a CPU also runs back-propagation; after `step`, `last` holds
    its (forward, backward, optimizer) seconds."""

    def __init__(self, module: Any, *, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._begin = clock, 0.0
        self._now: dict[str, float] = {}
        self._ready: dict[str, list[float]] = {}
        self._times: list[tuple[float, float, float]] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(self._note(name))
            for name, p in module.named_parameters()
            if p.requires_grad
        ]

    def _note(self, name: str) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            self._now[name] = self._clock() - self._begin

        return hook

    def step(self, loss: Callable[[], Any], optimizer: Any, *, counted: bool = True) -> tuple[float, float, float]:
        """One step; counted: it takes part in the medians. Answers with (forward, backward, optimizer) seconds."""
        clock = self._clock
        start = clock()
        value = loss()
        self._begin = clock()
        value.backward()
        end = clock()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times = (self._begin - start, end - self._begin, clock() - end)
        if counted:
            self._times.append(times)
            for name, seconds in self._now.items():
                self._ready.setdefault(name, []).append(seconds)
        return times

    def close(self) -> Steps:
        """What was noted; the hooks go."""
        for handle in self._handles:
            handle.remove()
        forward_s, backward_s, optimizer_s = zip(*self._times, strict=True)
        ordered = dict(sorted(self._ready.items(), key=lambda item: median(item[1])))
        return Steps(forward_s=forward_s, backward_s=backward_s, optimizer_s=optimizer_s, ready_s=ordered)


def watch(
    module: Any,
    loss: Callable[[], Any],
    optimizer: Any,
    *,
    steps: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.thread_time,
) -> Steps:
    """Runs training steps of `module` and notes where their time goes."""
    noted = Watch(module, clock=clock)
    for step in range(warm_up + steps):
        noted.step(loss, optimizer, counted=step >= warm_up)
    return noted.close()


def profile(
    module: Any, steps: Steps, *, name: str, device: str, batch: int, kind: str, share: float = 1.0, **measured: Any
) -> dict[str, Any]:
    """The compute profile of the medians. share: `time_share`; measured: said of the measurement."""
    ends = [(parameter, median(seconds)) for parameter, seconds in steps.ready_s.items()]
    backward_s, forward_s = median(steps.backward_s), median(steps.forward_s)
    ops, before = [], 0.0
    for parameter, end in ends:
        ops.append({"name": parameter, "backward_s": max(end - before, 0.0), "tensors": [parameter]})
        before = max(end, before)
    if backward_s > before:
        ops.append({"name": "rest", "backward_s": backward_s - before, "tensors": []})
    for op in ops:
        op["forward_s"] = round(forward_s / len(ops), 9)
        op["backward_s"] = round(float(str(op["backward_s"])), 9)
    return {
        KEY: 1,
        "name": name,
        "device": device,
        "batch": batch,
        "input": kind,
        "time_share": share,
        "tensors": {n: list(p.shape) for n, p in module.named_parameters() if p.requires_grad},
        "ops": ops[::-1],
        "measured": {"forward_s": forward_s, "backward_s": backward_s, "optimizer_s": median(steps.optimizer_s)}
        | measured,
    }
