"""From a peer that holds the same stage in another pipeline (SWARM, Petals, hivemind): the least busy of a few drawn.

Two random choices are nearly as good as looking at all (M. Mitzenmacher, "The power of two choices", IEEE TPDS 2001).
Where nobody else holds the stage, the checkpoint.
"""

from __future__ import annotations

from typing import Any

KEEPS = "work up to the last exchange, while another pipeline holds the stage"
CANDIDATES = 4
"""A choice: twice the two that the paper above finds enough."""


def sources(view: Any, unit: Any, stage: int, draw: float) -> list[Any]:
    found = view.replicas(stage, unit=unit, draw=draw, count=CANDIDATES)
    return [min(found, key=view.burden)] if found else []
