"""Pipeline schedules: orders written out by hand, bubbles of the papers, pipelines drawn by hand."""

import doctest

import numpy as np
import pytest

from simkit import schedules
from simkit.des import pipeline
from simkit.errors import InputError
from simkit.schedules import gpipe, interleaved, one_f_one_b, zb


def text(order, stage, **kw):
    return " ".join(f"{k}{i}" if not c else f"{k}{i}'" for k, i, c in order(stage, **kw))


def test_names_of_the_vocabulary():
    assert schedules.names() == ("1f1b", "gpipe", "interleaved", "zb")
    assert schedules.get("1f1b") is one_f_one_b
    with pytest.raises(InputError, match="did you mean 'interleaved'"):
        schedules.get("interleave")


@pytest.mark.parametrize("module", [one_f_one_b, gpipe, interleaved, zb])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_order_of_1f1b():
    """Narayanan et al. (2104.04473), figure 4 upper half: p = 4, m = 8."""
    kw = {"stages": 4, "micro_batches": 8}
    assert text(one_f_one_b.order, 0, **kw) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert text(one_f_one_b.order, 3, **kw) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"
    assert text(one_f_one_b.order, 0, stages=4, micro_batches=2) == "F0 F1 B0 B1"


def test_order_of_interleaved():
    """Narayanan et al. (2104.04473), figure 4 lower half: p = 4, m = 8, v = 2; a dash marks the second chunk."""
    kw = {"stages": 4, "micro_batches": 8, "virtual": 2}
    assert text(interleaved.order, 0, **kw).startswith("F0 F1 F2 F3 F0' F1' F2' F3' F4 F5 F6 B0' F7 B1' F4' B2'")
    assert text(interleaved.order, 3, **kw).startswith("F0 F1 F2 F3 F0' B0' F1' B1' F2' B2' F3' B3' F4 B0 F5 B1")
    assert text(interleaved.order, 0, **kw).endswith("B4' B5' B6' B7' B4 B5 B6 B7")


def test_order_of_zb_h1():
    """Qi et al. (2401.10241), figure 3: every stage holds p = 4 micro-batches whose W is still to come."""
    kw = {"stages": 4, "micro_batches": 8}
    assert text(zb.order, 0, **kw).startswith("F0 F1 F2 F3 B0 W0 F4 B1 W1 F5")
    assert text(zb.order, 3, **kw).startswith("F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1")
    assert text(zb.order, 3, **kw).endswith("F7 B7 W4 W5 W6 W7")


def test_warm_up_and_bubble_of_interleaved():
    """Case BR-88: p 8, m 32, v 5: (p-r-1)·2 + (v-1)·p chunks, 4.4 % of the ideal time instead of 21.9 %."""
    for r in range(8):
        kinds = [k for k, _, _ in interleaved.order(r, stages=8, micro_batches=32, virtual=5)]
        # The forward pass before the first backward one belongs to the steady part.
        assert kinds.index("B") - 1 == (7 - r) * 2 + 4 * 8
    ones = np.ones(8)
    found = interleaved.seconds(ones, 2 * ones, micro_batches=32, virtual=5)
    assert found.bubble_s / found.steady_s == pytest.approx(7 / 160)
    assert round(100 * found.bubble_s / found.steady_s, 1) == 4.4
    found = one_f_one_b.seconds(ones, 2 * ones, micro_batches=32)
    assert round(100 * found.bubble_s / found.steady_s, 1) == 21.9


@pytest.mark.parametrize(
    ("m", "flexible", "fits"),
    [(10, False, False), (8, False, True), (10, True, True), (3, True, True), (3, False, False), (13, True, False)],
)
def test_micro_batches_that_interleave(m, flexible, fits):
    """Case BR-89, p = 4; 13 micro-batches are 3 rounds and do not divide."""
    assert interleaved.allowed(m, 4, flexible=flexible) == fits
    order = {"stages": 4, "micro_batches": m, "virtual": 2, "flexible": flexible}
    if fits:
        assert len(interleaved.order(0, **order)) == 4 * m
    else:
        with pytest.raises(InputError, match=rf"^grad_accum = {m} .*; use (\d+)") as error:
            interleaved.order(0, **order)
        assert "\n" not in str(error.value)


def test_1f1b_with_a_slow_stage_in_the_middle():
    """Drawn by hand, p = 3, m = 3, f = 1, 2, 1, b = 1, 3, 1.

    stage 0  F0 0-1, F1 1-2, F2 2-3 (p - r = 3 in flight); B0 7-8, B1 12-13, B2 15-16
    stage 1  F0 1-3, F1 3-5; B0 arrives at 5: 5-8, F2 8-10, B1 10-13, B2 13-16
    stage 2  F0 3-4, B0 4-5, F1 5-6, B1 6-7, F2 10-11, B2 11-12
    so B0, B1, B2 of stage 0 start at 8, 13, 16 and end at 9, 14, 17.
    """
    f, b = np.array([1.0, 2.0, 1.0]), np.array([1.0, 3.0, 1.0])
    found = one_f_one_b.seconds(f, b, micro_batches=3)
    assert found.end_s == pytest.approx(17.0)
    assert found.exact
    assert found.steady_s == pytest.approx(15.0)
    assert found.bubble_s == pytest.approx(2.0)
    assert found.fill_s == pytest.approx(3.0)
    assert found.per_stage_busy_s == pytest.approx([6.0, 15.0, 6.0])
    run = pipeline.simulate(one_f_one_b.order, f, b, micro_batches=3, spans=True)
    starts = {(s.stream, s.name): s.start_s for s in run.spans}
    assert starts["stage 1", "F2"] == pytest.approx(8.0)
    assert starts["stage 2", "F2"] == pytest.approx(10.0)
    assert run.stage_end_s == pytest.approx([17.0, 16.0, 12.0])
    # The familiar formula takes every stage once and the slowest m - 1 times: 9 + 2·5 = 19, two seconds too long.
    assert found.end_s < f.sum() + b.sum() + 2 * 5.0


def test_gpipe_by_hand():
    """p = 2, m = 2, f = 1, 3, b = 2, 1: F end at 1, 2 and 4, 7; B at 8, 9 and 10, 12."""
    found = gpipe.seconds([1.0, 3.0], [2.0, 1.0], micro_batches=2)
    assert found.end_s == pytest.approx(12.0)


def test_blocking_and_overlapping_messages_by_hand():
    """p = 2, m = 2, f = b = 1, c = 0.5; a receive blocks: stage 1 F0 1.5-2.5, B0 -3.5, receives -4 (F1 was ready),
    F1 -5, B1 -6; stage 0 receives B0 3.5-4, B0 -5, receives B1 6-6.5, B1 -7.5. Overlapped: stage 1 F1 3.5-4.5, B1 -5.5;
    stage 0 B0 4-5, B1 6-7."""
    kw = {"micro_batches": 2, "p2p_s": 0.5}
    assert one_f_one_b.seconds([1.0, 1.0], [1.0, 1.0], **kw).end_s == pytest.approx(7.5)
    assert one_f_one_b.seconds([1.0, 1.0], [1.0, 1.0], overlap_p2p=True, **kw).end_s == pytest.approx(7.0)


@pytest.mark.parametrize(("f", "b", "w"), [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (2.0, 1.5, 0.5), (1.0, 1.2, 1.1)])
def test_bubble_of_zb_h1(f, b, w):
    """Qi et al. (2401.10241), table 2: (p-1)(T_F + T_B - T_W), T_B without the weights' part, where W <= F, B."""
    p = 4
    # A longer W cannot fill what comes before the first B: (1, 1.2, 1.1) keeps (p-1) b.
    expected = (p - 1) * (f + (b + w) - 2 * w if w <= min(f, b) else b)
    found = zb.seconds(np.full(p, f), np.full(p, b + w), micro_batches=12, weight_s=np.full(p, w))
    assert found.bubble_s == pytest.approx(expected)


def test_activations_in_flight():
    """Narayanan et al. (2104.04473), section 2.2: at most p - r with 1F1B, all m with GPipe; interleaving holds
    1 + (p-1)/(p v) times as much on the first stage (Korthikanti et al., 2205.05198, section 4.2.3)."""
    ones = np.ones(4)
    assert one_f_one_b.seconds(ones, ones, micro_batches=8).in_flight.tolist() == [4, 3, 2, 1]
    assert one_f_one_b.seconds(ones, ones, micro_batches=2).in_flight.tolist() == [2, 2, 2, 1]
    assert gpipe.seconds(ones, ones, micro_batches=8).in_flight.tolist() == [8, 8, 8, 8]
    assert interleaved.seconds(ones, ones, micro_batches=8, virtual=2).in_flight[0] == pytest.approx(4 * (1 + 3 / 8))
    assert zb.seconds(ones, ones, micro_batches=8).in_flight.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize("key", ["micro_batches", "virtual"])
def test_degrees_below_one_are_refused(key):
    with pytest.raises(InputError, match=rf"{key} = 0\.0 must be at least 1"):
        interleaved.seconds([1.0], [1.0], **{"micro_batches": 4, "virtual": 1, key: 0})


def test_malformed_arrays_are_refused():
    with pytest.raises(InputError, match="same stages"):
        one_f_one_b.seconds([1.0, 2.0], [1.0], micro_batches=2)
    with pytest.raises(InputError, match="weight_s"):
        zb.seconds([1.0, 2.0], [1.0, 1.0], micro_batches=2, weight_s=[2.0, 2.0])
    with pytest.raises(InputError, match="array of points"):
        pipeline.simulate(gpipe.order, np.ones((2, 2)), np.ones((2, 2)), micro_batches=2)


@pytest.mark.parametrize("run", [pipeline.recurrence, pipeline.simulate])
def test_an_order_that_cannot_end_is_refused(run):
    def backward_first(stage, *, stages, micro_batches, virtual=1):
        return [("B", 0, 0), ("F", 0, 0)]

    with pytest.raises(InputError, match="for ever; stage 0"):
        run(backward_first, [1.0, 1.0], [1.0, 1.0], micro_batches=1)
