"""Studies of a swarm: replications with confidence intervals, the smallest backup pool, money beside a datacentre.

Replication i has a seed of its own, derived from the seed and i alone; replications run on any number of processes
and are put together in order, so the answer is the same byte for byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from simkit.cost import ELECTRICITY_USD_PER_KWH
from simkit.des.streams import child_seed
from simkit.des.swarm import SwarmConfig, simulate
from simkit.des.swarm_outcome import Outcome
from simkit.errors import InputError, RefusedError
from simkit.spec.scenario import Scenario
from simkit.swarm_job import Job, job
from simkit.swarm_stats import mean_interval

LEVEL = 0.95
LARGEST_POOL = 4
"""Times the places: the largest backup pool that is looked at."""
DATACENTRE = "4xh100-pcie-80gb"
_SHARED = ("model", "precision", "optimizer", "seq_len", "global_batch", "micro_batch")


def replicate(config: SwarmConfig, *, replications: int = 1, workers: int = 1) -> list[Outcome]:
    """Independent runs, in order. The first one alone keeps what happened to each peer, where that is asked for."""
    _check_counts(replications, workers)
    configs = [
        replace(config, seed=child_seed(config.seed, i), record=config.record and i == 0) for i in range(replications)
    ]
    if workers == 1 or replications == 1:
        return [simulate(one) for one in configs]
    with ProcessPoolExecutor(max_workers=min(workers, replications)) as pool:
        return list(pool.map(simulate, configs))


def _check_counts(replications: int, workers: int) -> None:
    for name, value, most in (("replications", replications, 100_000), ("workers", workers, 1024)):
        if not 1 <= value <= most:
            raise InputError("is no count", key=name, value=value, hint=f"a whole number from 1 to {most}")


def _check_share(goodput_above: float) -> None:
    if not 0.0 < goodput_above <= 1.0:
        raise InputError("is no share", key="goodput_above", value=goodput_above, hint="between 0 and 1, as 0.9")


def summary(found: Sequence[Outcome], work: Job) -> dict[str, Any]:
    """What the runs say together: means, with 95 % intervals where there are several."""
    hours = found[0].horizon_s / 3600.0
    rates = {
        "goodput": [o.goodput for o in found],
        "useful_samples_per_s": [o.useful_hz * work.samples for o in found],
        "lost_work_fraction": [o.lost_fraction for o in found],
        "utilisation": [o.utilisation for o in found],
        "cost_usd_per_hour": [o.cost_usd / hours for o in found],
        "power_w": [o.energy_j / o.horizon_s for o in found],
        "recoveries": [float(o.counts.get("recovery", 0) + o.counts.get("handover", 0)) for o in found],
        "stalled_fraction": [sum(s.end_s - s.start_s for s in o.stalls) / o.horizon_s for o in found],
    }
    if work.tokens:
        rates["useful_tokens_per_s"] = [o.useful_hz * work.tokens for o in found]
    most = {"lost_work_fraction": 1.0, "stalled_fraction": 1.0, "utilisation": 1.0}
    if not may_gain(work.config):
        ideal_hz = max(o.ideal_hz for o in found)
        most |= {"goodput": 1.0, "useful_samples_per_s": ideal_hz * work.samples,
                 "useful_tokens_per_s": ideal_hz * work.tokens}  # fmt: skip
    answer: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for name, values in rates.items():
        mean, low, high = mean_interval(values, LEVEL, least=0.0, most=most.get(name, math.inf))
        answer[name] = mean
        if len(found) > 1:
            intervals[name] = [low, high]
    answer |= {"interval_95": intervals, "interval_method": _method(len(found), may_gain(work.config)),
               "replications": len(found), "hours": hours}  # fmt: skip
    return answer | _details(found, work)


def _method(runs: int, gains: bool) -> str:
    if runs == 1:
        return "none: this is one history, which has no interval; --replications 8 gives 95 % intervals"
    goodput = "goodput and rates from 0: newcomers may be faster" if gains else "rates from 0 to the one without churn"
    return f"95 %, Student's t over {runs} independent histories, cut to what can be (shares 0 to 100 %, {goodput})"


def may_gain(config: SwarmConfig) -> bool:
    """Whether newcomers can make a swarm faster than at its start: where all peers work, or where they are unlike."""
    kinds = {(p.flops, p.up_Bps, p.down_Bps, p.latency_s, p.region, p.relay) for p in config.peers}
    return config.wiring != "fixed" or len(kinds) > 1


def _details(found: Sequence[Outcome], work: Job) -> dict[str, Any]:
    runs = len(found)
    lost: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    time_by: Counter[str] = Counter()
    for one in found:
        lost.update(one.lost)
        counts.update(one.counts)
        time_by.update(one.time_by)
    units = found[0].units * found[0].horizon_s * runs
    shares = np.concatenate([o.peers["busy_s"] / np.maximum(o.peers["online_s"], 1e-9) for o in found])
    low, middle, high = np.quantile(shares, [0.1, 0.5, 0.9]).tolist()
    ideal = float(np.mean([o.ideal_hz for o in found]))
    return {
        "ideal_samples_per_s": ideal * work.samples,
        "micro_batches": {"done": sum(o.done for o in found) / runs, "useful": sum(o.useful for o in found) / runs,
                          "lost": {k: v / runs for k, v in sorted(lost.items())}},
        "events": {k: v / runs for k, v in sorted(counts.items())},
        "joins": sum(o.joins for o in found) / runs,
        "leaves": sum(o.leaves for o in found) / runs,
        "time_by_state": {k: v / units for k, v in sorted(time_by.items())},
        "detection_s": _mean([o.detection_s for o in found]),
        "takeover_s": _mean([o.takeover_s for o in found]),
        "recovery_s": _mean([o.recovery_s for o in found]),
        "moved_bytes": _mean([o.moved_bytes for o in found]),
        "broker_response_s": _mean([o.broker_response_s for o in found]),
        "utilisation_of_peers": {"p10": low, "p50": middle, "p90": high},
        "throughput_timeline": timeline(found, work),
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def timeline(found: Sequence[Outcome], work: Job) -> list[dict[str, float]]:
    """Means over the runs by time: peers there and spare, pipelines that run, micro-batches done and lost as samples/s.
    Work is lost when its peer is, so that useful may be negative for a while after a loss."""
    tables = {name: np.mean([o.samples[name] for o in found], axis=0) for name in found[0].samples}
    t_s = tables["t_s"]
    rows = []
    for i in range(1, len(t_s)):
        span = float(t_s[i] - t_s[i - 1])
        rows.append({
            "t_s": float(t_s[i]), "online": float(tables["online"][i]), "spares": float(tables["spares"][i]),
            "running": float(tables["running"][i]),
            "samples_per_s": float(tables["done"][i] - tables["done"][i - 1]) / span * work.samples,
            "useful_samples_per_s": float(tables["useful"][i] - tables["useful"][i - 1]) / span * work.samples,
        })  # fmt: skip
    return rows


def datacentre(scenario: Scenario, work: Job, cluster: str = DATACENTRE) -> dict[str, Any]:
    """The same network on a datacentre cluster, synchronous and without failures: rate, money and energy.

    Raises InputError where the cluster is none; why the job cannot be priced there is part of the answer.
    """
    from simkit.predict import predict_scenario

    plan = work.answer.plan
    fields: dict[str, Any] = {
        "model": scenario.get("model", work.answer.asked.resolved.model.name), "cluster": cluster,
        "optimizer": plan.optimizer, "precision": plan.precision,
    }  # fmt: skip
    if plan.seq_len:
        fields["seq_len"] = plan.seq_len
    try:
        report = predict_scenario(Scenario.of(fields, profiles=scenario.profiles, models=scenario.models), beside=False)
    except (InputError, RefusedError) as error:
        if isinstance(error, InputError) and error.key == "cluster":
            raise InputError(error.what, key="beside", value=cluster, hint=error.hint) from None
        return {"cluster": cluster, "why_not": str(error)}
    found: dict[str, Any] = {"cluster": cluster, "samples_per_s": report.samples_per_s, "fits": report.fits}
    found |= {k: v for k, v in report.cost.items() if k in ("cost_usd_per_hour", "power_w")}
    return found


def study(
    scenario: Scenario, *, replications: int = 1, workers: int = 1, goodput_above: float | None = None,
    beside: str | None = DATACENTRE, **knobs: Any,
) -> tuple[dict[str, Any], Job, list[Outcome]]:
    """(answer, job, runs) of one swarm. goodput_above: also the smallest backup pool that keeps it there; beside: the
    cluster to compare with. knobs: fields of `SwarmConfig`.

    Raises InputError and RefusedError as `simkit.swarm_job.job` does.
    """
    _check_counts(replications, workers)
    if goodput_above is not None:
        _check_share(goodput_above)
    work = job(scenario, **knobs)
    other = datacentre(scenario, work, beside) if beside else None
    answer: dict[str, Any] = {}
    if goodput_above is not None:
        pool, tried = smallest_pool(work.config, goodput_above, replications=replications, workers=workers)
        answer["backup_pool_for_goodput"] = {"goodput_above": goodput_above, "smallest": pool, "tried": tried}
        if pool is not None:
            work = replace(work, config=replace(work.config, backup_pool=pool))
    runs = replicate(work.config, replications=replications, workers=workers)
    answer = {"plan": plan_of(work), "backup_pool": work.config.backup_pool} | answer | summary(runs, work)
    answer |= money(answer, scenario, work, other)
    answer["assumptions"] = [*work.assumptions, *_assumed(work.config)]
    answer["warnings"] = list(_warnings(runs, work))
    return answer, work, runs


def plan_of(work: Job) -> dict[str, Any]:
    """The plan in figures."""
    cfg, cost = work.config, work.config.stages
    return {
        "peers": len(cfg.peers), "stages": cost.stages, "pipelines": cfg.pipelines, "micro_batch": work.samples,
        "micro_batches": cfg.micro_batches, "step_s": work.step_s, "wiring": cfg.wiring,
        "largest_state_bytes": float(cost.state_bytes.max()), "largest_stage_bytes": float(cost.memory_bytes.max()),
        "churn": cfg.churn.text, "mean_session_s": cfg.churn.mean_session_s(), "arrivals": cfg.arrivals,
    }  # fmt: skip


def money(
    answer: dict[str, Any], scenario: Scenario, work: Job, other: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Time, money and energy of a million samples and of the job, by rental and by electricity, beside `datacentre`."""
    rate = answer["useful_samples_per_s"]
    electricity = scenario.get("electricity", ELECTRICITY_USD_PER_KWH)
    found: dict[str, Any] = {"electricity_usd_per_hour": answer["power_w"] / 1000.0 * electricity}
    if rate > 0.0:
        found["usd_per_million_samples"] = answer["cost_usd_per_hour"] / 3600.0 / rate * 1e6
        found["kwh_per_million_samples"] = answer["power_w"] / rate * 1e6 / 3.6e6
        samples = scenario.get("samples")
        if scenario.given("tokens") and work.tokens:
            samples = scenario.get("tokens") * work.samples / work.tokens
        if samples:
            found |= {"time_to_end_s": samples / rate, "cost_usd": samples / 1e6 * found["usd_per_million_samples"],
                      "energy_j": samples / rate * answer["power_w"]}  # fmt: skip
    if other:
        theirs = other.get("samples_per_s")
        if theirs:
            other["throughput_ratio"] = rate / theirs
            if "cost_usd_per_hour" in other:
                other["usd_per_million_samples"] = other["cost_usd_per_hour"] / 3600.0 / theirs * 1e6
            if "power_w" in other:
                other["kwh_per_million_samples"] = other["power_w"] / theirs * 1e6 / 3.6e6
        found["datacentre"] = other
    return found


def smallest_pool(
    config: SwarmConfig, goodput_above: float, *, replications: int, workers: int
) -> tuple[int | None, list[dict[str, Any]]]:
    """(the smallest backup pool whose mean goodput is at least that, every pool tried); None where none up to
    `LARGEST_POOL` times the places does. Doubling, then bisection, with the same lives of peers for every pool.

    Raises InputError for a share outside (0, 1], and RefusedError where peers are never spare.
    """
    _check_share(goodput_above)
    if config.wiring != "fixed":
        raise RefusedError("with stochastic wiring every peer works and there is no backup pool; give --wiring fixed")
    tried: dict[int, tuple[float, float, float]] = {}
    alike = not may_gain(config)

    def enough(pool: int) -> bool:
        runs = replicate(replace(config, backup_pool=pool, record=False), replications=replications, workers=workers)
        tried[pool] = mean_interval([o.goodput for o in runs], LEVEL, least=0.0, most=1.0 if alike else math.inf)
        return tried[pool][0] >= goodput_above

    low, high, most = -1, 0, LARGEST_POOL * config.slots
    while not enough(high):
        low, high = high, max(1, 2 * high)
        if high > most:
            return None, _tried(tried)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high, _tried(tried)


def _tried(tried: dict[int, tuple[float, float, float]]) -> list[dict[str, Any]]:
    return [
        {"backup_pool": pool, "goodput": mean} | ({} if math.isnan(low) else {"interval_95": [low, high]})
        for pool, (mean, low, high) in sorted(tried.items())
    ]


def _assumed(cfg: SwarmConfig) -> list[str]:
    """What the simulation takes for granted."""
    return [
        f"heartbeat = {cfg.heartbeat_s:g} s, given up after {cfg.misses} misses",
        f"startup = {cfg.startup_s:g} s from registration to being usable",
        f"checkpoint every {cfg.checkpoint_interval_s:g} s to {cfg.checkpoint_servers} server(s) of "
        f"{cfg.checkpoint_Bps * 8e-9:g} Gb/s",
        "a pipeline that stood still catches up with the others at its next exchange",
        "idle peers draw a tenth of their board power; peers are paid while they are there, spare ones too",
    ]


def _warnings(runs: Sequence[Outcome], work: Job) -> list[str]:
    found = list(work.warnings)
    ended = [o for o in runs if o.stalls and o.stalls[-1].end_s >= o.horizon_s]
    if ended:
        found.append(f"{len(ended)} of {len(runs)} runs end in a stall: {ended[0].stalls[-1].reason}")
    lost = sum(o.counts.get("block lost", 0) for o in runs) / len(runs)
    if lost:
        found.append(f"{lost:.3g} times a run the last holder of a stage left, and all went back to a checkpoint")
    return found


__all__ = ["Job", "datacentre", "replicate", "smallest_pool", "study", "summary", "timeline"]
