"""Order in time: from priced work to spans on streams, in closed form.

A `Step` is everything that decides the order of one data-parallel iteration, in seconds, with no cluster and no model
left in it. `schedule` arranges it by array formulas; `simkit.des.iteration.simulate` arranges the same `Step` by
events; without jitter they agree to 1e-9.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simkit.errors import unknown
from simkit.spans import Span, add_collectives, add_kernels, add_segments, comm_span, kernel_span, span

Array = NDArray[np.float64]
Num = Any

OVERLAPS = ("none", "wfbp")
PLACEMENTS = ("inline", "hook")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration of data-parallel training, priced.

    forward_s: the forward pass of the last micro-batch; accumulation_s: the micro-batches before it (no exchange).
    backward_s[j]: backward segment j in the order of execution. Bucket i (in the order in which it becomes ready) may
    start after segment ready[i] (ready never decreases; -1 = before the first). Its chain: encode_s[i] on the device,
    comm_s[0][i] on the network, then for each further phase p: between_s[p-1][i] on the device and comm_s[p][i] on the
    network, at last decode_s[i] on the device. comm_s has shape (phases, buckets), between_s (phases - 1, buckets).
    optimizer_s follows the last decode. host_s: what the host adds per step and nothing hides.

    overlap: ``none`` runs backward, then the chains one after the other; ``wfbp`` runs chains during backward.
    placement (wfbp only): ``inline`` = encode runs on the compute stream at the moment the bucket is ready and decode
    after the last collective (barrier); ``hook`` = each chain runs as soon as it can, its kernels competing for the
    device with back-propagation, decode included (PyTorch's DDP communication hook).

    blocking (hook only): the host waits inside the chain, so no further backward segment starts from the end of a
    bucket's encode until it has been decoded. This is what PyTorch's Power-SGD hook does. The future of an NCCL
    collective counts as complete once enqueued, so the callbacks of the chain run at once, in the thread that launches
    back-propagation, and the last of them calls ``torch.cuda.synchronize`` (powerSGD_hook.py, `decompress`; PyTorch
    pull request 49435). Hence the overlapped form can lose to no overlap (arXiv 2103.00543; PyTorch issues 74148 and
    74907; epfml/powersgd issue 18).

    For spans alone: bucket_bytes[i], the uncompressed bytes of a bucket; wire_bytes[p][i], the size of its messages;
    segment_names and segment_bounds (what bounds a segment: ``compute``, ``memory``, ``launch``).
    """

    forward_s: float
    backward_s: Array
    ready: NDArray[np.int64]
    encode_s: Array
    comm_s: Array
    between_s: Array
    decode_s: Array
    optimizer_s: float = 0.0
    accumulation_s: float = 0.0
    host_s: float = 0.0
    overlap: str = "wfbp"
    placement: str = "inline"
    blocking: bool = False
    bucket_bytes: Array = field(default_factory=lambda: np.zeros(0))
    wire_bytes: Array = field(default_factory=lambda: np.zeros((0, 0)))
    segment_names: tuple[str, ...] = ()
    segment_bounds: tuple[str, ...] = ()


class Sums(NamedTuple):
    """Running sums of a Step, so that steps with the same passes, buffers or messages share them.

    done_s: ends of the backward segments counted from the begin of back-propagation, 0 before the first, shape
    (segments + 1,). encoded_s: of encode_s. compression_s: all device work of the chains. served_s: of comm_s, phase by
    phase; merged_s: of comm_s with all phases of a bucket taken as one message; comm_s: all of it.
    """

    done_s: Array
    encoded_s: Array
    compression_s: float
    served_s: Array
    merged_s: Array
    comm_s: float

    @classmethod
    def of(cls, step: Step) -> Sums:
        done_s = np.zeros(len(step.backward_s) + 1)
        step.backward_s.cumsum(out=done_s[1:])
        return cls(
            done_s=done_s,
            encoded_s=step.encode_s.cumsum(),
            compression_s=float(step.encode_s.sum() + step.between_s.sum() + step.decode_s.sum()),
            served_s=step.comm_s.cumsum(axis=1),
            merged_s=step.comm_s.sum(axis=0).cumsum(),
            comm_s=float(step.comm_s.sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When everything ended. `breakdown`: disjoint terms of the critical path that sum to `end_s`:
    forward_s, backward_s (earlier micro-batches split as the last one is), compression_s, exposed_comm_s, optimizer_s,
    host_s. exposed_comm_s: the time in which the device has nothing to do but wait for the network.
    busy_s: {stream: seconds in use}. comm_end_s[i]: end of the last collective of bucket i. spans: only on request."""

    end_s: float
    breakdown: dict[str, float]
    busy_s: dict[str, float]
    comm_end_s: Array
    spans: tuple[Span, ...] = ()


def schedule(step: Step, *, spans: bool = False, interference: float = 0.0, sums: Sums | None = None) -> Timeline:
    """The timeline of one iteration, without events.

    interference: seconds of compute that a second of hidden communication costs (`stretch`); sums: `Sums.of` the step,
    where they are known.

    With r_i the moment bucket i is encoded and c_i its collective, one FIFO network gives (``inline``, one phase)

        e_i = max(e_{i-1}, r_i) + c_i  =  C_i + max_{j<=i} (r_j - C_{j-1}),    C = cumsum(c)

    and the step ends at max(e_last, end of backward) + sum(decode) + optimizer. In further phases p the host walks the
    buckets in order: d_i = max(d_{i-1}, e^{p-1}_i) + between_i, e^p_i = max(e^p_{i-1}, d_i) + c^p_i, the same form.
    ``hook``: one pass over the kernels of the chains (see `_hook`), or a sum where they cannot meet (`_one_by_one`).
    ``none``: the sum of everything.

    The device works, or waits for the network; so exposed_comm_s is its idle time and the terms sum to end_s.
    Raises InputError for an overlap or placement that does not exist.
    """
    if step.overlap == "none":
        arrange = _serial
    elif step.overlap != "wfbp":
        raise unknown("overlap", step.overlap, OVERLAPS)
    elif step.placement == "inline":
        arrange = _inline
    elif step.placement == "hook":
        arrange = _hook
    else:
        raise unknown("placement", step.placement, PLACEMENTS)
    if sums is None:
        sums = Sums.of(step)
    factor = stretch(step, sums, interference)
    if factor != 1.0:
        sums = sums._replace(done_s=sums.done_s * factor)
        if spans or arrange is not _inline:
            step = stretched(step, factor)
    record: list[Span] | None = None
    if spans:
        record = opening(step)
    exposed_s, comm_end_s = arrange(step, sums, record)
    return closing(step, sums, exposed_s=exposed_s, comm_end_s=comm_end_s, record=record)


def stretch(step: Step, sums: Sums, interference: float) -> float:
    """How many times as long back-propagation takes because of the collectives that run beside it.

    NCCL's kernels take processors and memory bandwidth: a second of hidden communication costs `interference` seconds
    of compute. hidden = busy network - what sticks out behind back-propagation in the undisturbed step, all phases of a
    buffer taken as one message; every backward segment is stretched alike. A blocking hook hides nothing.
    """
    if interference <= 0.0 or step.overlap == "none" or step.blocking or not len(step.ready):
        return 1.0
    backward_s = float(sums.done_s[-1])
    if backward_s <= 0.0:
        return 1.0
    # The last end of `fifo`: all messages after the latest moment at which the network stood still.
    issue_s = sums.done_s[step.ready + 1]
    issue_s += sums.encoded_s
    issue_s[1:] -= sums.merged_s[:-1]
    last_s = float(issue_s.max()) + float(sums.merged_s[-1])
    exposed_s = max(last_s - backward_s - float(sums.encoded_s[-1]), 0.0)
    hidden_s = min(max(sums.comm_s - exposed_s, 0.0), backward_s)
    return 1.0 + interference * hidden_s / backward_s


def stretched(step: Step, factor: float) -> Step:
    """The step with every backward segment that many times as long."""
    return replace(step, backward_s=step.backward_s * factor)


def opening(step: Step) -> list[Span]:
    """The spans before back-propagation."""
    first_s = step.accumulation_s
    record = [span("forward", "compute", first_s, step.forward_s, "forward")]
    if first_s > 0.0:
        record.insert(0, span("accumulation", "compute", 0.0, first_s, "accumulation"))
    return record


def closing(
    step: Step, sums: Sums | None = None, *, exposed_s: float, comm_end_s: Array, record: list[Span] | None
) -> Timeline:
    """The Timeline once the idle time of the device is known: the terms of the breakdown, their sum, the last spans."""
    sums = Sums.of(step) if sums is None else sums
    optimizer_s, host_s = float(step.optimizer_s), float(step.host_s)
    breakdown, busy_s, end_s = terms(
        forward_s=float(step.forward_s),
        backward_s=float(sums.done_s[-1]),
        earlier_s=float(step.accumulation_s),
        compression_s=sums.compression_s,
        exposed_s=exposed_s,
        optimizer_s=optimizer_s,
        host_s=host_s,
    )
    if record is not None:
        record.append(span("optimizer", "compute", end_s - host_s - optimizer_s, optimizer_s, "optimizer"))
        if host_s > 0.0:
            record.append(span("host", "host", end_s - host_s, host_s, "host"))
        record.sort(key=lambda s: (s.start_s, s.end_s))
    return Timeline(
        end_s=end_s,
        breakdown=breakdown,
        busy_s={"compute": busy_s, "comm": sums.comm_s, "host": host_s},
        comm_end_s=comm_end_s,
        spans=() if record is None else tuple(record),
    )


def terms(
    *,
    forward_s: Num,
    backward_s: Num,
    earlier_s: Num,
    compression_s: Num,
    exposed_s: Num,
    optimizer_s: Num,
    host_s: Num,
) -> tuple[dict[str, Num], Num, Num]:
    """(breakdown, seconds in which the device works, end): the disjoint terms and their sum, for one step or arrays.

    earlier_s: the micro-batches before the last, split into forward and backward as the last one is.
    """
    last_s = forward_s + backward_s
    if isinstance(last_s, np.ndarray):
        share: Num = np.divide(forward_s, last_s, out=np.ones_like(last_s), where=last_s > 0.0)
    else:
        share = forward_s / last_s if last_s > 0.0 else 1.0
    forward_s = forward_s + earlier_s * share
    backward_s = earlier_s + last_s - forward_s
    busy_s = forward_s + backward_s + compression_s + optimizer_s
    breakdown = {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "compression_s": compression_s,
        "exposed_comm_s": exposed_s,
        "optimizer_s": optimizer_s,
        "host_s": host_s,
    }
    return breakdown, busy_s, busy_s + exposed_s + host_s


def fifo(issue_s: Array, duration_s: Array, free_s: float = 0.0) -> Array:
    """End times of jobs served one by one in order: e_i = max(e_{i-1}, issue_i) + duration_i, e_{-1} = free_s."""
    return _served(np.maximum(issue_s, free_s), duration_s.cumsum())


def _served(start: Array, total: Array) -> Array:
    """`fifo` in place: start, the issue times, becomes the end times; total: running sum of the durations."""
    start[1:] -= total[:-1]
    np.maximum.accumulate(start, out=start)
    start += total
    return start


def _serial(step: Step, sums: Sums, record: list[Span] | None) -> tuple[float, Array]:
    phases, buckets = step.comm_s.shape
    work_s = np.zeros((2 * phases + 1, buckets))
    work_s[0], work_s[1::2], work_s[2:-1:2], work_s[-1] = step.encode_s, step.comm_s, step.between_s, step.decode_s
    begin_s = step.accumulation_s + step.forward_s
    chains_s = begin_s + float(sums.done_s[-1])
    end_s = chains_s + np.cumsum(work_s.T.ravel()).reshape(buckets, 2 * phases + 1)
    if record is not None:
        add_segments(step, record, begin_s + np.cumsum(step.backward_s) - step.backward_s)
        for i in range(buckets):
            for row in range(2 * phases + 1):
                phase, seconds = row // 2, float(work_s[row, i])
                start_s = float(end_s[i, row]) - seconds
                if row % 2:
                    record.append(comm_span(step, i, phase, start_s, seconds))
                else:
                    record.append(kernel_span(step, i, phase, start_s, seconds))
    return sums.comm_s, end_s[:, -2] if phases else np.full(buckets, chains_s)


def _inline(step: Step, sums: Sums, record: list[Span] | None) -> tuple[float, Array]:
    begin_s = step.accumulation_s + step.forward_s
    phases, buckets = step.comm_s.shape
    if not buckets:
        if record is not None:
            add_segments(step, record, begin_s + np.cumsum(step.backward_s) - step.backward_s)
        return 0.0, np.zeros(0)
    encoded_s, done_s = sums.encoded_s, sums.done_s
    device_s = float(begin_s + done_s[-1] + encoded_s[-1])
    issue_s = done_s[step.ready + 1]
    issue_s += encoded_s
    issue_s += begin_s
    if record is not None:
        before = np.searchsorted(step.ready, np.arange(len(step.backward_s)), side="left")
        hooks_s = np.concatenate([[0.0], encoded_s])[before]
        add_segments(step, record, begin_s + done_s[:-1] + hooks_s)
        add_kernels(step, record, 0, issue_s, step.encode_s)
    end_s = _served(issue_s, sums.served_s[0])
    exposed_s = 0.0
    for p in range(1, phases):
        if record is not None:
            add_collectives(step, record, p - 1, end_s)
        between_s = step.between_s[p - 1]
        issue_s = fifo(end_s, between_s, device_s)
        exposed_s += float(issue_s[-1]) - device_s - float(between_s.sum())
        device_s = float(issue_s[-1])
        if record is not None:
            add_kernels(step, record, p, issue_s, between_s)
        end_s = _served(np.maximum(issue_s, end_s[-1]), sums.served_s[p])
    exposed_s = max(exposed_s + max(float(end_s[-1]) - device_s, 0.0), 0.0)
    if record is not None:
        add_collectives(step, record, phases - 1, end_s)
        add_kernels(step, record, phases, max(float(end_s[-1]), device_s) + np.cumsum(step.decode_s), step.decode_s)
    return exposed_s, end_s


def _one_by_one(step: Step, sums: Sums) -> tuple[float, Array]:
    """`_hook` where it blocks and no two buckets become ready at once: a chain runs to its end before back-propagation
    goes on, so nothing is hidden and bucket i starts after the segments and the chains before it."""
    sent_s = step.encode_s + step.comm_s.sum(axis=0) + step.between_s.sum(axis=0)
    ended_s = step.accumulation_s + step.forward_s + sums.done_s[step.ready + 1] + (sent_s + step.decode_s).cumsum()
    return sums.comm_s, ended_s - step.decode_s


def _hook(step: Step, sums: Sums, record: list[Span] | None) -> tuple[float, Array]:
    """One pass over the kernels of the chains; the device is one server that is never interrupted.

    At a boundary between segments the kernels that can run go first, in the order in which they became able to (of
    equal times those released by the network before those released by a segment). The network serves in the order of
    issue, so the end of a collective is known when it is issued and the kernels it releases are already in order. Runs
    of segments that nothing interrupts are jumped over by bisection in their cumulative time.
    """
    if step.blocking and record is None and (step.ready[1:] > step.ready[:-1]).all():
        return _one_by_one(step, sums)
    phases, buckets = step.comm_s.shape
    done_s = sums.done_s.tolist()
    ready = step.ready.tolist()
    kernel_s = [step.encode_s.tolist(), *step.between_s.tolist(), step.decode_s.tolist()]
    comm_s = step.comm_s.tolist()
    now_s = float(step.accumulation_s + step.forward_s)
    last, segment, encoded, ready_buckets = len(done_s) - 1, 0, 0, 0
    blocked, exposed_s, network_s = 0, 0.0, 0.0
    comm_end_s = [0.0] * buckets
    released: deque[tuple[float, int, int]] = deque()
    ready_s = [0.0] * buckets
    while ready_buckets < buckets and ready[ready_buckets] < 0:
        ready_s[ready_buckets] = now_s
        ready_buckets += 1
    while True:
        if released and released[0][0] <= now_s and not (encoded < ready_buckets and ready_s[encoded] < released[0][0]):
            _, bucket, phase = released.popleft()
        elif encoded < ready_buckets:
            bucket, phase = encoded, 0
            encoded += 1
        elif segment < last and not blocked:
            target = ready[encoded] + 1 if encoded < buckets else last
            origin_s = now_s - done_s[segment]
            stop = bisect_left(done_s, released[0][0] - origin_s, segment + 1, target) if released else target
            if record is not None:
                add_segments(step, record, origin_s + np.asarray(done_s[segment:stop]), segment)
            segment = stop
            now_s = origin_s + done_s[segment]
            while ready_buckets < buckets and ready[ready_buckets] < segment:
                ready_s[ready_buckets] = now_s
                ready_buckets += 1
            continue
        elif released:
            exposed_s += released[0][0] - now_s
            now_s = released[0][0]
            continue
        else:
            return exposed_s, np.asarray(comm_end_s)
        seconds = kernel_s[phase][bucket]
        if record is not None:
            record.append(kernel_span(step, bucket, phase, now_s, seconds))
        now_s += seconds
        if step.blocking:
            blocked += (phase == 0) - (phase == phases)
        if phase < phases:
            seconds = comm_s[phase][bucket]
            start_s = now_s if now_s > network_s else network_s
            network_s = start_s + seconds
            if record is not None:
                record.append(comm_span(step, bucket, phase, start_s, seconds))
            comm_end_s[bucket] = network_s
            released.append((network_s, bucket, phase + 1))
