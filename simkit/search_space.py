"""The plans a search tries: every axis with the values that make sense, and the rules that strike a combination out.

    tp          powers of two within a node; more only where a list is given
    pp          divisors of the GPUs, at most one stage a layer
    vpp         divisors of the layers of a stage
    cp          1; powers of two within a node from `LONG_TOKENS` on
    ep          divisors of the experts
    zero        0 to 3; over a pipeline 0 and 1
    sp          tp: it moves what tensor parallelism moves and divides the activations (arXiv 2205.05198, section 4.2)
    recompute   none, selective, full
    micro_batch powers of two

A field that was given has that value alone; a list of values is taken as it is. Striking out is counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from simkit.program import RECOMPUTE
from simkit.spec.model import TransformerSpec
from simkit.spec.plan import Plan
from simkit.spec.resolve import Resolved

SEARCHED = ("tp", "pp", "vpp", "cp", "ep", "zero", "offload", "micro_batch", "recompute")
"""Fields that a search varies, the last fastest."""
PARALLEL = frozenset({"dp", "tp", "pp", "vpp", "cp", "ep", "sp", "zero", "shard_group", "schedule", "offload"})
"""Fields of which any one given means that the degrees are the user's."""
LONG_TOKENS = 16384
"""Sequences from which context parallelism is tried: assumed, where the activations of one sample fill a device."""
MOST_STAGES, MOST_CHUNKS, MOST_SAMPLES = 64, 8, 4096

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The values of each field in `SEARCHED`, and what every plan shares. total: samples a step, None where only the
    accumulation is given; sp: what was given, None = as tp."""

    axes: Mapping[str, tuple[Any, ...]]
    world: int
    layers: int
    heads: int
    experts: int
    total: int | None
    accum: int | None
    dp: int | None
    sp: int | None

    @property
    def size(self) -> int:
        """Combinations before any is struck out."""
        return math.prod(len(values) for values in self.axes.values())

    def degrees(self, pruned: Counter[str]) -> Iterator[dict[str, Any]]:
        """Every combination but for micro-batch and recomputation that no rule strikes out."""
        names = SEARCHED[:-2]
        below = len(self.axes["micro_batch"]) * len(self.axes["recompute"])
        for values in product(*(self.axes[name] for name in names)):
            one = dict(zip(names, values, strict=True))
            reason = self.struck(one)
            if reason:
                pruned[reason] += below
                continue
            yield one

    def struck(self, v: Values) -> str:
        """Why no plan has these degrees; empty where some may."""
        tp, pp, vpp, cp, ep = (v[name] for name in ("tp", "pp", "vpp", "cp", "ep"))
        parallel = tp * pp * cp
        if self.world % parallel:
            return f"tp x pp x cp does not divide the {self.world} GPUs"
        dp = self.world // parallel
        if self.dp is not None and dp != self.dp:
            return f"dp = {self.dp} was asked for"
        if self.heads % tp:
            return f"tp does not divide the {self.heads} heads"
        if pp * vpp > self.layers:
            return f"more stages than the {self.layers} layers"
        if vpp > 1 and pp == 1:
            return "vpp needs a pipeline"
        if vpp > 1 and self.layers % (pp * vpp):
            return "pp x vpp does not divide the layers"
        if dp % ep or (ep > 1 and self.experts % ep):
            return "ep does not divide the data ranks or the experts"
        if v["zero"] and dp * cp == 1:
            return "ZeRO has one data rank: nothing to shard over"
        if v["zero"] > 1 and pp > 1:
            return "ZeRO-2 and 3 would reduce gradients at every micro-batch of a pipeline"
        return self._batch(dp)

    def _batch(self, dp: int) -> str:
        if self.total is not None and self.total % dp:
            return f"the global batch of {self.total} does not divide over the data ranks"
        return ""

    def samples(self, v: Values) -> list[int]:
        """Micro-batches of these degrees, smallest first."""
        if self.total is None:
            return list(self.axes["micro_batch"])
        per_rank = self.total // (self.world // (v["tp"] * v["pp"] * v["cp"]))
        sizes = [b for b in self.axes["micro_batch"] if per_rank % b == 0]
        return [b for b in sizes if self.accum is None or per_rank // b == self.accum]

    def fields(self, v: Values, micro_batch: int, recompute: str) -> dict[str, Any]:
        """The fields of the scenario of one plan."""
        out = {name: v[name] for name in SEARCHED[:-2]} | {"micro_batch": micro_batch, "recompute": recompute}
        out["sp"] = (v["tp"] if v["tp"] > 1 else 1) if self.sp is None else self.sp
        if self.total is not None:
            out["global_batch"] = self.total
        elif self.accum is not None:
            out["grad_accum"] = self.accum
        return out


def space(resolved: Resolved, lists: Mapping[str, Sequence[Any]], *, usual: int, chunks: bool = True) -> Space:
    """The Space of a resolved scenario. lists: fields with several values asked for; usual: samples a step where
    neither the global batch nor the accumulation is given; chunks: try vpp beyond 1."""
    scenario, cluster, spec = resolved.scenario, resolved.cluster, resolved.model.spec
    divisible = isinstance(spec, TransformerSpec) and spec.kind in ("decoder", "encoder")
    divisible = divisible and scenario.get("method", "s-sgd") == "s-sgd"
    world = cluster.gpus
    total = scenario.get("global_batch")
    accum = scenario.get("grad_accum")
    if total is None and accum is None:
        # One global batch for all plans: the usual one, or that of plain data parallelism with what was given.
        per_rank = scenario.get("micro_batch") if "micro_batch" not in lists else None
        total = world * (per_rank or max(round(usual / world), 1))
    heads, layers, experts = 1, 1, 1
    if isinstance(spec, TransformerSpec):
        heads, layers, experts = spec.heads, spec.layers, max(spec.experts, 1)
    node = math.gcd(*(g.gpus_per_node for g in cluster.groups))
    usually: dict[str, tuple[Any, ...]] = {name: (Plan.__dataclass_fields__[name].default,) for name in SEARCHED}
    if divisible:
        within = tuple(2**i for i in range(node.bit_length()) if node % 2**i == 0)
        long = resolved.plan.seq_len >= LONG_TOKENS
        usually |= {
            "tp": within,
            "pp": tuple(n for n in divisors(world) if n <= min(layers, MOST_STAGES)),
            "cp": within if long else (1,),
            "ep": divisors(experts) if experts > 1 else (1,),
            "zero": (0, 1, 2, 3),
        }
        if chunks:
            usually["vpp"] = tuple(n for n in divisors(layers) if n <= MOST_CHUNKS)
    most = min(total or MOST_SAMPLES, MOST_SAMPLES)
    usually["micro_batch"] = tuple(2**i for i in range(most.bit_length()))
    usually["recompute"] = RECOMPUTE
    axes = {
        name: tuple(lists[name]) if name in lists else
        (scenario.get(name),) if scenario.given(name) else usually[name]
        for name in SEARCHED
    }  # fmt: skip
    return Space(
        axes=axes, world=world, layers=layers, heads=heads, experts=experts, total=total, accum=accum,
        dp=scenario.get("dp"), sp=scenario.get("sp"),
    )  # fmt: skip


def divisors(n: int) -> tuple[int, ...]:
    """Divisors, smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


__all__ = ["PARALLEL", "SEARCHED", "Space", "divisors", "space"]
