"""Top-k whose ratio follows the line: the slowest compresses by 1/density, faster ones in proportion to their time.

    ratio = max(1, share / density),      bytes = min(raw, raw / ratio · (value + index) / value)

so that a line which takes less than `density` of the slowest one's time sends the whole tensor.
Source: AdaTopK of FusionLLM (arXiv 2410.12707), from its description; the exact rule of the paper was not seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PASSES = 4.0
"""As for `top_k`."""
LOSSY = True
INDEX_BYTES = 4.0


def sent_bytes(raw_bytes: Any, *, element_bytes: float, density: float, share: Any) -> Any:
    """The formula above, per line."""
    ratio = np.maximum(1.0, share / density)
    kept = raw_bytes / ratio * (element_bytes + INDEX_BYTES) / element_bytes
    return np.where(ratio > 1.0, np.minimum(raw_bytes, kept), raw_bytes + 0.0 * share)
