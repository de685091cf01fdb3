"""Do closed form, recurrence and event simulation of a pipeline over unequal peers give the same times?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit import schedules
from simkit.chain import Chain, bottleneck_s, fill_s, gpipe_s, interval_s, one_f_one_b_s, through_s
from simkit.des.chain import recurrence, simulate, step, streaming

TOLERANCE = 1e-9
seconds = st.floats(0.0, 10.0, allow_subnormal=False)


@st.composite
def chains(draw: st.DrawFn, most: int = 7) -> Chain:
    p = draw(st.integers(1, most))

    def column() -> np.ndarray:
        return np.array(draw(st.lists(seconds, min_size=p, max_size=p)))

    send, back, delay, back_delay = (column() for _ in range(4))
    send[-1] = delay[-1] = back[0] = back_delay[0] = 0.0
    return Chain(forward_s=column(), backward_s=column(), send_s=send, back_s=back, delay_s=delay,
                 back_delay_s=back_delay)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0)


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(1, 12))
def test_one_direction_is_fill_plus_bottleneck(chain: Chain, n: int) -> None:
    expected = fill_s(chain) + (n - 1) * bottleneck_s(chain)
    assert close(simulate(chain, streaming, n).end_s, expected)
    assert close(float(recurrence(chain, streaming, n).end_s), expected)


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(1, 12))
def test_gpipe_is_twice_fill_plus_bottleneck(chain: Chain, n: int) -> None:
    order = schedules.get("gpipe").order
    expected = through_s(chain, n) + through_s(chain, n, backward=True)
    assert close(gpipe_s(chain, n), expected)
    assert close(simulate(chain, order, n).end_s, expected)
    assert close(float(recurrence(chain, order, n).end_s), expected)


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(1, 14))
def test_one_f_one_b_simulation_is_the_recurrence(chain: Chain, n: int) -> None:
    order = schedules.get("1f1b").order
    walked, played = recurrence(chain, order, n), simulate(chain, order, n)
    assert close(float(walked.end_s), played.end_s)
    np.testing.assert_allclose(walked.stage_end_s, played.stage_end_s, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(walked.done_s, played.done_s, rtol=TOLERANCE, atol=TOLERANCE)


@settings(max_examples=100, deadline=None)
@given(chains(), st.integers(1, 14))
def test_the_schedule_only_costs_time(chain: Chain, n: int) -> None:
    """No schedule beats the work of its slowest stage or line, nor a single micro-batch's way there and back."""
    way = fill_s(chain) + fill_s(chain, backward=True)
    for name in ("gpipe", "1f1b"):
        end = float(recurrence(chain, schedules.get(name).order, n).end_s)
        assert end >= (n * chain.busy_s.max() - TOLERANCE)
        assert end >= way - TOLERANCE


@settings(max_examples=60, deadline=None)
@given(chains(most=5))
def test_the_interval_of_1f1b_is_the_slope_of_the_recurrence(chain: Chain) -> None:
    """The cycle ratio bounds the growth per micro-batch from below."""
    order = schedules.get("1f1b").order
    n = 12 * chain.stages
    slope = float(recurrence(chain, order, 2 * n).end_s - recurrence(chain, order, n).end_s) / n
    assert slope >= float(interval_s(chain)) - 1e-6 * max(slope, 1.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_points_are_walked_together(name: str) -> None:
    rng = np.random.default_rng(3)
    f, b = rng.uniform(0.5, 2.0, (2, 4)), rng.uniform(0.5, 2.0, (2, 4))
    send = np.broadcast_to(np.array([0.3, 0.2, 0.1, 0.0]), (2, 4))
    back = np.broadcast_to(np.array([0.0, 0.2, 0.1, 0.4]), (2, 4))
    order = schedules.get(name).order

    def at(i: int) -> Chain:
        return Chain(forward_s=f[i], backward_s=b[i], send_s=send[i], back_s=back[i], delay_s=send[i] / 2,
                     back_delay_s=back[i] / 2)

    both = recurrence(Chain(forward_s=f, backward_s=b, send_s=send, back_s=back, delay_s=send / 2,
                            back_delay_s=back / 2), order, 9)  # fmt: skip
    for i in range(2):
        assert both.end_s[i] == pytest.approx(float(recurrence(at(i), order, 9).end_s), rel=1e-12)


def test_without_messages_equal_stages_give_the_textbook() -> None:
    """(m + p - 1)(f + b): Narayanan et al. 2021, section 2.2."""
    one = np.ones(5)
    none = np.zeros(5)
    chain = Chain(forward_s=one, backward_s=2 * one, send_s=none, back_s=none, delay_s=none, back_delay_s=none)
    assert float(recurrence(chain, schedules.get("1f1b").order, 7).end_s) == pytest.approx((7 + 4) * 3.0)
    assert one_f_one_b_s(chain, 7) == pytest.approx((7 + 4) * 3.0)


def test_a_long_step_is_prolonged_by_its_slope(monkeypatch: pytest.MonkeyPatch) -> None:
    one = np.ones(3)
    none = np.zeros(3)
    chain = Chain(forward_s=one, backward_s=2 * one, send_s=none, back_s=none, delay_s=none, back_delay_s=none)
    monkeypatch.setattr("simkit.des.chain.MAX_EVENTS", 120)
    run, exact = step(chain, schedules.get("1f1b").order, 50)
    assert not exact
    assert float(run.end_s) == pytest.approx((50 + 2) * 3.0)
    assert run.done_s.shape == (50,)
