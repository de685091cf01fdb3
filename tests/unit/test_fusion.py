"""Fusion rules against hand-made groupings, the published rule of ACP-SGD, and brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.fusion import all as everything
from simkit.fusion import bucket, greedy, none, optimal
from simkit.plugins import get, names

MIB = 2.0**20
RULES = names("simkit.fusion")


def line(a: float, b: float):
    return lambda nbytes: a + b * np.asarray(nbytes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [0, 1, 2, 37])
def test_groups_are_contiguous_and_start_at_zero(rule: str, count: int) -> None:
    sizes = np.random.default_rng(count).integers(1, 10**6, count).astype(float)
    group = get("simkit.fusion", rule).groups(
        sizes, threshold_bytes=1.5e6, ready_s=np.arange(count) * 1e-4, seconds=line(1e-3, 1e-9)
    )
    assert group.shape == (count,)
    assert np.issubdtype(group.dtype, np.integer)
    if count:
        assert group[0] == 0
        assert set(np.diff(group)) <= {0, 1}


def test_none_and_all() -> None:
    sizes = np.array([3.0, 1.0, 2.0])
    assert none.groups(sizes).tolist() == [0, 1, 2]
    assert everything.groups(sizes).tolist() == [0, 0, 0]


def test_ddp_closes_a_bucket_with_the_tensor_that_reaches_the_cap() -> None:
    # First cap 1 MiB: 0.5 + 0.25 + 0.5 reaches it. Then 25 MiB: 10 + 10 + 10 passes it, 30 passes it alone.
    sizes = np.array([0.5, 0.25, 0.5, 10, 10, 10, 30, 1, 24, 1]) * MIB
    assert bucket.groups(sizes, threshold_bytes=25 * MIB).tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 3, 4]


def test_ddp_cap_below_one_mebibyte_holds_for_the_first_bucket_too() -> None:
    assert bucket.groups(np.full(4, 0.25 * MIB), threshold_bytes=0.5 * MIB).tolist() == [0, 0, 1, 1]
    assert bucket.groups(np.full(3, 8.0), threshold_bytes=0.0).tolist() == [0, 1, 2]


def test_greedy_never_passes_the_threshold_but_takes_a_first_tensor() -> None:
    sizes = np.array([10.0, 10, 5, 1, 40, 25, 1])
    assert greedy.groups(sizes, threshold_bytes=25.0).tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert greedy.groups(sizes, threshold_bytes=0.0).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert greedy.groups(sizes, threshold_bytes=1e9).tolist() == [0] * 7


def ends(sizes: np.ndarray, group: np.ndarray, ready_s: np.ndarray, seconds) -> float:
    """End of the last collective, one message at a time."""
    end = 0.0
    for g in range(int(group[-1]) + 1):
        members = np.flatnonzero(group == g)
        end = max(end, ready_s[members].max()) + float(seconds(np.array([sizes[members].sum()]))[0])
    return end


def best_of_all(sizes: np.ndarray, ready_s: np.ndarray, seconds) -> float:
    cuts = product([0, 1], repeat=len(sizes) - 1)
    return min(ends(sizes, np.cumsum([0, *c]), ready_s, seconds) for c in cuts)


COSTS = {
    "affine": line(1e-3, 1e-9),
    "free start": line(0.0, 1e-9),
    "free bytes": line(1e-3, 0.0),
    "with a root": lambda b: 1e-4 + 1e-6 * np.sqrt(b) + 5e-10 * b,
    "steps": lambda b: 1e-3 * np.ceil(np.asarray(b) / 1e6),
    "cheaper of two": lambda b: np.minimum(1e-4 + 4e-9 * b, 2e-3 + 5e-10 * b),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4_000_000), st.integers(0, 3000)), min_size=1, max_size=9),
    st.sampled_from(sorted(COSTS)),
)
def test_optimal_is_the_best_of_all_groupings(tensors: list[tuple[int, int]], cost: str) -> None:
    sizes = np.array([float(s) for s, _ in tensors])
    ready_s = np.cumsum([1e-6 * gap for _, gap in tensors])
    group = optimal.groups(sizes, ready_s=ready_s, seconds=COSTS[cost])
    assert ends(sizes, group, ready_s, COSTS[cost]) == pytest.approx(best_of_all(sizes, ready_s, COSTS[cost]), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_both_optima_agree_on_a_large_model(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes, gaps = random.lognormal(12, 2, 400), random.lognormal(-8, 1, 400)
    ready_s = np.cumsum(gaps)
    exact = optimal.groups(sizes, ready_s=ready_s, seconds=line(1e-3, 8e-10))
    total = np.concatenate([[0.0], np.cumsum(sizes)])
    previous = optimal._general_optimum(total, ready_s.tolist(), line(1e-3, 8e-10))
    starts = np.zeros(400, dtype=int)
    at = previous[400]
    while at > 0:
        starts[at] = 1
        at = previous[at]
    general = ends(sizes, np.cumsum(starts), ready_s, line(1e-3, 8e-10))
    assert ends(sizes, exact, ready_s, line(1e-3, 8e-10)) == pytest.approx(general, rel=1e-9)


def test_optimal_merges_everything_where_only_latency_counts_and_nothing_where_it_is_free() -> None:
    sizes, together, apart = np.full(6, 1e6), np.zeros(6), np.arange(6) * 1.0
    assert optimal.groups(sizes, ready_s=together, seconds=line(1.0, 1e-12)).tolist() == [0] * 6
    # Readiness is a second apart and a message takes a millisecond: all but the last are hidden anyway, and the last
    # must be as small as it can be.
    group = optimal.groups(sizes, ready_s=apart, seconds=line(1e-4, 1e-9))
    assert group[-1] == group[-2] + 1
