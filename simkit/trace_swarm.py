"""A run of a swarm as a Chrome trace (ui.perfetto.dev): one track a stay of a peer, what it did from when to when.

One process per peer name, one thread per stay, complete events in microseconds; stalls of the whole and outages stand
on a track of their own. Source: "Trace Event Format", Google.
"""

from __future__ import annotations

from typing import Any

from simkit.des.swarm_outcome import Mark, Outcome
from simkit.errors import InputError

MAX_STAYS = 5000
US_PER_S = 1e6


def swarm_trace(found: Outcome, *, label: str) -> dict[str, Any]:
    """The trace as a JSON-ready object. Raises InputError for a run that kept no marks (`SwarmConfig.record`)."""
    if not found.marks:
        raise InputError("has no marks", key="run", hint="simulate it with record=True")
    stays: dict[int, list[Mark]] = {}
    for mark in found.marks:
        stays.setdefault(mark.node, []).append(mark)
    kept = list(stays.items())[:MAX_STAYS]
    pids = {name: pid for pid, name in enumerate(dict.fromkeys(marks[0].name for _, marks in kept), 2)}
    events = [_named(1, 0, "process_name", "swarm")]
    events += [_named(pid, 0, "process_name", name) for name, pid in pids.items()]
    for node, marks in kept:
        pid = pids[marks[0].name]
        events.append(_named(pid, node + 1, "thread_name", f"stay {node}"))
        ends = [m.start_s for m in marks[1:]] + [found.horizon_s]
        for mark, end_s in zip(marks, ends, strict=True):
            if mark.kind != "gone" and end_s > mark.start_s:
                events.append(_span(pid, node + 1, mark.what, mark.kind, mark.start_s, end_s))
    events += [_span(1, 1, f"stall: {s.reason}", "stall", s.start_s, s.end_s) for s in found.stalls]
    events += [
        {"ph": "i", "s": "g", "pid": 1, "tid": 1, "ts": _us(at), "name": f"{what} {where}".strip(), "cat": what}
        for at, what, where, _ in found.happened
    ]
    shown = {"label": label, "generator": "simkit", "stays": len(stays), "shown": len(kept)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": shown}


def _us(seconds: float) -> float:
    return round(seconds * US_PER_S, 3)


def _named(pid: int, tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _span(pid: int, tid: int, name: str, kind: str, start_s: float, end_s: float) -> dict[str, Any]:
    ts, end = _us(start_s), _us(end_s)
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, "ts": ts, "dur": round(end - ts, 3)}
