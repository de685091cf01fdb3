"""The spans of a step over peers: what every peer computed and sent, pipeline by pipeline, by the event simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simkit import schedules
from simkit.decentral_report import breakdown
from simkit.decentral_search import Answer
from simkit.des.chain import simulate
from simkit.spans import Span
from simkit.timeline import Timeline

MOST = 60_000
"""Spans of one trace, at most: pipelines are added while they fit, the slowest first."""
LINE = " line"


def traced(found: Answer) -> Timeline:
    """The timeline with a stream per peer (`NAME`) and per line out (`NAME line`); then exchange and optimizer."""
    timed, peers = found.step, found.asked.peers
    order = schedules.get(found.asked.rules.schedule).order
    spans: list[Span] = []
    busy: dict[str, float] = {}
    for pipe in sorted(timed.pipes, key=lambda p: -p.end_s):
        if spans and len(spans) + 4 * pipe.micro_batches * len(pipe.held) > MOST:
            break
        names = [peers[h.peer].name for h in pipe.held]
        run = simulate(pipe.chain, order, pipe.micro_batches, spans=True)
        for span in run.spans:
            where, number = span.stream.split()
            stream = names[int(number)] + (LINE if where == "line" else "")
            spans.append(replace(span, stream=stream))
        for r, h in enumerate(pipe.held):
            at = float(run.stage_end_s[r])
            name = names[r]
            for title, kind, took in (("average gradients", "comm", float(timed.exchange_s[h.peer])),
                                      ("optimizer", "optimizer", float(timed.optimizer_s[h.peer]))):
                if took > 0.0:
                    stream = name + (LINE if kind == "comm" else "")
                    spans.append(Span(name=title, stream=stream, start_s=at, end_s=at + took, kind=kind))
                    at += took
            busy[name] = float(timed.busy_s[h.peer])
    spans.sort(key=lambda s: (s.start_s, s.end_s, s.stream))
    return Timeline(end_s=timed.end_s, breakdown=breakdown(found), busy_s=busy, comm_end_s=np.zeros(0),
                    spans=tuple(spans))  # fmt: skip
