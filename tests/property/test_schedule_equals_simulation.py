"""The closed form and the simulation answer the same question; without jitter they must not differ."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.des.iteration import simulate
from simkit.plugins import get, names
from simkit.timeline import Step, schedule

MODES = [("none", "inline"), ("wfbp", "inline"), ("wfbp", "hook")]
TICK_S = 2.0**-10


@st.composite
def steps(draw: st.DrawFn, *, exact: bool = False) -> Step:
    """A random step whose buckets come from a random fusion rule. exact: durations on a binary grid, zeros included,
    so that sums are exact and simultaneous events are frequent."""
    tensors = draw(st.integers(0, 12))
    segments = draw(st.integers(0, 12))
    phases = draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def seconds(*shape: int) -> np.ndarray:
        if exact:
            return random.integers(0, 4, shape) * TICK_S
        return random.lognormal(-7.0, 1.5, shape)

    backward_s = seconds(segments)
    after = np.sort(random.integers(-1, segments, tensors)) if segments else np.full(tensors, -1)
    ready_s = np.concatenate([[0.0], np.cumsum(backward_s)])[after + 1]
    rule = get("simkit.fusion", draw(st.sampled_from(names("simkit.fusion"))))
    sizes = random.integers(1, 1000, tensors).astype(float)
    group = rule.groups(sizes, threshold_bytes=1500.0, ready_s=ready_s, seconds=lambda b: 1e-4 + 1e-6 * b)
    buckets = int(group[-1]) + 1 if tensors else 0
    ready = np.array([after[group == b].max() for b in range(buckets)], dtype=np.int64)
    overlap, placement = draw(st.sampled_from(MODES))
    return Step(
        forward_s=float(seconds(1)[0]),
        accumulation_s=float(seconds(1)[0]) * draw(st.integers(0, 1)),
        backward_s=backward_s,
        ready=ready,
        encode_s=seconds(buckets) * draw(st.integers(0, 1)),
        comm_s=seconds(phases, buckets) * draw(st.sampled_from([0.125, 1.0, 8.0])),
        between_s=seconds(phases - 1, buckets),
        decode_s=seconds(buckets) * draw(st.integers(0, 1)),
        optimizer_s=float(seconds(1)[0]),
        host_s=float(seconds(1)[0]),
        overlap=overlap,
        placement=placement,
        blocking=draw(st.booleans()),
    )


def check_equal(step: Step) -> None:
    closed, simulated = schedule(step, spans=True), simulate(step, spans=True)
    assert closed.end_s == pytest.approx(simulated.end_s, rel=1e-9, abs=1e-15)
    scale = max(closed.end_s, 1e-15)
    for term, value in simulated.breakdown.items():
        assert closed.breakdown[term] == pytest.approx(value, rel=1e-9, abs=1e-9 * scale), term
    assert closed.busy_s == pytest.approx(simulated.busy_s, rel=1e-9)
    np.testing.assert_allclose(closed.comm_end_s, simulated.comm_end_s, rtol=1e-9, atol=1e-15)
    by_name = {(s.name, s.kind): s for s in simulated.spans}
    assert len(closed.spans) == len(simulated.spans) == len(by_name)
    for span in closed.spans:
        other = by_name[span.name, span.kind]
        assert span.start_s == pytest.approx(other.start_s, rel=1e-9, abs=1e-9 * scale), span.name
        assert span.end_s == pytest.approx(other.end_s, rel=1e-9, abs=1e-9 * scale), span.name


@settings(max_examples=150, deadline=None)
@given(steps())
def test_schedule_equals_simulation(step: Step) -> None:
    check_equal(step)


@settings(max_examples=250, deadline=None)
@given(steps(exact=True))
def test_schedule_equals_simulation_where_events_coincide(step: Step) -> None:
    check_equal(step)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_terms_are_disjoint_and_sum_to_the_step(step: Step) -> None:
    timeline = schedule(step)
    assert math.fsum(timeline.breakdown.values()) == pytest.approx(timeline.end_s, rel=1e-12)
    assert all(value >= 0.0 for value in timeline.breakdown.values())
    assert timeline.breakdown["exposed_comm_s"] <= float(step.comm_s.sum()) * (1 + 1e-9) + 1e-12
    comm_end_s = timeline.comm_end_s.max(initial=0.0)
    assert comm_end_s <= timeline.end_s * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_overlap_never_loses_for_one_collective_per_bucket(step: Step) -> None:
    step = replace(step, comm_s=step.comm_s[:1], between_s=step.between_s[:0], placement="inline", overlap="wfbp")
    serial = schedule(replace(step, overlap="none"))
    assert schedule(step).end_s <= serial.end_s * (1 + 1e-12)
    floor = step.forward_s + float(step.comm_s.sum())
    assert schedule(step).end_s >= floor * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(1, 4))
def test_equal_ranks_change_nothing(step: Step, ranks: int) -> None:
    one, many = simulate(step), simulate(step, ranks=ranks)
    assert many.end_s == one.end_s
    assert many.breakdown == one.breakdown


def ddp_step() -> Step:
    buckets, segments = 8, 24
    return Step(
        forward_s=0.05,
        backward_s=np.full(segments, 0.1 / segments),
        ready=np.arange(2, segments, 3),
        encode_s=np.full(buckets, 2e-4),
        comm_s=np.full((1, buckets), 0.01),
        between_s=np.zeros((0, buckets)),
        decode_s=np.full(buckets, 2e-4),
        optimizer_s=0.005,
    )


@pytest.mark.parametrize("placement", ["inline", "hook"])
def test_jitter_slows_the_mean_and_more_ranks_slow_it_more(placement: str) -> None:
    step = replace(ddp_step(), placement=placement)
    still = schedule(step).end_s
    mean = {}
    for ranks in (1, 2, 8):
        mean[ranks] = np.mean([simulate(step, jitter=0.2, seed=s, ranks=ranks).end_s for s in range(60)])
    assert mean[8] > mean[2] > mean[1]
    assert mean[8] > still
    # One rank: the time is convex in the durations, whose means are kept (Jensen); 3 sigma of the mean of 60 runs.
    spread = np.std([simulate(step, jitter=0.2, seed=s).end_s for s in range(60)]) / math.sqrt(60)
    assert mean[1] >= still - 3 * spread


def test_jitter_is_seeded_and_independent_of_the_other_ranks() -> None:
    step = ddp_step()
    first, again = simulate(step, jitter=0.1, seed=7, ranks=3), simulate(step, jitter=0.1, seed=7, ranks=3)
    assert first.end_s == again.end_s
    assert first.end_s != simulate(step, jitter=0.1, seed=8, ranks=3).end_s
    # A rank keeps its draws when ranks are added: the slowest of more ranks is never faster.
    assert simulate(step, jitter=0.1, seed=7, ranks=4).end_s >= first.end_s * (1 - 1e-12)
    assert simulate(step, jitter=0.0, ranks=2).end_s == simulate(step).end_s


def test_jitter_keeps_the_mean_of_a_duration() -> None:
    """exp(sigma z - sigma²/2) has mean 1 and variance exp(sigma²) - 1."""
    sigma, runs = 0.5, 400
    alone = Step(
        forward_s=1.0,
        backward_s=np.zeros(0),
        ready=np.zeros(0, dtype=np.int64),
        encode_s=np.zeros(0),
        comm_s=np.zeros((1, 0)),
        between_s=np.zeros((0, 0)),
        decode_s=np.zeros(0),
    )
    drawn = np.array([simulate(alone, jitter=sigma, seed=s).end_s for s in range(runs)])
    deviation = math.sqrt(math.exp(sigma**2) - 1)
    assert drawn.mean() == pytest.approx(1.0, abs=3.5 * deviation / math.sqrt(runs))
    assert drawn.std() == pytest.approx(deviation, rel=0.25)
