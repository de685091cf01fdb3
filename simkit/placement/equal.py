"""As many units to each peer, in the order in which they are listed: a baseline blind to speed and memory."""

from __future__ import annotations

import numpy as np

from simkit.placement._common import Assignment, Problem, at_shares, chained, spares, split


def place(problem: Problem, pipelines: int) -> Assignment:
    """Chains of equally many units a peer."""
    runs, _ = split(range(problem.peers), pipelines, most=problem.most)
    chains = tuple(chained(run, at_shares(problem.units, np.ones(len(run)))) for run in runs)
    return Assignment(pipelines=chains, spare=spares(problem, chains))
