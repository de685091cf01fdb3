"""Many points of one sharded plan at once: the formulas of `simkit.train` with the points as leading axis.

Compute is priced once per micro-batch, messages and stages once per pair of link and micro-batch, memory once per pair
of micro-batch and accumulation, the schedule once per point; no array is larger than `ELEMENTS` numbers.
"""

from __future__ import annotations

import numpy as np

from simkit.evaluate import priced_devices, traits, weigh_points, workload
from simkit.price import peak
from simkit.spec.resolve import Resolved
from simkit.sweep_columns import ELEMENTS, Array, Columns, Ints, Lane, Links, figures, tokens_of
from simkit.train import ALWAYS, Sharded, Traits, of_points, sharded_points, work_of_sizes
from simkit.train_blocks import Priced
from simkit.units import GIB

_SIZES = 2**10
"""Micro-batches priced together: every operator is priced for every tile and split."""
TERMS = ("forward_s", "backward_s", "exposed_comm_s", "optimizer_s", "host_s", "recompute_s", "tp_comm_s", "launch_s",
         "accumulation_s", "offload_s", "sharding_s", "bubble_s", "straggler_s")  # fmt: skip
"""Terms that have a column; the others are summed up in ``other_s``."""


class ShardedCase:
    """One structure of sharded training, all defaults filled in."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        plan = resolved.plan
        self.work = workload(resolved.model, plan, resolved.stack)
        calibrated = bool(resolved.scenario.get("calibration", True))
        self.lanes = [
            Lane(device=device, priced=priced, known=traits(resolved, priced, calibrated))
            for device, priced in priced_devices(resolved)
        ]
        self.tokens = tokens_of(resolved)

    def answers(self, micro: Ints, accum: Ints, link: Ints, links: Links) -> Columns:
        """The columns of these points, one entry each: micro-batch, micro-batches a step, position among the links."""
        sizes, size = np.unique(micro, return_inverse=True)
        out: Columns = {}
        for lane in self.lanes:
            found = self._on(lane, sizes, size, micro, accum, link, links)
            if not out:
                out = found
                continue
            # The slowest device of a mixed cluster sets the pace of the whole step, as in `evaluate`.
            slower = found["iteration_time_s"] > out["iteration_time_s"]
            out = {name: np.where(slower, found[name], values) for name, values in out.items()}
        return out | self._memory(sizes, size, accum)

    def _on(
        self, lane: Lane[Traits], sizes: Ints, size: Ints, micro: Ints, accum: Ints, link: Ints, links: Links
    ) -> Columns:
        """The columns of the points at the pace of that device."""
        plan, count = self.resolved.plan, len(size)
        terms = {name: np.zeros(count) for name in TERMS}
        end_s, busy_s, rest_s, flops = (np.zeros(count) for _ in range(4))
        code = link * len(sizes) + size
        for low in range(0, len(sizes), _SIZES):
            few = sizes[low : low + _SIZES].astype(float)
            work = work_of_sizes(self.work, self.resolved.model, plan, lane.priced.law, few)
            mine = np.flatnonzero((size >= low) & (size < low + _SIZES)) if len(sizes) > _SIZES else np.arange(count)
            # Points of one pair side by side.
            mine = mine[np.argsort(code[mine], kind="stable")]
            step = max(ELEMENTS // max(plan.pp, 4), 1)
            for first in range(0, len(mine), step):
                at = mine[first : first + step]
                found = self._few(lane, work, few, size[at] - low, link[at], accum[at], links)
                end_s[at], busy_s[at] = found.end_s, found.busy_s
                flops[at] = work.compute.model_flops[size[at] - low]
                for name, seconds in found.terms.items():
                    if name in terms:
                        terms[name][at] = seconds
                    else:
                        rest_s[at] += seconds
        peak_flops, _ = peak(lane.device, plan.precision, fp16_accumulate=plan.fp16_accumulate)
        shown = {k: v if k in ALWAYS else np.where(v > 0.0, v, np.nan) for k, v in terms.items()}
        return figures(
            self.resolved, self.tokens, end_s=end_s, breakdown=shown, busy_s=busy_s, micro=micro, accum=accum,
            flops=flops, peak_flops=peak_flops,
        ) | {"other_s": np.where(rest_s > 0.0, rest_s, np.nan)}  # fmt: skip

    def _few(
        self, lane: Lane[Traits], work: Priced, sizes: Array, size: Ints, link: Ints, accum: Ints, links: Links
    ) -> Sharded:
        """Some points, those of one pair of link and micro-batch side by side."""
        resolved = self.resolved
        code = link * len(sizes) + size
        begins = np.flatnonzero(np.diff(code, prepend=-1))
        pair = np.cumsum(np.diff(code, prepend=code[0]) != 0)
        return sharded_points(
            work,
            self.work,
            resolved.model,
            plan=resolved.plan,
            stack=resolved.stack,
            priced=lane.priced,
            traits=lane.known,
            cluster=links.at(resolved.cluster, link[begins]),
            device=lane.device,
            optimizer_bytes=resolved.stack.optimizer_bytes[resolved.plan.optimizer],
            sizes=sizes,
            size=size[begins],
            pair=pair,
            accum=accum.astype(float),
        )

    def _memory(self, sizes: Ints, size: Ints, accum: Ints) -> Columns:
        """What the points need, once per pair of micro-batch and accumulation."""
        plan = self.resolved.plan
        counts, count = np.unique(accum, return_inverse=True)
        pairs, pair = np.unique(size * len(counts) + count, return_inverse=True)
        of_size, of_count = divmod(pairs, len(counts))
        gib, fits, why = np.zeros(len(pairs)), np.zeros(len(pairs), dtype=bool), np.full(len(pairs), "", dtype=object)
        step = max(ELEMENTS // max(plan.pp, len(self.work.blocks.counts)), 1)
        for first in range(0, len(pairs), step):
            at = slice(first, first + step)
            batches = of_points(
                plan, micro_batch=sizes[of_size[at]].astype(float), grad_accum=counts[of_count[at]].astype(float)
            )
            nbytes, fits[at], why[at] = weigh_points(self.resolved, self.work, batches)
            gib[at] = nbytes / GIB
        return {"peak_memory_gib": gib[pair], "fits": fits[pair], "why_not": why[pair]}
