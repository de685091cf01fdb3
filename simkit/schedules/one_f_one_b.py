"""1F1B: stage r starts with p - r - 1 forward passes, then alternates one forward and one backward pass.

Equal stages: end = (m + p - 1)(f + b), a bubble of (p-1)/m of the ideal time; stage r holds min(m, p - r) of them.

Uneven stages: the longest path of the events, in closed form. A critical path warms up at the stage slowest forward,
stays at one stage r for the steady part and leaves through the stage slowest backward (`_common.sojourn`; for m <= p
also `_common.short`). With a slowest last stage it is the familiar sum_r (f_r + b_r) + (m-1) (f + b)_slowest, which is
too long by up to (p-1-r) min(f_r, b_r) where the slowest stage r stands before it.

Receives that block (`overlap_p2p=False`): exact for any stages. It equals the recurrence of `simkit.des.pipeline` on
4,500 random pipelines (p <= 12, m < 30; stages equal, within 10 %, lognormal with sigma up to 1.5, small integers
with ties and zeros). Messages of c that overlap: a path may also sweep over all stages and back, p micro-batches a
sweep; equal stages then end at (m+p-1)(f+b) + 2c (N - floor(N/p)), N = m + p - 2, exactly. Stages within 10 % of each
other: mean error 0.05 %, at most 0.9 % (c = 1 % of a stage's time).
Sources: Narayanan et al. (arXiv 2006.09503; 2104.04473, section 2.2); order as in Megatron-LM,
`forward_backward_pipelining_without_interleaving`.
"""

from __future__ import annotations

import numpy as np

from simkit.schedules._common import (
    BACKWARD,
    FORWARD,
    NONE,
    Event,
    Num,
    Pipeline,
    blockwise,
    finish,
    inputs,
    lagged,
    received,
    short,
    sojourn,
    sweeps,
    uniform,
)


def order(stage: int, *, stages: int, micro_batches: int, virtual: int = 1) -> list[Event]:
    """Warm-up, one forward and one backward in turn, cool-down.

    >>> order(0, stages=2, micro_batches=3)
    [('F', 0, 0), ('F', 1, 0), ('B', 0, 0), ('F', 2, 0), ('B', 1, 0), ('B', 2, 0)]
    """
    warm = min(stages - stage - 1, micro_batches)
    out: list[Event] = [(FORWARD, i, 0) for i in range(warm)]
    for i in range(micro_batches - warm):
        out += [(FORWARD, warm + i, 0), (BACKWARD, i, 0)]
    return out + [(BACKWARD, i, 0) for i in range(micro_batches - warm, micro_batches)]


def seconds(
    forward_s: Num, backward_s: Num, *, micro_batches: Num, virtual: Num = 1, p2p_s: Num = 0.0, weight_s: Num = None,
    overlap_p2p: bool = False,
) -> Pipeline:
    """The closed form above; `virtual` and `weight_s` have no meaning here. Raises InputError for malformed arrays."""
    x = inputs(forward_s, backward_s, micro_batches=micro_batches, virtual=1, p2p_s=p2p_s)
    f, b = received(x, overlap_p2p=overlap_p2p)
    lag = lagged(x, overlap_p2p=overlap_p2p)
    end_s = blockwise(sojourn, f, b, NONE, x.m, x.later, lag, f, b)
    if (x.m <= x.stages).any():
        end_s = np.maximum(end_s, blockwise(short, f, b, NONE, x.m, x.later, lag))
    if overlap_p2p:
        n = x.m + x.hops - 1.0
        end_s = np.maximum(end_s, sweeps(x, n + 1.0, n - np.floor(n / x.stages)))
    held = np.minimum(x.m, x.later + 1.0)
    return finish(x, end_s, in_flight=held, exact=not overlap_p2p or uniform(x.f, x.b))
