"""Every exported trace must survive a nesting check, whatever the schedule."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from simkit.errors import InputError
from simkit.spans import Span
from simkit.timeline import Step, Timeline, schedule
from simkit.trace import chrome_trace, write_trace

THIRD_S = 1e-3 / 3


def step(overlap: str = "wfbp", placement: str = "inline", phases: int = 2) -> Step:
    return Step(
        accumulation_s=0.001,
        forward_s=0.01 / 3,
        backward_s=np.full(9, THIRD_S),
        ready=np.array([2, 2, 5, 8]),
        encode_s=np.full(4, THIRD_S / 7),
        comm_s=np.full((phases, 4), THIRD_S * 1.1),
        between_s=np.full((phases - 1, 4), THIRD_S / 11),
        decode_s=np.array([THIRD_S, 0.0, THIRD_S, THIRD_S / 13]),
        optimizer_s=0.001 / 7,
        host_s=0.0001,
        overlap=overlap,
        placement=placement,
        bucket_bytes=np.array([1e6, 2e6, 3e6, 4e6]),
        wire_bytes=np.arange(4.0 * phases).reshape(phases, 4),
        segment_names=tuple(f"layer.{i}" for i in reversed(range(9))),
        segment_bounds=("memory",) + 8 * ("compute",),
    )


ALL = [(o, p, n) for o, p in [("none", "inline"), ("wfbp", "inline"), ("wfbp", "hook")] for n in (1, 2, 3)]


def check_nesting(events: list[dict[str, object]]) -> int:
    """Walk each thread as a viewer does: an event either lies inside the open one or starts after it has ended."""
    threads: dict[tuple[object, object], list[tuple[int, int]]] = {}
    for e in events:
        if e["ph"] == "X":
            start = round(float(e["ts"]) * 1000)  # type: ignore[arg-type]
            span = (start, start + round(float(e["dur"]) * 1000))  # type: ignore[arg-type]
            threads.setdefault((e["pid"], e["tid"]), []).append(span)
    for spans in threads.values():
        open_spans: list[tuple[int, int]] = []
        last_start = 0
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            assert end > start >= last_start
            while open_spans and open_spans[-1][1] <= start:
                open_spans.pop()
            if open_spans:
                assert open_spans[-1][0] <= start
                assert end <= open_spans[-1][1]
            open_spans.append((start, end))
            last_start = start
    return sum(map(len, threads.values()))


@pytest.mark.parametrize(("overlap", "placement", "phases"), ALL)
def test_every_event_nests(overlap: str, placement: str, phases: int) -> None:
    timeline = schedule(step(overlap, placement, phases), spans=True)
    trace = chrome_trace(timeline, device_names=["a", "b"], label="bert")
    # per device: iteration + backward + accumulation, forward, 9 segments, 4 encodes, 3 decodes of more than no time,
    # 4 betweens and 4 collectives a phase, optimizer, host
    expected = 2 + 2 + 9 + 4 + 3 + 4 * (phases - 1) + 4 * phases + 2
    assert check_nesting(trace["traceEvents"]) == 2 * expected


def test_the_check_finds_overlapping_siblings() -> None:
    good = {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2.0}
    with pytest.raises(AssertionError):
        check_nesting([good, {**good, "ts": 1.0}])


def test_backward_contains_its_segments_and_the_iteration_everything() -> None:
    events = chrome_trace(schedule(step(), spans=True))["traceEvents"]
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    for i in range(9):
        assert spans["backward"][0] <= spans[f"layer.{i}"][0]
        assert spans[f"layer.{i}"][1] <= spans["backward"][1] + 1e-9
    assert spans["iteration"][0] == 0.0
    assert spans["iteration"][1] == pytest.approx(schedule(step()).end_s * 1e6, abs=1e-3)
    assert all(end <= spans["iteration"][1] + 1e-9 for _, end in spans.values())
    # Microseconds: the forward pass takes 10/3 ms.
    assert spans["forward"][1] - spans["forward"][0] == pytest.approx(10_000 / 3, abs=1e-3)


def test_processes_count_from_one_and_everything_is_named() -> None:
    events = chrome_trace(schedule(step(), spans=True), device_names=["gpu 0", "gpu 1"])["traceEvents"]
    assert {e["pid"] for e in events} == {1, 2}
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert named == {(1, "gpu 0"), (2, "gpu 1")}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= set(threads)
    assert {threads[e["pid"], e["tid"]] for e in events if e.get("cat") == "comm"} == {"comm"}


def test_events_carry_bytes_and_bound() -> None:
    events = chrome_trace(schedule(step(phases=1), spans=True))["traceEvents"]
    sizes = {e["args"]["bucket"]: e["args"]["bucket_bytes"] for e in events if e.get("cat") == "comm"}
    assert sizes == {0: 1e6, 1: 2e6, 2: 3e6, 3: 4e6}
    assert [e["args"]["bytes"] for e in events if e.get("cat") == "comm"] == [0.0, 1.0, 2.0, 3.0]
    bounds = {e["name"]: e["args"].get("bound") for e in events if e["ph"] == "X"}
    assert bounds["layer.8"] == "memory"
    assert bounds["layer.0"] == "compute"


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "trace.json"
    timeline = schedule(step(), spans=True)
    write_trace(target, timeline, label="run")
    assert json.loads(target.read_text()) == chrome_trace(timeline, label="run")
    before = target.read_bytes()

    def fail(source, target) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(InputError, match="no space left"):
        write_trace(target, timeline, label="other")
    assert target.read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.json"]


def test_bad_input_is_one_line(tmp_path) -> None:
    with pytest.raises(InputError, match="spans=True"):
        chrome_trace(schedule(step()))
    with pytest.raises(InputError, match="at least one device"):
        chrome_trace(schedule(step(), spans=True), device_names=[])
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(tmp_path / "absent" / "t.json", schedule(step(), spans=True))


def test_rounding_never_makes_neighbours_overlap() -> None:
    """Two sums of the same durations can differ by more than the grid of the trace on a long step."""
    late = 1e-3 + 2e-9
    spans = tuple(
        Span(name=name, stream="compute", start_s=start, end_s=end, kind="forward")
        for name, start, end in [("a", 0.0, late), ("b", 1e-3, 2e-3 + 2e-9), ("c", 2e-3, 3e-3 + 2e-9)]
    )
    timeline = Timeline(end_s=3e-3, breakdown={}, busy_s={}, comm_end_s=np.zeros(0), spans=spans)
    assert check_nesting(chrome_trace(timeline)["traceEvents"]) == 4


def test_a_step_without_exchange_still_nests() -> None:
    alone = replace(
        step(phases=1),
        ready=np.zeros(0, dtype=np.int64),
        encode_s=np.zeros(0),
        comm_s=np.zeros((1, 0)),
        between_s=np.zeros((0, 0)),
        decode_s=np.zeros(0),
    )
    timeline: Timeline = schedule(alone, spans=True)
    assert check_nesting(chrome_trace(timeline)["traceEvents"]) == 2 + 2 + 9 + 2
