"""The least bottleneck under the memory of each peer, by dynamic programming: the default.

Exact for a chain in a given order. Peers are dealt to the chains by speed, so that every chain gets the same mix;
within a chain three orders are tried (as given, fastest line first, largest memory first, which the first stages of
1F1B need) and the best is kept. Equal peers have one order, for which the answer is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simkit.placement._common import Array, Assignment, Held, Problem, dealt, solve_chain, spares


def place(problem: Problem, pipelines: int) -> Assignment:
    """Chains of the least bottleneck; a chain is empty where no cut fits."""
    # Fast peers first: what is left over is slowest.
    order = np.lexsort((np.arange(problem.peers), -problem.line_Bps, -problem.speed))
    runs, _ = dealt([int(i) for i in order], pipelines, most=problem.most)
    costs: dict[tuple[int, int], Array] = {}
    solved: dict[tuple[int, ...], tuple[Held, ...]] = {}
    chains = []
    for run in runs:
        key = tuple(sorted(int(problem.alike[p]) for p in run))
        if key not in solved:
            solved[key] = best_order(problem, sorted(run), costs)
            chains.append(solved[key])
            continue
        # Runs of the same kinds of peers have the same chain.
        chain = solved[key]
        chains.append(tuple(Held(p, h.begin, h.end) for p, h in zip(_same(problem, run, chain), chain, strict=True)))
    return Assignment(pipelines=tuple(chains), spare=spares(problem, chains))


def best_order(problem: Problem, run: Sequence[int], costs: dict[tuple[int, int], Array]) -> tuple[Held, ...]:
    """The best chain over the orders that are tried."""
    tried: dict[tuple[int, ...], None] = {
        tuple(run): None,
        tuple(sorted(run, key=lambda p: (-problem.line_Bps[p], p))): None,
        tuple(sorted(run, key=lambda p: (-problem.room_bytes[p], p))): None,
    }
    return min((solve_chain(problem, order, costs=costs) for order in tried), key=lambda found: found[0])[1]


def _same(problem: Problem, run: Sequence[int], chain: Sequence[Held]) -> list[int]:
    """Peers of `run` that are like those of `chain`, in its order."""
    left = sorted(run)
    found = []
    for held in chain:
        peer = next(p for p in left if problem.alike[p] == problem.alike[held.peer])
        left.remove(peer)
        found.append(peer)
    return found
