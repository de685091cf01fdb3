"""The least money per FLOP first; free peers before all, faster ones first among equals."""

from __future__ import annotations

from typing import Any


def rank(node: Any) -> tuple[float, ...]:
    return (node.peer.price_usd_per_hour / node.peer.flops, -node.peer.flops, node.joined_s)
