"""Who holds what: one file per way of placing the units of a network on peers; the file's name is its key.

Every module offers ``place(problem, pipelines) -> Assignment``: `pipelines` chains of peers, each of which holds all
units once, a peer a run of consecutive units. Whether memory suffices and how long a step takes is for the caller to
judge, so that baselines may be bad. Peers that no chain uses are the spare ones.
"""

from __future__ import annotations

from simkit.placement._common import Assignment, Held, Problem, bottleneck, solve_chain, stage_cost

__all__ = ["Assignment", "Held", "Problem", "bottleneck", "solve_chain", "stage_cost"]
