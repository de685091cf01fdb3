"""What every schedule answers, and the longest paths that the closed forms share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError

Num = Any
Array = NDArray[np.float64]
Event = tuple[str, int, int]
Order = Callable[..., list[Event]]

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
NONE: Array = np.zeros(1)
"""No weight gradients apart from the backward pass."""
BLOCK = 2048
"""Points at a time, so that intermediate arrays of 32 stages stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """How long the micro-batches of one step take; arrays over sweep points, in seconds.

    steady_s: micro_batches x the slowest stage, the time without a pipeline's cost. bubble_s = end_s - steady_s: fill
    and drain, waits for uneven stages and messages. fill_s: until the last stage receives its first micro-batch.
    stage_s (..., stages): forward and backward of one micro-batch. in_flight (..., stages): the most micro-batches
    whose activations a stage holds at once, in whole micro-batches of the whole stage. exact: end_s is that of the
    event simulation, as tests hold; otherwise it is the estimate that the schedule documents.
    """

    end_s: Num
    steady_s: Num
    stage_s: Array
    micro_batches: Num
    in_flight: Array
    exact: bool
    inputs: Inputs

    @property
    def bubble_s(self) -> Num:
        return self.end_s - self.steady_s

    @property
    def fill_s(self) -> Num:
        x = self.inputs
        return np.add.reduce(x.f[..., :-1], axis=-1) / x.v[..., 0] + x.c[..., 0] * x.hops

    @property
    def per_stage_busy_s(self) -> Array:
        """What each stage computes in all (..., stages); receives that block it are not counted."""
        return np.asarray(np.asarray(self.micro_batches)[..., None] * self.stage_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Checked arrays. f, b: (..., stages); m, v, c: (..., 1), so that they broadcast against stages.

    later[r]: stages after r, p - r - 1; hops = p - 1; takes_f, takes_b: 1 where a stage receives messages.
    """

    f: Array
    b: Array
    m: Array
    v: Array
    c: Array
    later: Array
    takes_f: Array
    takes_b: Array
    hops: int

    @property
    def stages(self) -> int:
        return self.hops + 1


@lru_cache(maxsize=256)
def _places(stages: int) -> tuple[Array, Array, Array]:
    later = np.arange(stages - 1, -1, -1, dtype=float)
    return later, (later < stages - 1).astype(float), (later > 0).astype(float)


def inputs(forward_s: Num, backward_s: Num, *, micro_batches: Num, virtual: Num, p2p_s: Num) -> Inputs:
    """Raises InputError for degrees below one or arrays of different stages."""
    f, b = np.asarray(forward_s, dtype=float), np.asarray(backward_s, dtype=float)
    if f.ndim == 0 or b.ndim == 0 or f.shape[-1] != b.shape[-1] or not f.shape[-1]:
        hint = "the last axis of both is the stage"
        raise InputError("and backward_s do not have the same stages", key="forward_s", value=f.shape, hint=hint)
    m, v, c = (np.asarray(x, dtype=float)[..., None] for x in (micro_batches, virtual, p2p_s))
    for key, given, column in (("micro_batches", micro_batches, m), ("virtual", virtual, v)):
        least = given if isinstance(given, int) else np.minimum.reduce(column, axis=None)
        if not least >= 1.0:
            raise InputError("must be at least 1", key=key, value=float(least))
    later, takes_f, takes_b = _places(f.shape[-1])
    return Inputs(f=f, b=b, m=m, v=v, c=c, later=later, takes_f=takes_f, takes_b=takes_b, hops=f.shape[-1] - 1)


def received(x: Inputs, *, overlap_p2p: bool) -> tuple[Array, Array]:
    """(f, b) with the receives that block a stage: activations (not the first), gradients (not the last)."""
    if overlap_p2p or not x.c.any():
        return x.f, x.b
    return x.f + x.c * x.takes_f, x.b + x.c * x.takes_b


def lagged(x: Inputs, *, overlap_p2p: bool) -> Array:
    """The delay of a message that occupies no stage."""
    return x.c * float(overlap_p2p)


def sweeps(x: Inputs, passes: Num, turns: Num) -> Array:
    """The path that goes down all stages and back again and again where messages of c overlap: `passes` mean stages and
    2 c for each of its `turns` hops."""
    return np.asarray(passes * (x.f + x.b).mean(axis=-1, keepdims=True) + 2.0 * x.c * turns)


def finish(x: Inputs, end_s: Array, *, in_flight: Array, exact: bool) -> Pipeline:
    """The Pipeline once its end is known; `end_s` keeps the axis of stages with length one."""
    work = x.f + x.b
    steady = x.m[..., 0] * np.maximum.reduce(work, axis=-1)
    end = np.maximum(end_s[..., 0], steady)
    return Pipeline(
        end_s=end,
        steady_s=steady,
        stage_s=work,
        micro_batches=x.m[..., 0],
        in_flight=in_flight,
        exact=exact,
        inputs=x,
    )


def uniform(*stages_s: Array) -> bool:
    """Whether all stages take the same time, at every point."""
    return all(bool(np.logical_and.reduce(s == s[..., :1], axis=None)) for s in stages_s)


def blockwise(path: Callable[..., Array], *arrays: Array) -> Array:
    """The longest path (..., 1) of arrays (..., stages) or (..., 1), block by block over the first axis of points.

    `path` sees the stages in front, where running sums and maxima go row by row.
    """
    if all(a.ndim == 1 for a in arrays):
        return path(*arrays)
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    aligned = [np.moveaxis(a.reshape((1,) * (len(shape) - a.ndim) + a.shape), -1, 0) for a in arrays]
    out = np.empty((1, *shape[:-1]))
    step = max(1, BLOCK // math.prod(shape[1:-1]))
    for i in range(0, shape[0], step):
        block = (np.ascontiguousarray(a[:, i : i + step] if a.shape[1] > 1 else a) for a in aligned)
        out[:, i : i + step] = path(*block)
    return np.moveaxis(out, 0, -1)


def sojourn(
    f: Array, b: Array, w: Array, rounds: Array, warm: Array, lag: Array, fill: Array, drain: Array
) -> Array:
    """The longest path that stays in steady state at one stage r, over r: seconds (1, ...) of arrays (stages, ...).

    The stages alternate one F and one B after warm_r + 1 forward passes; each makes `rounds` of either. In the graph of
    events a path leaves r only at a loss until the last forward pass, so it is made of three pieces:

        to the first B of r     max_{q>=r}  sum_{s<=q} f + warm_q max_{s<=q} f + sum_{r<=s<=q} b
        steady at r             (rounds - warm_r - 2) (f_r + b_r) + max(rounds - p, 0) w_r
        from the last F of r    max_{q>=r}  sum_{r<=s<=q} f + warm_q max_{s<=q} (b + w) + sum_{h<=s<=q} b + tail_h

    It ends with the backward pass of stage h = 0 or, where weight gradients of w_h are put off to the end, with those
    of the last h + 1 micro-batches: tail_h = min(h + 1, rounds) w_h. fill, drain: f and b of the first and the last
    pass, which differ from the others where a receive blocks them. lag: a message between two stages of the path.
    """
    dwell = np.minimum(rounds - 1.0, warm)
    work, ends = f + b, fill + drain
    whole = running(np.add, ends)
    if lag.any():
        whole = whole + 2.0 * _column(f) * lag
    above = whole - ends
    to_first = most_from(whole + dwell * most(f))
    steady = rounds - warm - 2.0
    middle = steady * work
    alone = above + rounds * work
    if w.any():
        above_b = running(np.add, drain) - drain + _column(f) * lag
        put_off = b + w * (rounds >= f.shape[0])
        tail = most(np.minimum(_column(f) + 1.0, rounds) * w - above_b)
        # No path leads from the stage of the dwell back up to that of the tail: dwell at q, or tail at stage 0.
        after = np.maximum(dwell * put_off + tail, dwell * most(put_off) + w[:1])
        middle = middle + np.maximum(rounds - f.shape[0], 0.0) * w
        alone = np.maximum(alone, alone + rounds * w - above_b)
    else:
        after = dwell * most(b)
    path = to_first + most_from(whole + after) + middle - above
    longest = np.maximum(np.where(steady >= 0.0, path, alone), alone)
    return np.asarray(np.maximum.reduce(longest, axis=0, keepdims=True))


def short(f: Array, b: Array, w: Array, rounds: Array, warm: Array, lag: Array) -> Array:
    """The longest path where a stage h ends its forward passes before its first backward pass, warm_h >= rounds - 1:

        sum_{s<=q} (f + b) + min(rounds - 1, warm_q) max_{s<=q} f + (rounds - 1) max_h b        h <= q, and mirrored
    """
    stage = _column(f)
    dwell = np.minimum(rounds - 1.0, warm)
    drains = running(np.add, b) + stage * lag
    whole = running(np.add, f) + stage * lag + drains
    idle = warm >= rounds - 1.0
    through = (rounds - 1.0) * b + np.maximum(rounds - 1.0 - stage, 0.0) * w + w[:1]
    ends = (rounds - 1.0) * b + rounds * w - (drains - b)
    late = most(np.where(idle, np.maximum(through, ends), -np.inf)) + dwell * most(f)
    early = most(np.where(idle, (rounds - 1.0) * f, -np.inf)) + dwell * most(b) + w[:1]
    return np.asarray(np.maximum.reduce(whole + np.maximum(late, early), axis=0, keepdims=True))


def _column(x: Array) -> Array:
    """0, 1, ... along the stages in front."""
    return np.arange(float(x.shape[0])).reshape((-1,) + (1,) * (x.ndim - 1))


def running(op: np.ufunc, x: Array) -> Array:
    """`op.accumulate` over the first axis; numpy's own walks column by column, eight times slower on a block."""
    if x.ndim == 1:
        return np.asarray(op.accumulate(x))
    out = np.empty_like(x)
    out[0] = x[0]
    for i in range(1, len(x)):
        op(out[i - 1], x[i], out=out[i])
    return out


def most(x: Array) -> Array:
    """max over s <= r."""
    return running(np.maximum, x)


def most_from(x: Array) -> Array:
    """max over q >= r."""
    return running(np.maximum, x[::-1])[::-1]
