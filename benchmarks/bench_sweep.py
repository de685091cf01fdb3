"""Times grids: points a second on one core, and the memory they take.

Run: python benchmarks/bench_sweep.py [--check]

bandwidths  4,000 rates of the network between nodes x 16 others (4 micro-batches x 4 accumulations), BERT-large
ranks       4,000 rates x 16 ranks of ACP-SGD: every rank has buffers, and so collectives, of its own
bounded     peak of what a grid allocates, 20 blocks over 2 blocks: what is kept does not grow with the grid
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

from _timing import Result, finish

from simkit.grids import axes
from simkit.spec.scenario import Scenario
from simkit.sweep import Sweep

JOB: dict[str, Any] = {"model": "bert-large", "cluster": "8x4x2080ti", "precision": "fp32", "seq_len": 64}
RATES = "1Gb/s@5us:800Gb/s@5us:4000"
TARGET = 200_000.0


def asked(grid: dict[str, str], **fields: Any) -> Sweep:
    return Sweep(Scenario.of(JOB | fields), axes(grid))


def rate(grid: dict[str, str], *, repeat: int = 5, **fields: Any) -> float:
    """Points a CPU-second, the best of some runs after one that is not counted; every run resolves anew."""
    best = 0.0
    for turn in range(repeat + 1):
        sweep = asked(grid, **fields)
        start = time.process_time()
        points = sum(len(block["refused"]) for block in sweep.blocks())
        if turn:
            best = max(best, points / (time.process_time() - start))
    return best


def rates() -> Iterator[Result]:
    others = {"micro_batch": "1,2,4,8", "grad_accum": "1,2,4,8"}
    for method in ("s-sgd", "acp-sgd"):
        fields = {"method": method} | ({"rank": 32} if method == "acp-sgd" else {})
        for order, grid in (("last", others | {"inter": RATES}), ("first", {"inter": RATES} | others)):
            found = rate(grid, **fields)
            name = f"4,000 rates ({order}) x 16 batches, {method}"
            yield Result(name=name, value=found, unit="/s", target=TARGET, at_least=True)
    ranks = rate({"rank": "2:32:16", "inter": RATES}, method="acp-sgd", micro_batch=8)
    yield Result(name="16 ranks x 4,000 rates, acp-sgd", value=ranks, unit="/s", target=TARGET / 2, at_least=True)
    batches = rate({"micro_batch": "1:4000:4000", "inter": "10Gb/s@30us,25Gb/s@30us"}, repeat=2, method="s-sgd")
    yield Result(name="4,000 micro-batches x 2 rates, s-sgd", value=batches, unit="/s")


def peak_bytes(grid: dict[str, str]) -> int:
    """The most that Python and numpy hold at once while the blocks go by."""
    sweep = asked(grid, method="s-sgd")
    tracemalloc.start()
    for _ in sweep.blocks():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def bounded() -> Iterator[Result]:
    small = peak_bytes({"grad_accum": "1:32:32", "inter": "1Gb/s@5us:800Gb/s@5us:4096"})
    large = peak_bytes({"grad_accum": "1:320:320", "inter": "1Gb/s@5us:800Gb/s@5us:4096"})
    yield Result(name="bounded: 20 blocks over 2 blocks", value=large / small, unit="x", target=1.2)
    yield Result(name="bounded: peak of a block of 65,536 points", value=large / 2**20, unit="MiB", target=256.0)


def main() -> int:
    return finish([*rates(), *bounded()], (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    raise SystemExit(main())
