"""Bytes per device by pipeline stage, under tensor, sequence, context, expert and pipeline parallelism and ZeRO.

With t = tp, x = ep, c = cp, d = ranks that ZeRO shards over (shard_group · cp), e bytes of an element in arithmetic:

    parameters    column-, row-, vocabulary-parallel matrices /t, norms, routers and position tables whole,
                  routed experts /(t·x); the token table on the first stage, final norm and head on the last, both ends
                  hold a tied table
    weights       e a parameter (or the master's bytes)      ZeRO-3: /d
    gradients     4 or e a parameter                         ZeRO-2: /d
    optimizer     moments, master copy                       ZeRO-1: /d      (experts: /(d/x) each)
    gathered      ZeRO-3: two blocks (one prefetched) and the ends at e, the gradient of one block
    activations   in flight · (kept by the stage's blocks) + one replayed block; a token's bytes /t, /sp or whole
                  (`simkit.program.DIVIDES`), tokens /c
    transient     the gradients of the largest kept tensor and of the one behind it, where the logits do not exceed them
    logits        /t, on the last stage

Micro-batches in flight on stage r of p with m of them: 1F1B min(m, p - r); GPipe m; interleaved in v chunks
min(m v, 2 (p - r - 1) + (v - 1) p + 1) / v; zero-bubble min(m, p), a bound: inputs of delayed weight gradients stay.
Every quantity may be an array over sweep points: results have shape (..., stages).
Sources: Korthikanti et al. (arXiv 2205.05198, sections 4 and 5); Rajbhandari et al. (arXiv 1910.02054, section 3);
Narayanan et al. (arXiv 2104.04473, section 2.2); Zhao et al. (arXiv 2304.11277, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from simkit.memory_facts import LOSS, WORKSPACE_BYTES, MemoryFacts, memory_facts
from simkit.memory_states import (
    Placed,
    element_bytes,
    fixed,
    fixed_kept,
    rows_of,
    stage_sums,
)
from simkit.parallel import tensor
from simkit.parallel.pipeline import layers_per_stage
from simkit.program import BS, DIVIDES, SAVED, Program
from simkit.roofline import MEMORY, Array
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import Plan

Num = Any
FP32_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """Bytes of one rank of each stage; last axis = stage, leading axes = sweep points.

    items_bytes broadcast against each other and sum to allocated_bytes; reserved_bytes adds fragmentation. in_flight:
    micro-batches held.
    """

    items_bytes: Mapping[str, Array]
    allocated_bytes: Array
    reserved_bytes: Array
    in_flight: Array

    def stage(self, index: int) -> dict[str, float]:
        """The items of one stage of one point."""
        return {name: float(value[..., index]) for name, value in self.items_bytes.items()}


def memory_of_stages(
    program: Program,
    model: Model,
    plan: Plan,
    *,
    facts: MemoryFacts | None = None,
    held: Sequence[int] | None = None,
    exchange_bytes: float = 0.0,
    workspace_bytes: float = WORKSPACE_BYTES,
) -> StageMemory:
    """Itemised bytes of every stage of a transformer.

    Batch, length, degrees but pp, and shard_group may be arrays. facts: of the plan's stack unless given. held:
    blocks of each stage, evenly divided unless given. exchange_bytes: what the exchange of an unsharded model's
    gradients keeps. Raises ValueError where `held` does not place every block once.
    """
    facts = facts or memory_facts(plan.stack)
    blocks = len(program.blocks.counts)
    placed = tuple(map(int, layers_per_stage(blocks, plan.pp) if held is None else held))
    if len(placed) != plan.pp or sum(placed) != blocks:
        raise ValueError(f"{list(placed)} does not place {blocks} blocks on {plan.pp} stages")
    alone, arrays = _alone(plan), _of_arrays(plan)
    states = (fixed if arrays else fixed_kept)(model, alone, facts, placed, exchange_bytes, workspace_bytes)
    kept = (_coefficients if arrays else _coefficients_kept)(program, alone, plan.recompute, model, facts, placed)
    flights = flights_of(plan)
    moving = _activations(kept, plan, placed, flights)
    allocated: Array = sum(moving.values(), states["sum"])
    items = moving | states
    del items["sum"]
    return StageMemory(
        items_bytes=items,
        allocated_bytes=allocated,
        reserved_bytes=allocated * (1.0 + facts.fragmentation),
        in_flight=flights,
    )


@lru_cache(maxsize=1024)
def _in_flight(schedule: str, micro_batches: int, stages: int, virtual: int) -> Array:
    return in_flight(schedule, micro_batches=micro_batches, stages=stages, virtual=virtual)


def flights_of(plan: Any) -> Array:
    """`in_flight` of a plan."""
    if isinstance(plan.grad_accum, np.ndarray) or isinstance(plan.vpp, np.ndarray):
        return in_flight(plan.schedule, micro_batches=plan.grad_accum, stages=plan.pp, virtual=plan.vpp)
    return _in_flight(plan.schedule, plan.grad_accum, plan.pp, plan.vpp)


def in_flight(schedule: str, *, micro_batches: Num, stages: int, virtual: Num = 1) -> Array:
    """Most micro-batches whose activations a stage holds at once, shape (..., stages).

    >>> in_flight("1f1b", micro_batches=8, stages=4).tolist()
    [4.0, 3.0, 2.0, 1.0]
    """
    m, v = (np.asarray(n, dtype=float)[..., None] for n in (micro_batches, virtual))
    left = np.arange(stages, 0, -1, dtype=float)
    chunks = 2.0 * (left - 1.0) + (v - 1.0) * stages + 1.0
    plain = np.where(v > 1.0, chunks / v, left)
    bound: Num = {"gpipe": m, "zb": float(stages), "interleaved": chunks / v}.get(schedule, plain)
    found: Array = np.minimum(m, bound) + 0.0 * left
    return found


@lru_cache(maxsize=1024)
def most_in_flight(schedule: str, stages: int, virtual: int = 1) -> int:
    """Micro-batches a step beyond which no stage holds more of them; of GPipe, which holds all, a number no step has.

    >>> most_in_flight("1f1b", 4)
    4
    """
    most = float(in_flight(schedule, micro_batches=2.0**62, stages=stages, virtual=virtual).max())
    return math.ceil(most)


_VARIED = ("tp", "sp", "cp", "ep", "dp", "shard_group")
"""Fields of a plan that may be arrays and that states and coefficients depend on."""


def _alone(plan: Plan) -> Plan:
    """The plan at one batch: what does not depend on it is worked out once."""
    return replace(plan, micro_batch=1, grad_accum=1, seq_len=0, recompute="none", schedule="1f1b")


def _of_arrays(plan: Plan) -> bool:
    """Whether a degree is an array: such a plan has no hash, and its answers are not kept."""
    return any(isinstance(getattr(plan, name), np.ndarray) for name in _VARIED)


# -- activations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    """Bytes of one micro-batch as coefficients over BASIS, last axis; leading axes as the degrees.

    stays: of each stage (..., stages, 5) while its micro-batch is in flight; whole: without recomputation; replayed: of
    what is recomputed of each block (..., blocks, 5); widest: kept tensors, one by one (..., rows, 5); logits (..., 5).
    """

    stays: Array
    whole: Array
    replayed: Array
    widest: Array
    logits: Array


def _coefficients(
    program: Program, plan: Plan, recompute: str, model: Model, facts: MemoryFacts, placed: Placed
) -> _Kept:
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    ops = program.forward
    saved = ops.coefficients[SAVED]
    if spec.gated_mlp and (facts.fused_gate or plan.compile):
        saved = saved * np.array([name != "activation" for name in ops.names])
    t, sp = (np.asarray(n, dtype=float)[..., None, None] for n in (plan.tp, plan.sp))
    over_t = np.isin(ops.divides, [DIVIDES.index(d) for d in ("k", "batch", "bytes")])
    over_sp = np.isin(ops.divides, [DIVIDES.index(d) for d in ("n", "sequence")])
    rows = (saved / np.where(over_t, t, 1.0) / np.where(over_sp, sp, 1.0)).swapaxes(-1, -2)
    counts, replays = program.blocks.counts, program.replayed(recompute)
    extra = _extra(spec, plan, facts)[..., None, :]
    blocks, dropped = counts @ rows + extra, replays @ rows
    stays = blocks - dropped
    if recompute == "full":
        dropped = blocks
        stays = program.blocks.inputs / sp
    elif recompute == "selective" and facts.selective == "products" and plan.attention == "flash":
        dropped = blocks
        stays = program.blocks.inputs / sp + _every_second(program, spec, plan)
    held = [stage_sums(x.swapaxes(-1, -2), placed).swapaxes(-1, -2) for x in (stays, blocks)]
    for x in held:
        x[..., 0, :] += program.blocks.before[0] @ rows
        x[..., -1, :] += program.blocks.after[0] @ rows
    inside = rows[..., counts.any(axis=0), :] if len(counts) else rows[..., :0, :]
    return _Kept(
        stays=held[0],
        whole=held[1],
        replayed=dropped,
        widest=_distinct(inside),
        logits=_logits(program, spec, plan, facts, rows_of(model, plan, facts)),
    )


_coefficients_kept = lru_cache(maxsize=1024)(_coefficients)


def _every_second(program: Program, spec: TransformerSpec, plan: Plan) -> Array:
    """Bytes of the results that each block keeps: products 1, 3, 5 … in their order, attention with its log-sum-exp,
    and what tensor parallelism scatters; coefficients (..., blocks, 5)."""
    ops, e = program.forward, element_bytes(plan)
    t, sp = (np.asarray(n, dtype=float)[..., None, None] for n in (plan.tp, plan.sp))
    batch, m, n = ops.coefficients[:3]
    # Of products with a weight, copies and outputs are constants.
    weighted = (ops.kind != MEMORY) & ~batch[1:].any(axis=0) & ~n[1:].any(axis=0)
    results = (e * m * n[0] * batch[0]).T / np.where(ops.divides == DIVIDES.index("n"), t, 1.0).swapaxes(-1, -2)
    ends = np.cumsum(program.blocks.counts.sum(axis=1)).astype(int) + int(program.blocks.before[0].sum())
    begins = np.concatenate([[int(program.blocks.before[0].sum())], ends[:-1]])
    kept = np.zeros_like(program.blocks.counts)
    for block, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        products = [row for row in ops.order[begin:end] if weighted[row]]
        np.add.at(kept[block], products[::2], 1.0)
    attention = BS * spec.heads * (e * spec.value_dim + FP32_BYTES) / t
    scattered = np.where(t > 1.0, 2.0 * e * spec.hidden * BS / sp, 0.0)
    found: Array = kept @ results + attention + scattered
    return found


def _distinct(rows: Array) -> Array:
    """Each row once, where there is one table of them."""
    return np.unique(rows, axis=0) if rows.ndim == 2 else rows


@lru_cache(maxsize=256)
def _last(stages: int) -> Array:
    """1 for the last stage, 0 before it."""
    mask: Array = np.eye(stages)[-1]
    return mask


def _monomials(b: Num, s: Num, cp: Num) -> Array:
    """`tensor.monomials`, without its detours for three plain numbers."""
    if any(isinstance(n, np.ndarray) for n in (b, s, cp)):
        return tensor.monomials(b, s, cp)
    return np.array([1.0, b, s, b * s / cp, b * s / cp * s])


def _polynomials(coefficients: Array, at: Array) -> Array:
    """Values of (..., k, 5) coefficients at monomials (..., 5): shape (..., k)."""
    if coefficients.ndim == 2:
        return at @ coefficients.T
    return np.asarray((coefficients @ at[..., None])[..., 0])


def _activations(kept: _Kept, plan: Plan, placed: Placed, flights: Array) -> dict[str, Array]:
    at = _monomials(plan.micro_batch, plan.seq_len, plan.cp)
    activations = _polynomials(kept.stays, at) * flights
    if plan.recompute != "none":
        block = _polynomials(kept.replayed, at)
        starts = np.minimum(np.cumsum((0, *placed[:-1])), block.shape[-1] - 1)
        one = np.maximum.reduceat(block, starts, axis=-1) * np.greater(placed, 0)
        activations = np.minimum(activations + one, _polynomials(kept.whole, at) * flights)
    logits = _polynomials(kept.logits[..., None, :], at) * _last(plan.pp)
    transient = 2.0 * _polynomials(kept.widest, at).max(axis=-1, keepdims=True, initial=0.0)
    return {"activations": activations, "logits": logits, "transient": np.maximum(transient - logits, 0.0)}


def _extra(spec: TransformerSpec, plan: Plan, facts: MemoryFacts) -> Array:
    """Bytes a block keeps in this stack beside what an eager one keeps, coefficients over BASIS."""
    e = element_bytes(plan)
    t = np.asarray(plan.tp, dtype=float)[..., None]
    out: Array = 0.0 * BS / t
    if facts.separate_inputs:
        copies = 2.0 + (1.0 if spec.gated_mlp and not spec.experts else 0.0)
        out = out + np.where(t > 1.0, copies * e * spec.hidden * BS, 0.0)
    if facts.query_copy and spec.kv_heads < spec.heads and not spec.mla:
        out = out + e * spec.heads * spec.head_dim * BS / t
    return out


def _logits(program: Program, spec: TransformerSpec, plan: Plan, facts: MemoryFacts, rows: Num) -> Array:
    """Bytes of the logits of one rank: `Program.logits`, or what the stack's own loss holds."""
    share = np.asarray(rows / spec.vocab if spec.vocab else 0.0)[..., None]
    if facts.loss != "eager":
        e = element_bytes(plan)
        elements, wide = LOSS[facts.loss]
        each = elements * e + (wide if e < FP32_BYTES else 0.0)
        share = share * each / (2.0 * e + FP32_BYTES if plan.compile else e + LOSS["eager"][1])
    found: Array = program.logits * share
    return found
