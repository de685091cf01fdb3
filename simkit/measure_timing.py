"""Timing of one call on a CPU or a GPU: calls in batches that last long enough, the median over batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LEAST_S = 2e-3
"""A batch of calls lasts at least this long, a thousand times the resolution of the clocks."""
REPEATS, QUICK_REPEATS = 15, 5
EVICT_BYTES = 1 << 26
"""Written between calls that must not find their data in a cache."""
LONGEST_S, QUICK_LONGEST_S = 3.0, 0.6
"""Seconds after which a case stops repeating, at two repeats or more."""


class Timer:
    """Times calls on one device. quick: fewer repeats. cpu_time: processor time of the calling thread instead of wall
    time, which other jobs on the machine do not touch; right where the call runs on that thread alone."""

    def __init__(self, torch: Any, device: str, *, quick: bool = False, cpu_time: bool = False) -> None:
        self._torch, self.device, self.quick = torch, device, quick
        self.clock: Callable[[], float] = time.thread_time if cpu_time else time.perf_counter

    def samples(self, call: Callable[[], object]) -> list[float]:
        """Seconds of one call, one figure a batch, after a call that is not counted."""
        call()
        self.wait()
        once = max(self._batch(call, 1), 1e-9)
        inner = max(1, round(LEAST_S / once))
        repeats = QUICK_REPEATS if self.quick else REPEATS
        limit = QUICK_LONGEST_S if self.quick else LONGEST_S
        found: list[float] = []
        begin = time.perf_counter()
        while len(found) < repeats and (len(found) < 2 or time.perf_counter() - begin < limit):
            found.append(self._batch(call, inner))
        return found

    def cold(self, call: Callable[[], object]) -> list[float]:
        """Seconds of single calls, the caches filled with something else before each of them."""
        other = self._torch.zeros(EVICT_BYTES // 4, device=self.device)
        call()
        found: list[float] = []
        for _ in range(QUICK_REPEATS if self.quick else REPEATS):
            other.add_(1.0)
            self.wait()
            found.append(self._batch(call, 1))
        return found

    def _batch(self, call: Callable[[], object], inner: int) -> float:
        if self.device == "cuda":
            return self._events(call, inner)
        start = self.clock()
        for _ in range(inner):
            call()
        return (self.clock() - start) / inner

    def _events(self, call: Callable[[], object], inner: int) -> float:
        cuda = self._torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        first.record()
        for _ in range(inner):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3 / inner

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self.device == "cuda":
            self._torch.cuda.synchronize()
