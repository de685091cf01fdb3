"""Is it fast and lean? Loose bounds that hold on a busy machine; `benchmarks/bench_predict.py --check` has the targets.

Times are compared with a yardstick in the same process or run alternately with it, so that a slow machine slows both.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

from simkit.des.network import Collective, replay
from simkit.predict import predict

YARDSTICK = "import numpy, rich.table; from pydantic import BaseModel"
PREDICT = (
    "from simkit.cli import main; main('predict --cluster 8x4x2080ti --inter 10gbe --model bert-large --method acp-sgd "
    "--rank 32 --micro-batch 8 --seq-len 64 --precision fp32 --json'.split())"
)
JOB = {"model": "resnet-50", "precision": "fp32", "method": "s-sgd"}


def wall_s(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def cpu_s(run: Callable[[], object], repeat: int = 7) -> float:
    """Median CPU-seconds of one call, after one that is not counted."""
    run()
    found = []
    for _ in range(repeat):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return statistics.median(found)


def asked(cluster: str, count: int = 40) -> Callable[[], None]:
    """`count` predictions, no two alike: the bandwidth changes every time, the batch often."""
    turn = itertools.count()

    def run() -> None:
        for _ in range(count):
            i = next(turn)
            predict(**JOB, cluster=cluster, inter=f"{10 + i * 1e-6:.6f}Gb/s@50us", micro_batch=16 + i % 32)

    return run


def test_a_cold_command_costs_little_more_than_its_imports() -> None:
    pairs = [(wall_s(YARDSTICK), wall_s(PREDICT)) for _ in range(5)]
    # The target is 2; each pair ran side by side.
    assert statistics.median(predicted / base for base, predicted in pairs) < 3.0


def test_a_warm_prediction_is_a_few_hundred_array_operations() -> None:
    values = np.linspace(0.0, 1.0, 200)

    def yardstick() -> None:
        for _ in range(4000):
            np.maximum(values, 0.5)

    operation_s = cpu_s(yardstick) / 4000
    prediction_s = cpu_s(asked("8x4x2080ti")) / 40
    assert prediction_s < 3000 * operation_s, f"{prediction_s / operation_s:.0f} array operations"


@pytest.mark.parametrize(("small", "large"), [("1x8x2080ti", "2048x8x2080ti"), ("2x1x3080", "16384x1x3080")])
def test_the_closed_form_costs_the_same_for_any_number_of_gpus(small: str, large: str) -> None:
    assert cpu_s(asked(large)) < 2.5 * cpu_s(asked(small))


def test_a_step_of_1024_ranks_is_simulated_in_seconds() -> None:
    work = np.random.default_rng(0).random(1024) * 1e-3
    start = time.process_time()
    done = replay([Collective(duration_s=1e-3, work_s=work) for _ in range(97)], 1024)
    assert done.events >= 1024 * 97
    # The target is 2 CPU-seconds, the best peer takes 19.
    assert time.process_time() - start < 6.0
