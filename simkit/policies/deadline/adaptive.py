"""Follows the spread: median + 4 · 1.4826 · median absolute deviation, and 1.25 times the median at least.

1.4826 makes the deviation that of a normal law, as estimators of time-outs use it (V. Jacobson, "Congestion avoidance
and control", SIGCOMM 1988: mean plus four deviations).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

LEAST, DEVIATIONS = 1.25, 4.0


def limit_s(times: Sequence[float]) -> float:
    if not times:
        return 0.0
    middle = median(times)
    spread = median(abs(t - middle) for t in times)
    return max(LEAST * middle, middle + DEVIATIONS * 1.4826 * spread)
