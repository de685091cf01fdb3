"""Chrome traces of torch.profiler (Kineto), plain or gzip: kernels with the operators that launched them.

    prof = torch.profiler.profile(record_shapes=True, …);  prof.export_chrome_trace("trace.json.gz")

A kernel (``cat`` kernel, ``dur`` in us) belongs to the operator of its ``External id``, or by its ``correlation`` to
the operator during which the host launched it; kernels of one operator are added up. The calls of one shape make one
row, their median. NCCL kernels have their own metadata (``Collective name``, ``In msg nelems``, ``Group size``,
``Process Group Ranks``), or that of the ``record_param_comms`` that launched them; their row is the shortest of the
calls, for a longer one has waited for other ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from simkit.errors import InputError
from simkit.readers import _torch_ops
from simkit.readers._common import Asked, Read, Source, row

PRIORITY = 10
KERNEL, MEMORY_CATS = "kernel", ("gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
LAUNCH_NAMES = ("cudalaunchkernel", "culaunchkernel", "hiplaunchkernel", "hipextmodulelaunchkernel")
COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather",
    "all_gather": "all_gather", "allgather_into_tensor_coalesced": "", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter", "reduce_scatter_tensor_coalesced": "", "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all", "alltoall": "all_to_all", "alltoall_base": "all_to_all", "broadcast": "broadcast",
    "_broadcast_oop": "broadcast", "reduce": "reduce", "_reduce_oop": "reduce", "send": "send_recv",
    "recv": "send_recv",
}  # fmt: skip
BYTES = {"float": 4, "half": 2, "bfloat16": 2, "double": 8, "byte": 1, "char": 1, "int": 4, "long": 8, "bool": 1,
         "float8_e4m3fn": 1, "float8_e5m2": 1, "short": 2}  # fmt: skip
DTYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
FASTEST = 0.05
"""Quantile of the kernels that stands for one which does next to nothing: what a launch takes on the device."""
LEAST_KERNELS = 20
IDLE_US = 100.0
"""A longer pause between two launches of a thread is no pace of launching."""
_NONE = "tells no time of a kernel"


def matches(source: Source) -> bool:
    head = source.head.lstrip()
    return head[:1] in ("{", "[") and (
        '"traceEvents"' in head or '"ph"' in head or ('"nodes"' in head and '"schema"' in head)
    )


@dataclass(slots=True)
class _Trace:
    """The events by what they are. by_id: operators of an External id; by_thread: operators of a thread by their
    begin; launches: by correlation."""

    by_id: dict[int, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    by_thread: dict[tuple[Any, Any], list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    launches: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    kernels: list[Mapping[str, Any]] = field(default_factory=list)
    begins: dict[tuple[Any, Any], list[float]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def operator(self, kernel: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The innermost operator that launched a kernel."""
        args = _args(kernel)
        launch = self.launches.get(_whole(args.get("correlation")))
        if launch is not None:
            self.used.add(id(launch))
        found = self.by_id.get(_whole(args.get("External id")) or _whole(args.get("external id")))
        if not found and launch is not None:
            found = self.by_id.get(_whole(_args(launch).get("External id"))) or self._around(launch)
        return min(found, key=lambda op: float(op.get("dur", 0.0))) if found else None

    def _around(self, launch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The operators of the thread during which the launch began: the last few that began before it."""
        thread, at = (launch.get("pid"), launch.get("tid")), float(launch["ts"])
        every = self.by_thread.get(thread, [])
        if thread not in self.begins:
            every.sort(key=lambda op: float(op["ts"]))
            self.begins[thread] = [float(op["ts"]) for op in every]
        last = bisect.bisect_right(self.begins[thread], at)
        return [op for op in every[max(last - 64, 0) : last] if float(op["ts"]) + float(op.get("dur", 0.0)) >= at]


def read(source: Source, asked: Asked) -> Read:
    """The rows of a trace. Raises InputError where it is none, holds no kernel, or no kernel that gives a row."""
    events, properties, ranks_a_node = _opened(source)
    out = Read(file=source.name, kind="kineto", unit="events", total=len(events))
    trace = _sorted(events, out)
    if not trace.kernels:
        hint = "record with ProfilerActivity.CUDA on a machine with a GPU"
        raise InputError("holds no kernel of a GPU, only the host", file=source.name, hint=hint)
    device = _device(trace.kernels, properties, asked)
    if not device:
        raise InputError("has a device without a profile", file=source.name, hint="give --device NAME")
    per_node = asked.gpus_per_node or ranks_a_node
    calls: dict[int, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    exchanged: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for kernel in trace.kernels:
        if str(kernel.get("name", "")).lower().startswith(("nccl", "rccl", "msccl")):
            _collective(kernel, trace, per_node, exchanged, out)
            continue
        op = trace.operator(kernel)
        if op is None:
            out.skip("kernels that no operator of the trace launched (a CUDA graph?)")
        else:
            calls.setdefault(id(op), (op, []))[1].append(kernel)
    _computed(calls.values(), device, source, trace, out)
    _exchanged(exchanged, device, source, asked, out)
    # Operators and launches told whose kernels these are.
    out.used += len(trace.used)
    _rest(trace, out)
    _paces(trace, out)
    if not out.rows:
        why = "; ".join(f"{n} events: {reason}" for reason, n in out.skipped.most_common(3))
        raise InputError(f"holds no measurement that can be used ({why})", file=source.name)
    return out


def _opened(source: Source) -> tuple[list[Mapping[str, Any]], list[Any], int]:
    """(events, devices, GPUs of the node as the trace lists them)."""
    document = source.json
    if isinstance(document, dict) and "traceEvents" not in document and "nodes" in document:
        hint = "record with torch.profiler and export_chrome_trace"
        what = "is an execution trace of PyTorch, which holds no times of kernels"
        raise InputError(what, file=source.name, hint=hint)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        hint = "export_chrome_trace makes it"
        raise InputError("holds no list of events", file=source.name, key="traceEvents", hint=hint)
    properties = document.get("deviceProperties") if isinstance(document, dict) else None
    properties = properties if isinstance(properties, list) else []
    return events, properties, len(properties)


def _sorted(events: Iterable[Mapping[str, Any]], out: Read) -> _Trace:
    trace = _Trace()
    for event in events:
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or not _timed(event):
            out.skip("names, flow arrows and marks: no event with a duration")
        elif category == KERNEL:
            trace.kernels.append(event)
        elif category in ("cpu_op", "operator"):
            number = _whole(_args(event).get("External id"))
            if number:
                trace.by_id[number].append(event)
            trace.by_thread[event.get("pid"), event.get("tid")].append(event)
        elif category in LAUNCHES:
            number = _whole(_args(event).get("correlation"))
            if not number or number in trace.launches:
                out.skip(f"{category} without a correlation of its own: {_NONE}")
            else:
                trace.launches[number] = event
        elif category in MEMORY_CATS:
            out.skip(f"{category}: has no row in the tables")
        else:
            out.skip(f"{category or 'no category'}: {_NONE}")
    return trace


def _timed(event: Mapping[str, Any]) -> bool:
    return isinstance(event.get("ts"), (int, float)) and isinstance(event.get("dur"), (int, float))


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _device(kernels: list[Mapping[str, Any]], properties: list[Any], asked: Asked) -> str:
    at = _whole(_args(kernels[0]).get("device"))
    named = next((p for p in properties if isinstance(p, dict) and p.get("id") == at), {})
    return asked.named(str(named.get("name", "")))


# -- kernels that compute --------------------------------------------------------------------------------------------


def _computed(
    calls: Iterable[tuple[Mapping[str, Any], list[Mapping[str, Any]]]],
    device: str,
    source: Source,
    trace: _Trace,
    out: Read,
) -> None:
    """One row a shape: the median over its calls."""
    seconds: dict[tuple[tuple[str, Any], ...], list[float]] = defaultdict(list)
    for op, kernels in calls:
        made = _torch_ops.cells(str(op.get("name", "")), _args(op), [str(k.get("name", "")) for k in kernels])
        if isinstance(made, str):
            out.skip(f"kernels: {made}", len(kernels))
            continue
        trace.used.add(id(op))
        out.used += len(kernels)
        seconds[tuple(made.items())].append(sum(float(k["dur"]) for k in kernels) * 1e-6)
    for number, (key, times) in enumerate(seconds.items()):
        made = dict(key)
        middle = median(times)
        if middle <= 0.0:
            continue
        fused = made["op"].startswith("attention")
        out.rows.append(
            row(
                id=f"{source.stem}-{number}", source=source.name, where=f"{len(times)} calls", **made,
                engine="kernel" if fused else None, device=device, metric="time_s", value=middle,
                notes="kernels of a PyTorch trace; median of the calls of one shape",
            )
        )  # fmt: skip


# -- kernels that exchange -------------------------------------------------------------------------------------------


def _collective(
    kernel: Mapping[str, Any],
    trace: _Trace,
    per_node: int,
    exchanged: dict[tuple[Any, ...], list[float]],
    out: Read,
) -> None:
    """Files a NCCL kernel under what it moved, or skips it."""
    args = _args(kernel)
    if "Collective name" not in args:
        op = trace.operator(kernel)
        args = _args(op) if op is not None else args
        if op is not None and "Collective name" in args:
            trace.used.add(id(op))
    if "Collective name" not in args:
        return out.skip("NCCL kernels that do not say what they move")
    op_name = COLLECTIVES.get(str(args["Collective name"]).lower(), "")
    size = BYTES.get(str(args.get("dtype", "")).lower())
    if not op_name or size is None:
        return out.skip(f"NCCL kernels: {args['Collective name']} of {args.get('dtype')} has no row in the tables")
    ranks = _whole(args.get("Group size"))
    if op_name == "send_recv":
        ranks = 2
    elements = _whole(args.get("Out msg nelems" if op_name == "all_gather" else "In msg nelems"))
    if ranks < 2 or elements < 1 or float(kernel["dur"]) <= 0.0:
        return out.skip("NCCL kernels that move nothing or have one rank")
    between = _between(args, ranks, per_node)
    if between is None:
        return out.skip("NCCL kernels that do not say on which nodes their ranks are (give --gpus-per-node)")
    dtype = DTYPES.get(str(args.get("dtype", "")).lower(), "")
    exchanged[op_name, elements * size, ranks, dtype, between].append(float(kernel["dur"]) * 1e-6)
    out.used += 1
    return None


def _between(args: Mapping[str, Any], ranks: int, per_node: int) -> int | None:
    """Ranks of the group on one node where it spans several, 0 where it has one node, None where that is not known."""
    text = str(args.get("Process Group Ranks", "")).strip("[] ")
    members = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(members) == ranks and per_node > 1:
        nodes = Counter(member // per_node for member in members)
        return max(nodes.values()) if len(nodes) > 1 else 0
    # Without a list: a group that no node can hold spans nodes, one that is the whole of a single node does not.
    if per_node > 1 and ranks > per_node:
        return per_node
    return 0 if per_node == ranks else None


def _exchanged(
    exchanged: Mapping[tuple[Any, ...], list[float]], device: str, source: Source, asked: Asked, out: Read
) -> None:
    for number, ((op, nbytes, ranks, dtype, between), times) in enumerate(sorted(exchanged.items())):
        where: dict[str, Any] = {"intra": asked.link, "gpus_per_node": ranks}
        if between:
            where = {"inter": asked.link, "gpus_per_node": between, "nics_per_node": asked.nics_per_node}
        out.rows.append(
            row(
                id=f"{source.stem}-nccl-{number}", source=source.name, where=f"{len(times)} calls", **where, op=op,
                dtype=dtype, bytes=nbytes, ranks=ranks, device=device, metric="time_s", value=min(times),
                notes="NCCL kernel of a PyTorch trace; the shortest call, longer ones wait for other ranks",
            )
        )  # fmt: skip


# -- the rest --------------------------------------------------------------------------------------------------------


def _rest(trace: _Trace, out: Read) -> None:
    """Counts the operators and launches that told nothing."""
    operators = [op for ops in trace.by_thread.values() for op in ops]
    idle = sum(id(op) not in trace.used for op in operators)
    out.skip("operators whose kernels gave no row, or that launched none", idle)
    unused = sum(id(e) not in trace.used for e in trace.launches.values())
    out.skip("calls of the driver that launched none of these kernels", unused)


def _paces(trace: _Trace, out: Read) -> None:
    """What a launch takes: on the device, and on the host from one launch to the next."""
    durations = sorted(
        float(k["dur"]) * 1e-6 for k in trace.kernels
        if float(k["dur"]) > 0.0 and not str(k.get("name", "")).lower().startswith("nccl")
    )  # fmt: skip
    if len(durations) >= LEAST_KERNELS:
        out.facts["kernel_s"] = durations[int(FASTEST * (len(durations) - 1))]
        out.facts["kernels"] = float(len(durations))
    begins: dict[Any, list[float]] = defaultdict(list)
    for event in trace.launches.values():
        if str(event.get("name", "")).lower().startswith(LAUNCH_NAMES):
            begins[event.get("pid"), event.get("tid")].append(float(event["ts"]))
    pairs = [pair for ts in begins.values() for pair in itertools.pairwise(sorted(ts))]
    steps = [b - a for a, b in pairs if b - a < IDLE_US]
    if len(steps) >= LEAST_KERNELS:
        out.facts["host_kernel_s"] = median(steps) * 1e-6
