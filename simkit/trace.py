"""A timeline as a Chrome trace (chrome://tracing, ui.perfetto.dev).

One process per device, its pid counted from 1 because 0 is special to the viewers; one thread per stream: host,
compute, comm. Complete events (``ph: X``), ts and dur in microseconds. On a thread events nest: iteration > forward and
backward > segments and the kernels that ran between them; siblings never overlap, since viewers drop or swap those.
Source: "Trace Event Format", Google, sections Complete Events and Metadata Events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simkit.errors import InputError
from simkit.spans import Span
from simkit.spec.files import write_text
from simkit.timeline import Timeline

STREAMS = ("host", "compute", "comm")
US_PER_S = 1e6

Event = dict[str, Any]


def chrome_trace(
    timeline: Timeline, *, device_names: Sequence[str] = ("device 0",), label: str = "iteration"
) -> dict[str, Any]:
    """The trace as a JSON-ready object. Data-parallel devices do the same, so each name gets the whole timeline.

    The timeline must have been made with ``spans=True``. Times are cut on a grid of 1 ns, so that the start of a span
    and the end of the one before it stay one number. Raises InputError for a timeline without spans or no device.
    """
    if not timeline.spans:
        raise InputError("has no spans", key="timeline", hint="ask schedule or simulate for spans=True")
    if not device_names:
        raise InputError("is empty", key="device_names", hint="name at least one device")
    if any(span.stream not in STREAMS for span in timeline.spans):
        events = _by_peer(timeline)
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"label": label, "generator": "simkit"}}
    events = []
    for pid, name in enumerate(device_names, 1):
        events += _names(pid, name)
        events += _events(timeline, pid, label)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"label": label, "generator": "simkit"}}


LINE = " line"
"""The ending of a stream that is a peer's line out, beside the stream of its compute."""


def _by_peer(timeline: Timeline) -> list[Event]:
    """A process per peer, in the order of their first span: its compute, and its line out."""
    pids: dict[str, int] = {}
    events: list[Event] = []
    for span in timeline.spans:
        peer = span.stream.removesuffix(LINE)
        if peer not in pids:
            pids[peer] = len(pids) + 1
            events += [_meta(pids[peer], 0, "process_name", name=peer),
                       _meta(pids[peer], 0, "process_sort_index", sort_index=pids[peer])]  # fmt: skip
            events += [_meta(pids[peer], 1, "thread_name", name="compute"),
                       _meta(pids[peer], 2, "thread_name", name="line")]  # fmt: skip
        start, stop = _ticks(span.start_s), _ticks(span.end_s)
        events.append(_event(pids[peer], "compute", span.name, span.kind, start, stop, _args(span))
                      | {"tid": 2 if span.stream.endswith(LINE) else 1})  # fmt: skip
    return events


def write_trace(
    path: str | os.PathLike[str],
    timeline: Timeline,
    *,
    device_names: Sequence[str] = ("device 0",),
    label: str = "iteration",
) -> None:
    """Write the trace to `path`; the file appears whole or not at all. Raises InputError where it cannot be written."""
    events = chrome_trace(timeline, device_names=device_names, label=label)
    write_text(Path(path), json.dumps(events, allow_nan=False) + "\n")


def _names(pid: int, name: str) -> list[Event]:
    events = [_meta(pid, 0, "process_name", name=name), _meta(pid, 0, "process_sort_index", sort_index=pid)]
    for tid, stream in enumerate(STREAMS, 1):
        events.append(_meta(pid, tid, "thread_name", name=stream))
        events.append(_meta(pid, tid, "thread_sort_index", sort_index=tid))
    return events


def _meta(pid: int, tid: int, what: str, **args: object) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _ticks(seconds: float) -> int:
    return round(seconds * 1e9)


def _event(pid: int, stream: str, name: str, kind: str, start: int, end: int, args: dict[str, object]) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": STREAMS.index(stream) + 1,
        "name": name,
        "cat": kind,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": args,
    }


def _events(timeline: Timeline, pid: int, label: str) -> list[Event]:
    """Parents before their children: viewers nest events of equal start in the order of the file."""
    breakdown_us: dict[str, object] = {
        f"{k.removesuffix('_s')}_us": v * US_PER_S for k, v in timeline.breakdown.items()
    }
    end = _ticks(timeline.end_s)
    events = [_event(pid, "compute", label, "iteration", 0, end, breakdown_us)]
    backward = [s for s in timeline.spans if s.kind == "backward"]
    if backward:
        first, last = _ticks(backward[0].start_s), _ticks(max(s.end_s for s in backward))
        events.append(_event(pid, "compute", "backward", "backward", first, last, {"segments": len(backward)}))
    previous = dict.fromkeys(STREAMS, 0)
    for span in timeline.spans:
        start, stop = _ticks(span.start_s), _ticks(span.end_s)
        # Two sums of the same durations may differ in the last digit; a span never starts before its neighbour ends.
        start = max(start, previous[span.stream])
        stop = min(max(stop, start), end)
        previous[span.stream] = stop
        if stop > start:
            events.append(_event(pid, span.stream, span.name, span.kind, start, stop, _args(span)))
    return events


def _args(span: Span) -> dict[str, object]:
    return dict(span.args)
