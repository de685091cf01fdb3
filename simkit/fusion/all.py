"""Everything in one message, sent when the last gradient is ready: one latency, no overlap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def groups(
    sizes_bytes: Array,
    *,
    threshold_bytes: float = 0.0,
    ready_s: Array | None = None,
    seconds: Callable[[Array], Array] | None = None,
) -> NDArray[np.int64]:
    """0 for every tensor."""
    return np.zeros(len(sizes_bytes), dtype=np.int64)
