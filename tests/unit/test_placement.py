"""Does the dynamic programme find the best cut, do baselines do what they say, and is a thousand peers a matter of
seconds?"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit import plugins
from simkit.placement import Problem, bottleneck, solve_chain

NAMES = plugins.names("simkit.placement")


def problem(work: list[float], slow: list[float], **given: Any) -> Problem:
    """Units of `work` seconds on peers that take `slow` times as long; ample memory and lines unless given."""
    n, p = len(work), len(slow)
    edges = np.concatenate([[0.0], np.cumsum(work)])
    compute = np.maximum(edges[None, :] - edges[:, None], 0.0)
    sizes = np.concatenate([[0.0], np.cumsum(given.pop("sizes", [1.0] * n))])
    cut = np.array(given.pop("cut", [0.0] * (n + 1)), dtype=float)
    values = {
        "room_bytes": np.full(p, 1e9), "up_Bps": np.full(p, 1e9), "down_Bps": np.full(p, 1e9),
        "region": ("",) * p, "in_flight": np.zeros(p + 1), "kept_bytes": np.zeros((n + 1, n + 1)),
    }  # fmt: skip
    values |= {k: v if k in ("region", "seed") else np.array(v, dtype=float) for k, v in given.items()}
    return Problem(
        compute_s=compute[None], state_bytes=np.maximum(sizes[None, :] - sizes[:, None], 0.0)[None], cut_bytes=cut,
        kind=np.zeros(p, dtype=np.int64), slow=np.array(slow, dtype=float), **values,
    )  # fmt: skip


def brute(p: Problem, order: list[int]) -> float:
    """Every cut of all units over the peers in this order, empty ones allowed."""
    best = float("inf")
    for cuts in itertools.combinations_with_replacement(range(p.units + 1), len(order) - 1):
        edges, worst = [0, *cuts, p.units], 0.0
        for position, peer in enumerate(order):
            i, j = edges[position], edges[position + 1]
            if i == j:
                continue
            held = p.state_bytes[0, i, j] + p.in_flight[len(order) - position] * p.kept_bytes[i, j]
            if held > p.room_bytes[peer]:
                worst = float("inf")
                break
            line = (p.cut_bytes[i] + p.cut_bytes[j]) / min(p.up_Bps[peer], p.down_Bps[peer])
            worst = max(worst, p.compute_s[0, i, j] * p.slow[peer], line)
        best = min(best, worst)
    return best


few = st.floats(0.1, 5.0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_chain_is_solved_exactly(data: st.DataObject) -> None:
    n, p = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 4))

    def many(count: int) -> list[float]:
        return data.draw(st.lists(few, min_size=count, max_size=count))

    kept = np.concatenate([[0.0], np.cumsum(many(n))])
    asked = problem(
        many(n), many(p), sizes=many(n), cut=[0.0, *many(n - 1), 0.0], room_bytes=[8.0 * x for x in many(p)],
        up_Bps=many(p), down_Bps=many(p), in_flight=np.arange(p + 1.0),
        kept_bytes=np.maximum(kept[None, :] - kept[:, None], 0.0) / 4,
    )  # fmt: skip
    found, chain = solve_chain(asked, list(range(p)))
    assert found == pytest.approx(brute(asked, list(range(p))))
    if chain:
        assert bottleneck(asked, chain) == pytest.approx(found)
        assert [h.begin for h in chain[1:]] == [h.end for h in chain[:-1]]
        assert (chain[0].begin, chain[-1].end) == (0, n)


def test_speed_decides_how_much_a_peer_holds() -> None:
    """Ten equal units over a peer and one four times as fast: 2 and 8 units, both busy for 2 s."""
    asked = problem([1.0] * 10, [1.0, 0.25])
    found, chain = solve_chain(asked, [0, 1])
    assert found == 2.0
    assert [h.end - h.begin for h in chain] == [2, 8]


def test_memory_binds() -> None:
    """The fast peer holds three units at most: the slow one keeps seven."""
    found, chain = solve_chain(problem([1.0] * 10, [1.0, 0.25], room_bytes=[1e9, 3.0]), [0, 1])
    assert found == 7.0
    assert chain[1].end - chain[1].begin == 3
    assert solve_chain(problem([1.0] * 10, [1.0, 0.25], room_bytes=[6.0, 3.0]), [0, 1]) == (float("inf"), ())


def test_a_cut_avoids_the_large_tensor() -> None:
    """Equal work, but the middle cut is ten times as large: it moves one unit aside."""
    found, chain = solve_chain(problem([1.0] * 4, [1.0, 1.0], cut=[0, 1, 100, 1, 0], up_Bps=[1, 1], down_Bps=[1, 1]),
                               [0, 1])  # fmt: skip
    assert found == 3.0
    assert chain[0].end in (1, 3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pipelines", [1, 2, 3])
def test_every_placement_holds_every_unit_once_per_pipeline(name: str, pipelines: int) -> None:
    asked = problem([1.0, 2.0, 1.0, 3.0, 1.0, 2.0], [1.0, 2.0, 0.5, 1.0, 1.5, 3.0, 1.0], seed=3)
    found = plugins.get("simkit.placement", name).place(asked, pipelines)
    assert len(found.pipelines) == pipelines
    used = [h.peer for chain in found.pipelines for h in chain]
    assert len(set(used)) == len(used)
    assert sorted((*used, *found.spare)) == list(range(7))
    for chain in found.pipelines:
        assert [u for h in chain for u in range(h.begin, h.end)] == list(range(6))
    again = plugins.get("simkit.placement", name).place(asked, pipelines)
    assert again == found


@settings(max_examples=40, deadline=None)
@given(st.lists(few, min_size=4, max_size=9), st.lists(few, min_size=1, max_size=4))
def test_nothing_beats_the_exact_placement_of_equal_lines(work: list[float], slow: list[float]) -> None:
    """Without memory or lines, baselines of the same order are never better."""
    asked = problem(work, slow)
    exact, _ = solve_chain(asked, list(range(len(slow))))
    for name in ("equal", "by-speed"):
        chain = plugins.get("simkit.placement", name).place(asked, 1).pipelines[0]
        assert exact <= bottleneck(asked, chain) * (1 + 1e-12)


def test_op_fence_keeps_slow_lines_together() -> None:
    """Two fast and two slow lines: the slow pair is a pipeline of its own."""
    asked = problem([1.0] * 4, [1.0] * 4, up_Bps=[1e3, 1e9, 1e3, 1e9], down_Bps=[1e3, 1e9, 1e3, 1e9],
                    cut=[0, 1, 1, 1, 0])  # fmt: skip
    found = plugins.get("simkit.placement", "op-fence").place(asked, 2)
    assert [{h.peer for h in chain} for chain in found.pipelines] == [{1, 3}, {0, 2}]


@pytest.mark.parametrize("name", ["exact", "op-fence"])
def test_a_thousand_unlike_peers(name: str) -> None:
    """The bar is 2 s on one core; thread time, since the machine is shared."""
    rng = np.random.default_rng(0)
    n, p = 66, 1000
    asked = problem(
        list(rng.uniform(0.5, 1.5, n)), list(rng.uniform(0.5, 2.0, p)), cut=[0.0, *[1e6] * (n - 1), 0.0],
        up_Bps=rng.uniform(2e6, 2e8, p), down_Bps=rng.uniform(2e6, 2e8, p),
    )  # fmt: skip
    begin = time.thread_time()
    found = plugins.get("simkit.placement", name).place(asked, 20)
    assert time.thread_time() - begin < 2.0
    assert all(found.pipelines)
