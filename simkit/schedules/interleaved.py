"""Interleaved 1F1B: a stage holds v chunks of the model, and a micro-batch passes the stages v times.

Stage r starts with (p - r - 1)·2 + (v - 1)·p forward passes of chunks, in groups of p micro-batches a chunk.

    equal stages    end = (m + (p-1)/v) (f + b)        bubble (p-1)/(v m) of the ideal time, exact
    uneven stages   the longest path of `_common.sojourn` over chunks (m = p: and of `short`), or of `_by_way_of_last`

Held against the recurrence of `simkit.des.pipeline` on random pipelines with p <= 12, m/p <= 6, 2 <= v <= 5: all stages
equal but for the last and one other (head, embedding): exact; stages within 10 % of each other: at most 0.01 % short;
lognormal stages (sigma 0.5): exact on 97 %, mean 0.01 %, at most 0.6 % short. Receives that block are spread evenly
over the chunks of a stage: an error of 0.1 % in the mean, at most 0.6 %, where c = 1 % of a stage's time. Messages that
overlap: equal stages end 2 c (p v - 1) later, exactly while c is small beside a chunk's pass; uneven ones: 0.2 % in the
mean, at most 2 %.

A stage holds (p - r - 1)·2 + (v - 1)·p + 1 chunks' activations, each 1/v of a stage's.
Sources: Narayanan et al. (arXiv 2104.04473), section 2.2; order as in Megatron-LM, `forward_backward_pipelining_with_
interleaving` and `get_schedule_table`; flexible groups as in PyTorch's `ScheduleInterleaved1F1B`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError
from simkit.schedules._common import (
    BACKWARD,
    FORWARD,
    NONE,
    Array,
    Event,
    Num,
    Pipeline,
    blockwise,
    finish,
    inputs,
    lagged,
    most,
    most_from,
    received,
    running,
    short,
    sojourn,
    sweeps,
    uniform,
)


def allowed(micro_batches: Num, stages: int, *, flexible: bool = False) -> NDArray[np.bool_]:
    """Whether so many micro-batches can be interleaved over `stages`; arrays.

    Strict (Megatron-LM): m % p == 0. Flexible (PyTorch): m % max(1, m // p) == 0.
    """
    m = np.asarray(micro_batches)
    return np.asarray(m % (np.maximum(1, m // stages) if flexible else stages) == 0)


def group(*, stages: int, micro_batches: int, flexible: bool = False) -> int:
    """Micro-batches that pass one chunk before the next chunk's turn. Raises InputError where they do not divide."""
    rounds = max(1, micro_batches // stages)
    if allowed(micro_batches, stages, flexible=flexible):
        return micro_batches // rounds if flexible else stages
    near = rounds * stages
    if flexible:
        what, hint = f"does not divide into {rounds} rounds of the interleaved schedule", f"use {near}"
    else:
        what = f"is no multiple of pp = {stages}, which the interleaved schedule needs"
        hint = f"use {near} or {near + stages}, or vpp = 1"
    raise InputError(what, key="grad_accum", value=micro_batches, hint=hint)


def order(stage: int, *, stages: int, micro_batches: int, virtual: int = 1, flexible: bool = False) -> list[Event]:
    """Warm-up, one forward and one backward chunk in turn, cool-down. Raises InputError where m does not divide.

    >>> [f"{k}{i}.{c}" for k, i, c in order(1, stages=2, micro_batches=2, virtual=2)]
    ['F0.0', 'F1.0', 'F0.1', 'B0.1', 'F1.1', 'B1.1', 'B0.0', 'B1.0']
    """
    size = group(stages=stages, micro_batches=micro_batches, flexible=flexible)
    total, turn = micro_batches * virtual, size * virtual

    def passed(k: int, kind: str) -> Event:
        chunk = k % turn // size
        return kind, k // turn * size + k % size, chunk if kind == FORWARD else virtual - 1 - chunk

    warm = min((stages - stage - 1) * 2 + (virtual - 1) * size, total)
    out = [passed(k, FORWARD) for k in range(warm)]
    for k in range(total - warm):
        out += [passed(warm + k, FORWARD), passed(k, BACKWARD)]
    return out + [passed(k, BACKWARD) for k in range(total - warm, total)]


def seconds(
    forward_s: Num, backward_s: Num, *, micro_batches: Num, virtual: Num = 1, p2p_s: Num = 0.0, weight_s: Num = None,
    overlap_p2p: bool = False,
) -> Pipeline:
    """The closed form above; `weight_s` has no meaning here. It holds where `allowed`, which the caller asks (a sweep
    keeps such points with their reason). Raises InputError for malformed arrays."""
    x = inputs(forward_s, backward_s, micro_batches=micro_batches, virtual=virtual, p2p_s=p2p_s)
    c = x.c * float(x.hops > 0 and not overlap_p2p)
    # Chunk 0 of the first stage and the last chunk of the last one receive nothing.
    f = x.f / x.v + c * (1.0 - (1.0 - x.takes_f) / x.v)
    b = x.b / x.v + c * (1.0 - (1.0 - x.takes_b) / x.v)
    fill, drain = received(x, overlap_p2p=overlap_p2p)
    fill, drain = fill - x.f + x.f / x.v, drain - x.b + x.b / x.v
    warm = 2.0 * x.later + (x.v - 1.0) * x.stages
    lag = lagged(x, overlap_p2p=overlap_p2p)
    end_s = blockwise(sojourn, f, b, NONE, x.m * x.v, warm, lag, fill, drain)
    even = uniform(x.f, x.b)
    if not even:
        # Each point as it would be alone: paths that others take say nothing about it.
        detour = blockwise(_by_way_of_last, f, b, x.m * x.v, warm, lag, x.v)
        alike = (x.f == x.f[..., :1]).all(axis=-1, keepdims=True) & (x.b == x.b[..., :1]).all(axis=-1, keepdims=True)
        end_s = np.where(alike, end_s, np.maximum(end_s, detour))
    if (x.m <= x.stages).any():
        brief = blockwise(short, f, b, NONE, x.m * x.v, warm, lag)
        end_s = np.where(x.m <= x.stages, np.maximum(end_s, brief), end_s)
    if overlap_p2p:
        end_s = np.maximum(end_s, sweeps(x, x.m + x.hops / x.v, (x.stages * x.v - 1.0) * (x.hops > 0)))
    held = np.minimum(warm + 1.0, x.m * x.v) / x.v
    exact = even and not x.c.any() and bool(allowed(x.m, x.stages).all())
    return finish(x, end_s, in_flight=held, exact=exact)


def _by_way_of_last(f: Array, b: Array, rounds: Array, warm: Array, lag: Array, virtual: Array) -> Array:
    """The longest path that is steady at the last stage for p passes, goes on to the first stage's next chunk and from
    there to stage r, where it stays; the mirrored end; or both. Arrays (stages, ...), seconds (1, ...).

    In place of the piece of `sojourn` up to the first B of r (mirrored: from the last F) stands

        sum f + (v-1) p max f + p (f + b)_last + sum_{s<r} f - (2 r + 1) (f + b)_r

    since pass (v+1) p of r is the first that the detour reaches. It needs v > 1 and as many passes on either side.
    """
    p = f.shape[0]
    stage = np.arange(float(p)).reshape((-1,) + (1,) * (f.ndim - 1))
    work, reached = f + b, (virtual + 1.0) * p
    steady = rounds - warm - 2.0

    def ends(x: Array, y: Array) -> tuple[Array, Array]:
        """(straight, by way of the last stage) to the first pass of y after those of x."""
        dwell = np.minimum(rounds - 1.0, warm)
        whole_x, whole_y = running(np.add, x) + stage * lag, running(np.add, y) + stage * lag
        straight = most_from(whole_x + whole_y + dwell * most(x)) - (whole_y - y)
        detour = whole_x[-1:] + (virtual - 1.0) * p * most(x)[-1:] + p * work[-1:] + lag
        return straight, detour + (whole_x - x) - (2.0 * stage + 1.0) * work

    first, first_by = ends(f, b)
    final, final_by = ends(b, f)
    once = np.maximum(first_by + final, first + final_by)
    once = np.where((virtual > 1.0) & (steady >= 0.0) & (reached <= rounds - 1.0), once, -np.inf)
    twice = np.where((virtual > 1.0) & (2.0 * reached + 1.0 - warm <= rounds), first_by + final_by, -np.inf)
    return np.asarray(np.maximum.reduce(np.maximum(once, twice) + steady * work, axis=0, keepdims=True))
