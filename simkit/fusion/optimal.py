"""MG-WFBP: the contiguous grouping whose last collective ends first, exactly.

With r_i the moment tensor i is ready, S the cumulative bytes and c the cost of a message, one FIFO network ends with

    f(i) = min over j < i of  max(f(j), r_i) + c(S_i - S_j),        f(0) = 0

f grows with i, because a message of fewer bytes costs no more. So of all j whose messages are over by r_i only the
largest matters; the others form a window whose left edge never moves back. For c = a + b·bytes the minimum of
f(j) - b S_j over that window is kept in a monotone queue, and the whole takes O(n); any other c takes O(n²).
Source: S. Shi, X. Chu, B. Li, "MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms",
INFOCOM 2019 and IEEE TPDS 2021 (which merge greedily; the optimum is never later).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BLOCK = 64


def groups(
    sizes_bytes: Array,
    *,
    ready_s: Array,
    seconds: Callable[[Array], Array],
    threshold_bytes: float = 0.0,
) -> NDArray[np.int64]:
    """The grouping that ends first. seconds: cost of a message over an array of bytes, never decreasing."""
    count = len(sizes_bytes)
    if count < 2:
        return np.zeros(count, dtype=np.int64)
    total = np.concatenate([[0.0], np.cumsum(sizes_bytes)])
    line = _affine(seconds, float(total[-1]))
    ready = np.asarray(ready_s, dtype=np.float64).tolist()
    if line is not None:
        previous = _affine_optimum(total.tolist(), ready, *line)
    else:
        previous = _general_optimum(total, ready, seconds)
    starts = np.zeros(count, dtype=np.int64)
    at = previous[count]
    while at > 0:
        starts[at] = 1
        at = previous[at]
    return np.cumsum(starts)


def _affine(seconds: Callable[[Array], Array], largest_bytes: float) -> tuple[float, float] | None:
    """(a, b) where `seconds` is a + b·bytes up to rounding, at points over four decades of size; else None."""
    probe = largest_bytes * np.array([1e-4, 3e-4, 1e-3, 4e-3, 0.02, 0.11, 0.37, 1.0])
    cost = np.asarray(seconds(probe), dtype=np.float64)
    if largest_bytes <= 0.0:
        return float(cost[0]), 0.0
    slope = float((cost[-1] - cost[0]) / (probe[-1] - probe[0]))
    constant = float(cost[-1]) - slope * largest_bytes
    if np.all(np.abs(constant + slope * probe - cost) <= 1e-10 * np.abs(cost)):
        return constant, slope
    return None


def _affine_optimum(total: list[float], ready: list[float], a: float, b: float) -> list[int]:
    """previous[i]: the j that attains f(i), for c = a + b·bytes."""
    count = len(ready)
    end, key, previous = [0.0] * (count + 1), [0.0] * (count + 1), [0] * (count + 1)
    window: deque[int] = deque()
    over = 0
    for i in range(1, count + 1):
        now = ready[i - 1]
        while over + 1 < i and end[over + 1] <= now:
            over += 1
        while window and window[0] <= over:
            window.popleft()
        best, best_end = over, (now if now > end[over] else end[over]) - b * total[over]
        if window and key[window[0]] < best_end:
            best, best_end = window[0], key[window[0]]
        end[i] = best_end + a + b * total[i]
        previous[i] = best
        key[i] = end[i] - b * total[i]
        while window and key[window[-1]] >= key[i]:
            window.pop()
        window.append(i)
    return previous


def _general_optimum(total: Array, ready: list[float], seconds: Callable[[Array], Array]) -> list[int]:
    """previous[i] for any cost that never decreases with the bytes; costs are evaluated a block of rows at a time."""
    count = len(ready)
    end, previous, over = np.zeros(count + 1), [0] * (count + 1), 0
    for first in range(1, count + 1, BLOCK):
        until, left = min(first + BLOCK, count + 1), over
        nbytes = np.maximum(total[first:until, None] - total[None, left : until - 1], 0.0)
        cost = np.asarray(seconds(nbytes.ravel()), dtype=np.float64).reshape(nbytes.shape)
        for i in range(first, until):
            now = ready[i - 1]
            while over + 1 < i and end[over + 1] <= now:
                over += 1
            candidates = cost[i - first, over - left : i - left] + end[over:i]
            candidates[0] = cost[i - first, over - left] + max(float(end[over]), now)
            best = int(candidates.argmin())
            end[i] = candidates[best]
            previous[i] = over + best
    return previous
