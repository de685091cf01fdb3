"""Peers in random order and random cuts, by the seed of the scenario: the baseline of the FusionLLM study."""

from __future__ import annotations

import numpy as np

from simkit.placement._common import Assignment, Problem, chained, spares, split


def place(problem: Problem, pipelines: int) -> Assignment:
    """Chains of a random order with uniformly random cuts, at least one unit a peer."""
    rng = np.random.default_rng(problem.seed)
    runs, _ = split([int(p) for p in rng.permutation(problem.peers)], pipelines, most=problem.most)
    chains = []
    for run in runs:
        inner = rng.choice(np.arange(1, problem.units), size=len(run) - 1, replace=False)
        chains.append(chained(run, [*sorted(int(i) for i in inner), problem.units]))
    return Assignment(pipelines=tuple(chains), spare=spares(problem, chains))
