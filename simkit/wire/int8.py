"""One byte an element and a four-byte scale for every block of 64: block-wise quantisation.

Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), as SWARM (arXiv
2301.11913, section 4) and Petals (arXiv 2209.01188, section 3.2) send activations. The block of 64 is assumed; larger
ones send less than 5 % less.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PASSES = 2.0
"""Passes over the raw tensor on both ends together: read to quantise, write to restore; counted, not measured."""
LOSSY = True
BLOCK = 64.0
SCALE_BYTES = 4.0


def sent_bytes(raw_bytes: Any, *, element_bytes: float, density: float, share: Any) -> Any:
    """elements · (1 + 4/64), never more than the raw tensor."""
    elements = raw_bytes / element_bytes
    return np.minimum(raw_bytes, elements * (1.0 + SCALE_BYTES / BLOCK)) + 0.0 * share
