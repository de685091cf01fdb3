"""Times the network model: a price, an array of bucket sizes, a simulated ring, a replayed step.

Run: python benchmarks/bench_network.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from simkit.des.network import Collective, replay, simulate, star
from simkit.network import collective, seconds_fn
from simkit.spec.cluster import cluster

SHAPE, _ = cluster("4x8xh100", intra="nvlink4", inter="400gbe-rdma", nics_per_node=8)
BUCKETS = np.full(97, 25e6)
FAST = seconds_fn("all_reduce", cluster=SHAPE)
WORK = np.random.default_rng(0).random(1024) * 1e-3


def replay_step() -> int:
    return replay([Collective(duration_s=1e-3, work_s=WORK) for _ in range(97)], 1024).events


def ring_of_64() -> float:
    return simulate("all_reduce", algorithm="ring", nbytes=1e8, topology=star(64, Bps=1.25e9, alpha_s=50e-6))


CASES: dict[str, tuple[Callable[[], object], int, str]] = {
    "collective(), one size": (lambda: collective("all_reduce", nbytes=1e8, cluster=SHAPE), 500, "us"),
    "seconds_fn, 97 buckets": (lambda: FAST(BUCKETS), 5000, "us"),
    "simulated ring, 64 ranks": (ring_of_64, 5, "ms"),
    "replay, 1024 ranks x 97": (replay_step, 5, "ms"),
}


def main() -> None:
    scale = {"us": 1e6, "ms": 1e3}
    for name, (run, repeat, unit) in CASES.items():
        run()
        found = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(repeat):
                run()
            found.append((time.process_time() - start) / repeat)
        print(f"{name:28s} {statistics.median(found) * scale[unit]:9.1f} {unit}")


if __name__ == "__main__":
    main()
