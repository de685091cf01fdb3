"""ZB-H1: 1F1B with the backward pass split into input gradients (B) and weight gradients (W), W of stage r put off by r
micro-batches, which fills the drain and leaves every stage with as many micro-batches in flight, min(m, p).

With b the seconds of B alone (backward_s - weight_s) and w those of W, equal stages:

    end = m (f + b + w) + (p - 1) max(f + b - w, f, b)        m >= p, exact

The first term of max is the paper's bubble, (p-1)(f + b - w), in terms of the whole backward pass (p-1)(f + backward -
2w); the other two appear where w > b or w > f, since W cannot fill what comes before a stage's first B.

Uneven stages: the longest path of `_common.sojourn` (m <= p: and `short`), a lower bound. Against the recurrence of
`simkit.des.pipeline` on random pipelines (p <= 12): equal stages exact for any m and w; head and embedding on the end
stages: exact for m >= p; stages within 10 % of each other, m >= p: exact on 88 %, mean error 0.02 %, at most 0.7 %
short; lognormal stages (sigma 0.5): mean 0.4 %, at most 4.4 % short (m < p: mean 0.9 %).
Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.2, ZB-H1; the delay of r micro-batches
as in PyTorch's zero-bubble schedules.
"""

from __future__ import annotations

import numpy as np

from simkit.errors import InputError
from simkit.schedules._common import (
    BACKWARD,
    FORWARD,
    WEIGHT,
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
    uniform,
)


def order(stage: int, *, stages: int, micro_batches: int, virtual: int = 1) -> list[Event]:
    """1F1B, with W of micro-batch k - stage after B of micro-batch k, and what is left of W at the end.

    >>> order(1, stages=2, micro_batches=2)
    [('F', 0, 0), ('B', 0, 0), ('F', 1, 0), ('B', 1, 0), ('W', 0, 0), ('W', 1, 0)]
    """
    warm = min(stages - stage - 1, micro_batches)
    out: list[Event] = [(FORWARD, i, 0) for i in range(warm)]
    for k in range(micro_batches):
        if warm + k < micro_batches:
            out.append((FORWARD, warm + k, 0))
        out.append((BACKWARD, k, 0))
        if k >= stage:
            out.append((WEIGHT, k - stage, 0))
    return out + [(WEIGHT, k, 0) for k in range(max(micro_batches - stage, 0), micro_batches)]


def seconds(
    forward_s: Num, backward_s: Num, *, micro_batches: Num, virtual: Num = 1, p2p_s: Num = 0.0, weight_s: Num = None,
    overlap_p2p: bool = False,
) -> Pipeline:
    """The closed form above. weight_s: the part of backward_s that is W, half of it unless given (the two products of a
    linear layer cost the same). Raises InputError for malformed arrays and for weight_s above backward_s."""
    x = inputs(forward_s, backward_s, micro_batches=micro_batches, virtual=1, p2p_s=p2p_s)
    w = np.asarray(0.5 * x.b if weight_s is None else weight_s, dtype=float) + 0.0 * x.b
    if (w > x.b).any() or (w < 0.0).any():
        hint = "it is a part of backward_s"
        raise InputError("is not between 0 and backward_s", key="weight_s", value=float(w.max()), hint=hint)
    f, b = received(x, overlap_p2p=overlap_p2p)
    b = b - w
    lag = lagged(x, overlap_p2p=overlap_p2p)
    end_s = blockwise(sojourn, f, b, w, x.m, x.later, lag, f, b)
    if (x.m <= x.stages).any():
        end_s = np.maximum(end_s, blockwise(short, f, b, w, x.m, x.later, lag))
    exact = uniform(x.f, x.b, w) and not x.c.any()
    return finish(x, end_s, in_flight=np.minimum(x.m, float(x.stages)) + 0.0 * x.later, exact=exact)
