"""A part from each of up to four peers that hold the stage: home lines are slow upwards, the sum of several is not."""

from __future__ import annotations

from typing import Any

KEEPS = "work up to the last exchange, while another pipeline holds the stage"
STRIPES = 4
"""A choice: with access lines of 1:4 (up:down) and more, four senders fill one receiver."""


def sources(view: Any, unit: Any, stage: int, draw: float) -> list[Any]:
    return list(view.replicas(stage, unit=unit, draw=draw, count=STRIPES))
