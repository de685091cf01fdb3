"""Where cards at home equal a data centre: throughput over that of a reference, by bandwidth and micro-batches.

At every point the best shape (pipelines, depth, micro-batch, recomputation) is looked for with the closed forms,
T(n) = fill + (n - 1) · interval + what replicas exchange, and the best is then walked event by event. All lines have
the same rate in both directions. Crossings are read off between neighbouring points, on logarithms. What a latency does
is asked of the best plan of most micro-batches at every bandwidth, which is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.chain import ESTIMATES, endless_s
from simkit.decentral_search import NEAR, Answer, Asked, Cache, attempt, recomputes, shapes, sizes
from simkit.decentral_step import step
from simkit.errors import InputError
from simkit.spec.peers import Peer

Array = NDArray[np.float64]
MAX_POINTS = 2_000
SIZES = 3
"""Micro-batches tried at each point, spread over those that a step can use."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Map:
    """Axes: bandwidths (byte/s), micro-batches of a pipeline and step, latencies (s, between two peers). rate, ratio,
    pipelines, depth, micro_batch, recompute: (bandwidths, micro-batches); rate is samples a second, 0 where nothing
    fits (recompute: empty).
    by_latency: (bandwidths, latencies) ratios at most micro-batches."""

    bandwidth_Bps: Array
    counts: tuple[int, ...]
    latencies_s: tuple[float, ...]
    latency_s: float
    reference_rate: float
    rate: Array
    pipelines: NDArray[np.int64]
    depth: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    recompute: NDArray[np.str_]
    by_latency: Array

    @property
    def ratio(self) -> Array:
        return self.rate / self.reference_rate

    def bandwidth_crossings(self) -> list[float | None]:
        """For every number of micro-batches the bandwidth from which the peers equal the reference; None: never, or
        already at the slowest (then that bandwidth)."""
        return [crossing(self.bandwidth_Bps, self.ratio[:, i]) for i in range(len(self.counts))]

    def count_crossings(self) -> list[float | None]:
        """For every bandwidth the micro-batches from which they equal it."""
        return [crossing(np.array(self.counts, dtype=float), row) for row in self.ratio]

    def latency_crossings(self) -> list[float | None]:
        """For every bandwidth the latency up to which they equal it."""
        out: list[float | None] = []
        for row in self.by_latency:
            found = crossing(np.array(self.latencies_s), -np.asarray(row) + 2.0) if row[0] >= 1.0 else None
            out.append((found if found is not None else self.latencies_s[-1]) if row[0] >= 1.0 else None)
        return out


def crossing(along: Array, ratio: Array) -> float | None:
    """Where `ratio` first reaches 1, between the neighbours on the logarithm of `along`; its first value where it
    begins there, None where it never does.

    >>> crossing(np.array([1.0, 100.0]), np.array([0.5, 1.5]))
    10.0
    """
    above = np.flatnonzero(np.asarray(ratio) >= 1.0)
    if not len(above):
        return None
    i = int(above[0])
    if i == 0:
        return float(along[0])
    low, high = float(ratio[i - 1]), float(ratio[i])
    share = (1.0 - low) / (high - low)
    return float(np.exp(np.log(along[i - 1]) + share * np.log(along[i] / along[i - 1])))


def mapped(asked: Asked, *, bandwidths: Sequence[float], latency_s: float, counts: Sequence[int],
           latencies_s: Sequence[float], reference_rate: float) -> Map:  # fmt: skip
    """The map of a question; its peers' lines are replaced. Raises InputError for too many points."""
    if len(bandwidths) * len(counts) > MAX_POINTS:
        raise InputError("has too many points", key="map", value=len(bandwidths) * len(counts),
                         hint=f"at most {MAX_POINTS}")  # fmt: skip
    asked = replace(asked, grad_accum=max(counts))
    crews: Cache = {}
    cells = [_row(asked, bandwidth, latency_s, counts, crews) for bandwidth in bandwidths]
    shape = len(bandwidths), len(counts)
    rate, found = np.zeros(shape), np.zeros((3, *shape), dtype=np.int64)
    recompute = np.full(shape, "", dtype="<U9")
    by_latency = np.zeros((len(bandwidths), len(latencies_s)))
    for i, row in enumerate(cells):
        for k, cell in enumerate(row):
            if cell is not None:
                rate[i, k] = cell[1]
                found[:, i, k] = (len(cell[0].assignment.pipelines), max(map(len, cell[0].assignment.pipelines)),
                                  cell[0].plan.micro_batch)  # fmt: skip
                recompute[i, k] = cell[0].plan.recompute
        last = row[int(np.argmax(counts))]
        if last is not None:
            by_latency[i] = [_timed(last[0], wired(asked, bandwidths[i], x), max(counts)) / reference_rate
                             for x in latencies_s]  # fmt: skip
    return Map(
        bandwidth_Bps=np.asarray(bandwidths, dtype=float), counts=tuple(counts), latencies_s=tuple(latencies_s),
        latency_s=latency_s, reference_rate=reference_rate, rate=rate, pipelines=found[0], depth=found[1],
        micro_batch=found[2], recompute=recompute, by_latency=by_latency,
    )  # fmt: skip


def wired(asked: Asked, bandwidth: float, latency_s: float) -> tuple[Peer, ...]:
    """The peers behind lines of this rate, both directions; latency_s: between two of them."""
    return tuple(replace(p, up_Bps=bandwidth, down_Bps=bandwidth, latency_s=latency_s / 2.0) for p in asked.peers)


def _timed(found: Answer, peers: tuple[Peer, ...], count: int) -> float:
    """Samples a second of the same plan on other lines."""
    total = count * len(found.assignment.pipelines)
    timed = step(replace(found.crew, peers=peers), found.asked.rules, found.assignment, micro_batches=total)
    return total * found.plan.micro_batch / timed.end_s


def _row(asked: Asked, bandwidth: float, latency_s: float, counts: Sequence[int],
         crews: Cache) -> list[tuple[Answer, float] | None]:  # fmt: skip
    """The best plan and its samples a second for every number of micro-batches at one bandwidth. crews: priced jobs,
    which do not depend on lines."""
    peers = wired(asked, bandwidth, latency_s)
    here = replace(asked, peers=peers)
    cache = {key: replace(crew, peers=peers) for key, crew in crews.items()}
    every = sizes(here)
    several = every if len(every) <= SIZES else [every[i] for i in np.linspace(0, len(every) - 1, SIZES).astype(int)]
    known: list[list[tuple[Answer, float]]] = [[] for _ in counts]
    for recompute in recomputes(here):
        best: dict[int, tuple[Answer, float]] = {}
        for pipelines, depth in shapes(here):
            for micro in several:
                found = attempt(here, pipelines, depth, micro, recompute, cache)
                if found is None:
                    continue
                for k, count in enumerate(counts):
                    rate = _estimated(found, count)
                    if k not in best or rate > best[k][1]:
                        best[k] = found, rate
        for k, one in best.items():
            known[k].append(one)
    crews.update(cache)
    return [_best(rivals, peers, n) for rivals, n in zip(known, counts, strict=True)]


def _best(rivals: list[tuple[Answer, float]], peers: tuple[Peer, ...], count: int) -> tuple[Answer, float] | None:
    """The fastest by the walk of those whose estimates are near the best."""
    near = NEAR * max((rate for _, rate in rivals), default=0.0)
    walked = [(a, _timed(a, peers, count)) for a, rate in rivals if rate >= near]
    return max(walked, key=lambda one: one[1], default=None)


def _estimated(found: Answer, count: int) -> float:
    """Samples a second by the closed forms."""
    estimate: Any = endless_s if found.asked.rules.staleness else ESTIMATES[found.asked.rules.schedule]
    ends = [float(estimate(p.chain, count)) for p in found.step.pipes[:1]]
    rest = float((found.step.exchange_s + found.step.optimizer_s).max(initial=0.0))
    samples = count * len(found.step.pipes) * found.plan.micro_batch
    return samples / (max(ends) + rest)
