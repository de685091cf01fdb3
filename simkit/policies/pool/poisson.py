"""Enough for the losses of one lead time in 99 of 100 cases: the least B with P(Poisson(rate · lead) <= B) >= 0.99.

The base-stock level of a spare-part store (C. Sherbrooke, "METRIC", Operations Research 16 (1968) 122-141).
"""

from __future__ import annotations

import math

CONFIDENCE = 0.99


def target(*, slots: int, backup_pool: int, losses_per_s: float, lead_s: float) -> int:
    mean = losses_per_s * lead_s
    if not mean > 0.0 or math.isinf(mean):
        return backup_pool
    if mean > 500.0:  # the normal limit; e^-mean would underflow soon after
        return max(backup_pool, math.ceil(mean + 2.3263 * math.sqrt(mean)))
    term = total = math.exp(-mean)
    spares = 0
    while total < CONFIDENCE:
        spares += 1
        term *= mean / spares
        total += term
    return max(backup_pool, spares)
