"""From the stage before or after in the same pipeline, which keeps a copy in host memory (Bamboo, arXiv 2204.12013).

Where neither is there, as `replica`. The copies are refreshed with each exchange.
"""

from __future__ import annotations

from typing import Any

from simkit.policies.replacement import replica

KEEPS = "work up to the last exchange, while a neighbour of the stage or a replica is there"


def sources(view: Any, unit: Any, stage: int, draw: float) -> list[Any]:
    found = view.neighbours(unit, stage)
    return [min(found, key=view.burden)] if found else replica.sources(view, unit, stage, draw)
