"""A whole grid of scenarios: the formulas of `simkit.predict` on arrays, block by block.

>>> found = simkit.sweep(model="bert-large", cluster="8x4x2080ti", grid={"inter": "1Gb/s@5us:100Gb/s@5us:1000"})
>>> found["inter_Bps"], found["iteration_time_s"]

Axes are of two kinds. The batch (``micro_batch``, ``grad_accum``, and ``global_batch`` beside one of them) and links
given as RATE@LATENCY enter the formulas as arrays; all others (names, choices, degrees, and numbers that change what is
computed: rank, bucket_mb, seq_len, …) are resolved once each.
Every point equals `predict` of the same scenario. A point without an answer keeps its place, with the reason in
``refused``; one that does not fit into memory keeps its times, with the reason in ``why_not``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError, RefusedError
from simkit.goodput import COLUMNS as FAILURES
from simkit.goodput import FAILURE_FIELDS
from simkit.goodput import JOB_COLUMNS as JOB_FAILURES
from simkit.grids import Axis, axes
from simkit.spec.scenario import Scenario
from simkit.sweep_points import BATCH, Columns, Links, Structure, point

BLOCK = 65_536
"""Points worked on together."""
KEPT = 512
"""Structures remembered from one block to the next."""
FEW = 2
"""Points of a structure up to which they are asked one by one."""
MAX_SAMPLES = 2.0**62
TOO_MANY = "the global batch exceeds 2^62 samples; take fewer"
COUNTS = ("micro_batch", "grad_accum", "global_batch", "gpus")
RATES = (
    "iteration_time_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib",
)  # fmt: skip
TERMS = ("forward_s", "backward_s", "compression_s", "exposed_comm_s", "optimizer_s", "host_s")
SHARDED_TERMS = (
    "recompute_s", "tp_comm_s", "launch_s", "accumulation_s", "offload_s", "sharding_s", "bubble_s", "straggler_s",
    "other_s",
)  # fmt: skip
MONEY = ("cost_usd_per_hour", "usd_per_step", "power_w", "energy_j_per_step")
JOB_MONEY = ("duration_s", "cost_usd", "energy_j")
_SHARDED = frozenset({"tp", "pp", "cp", "ep", "zero", "offload", "schedule", "shard_group", "stack", "sp", "vpp"})
_LENGTHS = frozenset({"tokens", "samples", "epochs"})

Ints = NDArray[np.int64]


def sweep(
    *, grid: Mapping[str, Any], profiles: Sequence[str] = (), models: Sequence[str] = (), **given: Any
) -> dict[str, NDArray[Any]]:
    """Every point of a grid as columns: ``{name: array over the points}``, the last axis of the grid varying fastest.

    grid: ``{field: values}``; values are a sequence, one value, or text of the forms in `simkit.grids`. given: fields
    that hold for all points. Columns: the axes (links also as ``inter_Bps``, ``inter_latency_s``), micro_batch,
    grad_accum, global_batch, gpus, method, times and rates, the disjoint terms of the step, peak_memory_gib, fits,
    why_not, money, refused. A figure that a point lacks is NaN. Memory grows with the points; `Sweep.blocks` yields
    them piece by piece.
    Raises InputError for an unknown axis, a bad value, more than `simkit.grids.MAX_POINTS` points.
    """
    asked = Sweep(Scenario.of(given, profiles=tuple(map(str, profiles)), models=tuple(map(str, models))), axes(grid))
    parts = list(asked.blocks())
    return {name: np.concatenate([part[name] for part in parts]) for name in asked.columns}


class Sweep:
    """A scenario and the axes of a grid over it."""

    def __init__(self, scenario: Scenario, grid: Sequence[Axis], *, block: int = BLOCK) -> None:
        if not grid:
            raise InputError("has no axis", key="--grid", hint="write --grid micro_batch=1,2,4 or --grid rank=1:64:*2")
        self.scenario, self.axes, self.block = scenario, tuple(grid), block
        self.shape = tuple(len(axis) for axis in self.axes)
        self.points = math.prod(self.shape)
        self._given = frozenset(scenario) | {axis.name for axis in self.axes}
        # A global batch ties micro-batch and accumulation together; which of them follows is settled point by point,
        # but where a planner has to choose both.
        self._tied = "global_batch" in self._given
        counts = BATCH if self._given & {"micro_batch", "grad_accum"} else BATCH[:2]
        self._numeric = [i for i, a in enumerate(self.axes) if a.described or a.name in counts]
        self._counts = [i for i in self._numeric if not self.axes[i].described]
        self._fixed = [i for i in range(len(self.axes)) if i not in self._numeric]
        self._links = [i for i, a in enumerate(self.axes) if a.described]
        # Arrays of one or two points cost more than the points.
        self._few = math.prod(self.shape[i] for i in self._numeric) <= FEW
        self._structures: OrderedDict[tuple[int, ...], Structure] = OrderedDict()

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order: the same for every block."""
        names: list[str] = []
        for axis in self.axes:
            names.append(axis.name)
            if axis.described:
                names += [f"{axis.name}_Bps", f"{axis.name}_latency_s"]
        names += [*COUNTS, "method", *RATES, "fits", "why_not", *TERMS]
        if self._given & _SHARDED or self._structure((0,) * len(self._fixed)).sharded:
            names += SHARDED_TERMS
        names += MONEY
        if self._given & _LENGTHS:
            names += JOB_MONEY
        if self._given & (_LENGTHS | frozenset(FAILURE_FIELDS)):
            names += FAILURES if not self._given & _LENGTHS else (*FAILURES, *JOB_FAILURES)
        return tuple(dict.fromkeys([*names, "refused"]))

    def blocks(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The columns of the grid, at most `block` points at a time; no array is longer than that."""
        for first in range(0, self.points, self.block):
            yield self._block(np.arange(first, min(first + self.block, self.points)))

    def scenario_at(self, flat: int) -> Scenario:
        """The scenario of one point: `predict_scenario` of it gives the same figures."""
        index = np.unravel_index(flat, self.shape)
        return self.scenario.with_(**{a.name: a.value(int(i)) for a, i in zip(self.axes, index, strict=True)})

    def _block(self, flat: Ints) -> dict[str, NDArray[Any]]:
        index = [np.asarray(i, dtype=np.int64) for i in np.unravel_index(flat, self.shape)]
        out = self._empty(len(flat))
        for axis, where in zip(self.axes, index, strict=True):
            out[axis.name] = axis.column(where)
            if axis.Bps is not None and axis.latency_s is not None:
                out[f"{axis.name}_Bps"], out[f"{axis.name}_latency_s"] = axis.Bps[where], axis.latency_s[where]
        code = np.zeros(len(flat), dtype=np.int64)
        for i in self._fixed:
            code = code * self.shape[i] + index[i]
        order = np.argsort(code, kind="stable")
        for mine in np.split(order, np.flatnonzero(np.diff(code[order])) + 1):
            if self._few:
                self._ask(out, flat, mine)
                continue
            structure = self._structure(tuple(int(index[i][mine[0]]) for i in self._fixed))
            self._fill(out, structure, flat, mine, [i[mine] for i in index])
        return out

    def _empty(self, count: int) -> dict[str, NDArray[Any]]:
        out: dict[str, NDArray[Any]] = {}
        for name in self.columns:
            if name in COUNTS:
                out[name] = np.zeros(count, dtype=np.int64)
            elif name == "fits":
                out[name] = np.zeros(count, dtype=bool)
            elif name in ("why_not", "refused", "method"):
                out[name] = np.full(count, "", dtype=object)
            else:
                out[name] = np.full(count, np.nan)
        return out

    def _structure(self, key: tuple[int, ...]) -> Structure:
        if key in self._structures:
            self._structures.move_to_end(key)
            return self._structures[key]
        chosen = {self.axes[i].name: self.axes[i].value(at) for i, at in zip(self._fixed, key, strict=True)}
        chosen |= {self.axes[i].name: self.axes[i].value(0) for i in self._numeric}
        if self._tied and self._counts:
            # The batch of the first point may contradict itself where that of the second does not.
            chosen |= {"global_batch": None, "micro_batch": 1, "grad_accum": 1}
        made = Structure(self.scenario.with_(**chosen))
        self._structures[key] = made
        if len(self._structures) > KEPT:
            self._structures.popitem(last=False)
        return made

    def _fill(
        self, out: dict[str, NDArray[Any]], structure: Structure, flat: Ints, mine: Ints, index: Sequence[Ints]
    ) -> None:
        """Puts the answers of the points `mine` of one structure into the columns."""
        if structure.reason:
            out["refused"][mine] = structure.reason
            return
        if not structure.arrays:
            self._ask(out, flat, mine)
            return
        micro, accum, refused = self._batch(structure, index)
        refused[micro.astype(float) * accum * structure.resolved.plan.dp > MAX_SAMPLES] = TOO_MANY
        good = np.flatnonzero(refused == "")
        out["refused"][mine] = refused
        if not len(good):
            return
        link = np.zeros(len(mine), dtype=np.int64)
        for i in self._links:
            link = link * self.shape[i] + index[i]
        tables, used = self._tables(link[good])
        try:
            self._put(out, structure.answers(micro[good], accum[good], used, tables), mine[good])
        except (InputError, RefusedError) as error:
            out["refused"][mine[good]] = str(error)

    def _ask(self, out: dict[str, NDArray[Any]], flat: Ints, mine: Ints) -> None:
        """Puts the answers of the points `mine` into the columns, asked one by one."""
        for at, number in zip(mine.tolist(), flat[mine].tolist(), strict=True):
            self._put(out, point(self.scenario_at(number)), at)

    def _tables(self, link: Ints) -> tuple[Links, Ints]:
        """The links that these points use, and each point's position among them."""
        codes, used = np.unique(link, return_inverse=True)
        shape = tuple(self.shape[i] for i in self._links)
        index = np.unravel_index(codes, shape) if shape else ()
        tables = {}
        for i, where in zip(self._links, index, strict=True):
            axis = self.axes[i]
            if axis.Bps is not None and axis.latency_s is not None:
                tables[axis.name] = (axis.Bps[where], axis.latency_s[where])
        return Links(tables=tables), used

    def _batch(self, structure: Structure, index: Sequence[Ints]) -> tuple[Ints, Ints, NDArray[Any]]:
        """(micro-batch, micro-batches a step, refusal) of points of one structure."""
        plan, count = structure.resolved.plan, len(index[0])
        values = {self.axes[i].name: self.axes[i].values[index[i]] for i in self._counts}
        if not self._tied and not structure.needs_planning(self._given):
            micro = values.get("micro_batch", np.full(count, plan.micro_batch))
            accum = values.get("grad_accum", np.full(count, plan.grad_accum))
            return micro, accum, structure.interleavable(accum)
        code = np.zeros(count, dtype=np.int64)
        for i in self._counts:
            code = code * self.shape[i] + index[i]
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        fixed = {name: self.scenario.get(name) for name in BATCH if self.scenario.given(name)}
        micros, accums = np.ones((2, len(first)), dtype=np.int64)
        reasons = np.full(len(first), "", dtype=object)
        for at, where in enumerate(first.tolist()):
            given = fixed | {name: int(column[where]) for name, column in values.items()}
            try:
                micros[at], accums[at] = structure.batch(given) if self._counts else structure.chosen()
            except InputError as error:
                reasons[at] = str(error)
        return micros[which], accums[which], reasons[which]

    def _put(self, out: dict[str, NDArray[Any]], found: Columns, at: Any) -> None:
        """Writes columns of some points; a term that has no column of its own is part of ``other_s``."""
        known = {axis.name for axis in self.axes if axis.name not in COUNTS}
        for name, value in found.items():
            if name in out and name not in known:
                # An array without axes would itself become the element of a column of objects.
                out[name][at] = value if np.ndim(value) else np.asarray(value).item()
        if "other_s" in out and "iteration_time_s" in found and "other_s" not in found:
            rest = found["iteration_time_s"] - sum(found[name] for name in (*TERMS, *SHARDED_TERMS) if name in found)
            out["other_s"][at] = np.where(rest > 1e-9 * found["iteration_time_s"], rest, np.nan)


__all__ = ["BLOCK", "Sweep", "sweep"]
