"""Peers of similar lines next to each other, cut by dynamic programming: OP-Fence.

Peers are grouped by region and by the power of two of their line rate; groups stand one behind the other, the fastest
first, and are cut into chains of consecutive peers. So few cuts lie on a slow line, and a chain of slow lines does not
slow the fast ones: its share of the micro-batches is smaller.
Source: FusionLLM (arXiv 2410.12707), OP-Fence: devices are clustered by bandwidth and the operator graph is partitioned
along the clusters; the cut inside is ours.
"""

from __future__ import annotations

import numpy as np

from simkit.placement._common import Array, Assignment, Problem, solve_chain, spares, split


def groups(problem: Problem) -> list[list[int]]:
    """Peers by (region, power of two of the line rate), the fastest group first; within a group by speed."""
    rate = np.floor(np.log2(np.maximum(problem.line_Bps, 1.0)))
    keys = {(-rate[p], problem.region[p]) for p in range(problem.peers)}
    return [
        sorted((p for p in range(problem.peers) if (-rate[p], problem.region[p]) == key),
               key=lambda p: (-problem.speed[p], p))
        for key in sorted(keys)
    ]  # fmt: skip


def place(problem: Problem, pipelines: int) -> Assignment:
    """Chains of consecutive peers of the grouped list; a chain is empty where no cut fits."""
    listed = [p for group in groups(problem) for p in group]
    runs, _ = split(listed, pipelines, most=problem.most)
    costs: dict[tuple[int, int], Array] = {}
    chains = [solve_chain(problem, run, costs=costs)[1] for run in runs]
    return Assignment(pipelines=tuple(chains), spare=spares(problem, chains))
