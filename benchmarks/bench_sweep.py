"""Times grids: points a second on one core, and the memory they take.

Run: python benchmarks/bench_sweep.py [--check]

bandwidths  4,000 rates of the network between nodes x 16 others (4 micro-batches x 4 accumulations), BERT-large
ranks       4,000 rates x 16 ranks of ACP-SGD: every rank has buffers, and so collectives, of its own
sharded     4,000 rates x degrees x batches of GPT-3 175B on 1,024 GPUs under TP, PP and DP, of Llama-2 70B under ZeRO,
            and of a mixture of experts
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
LARGE: dict[str, Any] = {"model": "gpt3-175b", "cluster": "128x8xa100", "seq_len": 2048, "stack": "megatron"}
DEGREES = {"tp": "1,2,4,8", "pp": "1,2,4,8"}
SHARDED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "tp, pp, micro-batch": (DEGREES | {"micro_batch": "1,2,4", "inter": RATES}, {"grad_accum": 16}),
    "tp, pp, global batch": (DEGREES | {"global_batch": "1024:4096:*2", "inter": RATES}, {"micro_batch": 1}),
    "rates first": ({"inter": RATES} | DEGREES | {"micro_batch": "1,2,4"}, {"grad_accum": 16}),
    "16 stages": ({"pp": "16", "micro_batch": "1,2,4", "global_batch": "1024:4096:*2", "inter": RATES}, {"tp": 8}),
    "interleaved": ({"vpp": "1,2,4", "grad_accum": "16,32", "inter": RATES}, {"tp": 8, "pp": 4, "micro_batch": 1}),
    "zero": (
        {"zero": "0,1,2,3", "tp": "1,2,8", "micro_batch": "1,2,4,8", "inter": RATES},
        {"model": "llama-2-70b", "stack": "pytorch", "grad_accum": 2},
    ),
    "experts": (
        {"ep": "1,4,8", "tp": "2,4", "grad_accum": "16,32", "inter": RATES},
        {"model": "mixtral-8x22b", "pp": 2, "micro_batch": 1},
    ),
}


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


def sharded() -> Iterator[Result]:
    for name, (grid, fields) in SHARDED.items():
        found = rate(grid, repeat=2, **(LARGE | {"precision": "bf16"} | fields))
        yield Result(name=f"sharded, {name} x 4,000 rates", value=found, unit="/s", target=TARGET, at_least=True)
    degrees = DEGREES | {"zero": "0,1", "recompute": "none,full", "micro_batch": "1,2,4", "grad_accum": "8,16"}
    few = rate(degrees, repeat=2, **(LARGE | {"precision": "bf16"}))
    yield Result(name="sharded, 64 plans x 6 batches, one network", value=few, unit="/s")


def peak_bytes(grid: dict[str, str], **fields: Any) -> int:
    """The most that Python and numpy hold at once while the blocks go by."""
    sweep = asked(grid, method="s-sgd", **fields)
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
    plan = LARGE | {"precision": "bf16", "tp": 8, "pp": 16, "micro_batch": 1}
    few, many = (peak_bytes({"grad_accum": f"16:{n}:{n - 15}", "inter": RATES}, **plan) for n in (47, 335))
    yield Result(name="bounded: sharded, 20 blocks over 2 blocks", value=many / few, unit="x", target=1.2)
    yield Result(name="bounded: sharded, peak of a block", value=many / 2**20, unit="MiB", target=256.0)


def main() -> int:
    return finish([*rates(), *sharded(), *bounded()], (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    raise SystemExit(main())
