"""What every file of simkit/schedules must obey; a new one is picked up by its name."""

import numpy as np
import pytest

from simkit import plugins, schedules
from simkit.des.pipeline import nodes, recurrence

STAGES = (1, 2, 3, 4, 8)
RANDOM = np.random.default_rng(20240607)


@pytest.fixture(params=schedules.names())
def schedule(request):
    return schedules.get(request.param)


def test_every_file_has_a_name_of_the_vocabulary():
    assert len(schedules.names()) == len(plugins.names("simkit.schedules"))
    assert {"1f1b", "gpipe", "interleaved", "zb"} <= set(schedules.names())


@pytest.mark.parametrize("p", STAGES)
@pytest.mark.parametrize("virtual", [1, 3])
def test_order_holds_every_pass_once_and_never_waits_for_ever(schedule, p, virtual):
    for m in (p, 2 * p, 5 * p):
        for r in range(p):
            order = schedule.order(r, stages=p, micro_batches=m, virtual=virtual)
            kinds = {k for k, _, _ in order}
            chunks = {c for _, _, c in order}
            assert kinds in ({"F", "B"}, {"F", "B", "W"})
            # A schedule without chunks ignores `virtual`.
            assert chunks in ({0}, set(range(virtual)))
            assert sorted(order) == sorted((k, i, c) for k in kinds for i in range(m) for c in chunks)
            at = {e: n for n, e in enumerate(order)}
            assert all(at["F", i, c] < at["B", i, c] for i in range(m) for c in chunks)
            assert all(at["B", i, c] < at[k, i, c] for k, i, c in order if k == "W")
    if len({c for _, _, c in schedule.order(0, stages=p, micro_batches=p, virtual=virtual)}) == virtual:
        assert len(nodes(schedule.order, stages=p, micro_batches=2 * p, virtual=virtual)) == sum(
            len(schedule.order(r, stages=p, micro_batches=2 * p, virtual=virtual)) for r in range(p)
        )


@pytest.mark.parametrize("m", [1, 4, 7])
def test_one_stage_has_no_bubble(schedule, m):
    for virtual in (1, 2):
        found = schedule.seconds([2.0], [3.0], micro_batches=m, virtual=virtual, p2p_s=0.7)
        assert found.end_s == pytest.approx(5.0 * m)
        assert found.bubble_s == pytest.approx(0.0, abs=1e-12)
        assert found.fill_s == 0.0


@pytest.mark.parametrize("overlap", [False, True])
def test_bounds(schedule, overlap):
    """Never faster than the slowest stage's work or than one micro-batch through all stages."""
    for p in STAGES:
        f, b = RANDOM.lognormal(0, 0.5, (2, p))
        for m in (p, 4 * p):
            found = schedule.seconds(f, b, micro_batches=m, p2p_s=0.1, overlap_p2p=overlap)
            assert found.end_s >= m * (f + b).max() * (1 - 1e-12)
            split = "W" in {k for k, _, _ in schedule.order(0, stages=p, micro_batches=m)}
            weights = 0.5 * b[1:].sum() if split else 0.0
            assert found.end_s >= ((f + b).sum() - weights + 2 * 0.1 * (p - 1)) * (1 - 1e-12)
            assert found.end_s == pytest.approx(found.steady_s + found.bubble_s)


@pytest.mark.parametrize("overlap", [False, True])
def test_monotone_in_work_messages_and_micro_batches(schedule, overlap):
    f, b = RANDOM.uniform(0.8, 1.2, (2, 6))
    kw = {"micro_batches": 12, "virtual": 2, "overlap_p2p": overlap}
    base = schedule.seconds(f, b, p2p_s=0.01, **kw).end_s
    for r in range(6):
        more = np.where(np.arange(6) == r, 1.3, 1.0)
        assert schedule.seconds(f * more, b * more, p2p_s=0.01, **kw).end_s >= base * (1 - 1e-12)
    assert schedule.seconds(f, b, p2p_s=0.02, **kw).end_s >= base
    assert schedule.seconds(f, b, p2p_s=0.01, **{**kw, "micro_batches": 18}).end_s > base


def test_seconds_scale_with_time(schedule):
    f, b = RANDOM.uniform(0.8, 1.2, (2, 5))
    once = schedule.seconds(f, b, micro_batches=10, virtual=2, p2p_s=0.05)
    twice = schedule.seconds(2 * f, 2 * b, micro_batches=10, virtual=2, p2p_s=0.10)
    assert twice.end_s == pytest.approx(2 * once.end_s)
    assert twice.in_flight.tolist() == once.in_flight.tolist()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("points", [3, 5000])
def test_array_equals_one_by_one(schedule, points, overlap):
    """5,000 points are more than a block."""
    f, b = RANDOM.lognormal(0, 0.3, (2, points, 4))
    m, v, c = 4 * RANDOM.integers(1, 5, points), RANDOM.integers(1, 4, points), RANDOM.uniform(0, 0.1, points)
    whole = schedule.seconds(f, b, micro_batches=m, virtual=v, p2p_s=c, overlap_p2p=overlap)
    assert whole.end_s.shape == (points,)
    assert whole.per_stage_busy_s.shape == (points, 4)
    for i in (0, points // 2, points - 1):
        one = schedule.seconds(f[i], b[i], micro_batches=m[i], virtual=v[i], p2p_s=c[i], overlap_p2p=overlap)
        for name in ("end_s", "bubble_s", "steady_s", "fill_s", "per_stage_busy_s"):
            assert getattr(whole, name)[i] == pytest.approx(getattr(one, name), rel=1e-12, abs=1e-12)
        assert np.broadcast_to(whole.in_flight, (points, 4))[i] == pytest.approx(one.in_flight)


def test_grid_over_two_axes_broadcasts(schedule):
    f, b = RANDOM.uniform(1, 2, (2, 4))
    m, c = np.array([4.0, 8.0, 16.0]), np.array([0.0, 0.1])
    grid = schedule.seconds(f, b, micro_batches=m[:, None], virtual=2, p2p_s=c)
    assert grid.end_s.shape == (3, 2)
    for i, j in np.ndindex(3, 2):
        one = schedule.seconds(f, b, micro_batches=m[i], virtual=2, p2p_s=c[j])
        assert grid.end_s[i, j] == pytest.approx(one.end_s, rel=1e-12)


def test_recurrence_takes_points(schedule):
    f, b = RANDOM.lognormal(0, 0.3, (2, 6, 4))
    c = RANDOM.uniform(0, 0.1, 6)
    found = recurrence(schedule.order, f, b, micro_batches=8, p2p_s=c)
    for i in range(6):
        one = recurrence(schedule.order, f[i], b[i], micro_batches=8, p2p_s=float(c[i]))
        assert found.end_s[i] == pytest.approx(one.end_s, rel=1e-12)
        assert found.busy_s[i] == pytest.approx(one.busy_s, rel=1e-12)
