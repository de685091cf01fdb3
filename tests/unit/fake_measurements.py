"""Files as nccl-tests, torch.profiler and people write them, from laws that the tests state."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

FACTOR = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
          "reduce_scatter": lambda n: (n - 1) / n, "alltoall": lambda n: (n - 1) / n, "sendrecv": lambda n: 1.0,
          "broadcast": lambda n: 1.0}  # fmt: skip
"""busbw over algbw, as doc/PERFORMANCE.md of nccl-tests has it."""
NEW = "size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
OLD = "size count type redop time algbw busbw error time algbw busbw error"


def nccl_log(
    path: Path, test: str = "all_reduce", *, ranks: int = 8, hosts: int = 1, alpha_s: float = 20e-6, Bps: float = 200e9,
    device: str = "NVIDIA A100-SXM4-80GB", announce: bool = True, list_ranks: bool = True, columns: str = NEW,
    prefix: str = "", least: int = 8, most: int = 2**32, in_place: bool = True,
) -> Path:  # fmt: skip
    """A log of t = alpha + factor · size / Bps."""
    factor = FACTOR[test](ranks)
    redop = "sum" if test in ("all_reduce", "reduce_scatter") else "none"
    root = "0" if test == "broadcast" else "-1"
    lines = [f"# Collective test starting: {test}_perf"] if announce else []
    lines += ["# nThread 1 nGpus 1 minBytes 8 maxBytes 4294967296 step: 2(factor) warmup iters: 5 iters: 20", "#",
              "# Using devices"]  # fmt: skip
    if list_ranks:
        for r in range(ranks):
            host = r * hosts // ranks
            lines.append(f"#  Rank {r:2d} Group  0 Pid {4000 + r} on  node-{host} device {r:2d} [0x{r:02x}] {device}")
    lines += ["#", "#                    out-of-place                       in-place", "# " + columns,
              "#        (B)    (elements)           (us)  (GB/s)  (GB/s)      (us)  (GB/s)  (GB/s)"]  # fmt: skip
    size = least
    while size <= most:
        seconds = alpha_s + factor * size / Bps
        algbw = size / seconds / 1e9
        figures = [f"{seconds * 1e6:.2f}", f"{algbw:.2f}", f"{algbw * factor:.2f}", "0"]
        cells = [str(size), str(size // 4), "float", redop] + ([root] if "root" in columns else [])
        lines.append("  ".join([*cells, *figures, *(figures if in_place else ["N/A"] * 4)]))
        size *= 2
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 101.2", "#", ""]
    path.write_text("\n".join(prefix + line for line in lines), encoding="utf-8")
    return path


class Trace:
    """A trace as torch.profiler exports it: `call` adds an operator, its launch and its kernel."""

    def __init__(self, device: str = "NVIDIA A100-SXM4-80GB", devices: int = 8) -> None:
        self.events: list[dict[str, Any]] = []
        self.device, self.devices = device, devices
        self.now, self.number = 1000.0, 10

    def call(
        self, name: str, dims: list[Any], types: list[str], kernel: str, seconds: float, *,
        concrete: list[str] | None = None, linked: bool = True, extra: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """linked: the kernel names its operator (External id); else only the launch does, by its time."""
        self.number += 1
        args: dict[str, Any] = {"External id": self.number, "Input Dims": dims, "Input type": types}
        args |= {"Concrete Inputs": concrete} if concrete is not None else {}
        self.add("cpu_op", name, self.now, 9.0, 1, args | (extra or {}))
        self.add("cuda_runtime", "cudaLaunchKernel", self.now + 3, 4.0, 1, {"correlation": self.number})
        own: dict[str, Any] = {"device": 0, "stream": 7, "correlation": self.number}
        own |= {"External id": self.number} if linked else {}
        self.add("kernel", kernel, self.now + 20, seconds * 1e6, 0, own)
        self.now += 10.0

    def add(
        self, category: str, name: str, ts: float, dur: float, pid: int, args: dict[str, Any] | None = None
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": 1, "ts": ts, "dur": dur}
        self.events.append(event | ({"args": args} if args is not None else {}))

    def mm(self, m: int, n: int, k: int, seconds: float, dtype: str = "c10::BFloat16") -> None:
        self.call("aten::mm", [[m, k], [k, n]], [dtype, dtype], "ampere_bf16_s16816gemm_bf16_128x128", seconds)

    def collective(self, name: str, elements: int, out: int, ranks: int, seconds: float, *, on_kernel: bool = True,
                   members: str | None = None) -> None:  # fmt: skip
        said: dict[str, Any] = {"Collective name": name, "dtype": "BFloat16", "In msg nelems": elements,
                                "Out msg nelems": out, "Group size": ranks}  # fmt: skip
        said["Process Group Ranks"] = members if members is not None else str(list(range(ranks)))
        self.call("record_param_comms", [], [], "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", seconds, extra=said)
        if on_kernel:
            self.events[-1]["args"] |= said

    def write(self, path: Path) -> Path:
        properties = [{"id": i, "name": self.device} for i in range(self.devices)]
        text = json.dumps({"schemaVersion": 1, "deviceProperties": properties, "traceEvents": self.events})
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path
