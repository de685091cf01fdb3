"""Who has been there longest first: under heavy-tailed sessions it will also stay longest (Kondo et al. 2009)."""

from __future__ import annotations

from typing import Any


def rank(node: Any) -> tuple[float, ...]:
    return (node.joined_s,)
