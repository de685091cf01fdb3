"""Many points of one structure at once: the formulas of `simkit.evaluate` with the points as leading axes.

A structure is what names and choices fix: network, device, nodes, method, numerics. Its points differ in micro-batch,
accumulation and in the rates and latencies of described links. Compute is priced once per micro-batch, collectives once
per link, waiting once per pair of the two, the rest once per point; nothing is larger than `ELEMENTS` numbers.

Bucket-wise methods in one phase (S-SGD, Sign-SGD, Top-k, ACP-SGD), everything without overlap and sharded training
(`simkit.sweep_sharded`) take arrays. The communication hook of Power-SGD and optimal fusion are asked point by point,
of `predict`'s own line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simkit import network, plugins
from simkit.errors import InputError, RefusedError
from simkit.evaluate import (
    Constants,
    constants,
    evaluate,
    is_sharded,
    plain_softmax,
    priced_devices,
    weigh,
    workload,
)
from simkit.exchange import alone, buffers, message_seconds
from simkit.memory import staged
from simkit.methods import path
from simkit.planner import GAIN, interleavable, planned, rival, settled
from simkit.planner_degrees import never_fits, open_degrees, placed
from simkit.price import computed, peak
from simkit.program import basis
from simkit.report import Memory, Report
from simkit.spec.hardware import Cluster
from simkit.spec.plan import Plan
from simkit.spec.resolve import Resolved, resolve, resolve_batch
from simkit.spec.scenario import Scenario
from simkit.sweep_columns import ELEMENTS, Array, Columns, Ints, Lane, Links, figures, tokens_of
from simkit.timeline import terms
from simkit.units import GIB

if TYPE_CHECKING:
    from simkit.sweep_sharded import ShardedCase

BATCH = ("micro_batch", "grad_accum", "global_batch")
_ROWS = 2**21
"""The same while rows of operators are priced for every tile and split."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batches:
    """Per micro-batch on one device: seconds of a pass alone, FLOPs, memory. done_s[i, j]: when backward segment j has
    begun, counted from the begin of back-propagation; shape (sizes, segments + 1)."""

    forward_s: Array
    done_s: Array
    flops: Array
    memory: list[Memory]


class Case:
    """One structure with one method, all defaults filled in."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        plan = resolved.plan
        self.work = workload(resolved.model, plan, resolved.stack)
        self.lanes = [
            Lane(device=device, priced=priced, known=constants(resolved, device, priced))
            for device, priced in priced_devices(resolved)
        ]
        self.tokens = tokens_of(resolved)

    @staticmethod
    def takes_arrays(resolved: Resolved) -> bool:
        """Whether the formulas of this structure take arrays."""
        plan = resolved.plan
        if is_sharded(plan):
            return False
        module = plugins.get("simkit.compressors", plan.method)
        inline = module.PLACEMENT == "inline" and module.PHASES == 1
        if plan.schedule == "gpipe" and staged(plan, resolved.model):
            # It holds the activations of every micro-batch, even without a pipeline.
            return False
        return plan.dp <= 1 or (plan.fusion != "optimal" and (plan.overlap == "none" or inline))

    def answers(self, micro: Ints, accum: Ints, link: Ints, links: Links) -> Columns:
        """The columns of these points, one entry each: micro-batch, micro-batches a step, position among the links."""
        sizes, size = np.unique(micro, return_inverse=True)
        out: Columns = {}
        for lane, batches in zip(self.lanes, self._batches(sizes), strict=True):
            found = self._on(lane, batches, size, micro, accum, link, links)
            if not out:
                out = found
                continue
            # The slowest device of a mixed cluster sets the pace of the whole step, as in `evaluate`.
            slower = found["iteration_time_s"] > out["iteration_time_s"]
            out = {name: np.where(slower, found[name], values) for name, values in out.items()}
        return out

    def _batches(self, sizes: Ints) -> list[_Batches]:
        """One per lane. Sizes are priced a few at a time, so that the tiles of all operators never stand in memory
        together."""
        rows = len(self.work.forward) + len(self.work.backward)
        step = max(_ROWS // (32 * max(rows, 1)), 1)
        return [
            _joined([self._few(lane, sizes[i : i + step]) for i in range(0, len(sizes), step)]) for lane in self.lanes
        ]

    def _few(self, lane: Lane[Constants], sizes: Ints) -> _Batches:
        plan, work, known = self.resolved.plan, self.work, lane.known
        found = computed(work, basis(sizes.astype(float), np.float64(plan.seq_len)), lane.priced.law)
        fixed = {f.name: getattr(plan, f.name) for f in fields(Plan)} | {"grad_accum": 1}
        step = alone(work, Plan(**fixed), found, known.optimizer_s, known.host_s, known.host_kernel_s)
        forward_s, done_s = np.empty(len(sizes)), np.zeros((len(sizes), len(self._kept) + 1))
        forward_s[:] = step.forward_s
        ended_s = np.cumsum(step.backward_s, axis=-1)
        done_s[:, :-1] = np.where(self._kept >= 0, ended_s[:, self._kept], 0.0)
        done_s[:, -1] = ended_s[:, -1] if ended_s.shape[-1] else 0.0
        memory = []
        for size in sizes.tolist():
            fixed["micro_batch"] = int(size)
            memory.append(weigh(self.resolved, work, self.resolved.model, Plan(**fixed), found, advise=False))
        return _Batches(forward_s=forward_s, done_s=done_s, flops=found.model_flops, memory=memory)

    @cached_property
    def _kept(self) -> Ints:
        """The backward segments after which some buffer is complete; when others end does not matter."""
        if self.resolved.plan.dp <= 1:
            return np.zeros(0, dtype=np.int64)
        return np.unique(self.work.ready)

    def _on(
        self, lane: Lane[Constants], batches: _Batches, size: Ints, micro: Ints, accum: Ints, link: Ints, links: Links
    ) -> Columns:
        """The columns of the points at the pace of that device."""
        known, plan = lane.known, self.resolved.plan
        forward_s, backward_s = batches.forward_s[size], batches.done_s[size, -1]
        earlier_s = (accum - 1) * (forward_s + backward_s)
        pairs, pair = np.unique(link * len(batches.flops) + size, return_inverse=True)
        breakdown: Columns = {}
        end_s, busy = np.zeros(len(size)), np.zeros(len(size))
        every = [(0.0, np.zeros(len(pairs)), np.ones(len(pairs)))]
        if plan.dp > 1:
            which, at = divmod(pairs, len(batches.flops))
            every = self._waits(known, batches, which, at, links)
        for number, (compression_s, exposed_s, factor) in enumerate(every):
            found, busy_s, ended_s = terms(
                forward_s=forward_s,
                backward_s=backward_s * factor[pair],
                earlier_s=earlier_s,
                compression_s=compression_s,
                exposed_s=exposed_s[pair],
                optimizer_s=known.optimizer_s,
                host_s=known.host_s,
            )
            busy = busy_s if number == 0 else busy
            end_s += ended_s / len(every)
            for name, value in found.items():
                breakdown[name] = breakdown.get(name, 0.0) + value / len(every)
        peak_flops, _ = peak(lane.device, plan.precision, fp16_accumulate=plan.fp16_accumulate)
        kept = batches.memory
        gib = np.array([m.device_bytes / GIB for m in kept])
        return self.figures(end_s, breakdown, busy, micro, accum, batches.flops[size], peak_flops) | {
            "peak_memory_gib": gib[size],
            "fits": np.array([m.fits for m in kept])[size],
            "why_not": np.array([m.why_not for m in kept], dtype=object)[size],
        }

    def _waits(
        self, known: Constants, batches: _Batches, link: Ints, size: Ints, links: Links
    ) -> list[tuple[float, Array, Array]]:
        """Per variant of the compressor: (seconds of compression, exposed seconds and stretch of back-propagation by
        pair of link and size). Pairs come sorted by link."""
        plan = self.resolved.plan
        out = []
        for tensors, merged in buffers(self.work, self.resolved.model, plan=plan, law=known.law):
            ended_s = batches.done_s[:, np.searchsorted(self._kept, merged.ready)]
            encoded_s = np.cumsum(merged.encode_s)
            encode_s = float(encoded_s[-1]) if len(encoded_s) else 0.0
            compression_s = float(merged.encode_s.sum() + merged.between_s.sum() + merged.decode_s.sum())
            exposed_s, factor = np.zeros(len(link)), np.ones(len(link))
            step = max(ELEMENTS // max(len(merged.ready), 1), 1)
            for first in range(0, len(link), step):
                part = slice(first, first + step)
                used, which = np.unique(link[part], return_inverse=True)
                cluster = links.at(self.resolved.cluster, used, axes=1)
                comm_s = self._messages(tensors, merged, cluster, known.message_s, len(used))
                total_s = comm_s.sum(axis=(0, 2))
                if plan.overlap == "none" or not len(merged.ready):
                    exposed_s[part] = total_s[which]
                    continue
                served_s = encoded_s - (np.cumsum(comm_s[0], axis=-1) - comm_s[0])
                # Pairs with a link each need no copy of its row, nor do pairs that share their one size.
                own, here = len(used) == len(which), size[part] if len(ended_s) > 1 else size[:1]
                exposed_s[part], factor[part] = waits(
                    ended_s[here],
                    served_s if own else served_s[which],
                    total_s if own else total_s[which],
                    batches.done_s[here, -1],
                    encode_s,
                    known.interference,
                )
            out.append((compression_s, exposed_s, factor))
        return out

    def _messages(self, tensors: Any, merged: Any, cluster: Cluster, message_s: float, count: int) -> Array:
        """Seconds of every collective, shape (phases, links, buffers)."""
        algorithm = self.resolved.plan.algorithm
        chosen = None if algorithm == "auto" else algorithm
        seconds = np.empty((len(merged.sent), count, len(merged.ready)))
        for phase, (op, share, sent) in enumerate(zip(tensors.module.OP, tensors.shares, merged.sent, strict=True)):
            of = network.seconds_fn(op, cluster=cluster, algorithm=chosen)
            seconds[phase] = message_seconds(of, sent, share, message_s, every=bool(sent.all()))
        return seconds

    def figures(
        self,
        end_s: Any,
        breakdown: Mapping[str, Any],
        busy_s: Any,
        micro: Any,
        accum: Any,
        flops: Any,
        peak_flops: float,
    ) -> Columns:
        """Rates, terms and money of points; numbers or arrays."""
        return figures(
            self.resolved, self.tokens, end_s=end_s, breakdown=breakdown, busy_s=busy_s, micro=micro, accum=accum,
            flops=flops, peak_flops=peak_flops,
        )  # fmt: skip


def _joined(parts: list[_Batches]) -> _Batches:
    if len(parts) == 1:
        return parts[0]
    return _Batches(
        forward_s=np.concatenate([p.forward_s for p in parts]),
        done_s=np.concatenate([p.done_s for p in parts]),
        flops=np.concatenate([p.flops for p in parts]),
        memory=[m for p in parts for m in p.memory],
    )


def waits(
    ended_s: Array, served_s: Array, comm_s: Array, backward_s: Array, encode_s: float, rho: float
) -> tuple[Array, Array]:
    """(exposed seconds, factor by which back-propagation stretches) of many one-phase ``inline`` steps at once.

    With F_i the end of the segment that completes bucket i, counted from the begin of back-propagation, E_i the
    encoding up to
    bucket i, c its collective, C = cumsum(c), the network is free at  C_n + max_i (F_i + E_i - C_{i-1}); the device
    has waited
    what lies behind backward + E_n. Hidden communication slows back-propagation (`simkit.timeline`), after
    which the same holds for the stretched F.

    ended_s: F, shape (points, buckets); served_s: E_i - C_{i-1}, the same shape; comm_s: C_n and backward_s, shape
    (points,); encode_s: E_n; rho: seconds of compute that a second of hidden communication costs.
    """
    behind_s = comm_s - encode_s
    exposed_s = np.maximum((ended_s + served_s).max(axis=-1) + behind_s - backward_s, 0.0)
    factor = np.ones_like(exposed_s)
    if rho > 0.0:
        hidden_s = np.minimum(np.maximum(comm_s - exposed_s, 0.0), backward_s)
        np.divide(rho * hidden_s, backward_s, out=factor, where=backward_s > 0.0)
        factor = np.where(backward_s > 0.0, 1.0 + factor, 1.0)
        later_s = ended_s * factor[:, None]
        later_s += served_s
        exposed_s = np.maximum(later_s.max(axis=-1) + behind_s - backward_s * factor, 0.0)
    return exposed_s, factor


def point(scenario: Scenario) -> Columns:
    """The columns of one point, by the line that `predict` takes; ``refused`` where there is no answer."""
    try:
        own = path(scenario)
        if own is not None:
            return columns_of(own.report(scenario, spans=False, beside=False))
        resolved = planned(resolve(scenario))
        found = evaluate(resolved, advise=False)
        if not found.memory.fits and (chosen := placed(resolved)) is not resolved:
            resolved, found = chosen, evaluate(chosen, advise=False)
    except (InputError, RefusedError) as error:
        return {"refused": str(error)}
    plan = resolved.plan
    peak_flops, _ = peak(found.device, plan.precision, fp16_accumulate=plan.fp16_accumulate)
    busy_s = found.timelines[0].busy_s.get("compute", found.end_s)
    return figures(
        resolved, tokens_of(resolved), end_s=found.end_s, breakdown=found.breakdown, busy_s=busy_s,
        micro=plan.micro_batch, accum=plan.grad_accum, flops=float(found.compute.model_flops), peak_flops=peak_flops,
    ) | {
        "peak_memory_gib": found.memory.device_bytes / GIB,
        "fits": found.memory.fits,
        "why_not": found.memory.why_not,
    }  # fmt: skip


def columns_of(report: Report) -> Columns:
    """The columns of a report of work over peers; an absent figure has no column."""
    values = report.scenario
    rates = ("iteration_time_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu")
    out: Columns = {name: getattr(report, name) for name in rates if getattr(report, name) is not None}
    out |= {name: values[name] for name in ("micro_batch", "grad_accum", "global_batch", "method") if name in values}
    return dict(report.breakdown) | dict(report.cost) | out | {
        "gpus": report.facts["gpus"], "peak_memory_gib": report.memory.device_bytes / GIB, "fits": report.fits,
        "why_not": report.memory.why_not,
    }  # fmt: skip


class Structure:
    """All points that share names and choices, with the batch of the first; what the others have, `batch` says."""

    def __init__(self, scenario: Scenario) -> None:
        self.reason, self.arrays, self.sharded = "", False, False
        self.cases: list[Case] | list[ShardedCase] = []
        self._odd: list[Case] | list[ShardedCase] = []
        try:
            if path(scenario) is not None:
                return
            resolved = resolve(scenario)
            choose = "method" in resolved.open and resolved.cluster.nodes > 1
            self.resolved = first = settled(replace(resolved, open=resolved.open - {"method"}))
            self.sharded = is_sharded(first.plan)
            if self.sharded:
                self.arrays, self.cases = True, [self._sharded_case(first)]
                return
            every = [first, rival(first)] if choose else [first]
            self.arrays = all(Case.takes_arrays(one) for one in every)
            if self.arrays and open_degrees(first) and never_fits(first):
                # A planner chooses degrees point by point.
                self.arrays, self.sharded = False, True
            self.cases = [Case(one) for one in every] if self.arrays else []
        except (InputError, RefusedError) as error:
            self.reason = str(error)

    @staticmethod
    def _sharded_case(resolved: Resolved) -> ShardedCase:
        # Most grids have no degrees, and need not wait for what they do not use.
        from simkit.sweep_sharded import ShardedCase

        return ShardedCase(resolved)

    def needs_planning(self, given: frozenset[str]) -> bool:
        """Whether the micro-batch that fits depends on how many a step has: a pipeline holds several at once."""
        plan = self.resolved.plan
        held = plan.pp > 1 or plan.schedule == "gpipe"
        return held and "grad_accum" in given and "micro_batch" not in given

    def interleavable(self, accum: Ints) -> NDArray[Any]:
        """Why the schedule cannot take so many micro-batches a step, for each of them; empty where it can."""
        reasons = np.full(len(accum), "", dtype=object)
        if self.resolved.plan.vpp > 1:
            for count in np.unique(accum).tolist():
                try:
                    interleavable(self.resolved, count)
                except InputError as error:
                    reasons[accum == count] = str(error)
        return reasons

    def chosen(self) -> tuple[int, int]:
        """(micro-batch, micro-batches a step) of its first point. Raises InputError where the schedule cannot take
        them."""
        plan = self.resolved.plan
        interleavable(self.resolved, plan.grad_accum)
        return plan.micro_batch, plan.grad_accum

    def batch(self, given: dict[str, int]) -> tuple[int, int]:
        """(micro-batch, micro-batches a step) of the points with these of micro_batch, grad_accum, global_batch.

        Raises InputError where they contradict each other or the schedule cannot take them.
        """
        scenario = self.resolved.scenario
        others = {name: value for name, value in scenario.values.items() if name not in BATCH}
        scenario = replace(scenario, values=others | given)
        micro, accum, undecided = resolve_batch(scenario, self.resolved.plan.dp, [])
        if undecided - {"method"}:
            plan = replace(self.resolved.plan, micro_batch=micro, grad_accum=accum)
            plan = settled(replace(self.resolved, scenario=scenario, plan=plan, open=undecided - {"method"})).plan
            micro, accum = plan.micro_batch, plan.grad_accum
        interleavable(self.resolved, accum)
        return micro, accum

    def answers(self, micro: Ints, accum: Ints, link: Ints, links: Links) -> Columns:
        """The columns of these points. Raises InputError and RefusedError for a network that cannot be priced."""
        first = self.resolved
        facts = (first.model, first.plan, first.stack)
        odd = plain_softmax(*facts, micro) != plain_softmax(*facts, first.plan.micro_batch)
        if not np.any(odd):
            return self._answers(self.cases, micro, accum, link, links)
        if not self._odd:
            # Some micro-batches run another program than that of the first point.
            size = int(micro[odd][0])
            every = [replace(c.resolved, plan=replace(c.resolved.plan, micro_batch=size)) for c in self.cases]
            self._odd = [self._sharded_case(one) for one in every] if self.sharded else [Case(one) for one in every]
        out: Columns = {}
        for cases, mine in ((self.cases, np.flatnonzero(~odd)), (self._odd, np.flatnonzero(odd))):
            if not len(mine):
                continue
            found = self._answers(cases, micro[mine], accum[mine], link[mine], links)
            for name, values in found.items():
                out.setdefault(name, np.empty(len(micro), dtype=values.dtype))[mine] = values
        return out

    @staticmethod
    def _answers(
        cases: list[Case] | list[ShardedCase], micro: Ints, accum: Ints, link: Ints, links: Links
    ) -> Columns:
        plain = cases[0].answers(micro, accum, link, links)
        if len(cases) == 1:
            return plain
        other = cases[1].answers(micro, accum, link, links)
        better = (other["iteration_time_s"] * GAIN < plain["iteration_time_s"]) & (other["fits"] | ~plain["fits"])
        return {name: np.where(better, other[name], plain[name]) for name in plain}


__all__ = ["Case", "Columns", "Links", "Structure", "figures", "point"]
