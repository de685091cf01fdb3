"""The fastest peer first."""

from __future__ import annotations

from typing import Any


def rank(node: Any) -> tuple[float, ...]:
    return (-node.peer.flops, node.joined_s)
