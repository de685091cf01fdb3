"""SALR on this CPU: its product against our own dense one, against torch, and against what memory streams.

    python benchmarks/bench_salr.py [--threads 1,2] [--dtypes bf16,fp32] [--batches 1,4,16,64,256]
                                    [--shapes 4096x4096,4096x11008] [--rank 16] [--repeats 40] [--check] [--json FILE]

Shapes are OUTxIN. SALR is 50 % pruned with a residual and a task adapter of `--rank` each, "bare" is without them.
Every call takes the next copy of the weights, so that none is found in a cache; all weights, dense ones too, are asked
into huge pages. Paths take turns within one process, and a ratio is the median over turns of (other time / SALR time)
of the same turn. One thread is timed in CPU time of the thread, so that what else runs drops out in part; more threads
in wall time: quiet machines only. `--check` exits with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from simkit.kernels.salr import native
from simkit.kernels.salr.encoding import encode
from simkit.kernels.salr.masks import magnitude_mask

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BARS = {
    # (threads, batch): {ratio: at least}; "own" and "stream" exist at batch 1 alone.
    (2, 1): {"own/salr": 1.5, "torch/salr": 1.7, "own GB/s / stream": 0.85},
    (1, 1): {"own/salr": 1.25},
    (2, 4): {"torch/salr": 1.4},
    (2, 16): {"torch/salr": 1.0},
    (2, 64): {"torch/salr": 0.9},
    (2, 256): {"torch/salr": 0.85},
}
AVX2_BAR = 1.2
"""own/salr at batch 1, 2 threads, where the AVX2 path runs (SIMKIT_SALR_ISA=avx2 forces it)."""


class Case:
    """The copies of one layer, dense and encoded."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, rank: int) -> None:
        torch.manual_seed(0)
        self.rows, self.columns, self.dtype = rows, columns, dtype
        weight = torch.randn(rows, columns).to(dtype)
        encoded = encode(weight, magnitude_mask(weight, 0.5))
        self.dense_bytes = weight.numel() * weight.element_size()
        copies = max(3, 300_000_000 // self.dense_bytes)
        self.dense = [weight.clone() for _ in range(copies)]
        self.encoded = [tuple(t.clone() for t in encoded[:3]) for _ in range(copies)]
        self.a = (torch.randn(2 * rank, columns) / 64).to(dtype)
        self.b = torch.randn(rows, 2 * rank).to(dtype)
        native.huge(*self.dense, *(t for three in self.encoded for t in three))
        self.salr_bytes = sum(t.numel() * t.element_size() for t in encoded[:3])

    def paths(self, batch: int, stream: torch.Tensor) -> dict[str, Callable[[int], object]]:
        x = torch.randn(batch, self.columns).to(self.dtype)
        n, count = self.rows, len(self.dense)
        none_a, none_b = self.a[:0], self.b[:, :0].contiguous()
        found: dict[str, Callable[[int], object]] = {
            "salr": lambda i: native.linear(x, *self.encoded[i % count], self.a, self.b, None, n),
            "bare": lambda i: native.linear(x, *self.encoded[i % count], none_a, none_b, None, n),
            "torch": lambda i: functional.linear(x, self.dense[i % count]),
        }
        if batch == 1:
            vector, out = native.dense_vector(x[0]), torch.empty(n, dtype=self.dtype)
            found["own"] = lambda i: native.dense(self.dense[i % count], vector, out)
            found["stream"] = lambda i: native.stream(stream)
        return found


def measured(
    paths: dict[str, Callable[[int], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """{path: seconds of each turn}."""
    times: dict[str, list[float]] = {name: [] for name in paths}
    turn = 0
    for path in paths.values():
        path(0)
    for _ in range(repeats):
        for name, path in paths.items():
            turn += 1
            start = clock()
            path(turn)
            times[name].append(clock() - start)
    return times


def paired(times: dict[str, list[float]], other: str, one: str = "salr") -> float:
    return statistics.median(a / b for a, b in zip(times[other], times[one], strict=True))


def row(
    case: Case, name: str, shape: str, threads: int, batch: int, repeats: int, stream: torch.Tensor
) -> dict[str, object]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    fewer = max(5, round(repeats / (1, 1, 2, 4, 8)[min(4, batch.bit_length() // 2)]))
    times = measured(case.paths(batch, stream), fewer, clock)
    ratios = {"torch/salr": paired(times, "torch"), "torch/bare": paired(times, "torch", "bare")}
    if batch == 1:
        ratios |= {"own/salr": paired(times, "own"), "own/bare": paired(times, "own", "bare")}
        share = case.dense_bytes / (stream.numel() * 4)
        ratios["own GB/s / stream"] = share * paired(times, "stream", "own")
    bar = BARS.get((threads, batch), {})
    if native.isa() == "avx2" or os.environ.get("SIMKIT_SALR_ISA") == "avx2":
        bar = {**bar, **({"own/salr (AVX2)": AVX2_BAR} if (threads, batch) == (2, 1) else {})}
    missed = {k: v for k, v in bar.items() if ratios[k.removesuffix(" (AVX2)")] < v}
    return {
        "dtype": name,
        "shape": shape,
        "threads": threads,
        "batch": batch,
        "turns": fewer,
        "p10_ms": {k: round(sorted(v)[len(v) // 10] * 1e3, 3) for k, v in times.items()},
        "median_ms": {k: round(statistics.median(v) * 1e3, 3) for k, v in times.items()},
        "ratios": {k: round(v, 3) for k, v in ratios.items()},
        "bytes_ratio": round(case.dense_bytes / case.salr_bytes, 3),
        "missed": missed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--batches", default="1,4,16,64,256")
    parser.add_argument("--shapes", default="4096x4096,4096x11008", help="OUTxIN, comma-separated")
    parser.add_argument("--rank", type=int, default=16, help="of the residual and of the task adapter")
    parser.add_argument("--repeats", type=int, default=40, help="turns at batch 1; fewer above")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not native.available(torch.float32):
        print(f"no native kernels here (instruction set: {native.isa()}): nothing to measure")
        return 1 if args.check else 0
    stream = torch.zeros(40_000_000)
    native.huge(stream)
    rows = []
    print(
        f"instruction set {native.isa()}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )
    for name in args.dtypes.split(","):
        for shape in args.shapes.split(","):
            n, k = (int(v) for v in shape.split("x"))
            case = Case(n, k, DTYPES[name], args.rank)
            for threads in (int(t) for t in args.threads.split(",")):
                torch.set_num_threads(threads)
                for batch in (int(b) for b in args.batches.split(",")):
                    found = row(case, name, shape, threads, batch, args.repeats, stream)
                    rows.append(found)
                    print(
                        f"{name} {shape} threads {threads} batch {batch:3d}: p10 ms {found['p10_ms']} {found['ratios']}"
                        + (f" BELOW {found['missed']}" if found["missed"] else ""),
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    below = sum(bool(r["missed"]) for r in rows)
    print(f"load {os.getloadavg()[0]:.1f} at the end; {len(rows) - below} of {len(rows)} rows at their bars")
    return 1 if args.check and below else 0


if __name__ == "__main__":
    sys.exit(main())
