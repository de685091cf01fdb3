"""How the simulation of a swarm scales: peers against CPU seconds and memory, for a day of churn.

Pipelines of 50 stages, exponential sessions of 4 h, a tenth of the peers spare, both wirings. Bars: 10,000 peers within
120 s on one core and 2 GB; cost grows with an exponent of at most 1.2 from 100 to 10,000 peers.

Run: python benchmarks/bench_swarm.py [--check]
"""

from __future__ import annotations

import math
import resource
import sys
import time

from _timing import Result, finish

from simkit.churn._common import churn
from simkit.des.swarm import SwarmConfig, simulate
from simkit.spec.peers import Peer
from simkit.spec.stage import uniform

STAGES, SIZES = 50, (100, 1000, 10_000)
BAR_S, BAR_GB, BAR_EXPONENT = 120.0, 2.0, 1.2


def config(count: int, wiring: str) -> SwarmConfig:
    peers = tuple(
        Peer(name=f"p{i}", device="x", flops=1.0, memory_bytes=1e10, up_Bps=6.25e7, down_Bps=1.25e8, latency_s=0.01,
             price_usd_per_hour=0.15, power_w=320.0)
        for i in range(count)
    )  # fmt: skip
    cost = uniform(STAGES, forward_s=0.05, activation_bytes=4e6, state_bytes=1e9, memory_bytes=8e9)
    return SwarmConfig(stages=cost, peers=peers, pipelines=count // STAGES, churn=churn("exponential:4h"),
                       horizon_s=86400.0, micro_batches=64, backup_pool=count // 10, wiring=wiring)  # fmt: skip


def main() -> int:
    results = []
    for wiring in ("fixed", "stochastic"):
        took = {}
        for count in SIZES:
            cfg = config(count, wiring)
            start = time.process_time()
            found = simulate(cfg)
            took[count] = time.process_time() - start
            gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            name = f"{count} peers, {wiring}: {found.events} events, goodput {found.goodput:.0%}"
            largest = count == SIZES[-1]
            results.append(Result(name=name, value=took[count], unit="s", target=BAR_S if largest else None))
            if largest:
                results.append(Result(name="largest memory so far", value=gb, unit="GB", target=BAR_GB))
        span = math.log(SIZES[-1] / SIZES[0])
        exponent = math.log(took[SIZES[-1]] / took[SIZES[0]]) / span
        results.append(Result(name=f"exponent, {wiring}", value=exponent, unit="", target=BAR_EXPONENT))
    return finish(results, (__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
