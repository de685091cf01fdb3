"""What every schedule answers, and the longest paths that the closed forms share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError

Num = Any
Array = NDArray[np.float64]
Event = tuple[str, int, int]
Order = Callable[..., list[Event]]

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
BLOCK = 2048
"""Points at a time: intermediate arrays of 32 stages then stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """How long the micro-batches of one step take; arrays over sweep points, in seconds.

    steady_s: micro_batches x the slowest stage, the time without a pipeline's cost. bubble_s = end_s - steady_s: fill,
    drain, waits for uneven stages and messages. fill_s: until the last stage receives its first micro-batch.
    per_stage_busy_s (last axis = stage): computing, blocking receives not counted. in_flight (last axis = stage): the
    most micro-batches whose activations a stage holds at once, in whole micro-batches of the whole stage.
    exact: end_s is proven by test to be that of the event simulation; otherwise it is the bound that the schedule
    documents.
    """

    end_s: Num
    bubble_s: Num
    steady_s: Num
    fill_s: Num
    per_stage_busy_s: Array
    in_flight: Array
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Checked arrays. f, b: (..., stages); m, v, c: (..., 1), so that they broadcast against stages."""

    f: Array
    b: Array
    m: Array
    v: Array
    c: Array
    later: Array
    hops: int

    @property
    def stages(self) -> int:
        return int(self.later.shape[0])


def inputs(forward_s: Num, backward_s: Num, *, micro_batches: Num, virtual: Num, p2p_s: Num) -> Inputs:
    """Raises InputError for degrees below one or arrays of different stages. `later[r]` = stages after r, p - r - 1."""
    f, b = np.asarray(forward_s, dtype=float), np.asarray(backward_s, dtype=float)
    if f.ndim == 0 or b.ndim == 0 or f.shape[-1] != b.shape[-1] or not f.shape[-1]:
        hint = "the last axis of both is the stage"
        raise InputError("and backward_s do not have the same stages", key="forward_s", value=f.shape, hint=hint)
    columns = [np.asarray(x, dtype=float)[..., None] for x in (micro_batches, virtual, p2p_s)]
    for key, column in zip(("micro_batches", "virtual"), columns, strict=False):
        if not (column >= 1).all():
            raise InputError("must be at least 1", key=key, value=float(column.min()))
    stages = f.shape[-1]
    later = np.arange(stages - 1, -1, -1, dtype=float)
    return Inputs(f=f, b=b, m=columns[0], v=columns[1], c=columns[2], later=later, hops=stages - 1)


def received(x: Inputs, *, overlap_p2p: bool, forwards: Num = 1.0, backwards: Num = 1.0) -> tuple[Array, Array]:
    """(f, b) with the receives that block a stage: all but the first stage wait for `forwards` messages a micro-batch,
    all but the last for `backwards`."""
    c = 0.0 * x.c if overlap_p2p else x.c
    return x.f + c * forwards * (x.later < x.hops), x.b + c * backwards * (x.later > 0)


def lagged(x: Inputs, *, overlap_p2p: bool) -> Array:
    """The delay of a message that occupies no stage."""
    return x.c * float(overlap_p2p)


def sweeps(x: Inputs, passes: Num, turns: Num) -> Array:
    """The path that goes down all stages and back again and again where messages of c overlap: `passes` mean stages and
    2 c for each of its `turns` hops."""
    return np.asarray(passes * (x.f + x.b).mean(axis=-1, keepdims=True) + 2.0 * x.c * turns)


def finish(x: Inputs, end_s: Array, *, in_flight: Array, exact: bool, weight_s: Num = 0.0) -> Pipeline:
    """The Pipeline once its end is known; `end_s` keeps the axis of stages with length one."""
    work = x.f + x.b + weight_s
    steady = x.m * work.max(axis=-1, keepdims=True)
    end = np.maximum(end_s, steady)
    fill = x.f[..., :-1].sum(axis=-1, keepdims=True) / x.v + x.c * x.hops
    return Pipeline(
        end_s=end[..., 0],
        bubble_s=(end - steady)[..., 0],
        steady_s=steady[..., 0],
        fill_s=fill[..., 0],
        per_stage_busy_s=x.m * work,
        in_flight=in_flight,
        exact=exact,
    )


def uniform(*stages_s: Array) -> bool:
    """Whether all stages take the same time, at every point."""
    return all(bool((s == s[..., :1]).all()) for s in stages_s)


def blockwise(path: Callable[..., Array], *arrays: Array) -> Array:
    """`path` of arrays (..., stages) or (..., 1), block by block over the first axis of sweep points; keeps a last axis of one."""
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    if math.prod(shape[:-1]) <= BLOCK:
        return path(*arrays)
    step = max(1, BLOCK // math.prod(shape[1:-1]))
    out = np.empty((*shape[:-1], 1))
    for i in range(0, shape[0], step):
        out[i : i + step] = path(*(a[i : i + step] if a.ndim == len(shape) and a.shape[0] > 1 else a for a in arrays))
    return out


def sojourn(
    f: Array, b: Array, w: Array, rounds: Array, warm: Array, lag: Array, fill: Array, drain: Array
) -> Array:
    """The longest path that stays in steady state at one stage r, over r: seconds (..., 1).

    The stages alternate one F and one B after warm_r + 1 forward passes; each makes `rounds` of either. In the graph of
    events a path may leave r only at a loss until the last forward pass, so it is made of three pieces (P, Q = cumsum
    of f, b):

        to the first B of r     max_{q>=r}  P_q + warm_q max_{s<=q} f_s + sum_{r<=s<=q} b_s
        steady at r             (rounds - warm_r - 2) (f_r + b_r) + max(rounds - p, 0) w_r
        from the last F of r    max_{q>=r}  sum_{r<=s<=q} f_s + warm_q max_{s<=q} (b_s + w_s) + sum_{h<=s<=q} b_s + tail_h

    It ends with the backward pass of stage h = 0, or where weight gradients of w_h are put off to the end, with those
    of the last h + 1 micro-batches: tail_h = min(h + 1, rounds) w_h. fill, drain: f and b of the first and the last
    pass, which differ from the others where a receive blocks them. lag: a message between two stages of the path.
    """
    stage = np.arange(f.shape[-1])
    dwell = np.minimum(rounds - 1.0, warm)
    fills, drains = fill.cumsum(axis=-1) + stage * lag, drain.cumsum(axis=-1) + stage * lag
    put_off = b + w * (rounds >= f.shape[-1])
    before = fills + dwell * _most(f)
    # No path leads from the stage of the dwell back up to that of the tail: the dwell is at q, or the tail at stage 0.
    tail = _most(np.minimum(stage + 1.0, rounds) * w - (drains - drain))
    after = np.maximum(dwell * put_off + tail, dwell * _most(put_off) + w[..., :1])
    first = _most_from(before + drains) - (drains - drain)
    final = _most_from(fills + drains + after) - (fills - fill)
    steady = rounds - warm - 2.0
    path = first + final + steady * (f + b) + np.maximum(rounds - f.shape[-1], 0.0) * w
    path = np.where(steady >= 0.0, path, -np.inf)
    # A stage that never waits once it has begun.
    path = np.maximum(path, fills - fill + rounds * (f + b + w) + np.maximum(drains - drain - rounds * w, 0.0))
    return np.asarray(path.max(axis=-1, keepdims=True))


def short(f: Array, b: Array, w: Array, rounds: Array, warm: Array, lag: Array) -> Array:
    """The longest path where a stage h ends all its forward passes before its first backward pass (warm_h >= rounds - 1):

        P_q + Q_q + min(rounds - 1, warm_q) max_{s<=q} f + (rounds - 1) max_h b        h <= q, and mirrored
    """
    dwell = np.minimum(rounds - 1.0, warm)
    stage = np.arange(f.shape[-1])
    drains = b.cumsum(axis=-1) + stage * lag
    whole = f.cumsum(axis=-1) + stage * lag + drains
    idle = warm >= rounds - 1.0
    through = (rounds - 1.0) * b + np.maximum(rounds - 1.0 - stage, 0.0) * w + w[..., :1]
    ends = (rounds - 1.0) * b + rounds * w - (drains - b)
    late = _most(np.where(idle, np.maximum(through, ends), -np.inf)) + dwell * _most(f)
    early = _most(np.where(idle, (rounds - 1.0) * f, -np.inf)) + dwell * _most(b) + w[..., :1]
    return np.asarray((whole + np.maximum(late, early)).max(axis=-1, keepdims=True))


def _most(x: Array) -> Array:
    """max over s <= r."""
    return np.maximum.accumulate(x, axis=-1)


def _most_from(x: Array) -> Array:
    """max over q >= r."""
    return np.maximum.accumulate(x[..., ::-1], axis=-1)[..., ::-1]
