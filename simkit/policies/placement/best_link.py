"""The widest upload first: it is what carries activations, and later the state of whoever takes over from it."""

from __future__ import annotations

from typing import Any


def rank(node: Any) -> tuple[float, ...]:
    return (-node.peer.up_Bps, node.peer.latency_s, node.joined_s)
