"""Times what a user waits for: a cold command, warm predictions, large clusters, a simulated step.

Run: python benchmarks/bench_predict.py [--check]

cold   median of interleaved runs of the command over that of the imports any peer pays for (numpy, rich, pydantic)
warm   predictions a second in one process, each a different question: bandwidth, batch or rank changes every time;
       data parallel, and GPT-3 175B under TP, PP, DP and ZeRO
flat   warm cost at 16,384 GPUs over that at 8, and under TP and PP over that at 64
replay 1,024 ranks x 97 collectives with an event per rank and collective
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _timing import Result, finish, median_s

from simkit.des.network import Collective, replay
from simkit.predict import predict

YARDSTICK = "import numpy, rich.table; from pydantic import BaseModel"
JOB = (
    "predict --cluster 8x4x2080ti --inter 10gbe --model bert-large --method acp-sgd --rank 32 --micro-batch 8 "
    "--seq-len 64 --precision fp32"
)
BASE: dict[str, Any] = {"cluster": "8x4x2080ti", "precision": "fp32"}
CONV = {"model": "resnet-50", "micro_batch": 64}
BERT = {"model": "bert-large", "seq_len": 64, "micro_batch": 8}
CASES: dict[str, dict[str, Any]] = {
    "resnet-50 s-sgd": CONV | {"method": "s-sgd"},
    "resnet-50 acp-sgd": CONV | {"method": "acp-sgd", "rank": 4},
    "resnet-50 power-sgd": CONV | {"method": "power-sgd", "rank": 4},
    "bert-large s-sgd": BERT | {"method": "s-sgd"},
    "bert-large acp-sgd": BERT | {"method": "acp-sgd", "rank": 32},
    "bert-large power-sgd": BERT | {"method": "power-sgd", "rank": 32},
}
GPT = {"model": "gpt3-175b", "precision": "bf16", "stack": "megatron", "seq_len": 2048, "recompute": "full"}
SHARDED: dict[str, dict[str, Any]] = {
    "96 layers, tp 8, pp 8, dp 24": GPT | {"cluster": "192x8xa100", "tp": 8, "pp": 8, "micro_batch": 4},
    "96 layers, tp 8, pp 12, zero 1": GPT | {"cluster": "192x8xa100", "tp": 8, "pp": 12, "zero": 1, "micro_batch": 1},
    "96 layers, zero 3": GPT | {"cluster": "192x8xa100", "stack": "pytorch-fsdp", "zero": 3, "micro_batch": 1},
}
WALK = {"bandwidth": 0.5, "batch": 0.4, "rank": 0.1}
"""How often a question differs from the one before in each of these, the way a sweep or a search walks."""


def _wall(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    return time.perf_counter() - start


def cold(rounds: int = 15) -> Iterator[Result]:
    """Interleaved, so that a busy machine slows all three alike."""
    simkit = str(Path(sysconfig.get_path("scripts")) / "simkit")
    commands = {
        "yardstick": [sys.executable, "-c", YARDSTICK],
        "text": [simkit, *JOB.split()],
        "json": [simkit, *JOB.split(), "--json"],
        "50x3080": [simkit, "predict", "--cluster", "50x3080"],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            seconds = _wall(command)
            if turn:
                found[name].append(seconds)
    base = statistics.median(found.pop("yardstick"))
    yield Result(name="cold: the imports numpy, rich.table, pydantic", value=base * 1e3, unit="ms")
    for name, values in found.items():
        share = statistics.median(values) / base
        yield Result(name=f"cold: simkit predict ({name}), of that", value=share, unit="x", target=2.0)


def questions(fields: dict[str, Any], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Endless questions about one job, no two alike."""
    rng = np.random.default_rng(seed)
    kinds, odds = list(WALK), list(WALK.values())
    now: dict[str, Any] = BASE | fields | {"inter": "10Gb/s@50us"}
    batch, rank = now["micro_batch"], now.get("rank", 0)
    for turn in itertools.count():
        kind = kinds[int(rng.choice(len(kinds), p=odds))]
        if kind == "bandwidth" or (kind == "rank" and not rank):
            now |= {"inter": f"{1 + 99 * rng.random():.6f}Gb/s@50us"}
        elif kind == "batch":
            now |= {"micro_batch": int(rng.integers(1, 2 * batch)), "grad_accum": 1 + turn}
        else:
            now |= {"rank": int(rng.integers(1, 2 * rank))}
        yield dict(now)


def rate(fields: dict[str, Any], count: int = 1500) -> float:
    """Warm predictions a CPU-second; the questions are drawn beforehand."""
    asked = list(itertools.islice(questions(fields), count + 50))
    for question in asked[:50]:
        predict(**question)
    start = time.process_time()
    for question in asked[50:]:
        predict(**question)
    return count / (time.process_time() - start)


def warm() -> Iterator[Result]:
    rates = {name: rate(fields) for name, fields in (CASES | SHARDED).items()}
    for name, value in rates.items():
        yield Result(name=f"warm: {name}", value=value, unit="/s", target=3000.0, at_least=True)


def flat(small: int, large: int, device: str, **fields: Any) -> float:
    """Cost of a prediction at `large` over that at `small` GPUs, bandwidth changing each time."""

    def ask(nodes: int) -> Callable[[], None]:
        turn = itertools.count()

        def run() -> None:
            for _ in range(50):
                inter = f"{10 + next(turn) * 1e-6:.6f}Gb/s@50us"
                predict(**fields, cluster=f"{nodes}x8x{device}", inter=inter)

        return run

    # Alternately, and the least of each: a neighbour on the machine can only add to it.
    runs = {nodes: ask(nodes) for nodes in (small // 8, large // 8)}
    found: dict[int, list[float]] = {nodes: [] for nodes in runs}
    for _ in range(7):
        for nodes, run in runs.items():
            found[nodes].append(median_s(run, repeat=1))
    return min(found[large // 8]) / min(found[small // 8])


def replay_s(ranks: int = 1024, collectives: int = 97) -> float:
    """CPU-seconds of one simulated step in which every rank takes part in every collective."""
    work = np.random.default_rng(0).random(ranks) * 1e-3
    plan = [Collective(duration_s=1e-3, work_s=work) for _ in range(collectives)]
    start = time.process_time()
    if replay(plan, ranks).events < ranks * collectives:
        raise RuntimeError("an event per rank and collective was not simulated")
    return time.process_time() - start


def main() -> int:
    results = [*cold(), *warm()]
    plain = flat(8, 16384, "2080ti", **CONV, method="s-sgd", precision="fp32")
    results.append(Result(name="flat: 16,384 GPUs over 8 GPUs", value=plain, unit="x", target=1.5))
    sharded = flat(64, 16384, "a100", **(GPT | {"tp": 4, "pp": 4, "micro_batch": 1, "grad_accum": 16}))
    results.append(Result(name="flat: sharded, 16,384 GPUs over 64 GPUs", value=sharded, unit="x", target=1.5))
    results.append(Result(name="replay: 1,024 ranks x 97 collectives", value=replay_s(), unit="CPU-s", target=2.0))
    return finish(results, (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    raise SystemExit(main())
