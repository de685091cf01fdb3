"""The simulation of swarms against queueing and renewal theory: theory, simulated, and the 99 % interval.

Each row simulates independent replications and asks whether the exact value of theory lies in the interval of their
mean. Sources stand beside the formulas.

Run: python benchmarks/swarm_oracles.py [--check] [--scale 1] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simkit.churn._common import churn
from simkit.des.clock import Clock
from simkit.des.fluid import Fluid
from simkit.des.streams import child_seed
from simkit.des.swarm import Swarm, SwarmConfig, simulate
from simkit.des.swarm_broker import Broker
from simkit.spec.peers import Peer
from simkit.spec.stage import uniform
from simkit.swarm_stats import mean_interval

LEVEL = 0.99
DAY_S, HOUR_S = 86400.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. values: of the replications."""

    name: str
    theory: float
    values: tuple[float, ...]

    @property
    def interval(self) -> tuple[float, float, float]:
        return mean_interval(self.values, LEVEL)

    @property
    def met(self) -> bool:
        mean, low, high = self.interval
        # A simulation without chance has an interval of no width: equal to rounding.
        return low <= self.theory <= high or abs(mean - self.theory) <= 1e-9 * abs(self.theory)

    def __str__(self) -> str:
        mean, low, high = self.interval
        verdict = "within" if self.met else "OUTSIDE"
        return f"{self.name:66s} {self.theory:11.6g} {mean:11.6g} [{low:.6g}, {high:.6g}] {verdict}"


def peers(count: int, **fields: Any) -> tuple[Peer, ...]:
    given = {"flops": 1.0, "memory_bytes": 1e10, "up_Bps": 1e8, "down_Bps": 1e8} | fields
    return tuple(Peer(name=f"p{i}", device="x", **given) for i in range(count))


def config(count: int, *, horizon_s: float, **fields: Any) -> SwarmConfig:
    """A swarm in which nothing but the question at hand takes time."""
    given: dict[str, Any] = {
        "stages": uniform(1, forward_s=1.0), "peers": peers(count), "churn": churn("exponential:4h"),
        "heartbeat_s": 1e-6, "misses": 1, "broker_s": 0.0, "startup_s": 0.0, "patience_s": 1e12, "bins": 1,
    }
    return SwarmConfig(horizon_s=horizon_s, **(given | fields))


def queue(law: str, load: float, scale: float, seed: int) -> float:
    """Mean response of the broker, for a mean service of one second."""
    rng = np.random.default_rng([seed, 1])
    clock = Clock()
    broker = Broker(clock, mean_s=1.0, law=law, rng=np.random.default_rng([seed, 2]))
    for at in np.cumsum(rng.exponential(1.0 / load, int(20_000 * scale))).tolist():
        clock.at(at, broker.ask, lambda: None)
    clock.run(math.inf)
    return broker.response_s / broker.requests


def sharing(pareto: bool, load: float, scale: float, seed: int) -> float:
    """Mean response of flows that share one port of 1 B/s fairly; mean size 1."""
    rng = np.random.default_rng(seed)
    count = int(6_000 * scale)
    sizes = (rng.pareto(3.0, count) + 1.0) * 2.0 / 3.0 if pareto else rng.exponential(1.0, count)
    clock, spent = Clock(), []
    fluid = Fluid(clock)
    fluid.port("up", 1.0)

    def start(size: float) -> None:
        begin = clock.now
        fluid.add(("up",), size, lambda flow: spent.append(clock.now - begin))

    for at, size in zip(np.cumsum(rng.exponential(1.0 / load, count)).tolist(), sizes.tolist(), strict=True):
        clock.at(at, start, size)
    clock.run(1e12)
    return float(np.mean(spent))


def star(flows: int) -> float:
    """Seconds of `flows` equal downloads of 100 bytes from 1000 B/s, each line 50 B/s."""
    clock, ends = Clock(), []
    fluid = Fluid(clock)
    fluid.port("server", 1000.0)
    for i in range(flows):
        fluid.port(("down", i), 50.0)
        fluid.add(("server", ("down", i)), 100.0, lambda flow: ends.append(clock.now))
    clock.run(1e9)
    return max(ends)


def joins_per_s(law: str, scale: float, seed: int) -> float:
    cfg = config(200, horizon_s=2.0 * DAY_S * scale, churn=churn(law), seed=seed)
    return simulate(cfg).joins / cfg.horizon_s


def online(law: str, scale: float, seed: int) -> float:
    """Mean number of peers there, beginning in the stationary state."""
    found = simulate(config(200, horizon_s=2.0 * DAY_S * scale, churn=churn(law), seed=seed, bins=200))
    return float(found.samples["online"].mean())


def everybody(need: int, spares: int, scale: float, seed: int) -> float:
    """Share of the time in which all of `need` places are filled, spares included in the machine-repair model."""
    cfg = config(need, horizon_s=20.0 * DAY_S * scale, stages=uniform(need, forward_s=1.0), backup_pool=spares,
                 arrivals="recruit", recruit_s=HOUR_S, churn=churn("exponential:8h"), seed=seed)
    return simulate(cfg).time_by["running"] / cfg.horizon_s


def binomial_tail(n: int, k: int, p: float) -> float:
    """P(Binomial(n, p) >= k): the stationary law of the birth-death chain of n independent machines."""
    return sum(math.comb(n, i) * p**i * (1.0 - p) ** (n - i) for i in range(k, n + 1))


STAGES, STATE_BYTES, BEAT_S, MISSES, MEAN_S = 8, 2e10, 20.0, 3, 4 * HOUR_S


def takeover(scale: float, seed: int) -> float:
    """Share of the time in which a pipeline runs when each loss takes detection and a transfer of 200 s."""
    cfg = config(STAGES, horizon_s=20.0 * DAY_S * scale, replacement="checkpoint", checkpoint_servers=STAGES,
                 stages=uniform(STAGES, forward_s=1.0, state_bytes=STATE_BYTES), backup_pool=60, misses=MISSES,
                 heartbeat_s=BEAT_S, checkpoint_Bps=1e9, checkpoint_interval_s=1e12, seed=seed)
    return simulate(cfg).time_by["running"] / cfg.horizon_s


def takeover_theory() -> float:
    """Alternating renewal: each place is up for m, then down for (d + m (1 - e^(-L/m))) e^(L/m), since a newcomer may
    leave while it loads and is missed as slowly (Cox, "Renewal Theory", section 7); places are independent."""
    lost_s, load_s = (MISSES - 0.5) * BEAT_S, STATE_BYTES / 1e8
    down_s = (lost_s + MEAN_S * -math.expm1(-load_s / MEAN_S)) * math.exp(load_s / MEAN_S)
    return float((MEAN_S / (MEAN_S + down_s)) ** STAGES)


TAU_S, DUMP_S, RESTART_S, MTBF_S = 900.0, 60.0, 120.0, 2 * HOUR_S


def daly(scale: float, seed: int) -> float:
    """Goodput of one machine with checkpoints that stop it."""
    cfg = config(1, horizon_s=20.0 * DAY_S * scale, churn=churn("exponential:2h"), backup_pool=40,
                 stages=uniform(1, forward_s=0.1, backward_s=0.0, state_bytes=RESTART_S * 1e8),
                 replacement="checkpoint", checkpoint_interval_s=TAU_S, checkpoint_s=DUMP_S, checkpoint_Bps=1e12,
                 seed=seed)
    return simulate(cfg).goodput


def daly_theory() -> float:
    """tau / (M e^(R/M) (e^((tau + C)/M) - 1)) (Daly, FGCS 22 (2006) 303-312)."""
    segment = MTBF_S * math.exp(RESTART_S / MTBF_S) * math.expm1((TAU_S + DUMP_S) / MTBF_S)
    return TAU_S / segment


def evening(scale: float, seed: int) -> float:
    """Peers at 30 h of the third day over their mean, under arrivals that follow the clock."""
    found = simulate(config(400, horizon_s=78.0 * HOUR_S, churn=churn("day-night:4h,amplitude=0.8,peak=2h"), seed=seed))
    return float(found.samples["online"][-1]) / 400.0


def evening_theory() -> float:
    """M(t)/M/inf (Eick, Massey, Whitt 1993): 1 + a (cos x + w m sin x)/(1 + w^2 m^2), x = w (t - peak)."""
    w = 2.0 * math.pi / DAY_S
    x, wm = w * (78.0 - 2.0) * HOUR_S, w * 4.0 * HOUR_S
    return 1.0 + 0.8 * (math.cos(x) + wm * math.sin(x)) / (1.0 + wm * wm)


def spread(scale: float, seed: int) -> float:
    """Variance of the number of peers over its mean, from samples a session apart and more."""
    found = simulate(config(100, horizon_s=20.0 * DAY_S * scale, churn=churn("exponential:1h"), seed=seed, bins=160))
    return float(found.samples["online"][1:].var(ddof=1)) / 100.0


def mesh_hole(scale: float, seed: int) -> float:
    """Share of the time in which a stage of a mesh has nobody."""
    cfg = config(6, horizon_s=20.0 * DAY_S * scale, wiring="stochastic", churn=churn("exponential:2h"), seed=seed)
    return 1.0 - simulate(cfg).time_by["running"] / cfg.horizon_s


Case = tuple[str, float, Callable[[int], float]]


def rows(scale: float, seed: int, runs: int, *, only: Sequence[str] = ("",)) -> Iterator[Row]:
    """All comparisons, or those whose names hold one of `only`. scale: length of each replication; runs: how many."""
    for name, theory, run in cases(scale):
        if any(part in name for part in only):
            count = 2 if "max-min" in name else runs
            yield Row(name=name, theory=theory, values=tuple(run(child_seed(seed, i)) for i in range(count)))


def cases(scale: float) -> Iterator[Case]:
    """(what, its exact value, how to simulate it from a seed)."""
    # Kleinrock I: M/M/1 1/(mu - lambda); M/G/1 E[S] + lambda E[S^2]/(2 (1 - rho)).
    yield ("M/M/1 response of the broker, load 0.5 (s)", 2.0, lambda s: queue("exponential", 0.5, scale, s))
    yield ("M/M/1 response of the broker, load 0.7 (s)", 10.0 / 3.0, lambda s: queue("exponential", 0.7, scale, s))
    yield ("M/D/1 response of the broker, load 0.7 (s)", 1.0 + 0.7 / 0.6,
              lambda s: queue("deterministic", 0.7, scale, s))
    yield ("M/G/1 response of the broker, uniform service, load 0.7 (s)", 1.0 + 0.7 * (4.0 / 3.0) / 0.6,
              lambda s: queue("uniform", 0.7, scale, s))
    # Kleinrock II, section 4.4: E[S]/(1 - rho), whatever the law.
    yield ("M/M/1-PS response of flows on a line, load 0.5 (s)", 2.0, lambda s: sharing(False, 0.5, scale, s))
    yield ("M/G/1-PS response of flows, Pareto sizes, load 0.5 (s)", 2.0, lambda s: sharing(True, 0.5, scale, s))
    yield ("max-min limit: 10 downloads, lines bind (s)", 2.0, lambda s: star(10))
    yield ("max-min limit: 400 downloads, the server binds (s)", 40.0, lambda s: star(400))
    for law in ("exponential:4h", "weibull:4h,shape=0.6", "pareto:4h,alpha=3"):
        yield (f"join rate N/mean session, {law} (1/h)", 50.0, lambda s, k=law: joins_per_s(k, scale, s) * HOUR_S)
        yield (f"peers there under M/G/inf, {law}", 200.0, lambda s, k=law: online(k, scale, s))
    yield ("variance over mean of the number of peers (Poisson)", 1.0, lambda s: spread(scale, s))
    yield ("peers at an hour of the day, M(t)/M/inf (over mean)", evening_theory(), lambda s: evening(scale, s))
    for need, spares in ((5, 0), (5, 2), (12, 3)):
        theory = binomial_tail(need + spares, need, 8.0 / 9.0)
        yield (f"all of {need} places filled, {spares} spares (machine repair)", theory,
                  lambda s, n=need, b=spares: everybody(n, b, scale, s))
    yield ("pipeline of 8 up: detection and takeover (alternating renewal)", takeover_theory(),
              lambda s: takeover(scale, s))
    yield ("goodput under checkpoints that stop the job (Daly)", daly_theory(), lambda s: daly(scale, s))
    # Poisson number there: P(N = 0) = e^-6.
    yield ("stage of a mesh without peers, M/G/inf of mean 6", math.exp(-6.0), lambda s: mesh_hole(scale, s))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when theory lies outside an interval")
    parser.add_argument("--scale", type=float, default=1.0, help="length of each replication")
    parser.add_argument("--runs", type=int, default=20, help="replications of each row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    sys.stdout.write(f"{'':66s} {'theory':>11s} {'simulated':>11s} 99 % interval\n")
    start, failed = time.process_time(), 0
    for row in rows(args.scale, args.seed, args.runs):
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        failed += not row.met
    sys.stdout.write(f"{failed} outside; {time.process_time() - start:.0f} s\n")
    return int(args.check and failed > 0)


__all__ = ["Row", "Swarm", "main", "rows"]

if __name__ == "__main__":
    sys.exit(main())
