"""What occupied a stream and when: the spans that schedules record on request, for traces and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from simkit.timeline import Step

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that occupied a stream from start_s to end_s. stream: ``compute``, ``comm`` or ``host``.

    kind: ``accumulation forward backward encode between decode comm optimizer host``.
    """

    name: str
    stream: str
    start_s: float
    end_s: float
    kind: str
    args: tuple[tuple[str, float | str], ...] = ()


def span(name: str, stream: str, start_s: float, seconds: float, kind: str, *args: tuple[str, float | str]) -> Span:
    """A span by its length."""
    return Span(name=name, stream=stream, start_s=start_s, end_s=start_s + seconds, kind=kind, args=args)


def segment_span(step: Step, segment: int, start_s: float, seconds: float) -> Span:
    """The span of one backward segment."""
    name = step.segment_names[segment] if segment < len(step.segment_names) else f"segment {segment}"
    args: list[tuple[str, float | str]] = [("segment", segment)]
    if segment < len(step.segment_bounds):
        args.append(("bound", step.segment_bounds[segment]))
    return span(name, "compute", start_s, seconds, "backward", *args)


def kernel_span(step: Step, bucket: int, phase: int, start_s: float, seconds: float) -> Span:
    """The span of device work of a chain: phase 0 encodes, the last decodes, those between are `between`."""
    kind = "encode" if phase == 0 else "decode" if phase == step.comm_s.shape[0] else "between"
    name = f"between {bucket} phase {phase}" if kind == "between" else f"{kind} {bucket}"
    return span(name, "compute", start_s, seconds, kind, ("bucket", bucket), ("phase", phase))


def comm_span(step: Step, bucket: int, phase: int, start_s: float, seconds: float) -> Span:
    """The span of one collective, with its bytes and the uncompressed bytes of its bucket where they are known."""
    args: list[tuple[str, float | str]] = [("bucket", bucket), ("phase", phase)]
    if bucket < len(step.bucket_bytes):
        args.append(("bucket_bytes", float(step.bucket_bytes[bucket])))
    if step.wire_bytes.size:
        args.append(("bytes", float(step.wire_bytes[phase, bucket])))
    return span(f"bucket {bucket} phase {phase}", "comm", start_s, seconds, "comm", *args)


def add_segments(step: Step, record: list[Span], start_s: Array, first: int = 0) -> None:
    """Records backward segments from number `first` on."""
    for j, start in enumerate(start_s.tolist(), first):
        record.append(segment_span(step, j, start, float(step.backward_s[j])))


Maker = Callable[["Step", int, int, float, float], Span]


def _rows(step: Step, record: list[Span], make: Maker, phase: int, end_s: Array, seconds: Array) -> None:
    for i, (end, duration) in enumerate(zip(end_s.tolist(), seconds.tolist(), strict=True)):
        record.append(make(step, i, phase, end - duration, duration))


def add_kernels(step: Step, record: list[Span], phase: int, end_s: Array, seconds: Array) -> None:
    """Records device work of one phase of every bucket."""
    _rows(step, record, kernel_span, phase, end_s, seconds)


def add_collectives(step: Step, record: list[Span], phase: int, end_s: Array) -> None:
    """Records the collectives of one phase of every bucket."""
    _rows(step, record, comm_span, phase, end_s, step.comm_s[phase])
