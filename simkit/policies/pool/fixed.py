"""As many as `backup_pool` says."""

from __future__ import annotations


def target(*, slots: int, backup_pool: int, losses_per_s: float, lead_s: float) -> int:
    return backup_pool
