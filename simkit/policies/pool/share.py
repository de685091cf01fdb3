"""A tenth of the places, and `backup_pool` at least."""

from __future__ import annotations

import math

SHARE = 0.1
"""A rule of thumb, to compare with; `poisson` sizes the pool by the losses."""


def target(*, slots: int, backup_pool: int, losses_per_s: float, lead_s: float) -> int:
    return max(backup_pool, math.ceil(SHARE * slots))
