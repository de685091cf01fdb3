"""GPipe: all forward passes, then all backward passes.

With f_r, b_r the seconds of stage r and the receives that block it, m micro-batches and messages of c that overlap:

    end = sum f + (m-1) max f + sum b + (m-1) max b + 2 c (p-1)        exact for any stages

Two flow shops of equal jobs, one after the other: the last stage begins its first backward pass when it ends its last
forward pass, and no other stage is later than that. Bubble of equal stages: (p-1)/m of the ideal time; every stage
holds the activations of all m micro-batches.
Source: Huang et al., GPipe (arXiv 1811.06965), section 2.3; flow shop of equal jobs: Johnson (1954).
"""

from __future__ import annotations

import numpy as np

from simkit.schedules._common import BACKWARD, FORWARD, Event, Num, Pipeline, finish, inputs, received


def order(stage: int, *, stages: int, micro_batches: int, virtual: int = 1) -> list[Event]:
    """Forward passes and then backward passes, each in the order of the micro-batches (as PyTorch issues them).

    >>> order(0, stages=2, micro_batches=2)
    [('F', 0, 0), ('F', 1, 0), ('B', 0, 0), ('B', 1, 0)]
    """
    return [(kind, i, 0) for kind in (FORWARD, BACKWARD) for i in range(micro_batches)]


def seconds(
    forward_s: Num, backward_s: Num, *, micro_batches: Num, virtual: Num = 1, p2p_s: Num = 0.0, weight_s: Num = None,
    overlap_p2p: bool = False,
) -> Pipeline:
    """The closed form above; `virtual` and `weight_s` have no meaning here. Raises InputError for malformed arrays."""
    x = inputs(forward_s, backward_s, micro_batches=micro_batches, virtual=1, p2p_s=p2p_s)
    f, b = received(x, overlap_p2p=overlap_p2p)
    passes = [
        np.add.reduce(s, axis=-1, keepdims=True) + (x.m - 1.0) * np.maximum.reduce(s, axis=-1, keepdims=True)
        for s in (f, b)
    ]
    end_s = passes[0] + passes[1] + (2.0 * x.hops * overlap_p2p) * x.c
    return finish(x, end_s, in_flight=x.m + 0.0 * np.zeros(x.stages), exact=True)
