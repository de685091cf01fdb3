"""Blocks of one rank in seconds: what it computes, what it sends inside them, and the host that launches both.

Blocks of one kind (`simkit.program.kinds`) cost the same: the last axis is the kind, axes in front are sweep points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from simkit import roofline
from simkit.parallel import tensor
from simkit.price import Compute, hosted
from simkit.program import DIVIDES, Ops, Program, kinds
from simkit.roofline import Array, Law
from simkit.spec.model import TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.train_messages import Lines

Num = Any


def column(value: Num) -> Array:
    """Numbers of points, ready to meet an axis of blocks or stages."""
    return np.asarray(value)[..., None]


def taken(value: Num, index: Any, axes: int) -> Num:
    """The values of some points; what has no more than its own `axes` holds for all of them."""
    return value[index] if np.ndim(value) > axes else value


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """What a rank computes whatever its network: seconds per kind of block (last axis), and of the ends (forward,
    backward).

    fused_*_s: of fused attention, beside which keys and values go round; linear_*_s: of the products with weights that
    are divided over the tensor-parallel ranks, wgrad_s: of the weight gradients of the column-parallel ones alone,
    beside which messages of tensor parallelism may go; launches_*: kernels of a block.
    """

    forward_s: Array
    backward_s: Array
    recompute_s: Array
    fused_forward_s: Array
    fused_backward_s: Array
    linear_forward_s: Array
    linear_backward_s: Array
    wgrad_s: Array
    launches_forward: Array
    launches_backward: Array
    before: tuple[Num, Num]
    after: tuple[Num, Num]
    compute: Compute

    def at(self, index: Any) -> Priced:
        """The same at some of its points, but for `compute`."""
        own = {f.name: taken(getattr(self, f.name), index, 1) for f in fields(self) if f.type == "Array"}
        ends = {name: tuple(taken(x, index, 0) for x in getattr(self, name)) for name in ("before", "after")}
        changed: Priced = replace(self, **own, **ends)  # type: ignore[arg-type]
        return changed


def price(
    program: Program,
    law: Law,
    degrees: tensor.Degrees,
    *,
    stages: int,
    micro_batch: Num,
    seq_len: int,
    recompute: str,
    causal: bool,
) -> Priced:
    """The share of one rank of one micro-batch under a Law; micro_batch may be an array."""
    at = tensor.monomials(micro_batch, seq_len, degrees.cp)
    forward, kept = tensor.share(program.forward, at, degrees)
    backward, _ = tensor.share(program.backward, at, degrees)
    tf, math_f = roofline.seconds(forward, law)
    tb, math_b = roofline.seconds(backward, law)
    fused_f, fused_b = program.forward.kind == roofline.ATTENTION, program.backward.kind == roofline.ATTENTION_GRAD
    if degrees.cp > 1 and causal:
        # Contiguous shards of a causal ring: the last rank attends to everything before it.
        last = 2.0 - 1.0 / degrees.cp
        tf, tb = np.where(fused_f, tf * last, tf), np.where(fused_b, tb * last, tb)
    b, first = program.blocks, kinds(program).first
    runs_f, runs_b, replayed = b.counts[first], b.backward_counts[first], program.replayed(recompute)[first]
    counts_f, counts_b = program.forward.counts, program.backward.counts
    total_f, total = tf @ counts_f, tf @ counts_f + tb @ counts_b
    bound = (tf * math_f) @ counts_f + (tb * math_b) @ counts_b
    flops = tensor.monomials(micro_batch, seq_len) @ program.model_flops
    return Priced(
        forward_s=tf @ runs_f.T,
        backward_s=tb @ runs_b.T,
        recompute_s=tf @ replayed.T,
        fused_forward_s=_part(tf, runs_f, fused_f),
        fused_backward_s=_part(tb, runs_b, fused_b),
        linear_forward_s=_part(tf, runs_f, _divided(program.forward, "nk")),
        linear_backward_s=_part(tb, runs_b, _divided(program.backward, "mnk")),
        wgrad_s=_part(tb, runs_b, _divided(program.backward, "m")),
        launches_forward=runs_f @ program.forward.kernels,
        launches_backward=runs_b @ program.backward.kernels + replayed @ program.forward.kernels,
        before=(_number(tf @ b.before[0]), _number(tb @ b.before[1])),
        after=(_number(tf @ b.after[0]), _number(tb @ b.after[1])),
        compute=Compute(
            forward_s=tf,
            backward_s=tb,
            forward_math=math_f,
            backward_math=math_b,
            saved_bytes=_number(kept @ counts_f),
            logits_bytes=_number(at @ program.logits) / degrees.tp,
            model_flops=_number(flops) / (degrees.tp * stages * degrees.cp),
            forward_total_s=_number(total_f),
            backward_total_s=_number(total - total_f),
            math_share=_number(np.divide(bound, total, out=np.zeros_like(total), where=total > 0.0)),
        ),
    )


def _part(seconds: Array, runs: Array, rows: Any) -> Array:
    """Seconds by kind of block of some rows."""
    return np.asarray(seconds[..., rows] @ runs[:, rows].T)


@lru_cache(maxsize=256)
def _divided(ops: Ops, dimensions: str) -> Any:
    """The products that tensor-parallel ranks divide along one of these dimensions."""
    codes = [DIVIDES.index(one) for one in dimensions]
    return np.isin(ops.divides, codes) & (ops.kind != roofline.MEMORY)


def exposed(sent_s: Num, beside_s: Num, chunks: int, rho: float) -> Num:
    """What is left of messages of `sent_s` that go beside products of `beside_s`: the first of the chunks waits for
    nothing to hide behind, the rest hides as far as the products last, and slows them by rho seconds a second.

        c/n + max(c (n-1)/n - t, 0) + rho min(c (n-1)/n, t)          n = 0: all of it may hide, c instead of c (n-1)/n
    """
    first = sent_s / chunks if chunks else 0.0
    hideable = sent_s - first
    hidden = np.minimum(hideable, beside_s)
    return first + hideable - (1.0 - min(rho, 1.0)) * hidden


def _number(value: Any) -> Any:
    """A number of its own as a float, arrays as they are."""
    return float(value) if np.ndim(value) == 0 else value


priced = lru_cache(maxsize=1024)(price)


Sent = tuple[Array, Array, Num]
"""Seconds of one kind of message: of each kind of block forward, backward, and of either end of the network."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Seconds of one micro-batch on one rank: per kind of block (last axis), and before the first and after the last
    block.

    forward_s, backward_s, recompute_s (forward work replayed), tp_*_s: of the device; forward_all_s, backward_all_s: of
    a block with its messages, its replay and the host that launches it.
    """

    forward_s: Array
    backward_s: Array
    recompute_s: Array
    forward_all_s: Array
    backward_all_s: Array
    tp_forward_s: Num
    tp_backward_s: Num
    before: tuple[Num, Num]
    after: tuple[Num, Num]
    sent: Mapping[str, Sent]

    def messages(self, program: Program) -> dict[str, tuple[Num, Num]]:
        """Seconds that the network is busy (forward, backward) by kind of message."""
        many = kinds(program).many
        return {name: (there @ many + end, back @ many + end) for name, (there, back, end) in self.sent.items()}


def blocks(
    priced: Priced,
    program: Program,
    spec: TransformerSpec,
    plan: Plan,
    lines: Lines,
    launch_s: float,
    *,
    rho: float = 0.0,
) -> Blocks:
    """Blocks with their messages and with the host that launches them (launch_s a kernel); rho: seconds of compute that
    a second of a message beside it costs."""
    sent = _sent(priced, program, spec, plan, lines, rho)
    edge = sent["tensor parallelism"][2] if plan.tp > 1 else 0.0
    tp_f: Num = sum(there for there, _, _ in sent.values())
    tp_b: Num = sum(back for _, back, _ in sent.values())
    f, g = priced.forward_s, priced.backward_s
    return Blocks(
        forward_s=f,
        backward_s=g,
        recompute_s=priced.recompute_s,
        forward_all_s=hosted(f + tp_f, priced.launches_forward * launch_s),
        backward_all_s=hosted(g + priced.recompute_s + tp_b, priced.launches_backward * launch_s),
        tp_forward_s=tp_f,
        tp_backward_s=tp_b,
        before=(priced.before[0] + edge, priced.before[1]),
        after=(priced.after[0], priced.after[1] + edge),
        sent=sent,
    )


def _sent(
    priced: Priced, program: Program, spec: TransformerSpec, plan: Plan, lines: Lines, rho: float
) -> dict[str, Sent]:
    """The messages inside the blocks, of those kinds of parallelism that there are."""
    found: dict[str, Sent] = {}
    per_block, routed, width = _per_kind(program, spec.hidden, DTYPE_BYTES[plan.precision])
    if plan.tp > 1:
        message_s = lines.tensor_message(width)
        there, back = _beside_products(priced, plan, column(message_s) * per_block, rho)
        found["tensor parallelism"] = there, back, message_s
    if plan.cp > 1:
        found["ring of keys and values"] = *_ring(priced, spec, plan, lines), 0.0
    if plan.ep > 1 and spec.experts:
        moved_s = column(lines.expert_message(width * max(spec.top_k, 1))) * routed
        found["expert all-to-all"] = 2.0 * moved_s, (4.0 if plan.recompute == "full" else 2.0) * moved_s, 0.0
    return found


def _beside_products(priced: Priced, plan: Plan, sent_s: Array, rho: float) -> tuple[Array, Array]:
    """What messages of tensor parallelism leave exposed forward and backward, of `sent_s` in either direction.

    Gradients go as activations do; a sharded sequence is gathered once more, and what is replayed is sent again.
    """
    regather = 0.5 * sent_s * (plan.sp > 1)
    there, back = sent_s, sent_s + regather
    if plan.tp_overlap == "chunks" and plan.sp > 1:
        # Chunks go by copy engines or few processors, and leave the products alone (PyTorch's symmetric memory,
        # Transformer Engine's userbuffers).
        there = exposed(there, priced.linear_forward_s, plan.tp, 0.0)
        back = exposed(back, priced.linear_backward_s, plan.tp, 0.0)
    elif plan.tp_overlap != "none":
        # Beside weight gradients goes what the gradients of the inputs need: an all-reduce, or a reduce-scatter with
        # the inputs that are gathered again.
        aside = sent_s if plan.sp == 1 else 0.5 * sent_s + regather
        back = back - aside + exposed(aside, priced.wgrad_s, 0, rho)
    return there, back + there * (plan.recompute == "full")


@lru_cache(maxsize=512)
def _per_kind(program: Program, hidden: int, element_bytes: float) -> tuple[Array, Array, float]:
    """(messages of tensor parallelism, 1 where tokens are routed to experts, both by kind of block; bytes a token)."""
    found, first = tensor.messages(program, hidden, element_bytes), kinds(program).first
    return found.per_block[first], found.routed[first], found.width


def _ring(priced: Priced, spec: TransformerSpec, plan: Plan, lines: Lines) -> tuple[Array, Array]:
    """What the ring of context parallelism leaves exposed per block: keys and values go round, forward once and
    backward twice (their gradients too), beside the attention of the rank."""
    width = spec.kv_heads * (spec.head_dim + spec.value_dim) * DTYPE_BYTES[plan.precision] / plan.tp
    ring_s = column(lines.ring_message(width))
    forward = np.maximum(ring_s - priced.fused_forward_s, 0.0)
    return forward, np.maximum(2.0 * ring_s - priced.fused_backward_s, 0.0)
