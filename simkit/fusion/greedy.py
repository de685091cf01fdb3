"""Greedy buffers that never pass the threshold: a tensor joins while current size + its size <= threshold.

A buffer's first tensor always joins, so one above the threshold travels alone. This is the rule of ACP-SGD's authors,
who apply it to compressed sizes with a scaled threshold (`simkit.compressors.acp_sgd.fusing`).
Source: lzhangbv/acpsgd, acpsgd.py, _generate_groups_with_threshold.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def groups(
    sizes_bytes: Array,
    *,
    threshold_bytes: float,
    ready_s: Array | None = None,
    seconds: Callable[[Array], Array] | None = None,
) -> NDArray[np.int64]:
    """The longest run of tensors whose bytes do not pass the threshold, at least one."""
    count = len(sizes_bytes)
    total = np.cumsum(sizes_bytes).tolist()
    starts = np.zeros(count, dtype=np.int64)
    start, sent = 0, 0.0
    while count:
        start = max(bisect_right(total, sent + threshold_bytes, start), start + 1)
        if start >= count:
            break
        starts[start] = 1
        sent = total[start - 1]
    return np.cumsum(starts)
