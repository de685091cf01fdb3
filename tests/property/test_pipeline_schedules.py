"""Closed form, recurrence and event simulation of a pipeline answer the same question."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit import schedules
from simkit.des.pipeline import recurrence, simulate

REL = 1e-9
SPREADS = {"equal": 0.0, "near": 0.05, "far": 0.5}
SHORT = {"1f1b": (0.0, 0.0), "gpipe": (0.0, 0.0), "interleaved": (0.01, 0.03), "zb": (0.06, 0.25)}
"""How far the closed form may fall short of the recurrence: stages within 10-20 % of each other, lognormal stages."""


@st.composite
def pipelines(draw: st.DrawFn, key: str, spread: str, messages: bool = False, stages: int = 8):
    """(forward, backward, arguments) of one random pipeline."""
    p, virtual = draw(st.integers(1, stages)), draw(st.integers(1, 4)) if key == "interleaved" else 1
    m = p * draw(st.integers(1, 4)) if key == "interleaved" else draw(st.integers(1, 24))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    f, b, w = random.uniform(0.5, 2.0), random.uniform(0.5, 4.0), random.uniform(0.0, 1.0)
    forward_s, backward_s = (x * np.exp(SPREADS[spread] * random.standard_normal(p)) for x in (f, b))
    p2p_s = float(random.uniform(0.0, 0.2)) if messages else 0.0
    return forward_s, backward_s, {"micro_batches": m, "virtual": virtual, "p2p_s": p2p_s, "weight_s": w * backward_s}


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapping"])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("key", schedules.names())
def test_recurrence_equals_simulation(key: str, spread: str, overlap: bool) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(pipelines(key, spread, messages=True))
    def check(drawn):
        f, b, kw = drawn
        by_arrays = recurrence(schedules.get(key).order, f, b, overlap_p2p=overlap, **kw)
        by_events = simulate(schedules.get(key).order, f, b, overlap_p2p=overlap, **kw)
        assert by_arrays.end_s == pytest.approx(by_events.end_s, rel=REL)
        assert by_arrays.stage_end_s == pytest.approx(by_events.stage_end_s, rel=REL)
        assert by_arrays.busy_s == pytest.approx(by_events.busy_s, rel=REL)
        assert by_arrays.busy_s == pytest.approx(kw["micro_batches"] * (f + b), rel=REL)

    check()


@pytest.mark.parametrize("key", schedules.names())
def test_equal_stages_closed_form_equals_simulation(key: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(pipelines(key, "equal"))
    def check(drawn):
        f, b, kw = drawn
        found = schedules.get(key).seconds(f, b, **kw)
        assert found.exact
        assert found.end_s == pytest.approx(simulate(schedules.get(key).order, f, b, **kw).end_s, rel=REL)

    check()


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("key", ["1f1b", "gpipe"])
def test_uneven_stages_with_messages_closed_form_is_exact(key: str, spread: str) -> None:
    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(pipelines(key, spread, messages=True, stages=12))
    def check(drawn):
        f, b, kw = drawn
        found = schedules.get(key).seconds(f, b, **kw)
        assert found.exact
        assert found.end_s == pytest.approx(recurrence(schedules.get(key).order, f, b, **kw).end_s, rel=REL)

    check()


def test_ties_and_stages_without_work() -> None:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        p, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 10))
        f, b = (np.array(data.draw(st.lists(st.integers(0, 3), min_size=p, max_size=p)), dtype=float) for _ in "fb")
        kw = {"micro_batches": m, "p2p_s": data.draw(st.sampled_from([0.0, 1.0]))}
        for key in ("1f1b", "gpipe"):
            exact = recurrence(schedules.get(key).order, f, b, **kw).end_s
            assert schedules.get(key).seconds(f, b, **kw).end_s == pytest.approx(exact, rel=REL)

    check()


@pytest.mark.parametrize("spread", ["near", "far"])
@pytest.mark.parametrize("key", ["interleaved", "zb"])
def test_uneven_stages_bound_from_below(key: str, spread: str) -> None:
    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(pipelines(key, spread))
    def check(drawn):
        f, b, kw = drawn
        closed = schedules.get(key).seconds(f, b, **kw).end_s
        exact = recurrence(schedules.get(key).order, f, b, **kw).end_s
        assert exact * (1 - SHORT[key][spread == "far"]) <= closed <= exact * (1 + REL)

    check()


@pytest.mark.parametrize("key", ["interleaved", "zb"])
def test_a_slow_last_stage_is_exact(key: str) -> None:
    """The usual pipeline: equal blocks, the head on the last stage; as many micro-batches as stages or more."""
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(pipelines(key, "equal"), st.floats(1.0, 1.5))
    def check(drawn, factor):
        f, b, kw = drawn
        slow = np.ones(len(f))
        slow[-1] = factor
        kw = {**kw, "weight_s": kw["weight_s"] * slow}
        if kw["micro_batches"] >= len(f):
            exact = recurrence(schedules.get(key).order, f * slow, b * slow, **kw).end_s
            assert schedules.get(key).seconds(f * slow, b * slow, **kw).end_s == pytest.approx(exact, rel=REL)

    check()


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlapping"])
@pytest.mark.parametrize("key", schedules.names())
def test_messages_of_equal_stages(key: str, overlap: bool) -> None:
    """c = 1 % of a stage's time: within 1 % of the recurrence, in either mode."""
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(pipelines(key, "equal"))
    def check(drawn):
        f, b, kw = drawn
        kw["p2p_s"] = 0.01 * float(f[0] + b[0])
        found = schedules.get(key).seconds(f, b, overlap_p2p=overlap, **kw)
        exact = recurrence(schedules.get(key).order, f, b, overlap_p2p=overlap, **kw).end_s
        assert found.end_s == pytest.approx(exact, rel=REL if found.exact else 0.01)

    check()


@pytest.mark.parametrize("key", schedules.names())
def test_in_flight_is_what_the_order_holds(key: str) -> None:
    """Counted over the order of issue: chunks whose forward pass is issued and whose last gradient is not."""
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(pipelines(key, "equal"))
    def check(drawn):
        f, b, kw = drawn
        m, v = kw["micro_batches"], kw["virtual"]
        found = schedules.get(key).seconds(f, b, **kw).in_flight
        for r in range(len(f)):
            kinds = [k for k, _, _ in schedules.get(key).order(r, stages=len(f), micro_batches=m, virtual=v)]
            last = "W" if "W" in kinds else "B"
            held = np.cumsum([(k == "F") - (k == last) for k in kinds]).max()
            assert found[r] == pytest.approx(held / v)

    check()


@pytest.mark.parametrize("key", schedules.names())
def test_spans_never_overlap_and_fill_the_busy_time(key: str) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(pipelines(key, "near", messages=True))
    def check(drawn):
        f, b, kw = drawn
        run = simulate(schedules.get(key).order, f, b, spans=True, **kw)
        for r in range(len(f)):
            mine = [s for s in run.spans if s.stream == f"stage {r}"]
            assert all(a.end_s <= z.start_s + 1e-12 for a, z in pairwise(mine))
            worked = sum(s.end_s - s.start_s for s in mine if s.kind != "comm")
            assert worked == pytest.approx(run.busy_s[r], rel=REL)
            assert mine[-1].end_s == pytest.approx(run.stage_end_s[r], rel=REL)

    check()
