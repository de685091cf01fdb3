"""Schedules worked out by hand, and six measured ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simkit.des.iteration import simulate
from simkit.errors import InputError
from simkit.timeline import Step, Timeline, fifo, schedule

NO_BUCKETS = {
    "ready": np.zeros(0, dtype=np.int64),
    "encode_s": np.zeros(0),
    "decode_s": np.zeros(0),
}


def three_buckets(**changes: object) -> Step:
    """Forward 1, three segments of 1, a bucket after each; encode 0.5, collectives 2, 1, 1; decode 0.25."""
    step = Step(
        forward_s=1.0,
        backward_s=np.ones(3),
        ready=np.array([0, 1, 2]),
        encode_s=np.full(3, 0.5),
        comm_s=np.array([[2.0, 1.0, 1.0]]),
        between_s=np.zeros((0, 3)),
        decode_s=np.full(3, 0.25),
        optimizer_s=0.125,
    )
    return replace(step, **changes)  # type: ignore[arg-type]


def two_phases(**changes: object) -> Step:
    """Two segments of 1, a bucket after each; encode 0.5, two collectives of 1, 0.25 between them, decode 0.25."""
    step = Step(
        forward_s=0.0,
        backward_s=np.ones(2),
        ready=np.array([0, 1]),
        encode_s=np.full(2, 0.5),
        comm_s=np.ones((2, 2)),
        between_s=np.full((1, 2), 0.25),
        decode_s=np.full(2, 0.25),
        placement="hook",
    )
    return replace(step, **changes)  # type: ignore[arg-type]


def times(timeline: Timeline, kind: str) -> list[tuple[float, float]]:
    return [(s.start_s, s.end_s) for s in timeline.spans if s.kind == kind]


def test_without_overlap_everything_adds_up() -> None:
    timeline = schedule(three_buckets(overlap="none"))
    assert timeline.end_s == 1 + 3 + 3 * 0.5 + 4 + 3 * 0.25 + 0.125
    # A chain is encode, collective, decode: 4 + 0.5 + 2 | + 0.25 + 0.5 + 1 | + 0.25 + 0.5 + 1
    assert timeline.comm_end_s.tolist() == [6.5, 8.25, 10.0]
    assert timeline.breakdown == {
        "forward_s": 1.0,
        "backward_s": 3.0,
        "compression_s": 2.25,
        "exposed_comm_s": 4.0,
        "optimizer_s": 0.125,
        "host_s": 0.0,
    }


def test_inline_encodes_on_the_compute_stream_and_decodes_after_the_barrier() -> None:
    # seg 1-2, enc 2-2.5, seg 2.5-3.5, enc 3.5-4, seg 4-5, enc 5-5.5; network 2.5-4.5, 4.5-5.5, 5.5-6.5; decode to 7.25
    timeline = schedule(three_buckets(), spans=True)
    assert times(timeline, "backward") == [(1.0, 2.0), (2.5, 3.5), (4.0, 5.0)]
    assert times(timeline, "encode") == [(2.0, 2.5), (3.5, 4.0), (5.0, 5.5)]
    assert times(timeline, "comm") == [(2.5, 4.5), (4.5, 5.5), (5.5, 6.5)]
    assert times(timeline, "decode") == [(6.5, 6.75), (6.75, 7.0), (7.0, 7.25)]
    assert timeline.end_s == 7.375
    assert timeline.breakdown["exposed_comm_s"] == 1.0
    assert timeline.busy_s == {"compute": 6.375, "comm": 4.0, "host": 0.0}


def test_hook_kernels_run_at_segment_boundaries_first_come_first_served() -> None:
    # As above to 5; there decode 0 (since 4.5) goes before encode 2 (since 5): 5-5.25, 5.25-5.75; decode 1 5.75-6;
    # collective 2 runs 5.75-6.75, then decode 2.
    timeline = schedule(three_buckets(placement="hook"), spans=True)
    assert times(timeline, "backward") == [(1.0, 2.0), (2.5, 3.5), (4.0, 5.0)]
    assert times(timeline, "encode") == [(2.0, 2.5), (3.5, 4.0), (5.25, 5.75)]
    assert times(timeline, "comm") == [(2.5, 4.5), (4.5, 5.5), (5.75, 6.75)]
    assert times(timeline, "decode") == [(5.0, 5.25), (5.75, 6.0), (6.75, 7.0)]
    assert timeline.end_s == 7.125
    assert timeline.breakdown["exposed_comm_s"] == 0.75


def test_two_dependent_collectives_hide_behind_each_other_where_nothing_blocks() -> None:
    # seg 0-1, enc 1-1.5, seg 1.5-2.5, between 2.5-2.75, enc 2.75-3.25; network 1.5-2.5 (P0), 2.75-3.75 (Q0),
    # 3.75-4.75 (P1), 5-6 (Q1); decode 3.75-4 and 6-6.25
    timeline = schedule(two_phases(), spans=True)
    assert times(timeline, "comm") == [(1.5, 2.5), (2.75, 3.75), (3.75, 4.75), (5.0, 6.0)]
    assert timeline.end_s == 6.25
    assert timeline.comm_end_s.tolist() == [3.75, 6.0]
    # Idle 3.25-3.75, 4-4.75, 5-6
    assert timeline.breakdown["exposed_comm_s"] == 2.25


def test_a_blocking_hook_gains_nothing_over_no_overlap() -> None:
    # The host waits in the chain, so the second segment starts at 4, when the first bucket is decoded.
    blocked = schedule(two_phases(blocking=True), spans=True)
    assert times(blocked, "backward") == [(0.0, 1.0), (4.0, 5.0)]
    assert blocked.end_s == schedule(two_phases(overlap="none")).end_s == 8.0
    assert blocked.breakdown["exposed_comm_s"] == 4.0


def test_inline_in_two_phases_walks_the_buckets_phase_by_phase() -> None:
    # enc 1-1.5 and 2.5-3; P 1.5-2.5 and 3-4; between 3-3.25 and 4-4.25; Q 4-5 (after P1) and 5-6; decode to 6.5
    timeline = schedule(two_phases(placement="inline"), spans=True)
    assert times(timeline, "between") == [(3.0, 3.25), (4.0, 4.25)]
    assert times(timeline, "comm") == [(1.5, 2.5), (3.0, 4.0), (4.0, 5.0), (5.0, 6.0)]
    assert timeline.end_s == 6.5
    # Idle 3.25-4 and 4.25-6
    assert timeline.breakdown["exposed_comm_s"] == 2.5


def test_power_sgd_pays_two_latencies_where_acp_pays_one() -> None:
    alpha_s, beta = 2 * 31 * 13e-6, 1e-9  # a ring of 32 ranks at 13 us a hop
    p, q = 4e6, 3e6
    power = two_phases(
        backward_s=np.ones(1),
        ready=np.array([0]),
        encode_s=np.zeros(1),
        decode_s=np.zeros(1),
        between_s=np.zeros((1, 1)),
        comm_s=np.array([[alpha_s + p * beta], [alpha_s + q * beta]]),
    )
    acp = replace(power, comm_s=power.comm_s[:1], between_s=np.zeros((0, 1)), placement="inline")
    difference = schedule(power).end_s - schedule(acp).end_s
    assert difference == pytest.approx(alpha_s + q * beta, rel=1e-9)


MEASURED = [
    # buckets, MB, Mbit/s, measured ms: four processes, gloo on a shaped link, 100 ms forward, 20 ms a segment
    (10, 1.375, 1000, 322.8),
    (10, 0.25, 1000, 312.1),
    (10, 1.375, 100, 1841.0),
    (10, 0.25, 100, 427.6),
]


@pytest.mark.parametrize(("buckets", "megabytes", "rate", "measured_ms"), MEASURED)
def test_measured_overlap_of_real_collectives(buckets: int, megabytes: float, rate: float, measured_ms: float) -> None:
    """Ring over 4 ranks: 6 steps of 0.1 ms and 1.5 x the bytes at 95.6 % of the line rate (Ethernet framing)."""
    comm_s = 6 * 1e-4 + 1.5 * megabytes * 8 / (0.956 * rate)
    timeline = schedule(
        Step(
            forward_s=0.1,
            backward_s=np.full(buckets, 0.02),
            ready=np.arange(buckets),
            encode_s=np.zeros(buckets),
            comm_s=np.full((1, buckets), comm_s),
            between_s=np.zeros((0, buckets)),
            decode_s=np.zeros(buckets),
        )
    )
    assert timeline.end_s * 1e3 == pytest.approx(measured_ms, rel=0.05)


@pytest.mark.parametrize(("overlap", "placement"), [("none", "inline"), ("wfbp", "inline"), ("wfbp", "hook")])
@pytest.mark.parametrize("phases", [1, 3])
@pytest.mark.parametrize("segments", [0, 2])
def test_one_device_exchanges_nothing(overlap: str, placement: str, phases: int, segments: int) -> None:
    step = Step(
        forward_s=1.0,
        accumulation_s=6.0,
        backward_s=np.ones(segments),
        comm_s=np.zeros((phases, 0)),
        between_s=np.zeros((phases - 1, 0)),
        optimizer_s=0.5,
        host_s=0.25,
        overlap=overlap,
        placement=placement,
        **NO_BUCKETS,  # type: ignore[arg-type]
    )
    for timeline in (schedule(step, spans=True), simulate(step, spans=True)):
        assert timeline.end_s == 7.0 + segments + 0.75
        assert timeline.breakdown["exposed_comm_s"] == 0.0
        assert timeline.comm_end_s.shape == (0,)
        assert max(s.end_s for s in timeline.spans) == timeline.end_s
        # Six seconds of earlier micro-batches: of the same making as the last one.
        forward = 1.0 + 6.0 / (1 + segments)
        assert timeline.breakdown["forward_s"] == pytest.approx(forward)


def test_communication_is_hidden_completely_or_starts_at_once() -> None:
    hidden = schedule(three_buckets(comm_s=np.array([[0.5, 0.5, 0.0]])))
    assert hidden.breakdown["exposed_comm_s"] == 0.0
    early = schedule(three_buckets(ready=np.array([-1, -1, -1]), comm_s=np.full((1, 3), 0.25)), spans=True)
    assert times(early, "encode") == [(1.0, 1.5), (1.5, 2.0), (2.0, 2.5)]
    assert times(early, "backward")[0] == (2.5, 3.5)


def test_fifo_serves_in_order() -> None:
    assert fifo(np.array([0.0, 1.0, 10.0]), np.array([3.0, 1.0, 1.0])).tolist() == [3.0, 4.0, 11.0]
    assert fifo(np.array([0.0, 1.0]), np.array([1.0, 1.0]), 5.0).tolist() == [6.0, 7.0]
    assert fifo(np.zeros(0), np.zeros(0)).shape == (0,)


def test_ties_are_resolved_the_same_way_every_time() -> None:
    step = three_buckets(placement="hook", ready=np.array([2, 2, 2]), encode_s=np.zeros(3), comm_s=np.zeros((1, 3)))
    first, again = simulate(step, spans=True), simulate(step, spans=True)
    assert [s.name for s in first.spans] == [s.name for s in again.spans]
    assert [s.name for s in schedule(step, spans=True).spans if s.kind == "decode"] == [
        "decode 0",
        "decode 1",
        "decode 2",
    ]


@pytest.mark.parametrize("run", [schedule, simulate])
def test_unknown_names_are_refused_in_one_line(run) -> None:
    with pytest.raises(InputError, match=r"wfbp"):
        run(three_buckets(overlap="wfpb"))
    with pytest.raises(InputError, match=r"hook"):
        run(three_buckets(placement="hooks"))


def test_simulation_refuses_bad_arguments() -> None:
    with pytest.raises(InputError, match="ranks"):
        simulate(three_buckets(), ranks=0)
    with pytest.raises(InputError, match="jitter"):
        simulate(three_buckets(), jitter=-0.1)
    with pytest.raises(InputError, match="jitter"):
        simulate(three_buckets(), jitter=float("nan"))
