"""Tensor, sequence, context and expert parallelism: the share of one rank, and its messages per block.

With t = tp, c = cp, x = ep (`simkit.program.DIVIDES` says which rule a row follows):

    column-parallel W[n,k]   forward m, n/t, k     data gradient m, k, n/t     weight gradient n/t, k, m
    row-parallel W[n,k]      forward m, n, k/t     data gradient m, k/t, n     weight gradient n, k/t, m
    attention heads          batch/t; queries m/c against all keys
    sharded widths           bytes/t;   norms, residuals, dropout: bytes/sp
    routed experts           copies/x, tokens a copy · x

All terms with b·s or b·s² are divided by c. A block exchanges b·s·h/c elements after every row-parallel product: an
all-reduce, forward and (before the column-parallel ones) backward; with sequence parallelism an all-gather and a
reduce-scatter instead, and one more all-gather per column-parallel product to form its weight gradient.
Sources: Shoeybi et al. (arXiv 1909.08053); Korthikanti et al. (arXiv 2205.05198); Megatron-LM's context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.program import DIVIDES, Ops, Program
from simkit.roofline import ATTENTION, ATTENTION_GRAD, MEMORY, Array, Columns

Num = Any
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of one rank's share; numbers, or arrays over sweep points."""

    tp: Num = 1
    sp: Num = 1
    cp: Num = 1
    ep: Num = 1


@lru_cache(maxsize=512)
def degrees(tp: int, sp: int, cp: int, ep: int) -> Degrees:
    """The same object for the same degrees, so that what was worked out for it is found again quickly."""
    return Degrees(tp=tp, sp=sp, cp=cp, ep=ep)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rules:
    """Which rows follow which rule, as masks over the rows."""

    along: dict[str, Mask]
    products: Mask
    experts: Mask
    token_depth: Mask
    weights: Mask


@lru_cache(maxsize=512)
def _rules(ops: Ops) -> _Rules:
    modules = np.array([m == "experts" for m in ops.modules])
    names = np.array(ops.names)
    ends = np.char.endswith(names.astype(str), ".wgrad") if len(names) else np.zeros(0, dtype=bool)
    casts = np.array([n.endswith((".cast", ".grad_cast")) for n in ops.names], dtype=bool)
    return _Rules(
        along={name: ops.divides == code for code, name in enumerate(DIVIDES)},
        products=ops.kind != MEMORY,
        experts=modules.astype(bool),
        token_depth=ends,
        weights=casts,
    )


def monomials(b: Num, s: Num, cp: Num = 1) -> Array:
    """1, b, s, b·s/cp, b·s²/cp on the last axis."""
    b, s, cp = (np.asarray(x, dtype=float) for x in (b, s, cp))
    tokens = b * s / cp
    ones = np.ones(np.broadcast_shapes(tokens.shape, b.shape))
    return np.stack([ones, b * ones, s * ones, tokens * ones, tokens * s * ones], axis=-1)


def share(ops: Ops, at: Array, degrees: Degrees) -> tuple[Columns, Array]:
    """(columns, saved bytes) of one rank at monomials of shape (..., 5); degree 1 divides by one."""
    batch, m, n, k, nbytes, saved = (at @ c for c in ops.coefficients)
    rules = _rules(ops)
    t, sp, c, x = (np.asarray(d, dtype=float)[..., None] for d in (degrees.tp, degrees.sp, degrees.cp, degrees.ep))

    def over(mask: Mask, degree: Array) -> Array:
        return np.where(mask, degree, 1.0)

    before = m * k + k * n + m * n
    heads = rules.along["batch"]
    experts = rules.experts & rules.products
    rm = m / over(rules.along["m"], t) / over(heads, c) * over(experts & ~rules.token_depth, x)
    rn = n / over(rules.along["n"], t)
    rk = k / over(rules.along["k"], t) * over(experts & rules.token_depth, x)
    rb = batch / over(heads, t) / over(experts, x)
    after = rm * rk + rk * rn + rm * rn
    ratio = np.divide(after * rb, before * batch, out=np.ones_like(after * rb), where=(before * batch) > 0)
    fused = (ops.kind == ATTENTION) | (ops.kind == ATTENTION_GRAD)
    plain = rules.products & ~heads & ~fused
    sharded = heads | rules.along["bytes"]
    moved = nbytes * np.where(plain, ratio, 1.0) / over(sharded, t) / over(rules.along["sequence"], sp)
    moved = moved / over(rules.experts & rules.weights, x)
    kept = saved / over(sharded | rules.along["k"], t) / over(rules.along["sequence"] | rules.along["n"], sp)
    columns = Columns(kind=ops.kind, batch=rb, m=rm, n=rn, k=rk, nbytes=moved, kernels=ops.kernels)
    return columns, kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Messages:
    """Messages of tensor parallelism: per block the row-parallel products (all-reduces forward, as many backward) and
    the column-parallel groups (all-gathers under sequence parallelism)."""

    per_block: Array
    routed: Array
    """1 for each block that routes tokens to experts, else 0."""
    width: float


@lru_cache(maxsize=512)
def messages(program: Program, hidden: int, element_bytes: float) -> Messages:
    """One message per row-parallel product of a block; each carries `hidden` elements a token."""
    ops = program.forward
    rows = (ops.divides == DIVIDES.index("k")) & (ops.kind != MEMORY)
    return Messages(
        per_block=program.blocks.counts[:, rows].sum(axis=1),
        routed=program.blocks_with_experts,
        width=hidden * element_bytes,
    )
