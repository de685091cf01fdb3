"""No fusion: every tensor is a message of its own."""

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
    """0, 1, 2, …"""
    return np.arange(len(sizes_bytes), dtype=np.int64)
