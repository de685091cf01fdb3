"""The largest elements, each with its value and a four-byte index; the same density on every line.

The wire shrinks by less than 1/density: with two-byte values by a third of it. Source: FusionLLM (arXiv 2410.12707),
uniform Top-k; S. Shi et al. (arXiv 1901.04359) for the index.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PASSES = 4.0
"""Passes over the raw tensor on both ends together: threshold and pick, clear and scatter; counted, not measured."""
LOSSY = True
INDEX_BYTES = 4.0


def sent_bytes(raw_bytes: Any, *, element_bytes: float, density: float, share: Any) -> Any:
    """elements · density · (value + index), never more than the raw tensor."""
    elements = raw_bytes / element_bytes
    return np.minimum(raw_bytes, elements * density * (element_bytes + INDEX_BYTES)) + 0.0 * share
