"""Any peer with the same chance: the baseline."""

from __future__ import annotations

from typing import Any


def rank(node: Any) -> tuple[float, ...]:
    return (node.draw,)
