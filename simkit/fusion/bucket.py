"""PyTorch DDP's buckets: a bucket closes with the tensor that brings it to its cap.

The first bucket is capped at 1 MiB, so that communication starts early (``dist._DEFAULT_FIRST_BUCKET_BYTES``), the
others at the threshold. Buckets are rebuilt in the order of readiness after the first iteration, the order here.
Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size and rebuild_buckets; S. Li et al.,
"PyTorch Distributed", VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FIRST_BUCKET_BYTES = 2.0**20


def groups(
    sizes_bytes: Array,
    *,
    threshold_bytes: float,
    ready_s: Array | None = None,
    seconds: Callable[[Array], Array] | None = None,
) -> NDArray[np.int64]:
    """A bucket takes tensors until the sum of their bytes reaches its cap."""
    count = len(sizes_bytes)
    total = np.cumsum(sizes_bytes).tolist()
    starts = np.zeros(count, dtype=np.int64)
    cap, start, sent = min(FIRST_BUCKET_BYTES, threshold_bytes), 0, 0.0
    while True:
        start = bisect_left(total, sent + cap, start) + 1
        if start >= count:
            return np.cumsum(starts)
        starts[start] = 1
        sent, cap = total[start - 1], threshold_bytes
