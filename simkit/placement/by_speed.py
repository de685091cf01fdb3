"""Work in proportion to the speed of each peer, in the order listed; lines and memory do not count: a baseline."""

from __future__ import annotations

import numpy as np

from simkit.placement._common import Assignment, Held, Problem, chained, spares, split


def place(problem: Problem, pipelines: int) -> Assignment:
    """Chains whose cuts stand where the share of the work comes closest to the share of the speed."""
    runs, _ = split(range(problem.peers), pipelines, most=problem.most)
    chains = tuple(_cut(problem, run) for run in runs)
    return Assignment(pipelines=chains, spare=spares(problem, chains))


def _cut(problem: Problem, run: list[int]) -> tuple[Held, ...]:
    work = problem.compute_s[problem.kind[run[0]], 0] / problem.compute_s[problem.kind[run[0]], 0, -1]
    shares = np.cumsum(problem.speed[run]) / problem.speed[run].sum()
    ends: list[int] = []
    for i, share in enumerate(shares):
        low, high = (ends[-1] if ends else 0) + 1, problem.units - (len(run) - 1 - i)
        ends.append(int(np.clip(np.abs(work - share).argmin(), low, high)))
    ends[-1] = problem.units
    return chained(run, ends)
