"""What the stages of a pipeline over peers cost: arrays with one entry a stage, whoever holds it.

A placement (`simkit.placement`) fills them in; the closed forms and the simulation of a swarm take them from there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCost:
    """The stages of one pipeline; every field has shape (stages,), SI.

    forward_s, backward_s: one micro-batch through the stage, on a peer that sustains `flops`; a peer p takes
    flops / p.flops times as long. activation_bytes: what the stage sends to the next one per micro-batch (the last
    entry is 0). gradient_bytes: gradient of its input, which it sends back to the stage before (the first entry is 0).
    state_bytes: weights and optimizer, what a peer must fetch to take the stage over. memory_bytes: what the stage
    needs on its device, activations in flight included. exchange_bytes: what replicas of the stage exchange once a
    round under data parallelism. flops: FLOP/s at which the times hold; 1 makes them FLOP counts.

    Raises InputError for arrays of different lengths, negative entries, and no stage at all.
    """

    forward_s: Array
    backward_s: Array
    activation_bytes: Array
    gradient_bytes: Array
    state_bytes: Array
    memory_bytes: Array
    exchange_bytes: Array
    flops: Array

    def __post_init__(self) -> None:
        count = np.size(self.forward_s)
        for field in fields(self):
            value = np.atleast_1d(np.asarray(getattr(self, field.name), dtype=np.float64))
            if value.shape != (count,) or not count:
                raise InputError(f"has shape {value.shape}, not one number for each of {count} stages", key=field.name)
            if not np.all(np.isfinite(value)) or np.any(value < 0.0):
                raise InputError("has an entry that is negative or not finite", key=field.name)
            object.__setattr__(self, field.name, value)
        if np.any(self.flops <= 0.0):
            raise InputError("has an entry that is not positive", key="flops")

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def compute_s(self) -> Array:
        """Forward and backward of one micro-batch, on the reference peer of each stage."""
        return self.forward_s + self.backward_s

    def seconds_on(self, flops: Array | float) -> Array:
        """Forward and backward of one micro-batch of each stage on a peer of `flops` FLOP/s."""
        found: Array = self.compute_s * self.flops / np.asarray(flops, dtype=np.float64)
        return found


def uniform(
    stages: int,
    *,
    forward_s: float,
    backward_s: float | None = None,
    activation_bytes: float = 0.0,
    state_bytes: float = 0.0,
    memory_bytes: float = 0.0,
    exchange_bytes: float = 0.0,
    flops: float = 1.0,
) -> StageCost:
    """Equal stages; the backward pass takes twice the forward one unless it is given, and its messages are as large."""
    if stages < 1:
        raise InputError("is no count of stages", key="stages", value=stages, hint="at least 1")
    one = np.ones(stages)
    sent, back = activation_bytes * one, activation_bytes * one
    sent[-1] = back[0] = 0.0
    return StageCost(
        forward_s=forward_s * one,
        backward_s=(2.0 * forward_s if backward_s is None else backward_s) * one,
        activation_bytes=sent,
        gradient_bytes=back,
        state_bytes=state_bytes * one,
        memory_bytes=memory_bytes * one,
        exchange_bytes=exchange_bytes * one,
        flops=flops * one,
    )
