"""The tensor as it is."""

from __future__ import annotations

from typing import Any

PASSES = 0.0
LOSSY = False


def sent_bytes(raw_bytes: Any, *, element_bytes: float, density: float, share: Any) -> Any:
    """All of them."""
    return raw_bytes + 0.0 * share
