"""Stages as arrays: worked by hand, and refused where they make no sense."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.errors import InputError
from simkit.spec.stage import StageCost, uniform


def test_a_faster_peer_takes_less_time() -> None:
    cost = uniform(3, forward_s=0.1, activation_bytes=8.0, flops=2.0)
    assert cost.stages == 3
    # Forward 0.1 s, backward twice that; at double the rate half of 0.3 s.
    np.testing.assert_allclose(cost.seconds_on(4.0), [0.15, 0.15, 0.15])
    assert cost.activation_bytes.tolist() == [8.0, 8.0, 0.0]
    assert cost.gradient_bytes.tolist() == [0.0, 8.0, 8.0]


@pytest.mark.parametrize("change", [{"forward_s": [1.0]}, {"state_bytes": [-1.0, 0.0]}, {"flops": [0.0, 1.0]},
                                    {"memory_bytes": [np.nan, 1.0]}])
def test_senseless_arrays_are_refused(change: dict[str, list[float]]) -> None:
    names = ("forward_s", "backward_s", "activation_bytes", "gradient_bytes", "state_bytes", "memory_bytes",
             "exchange_bytes", "flops")
    fields = {name: [1.0, 1.0] for name in names} | change
    with pytest.raises(InputError):
        StageCost(**{name: np.array(value) for name, value in fields.items()})
    with pytest.raises(InputError):
        uniform(0, forward_s=1.0)
