"""Failures, checkpoints and restarts of a synchronous job: goodput, expected time and money to the end.

One failure anywhere stops the whole job, which restarts from its last checkpoint. With failures a Poisson process of
rate 1/M, useful work in segments of length tau, each followed by a checkpoint of length C that stops the job, and
every failure followed by a restart of length R that may itself fail and then starts over,

    M            = MTBF of one GPU / GPUs
    E[segment]   = M e^(R/M) (e^((tau+C)/M) - 1)              exact (Daly 2006, the complete cost function)
    E[T]         = W/tau · E[segment]                         W: the time the work takes without failures
    goodput      = W / E[T] = tau / E[segment]
    tau (Young)  = sqrt(2 C M)
    tau (Daly)   = sqrt(2 C M) (1 + sqrt(C/2M)/3 + C/18M) - C   for C < 2M, else M
    tau (exact)  = M (1 + W0(-e^(-1-C/M))), that is  x + C/M + ln(1-x) = 0  with x = tau/M

What is not goodput divides into checkpoints (goodput · C/tau), restarts (1 - e^(-R/M): the share of all time spent
restarting, whatever tau is) and work done twice (the rest); the expected number of failures is E[T]/M.
All functions take arrays of any shapes that broadcast. Seconds and bytes throughout.

Sources: J. T. Daly, Future Generation Computer Systems 22 (2006) 303-312, doi:10.1016/j.future.2004.11.016; J. W.
Young, Communications of the ACM 17 (1974) 530-531. Defaults: The Llama 3 Herd of Models (arXiv 2407.21783), sections
3.3.1 and 3.3.4; MegaScale (arXiv 2402.15627), section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simkit.errors import InputError
from simkit.memory_facts import OPTIMIZER_STATES
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.spec.resolve import Resolved
from simkit.spec.scenario import FIELDS, Scenario
from simkit.units import format_Bps, format_s, parse

Array = NDArray[np.float64]

MTBF_HOURS = 54 * 24 * 16384 / 419
"""GPU-hours a failure: 419 unexpected interruptions of Llama 3 405B in 54 days on 16,384 H100 (arXiv 2407.21783,
section 3.3.4); hosts, network and software are in it."""
CHECKPOINT_BPS_PER_GPU = 2e12 / 16384
"""The sustained 2 TB/s of the storage of that run over its GPUs (arXiv 2407.21783, section 3.3.1)."""
RESTART_S = 600.0
"""From the failure to the first new step: MegaScale detects and recovers in less than 10 minutes on average
(arXiv 2402.15627, section 6); its upper end."""
FAILURE_FIELDS = tuple(name for name, spec in FIELDS.items() if spec.group == "failures")
_LENGTH = ("tokens", "samples", "epochs")
_TINY = 1e-300


def segment_s(*, interval_s: ArrayLike, checkpoint_s: ArrayLike, restart_s: ArrayLike, mtbf_s: ArrayLike) -> Array:
    """Expected seconds of one segment and its checkpoint: M e^(R/M) (e^((tau+C)/M) - 1); inf where it overflows."""
    tau, dump, restart, mtbf = _floats(interval_s, checkpoint_s, restart_s, mtbf_s)
    with np.errstate(over="ignore"):
        found: Array = mtbf * np.exp(restart / mtbf) * np.expm1((tau + dump) / mtbf)
    return found


def goodput(*, interval_s: ArrayLike, checkpoint_s: ArrayLike, restart_s: ArrayLike, mtbf_s: ArrayLike) -> Array:
    """Share of the time that ends up as useful work: tau / E[segment], between 0 and 1.

    An interval of 0 means its limit: e^(-R/M) where a checkpoint costs nothing, else 0.
    """
    tau, dump, restart, mtbf = _floats(interval_s, checkpoint_s, restart_s, mtbf_s)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        share = tau / segment_s(interval_s=tau, checkpoint_s=dump, restart_s=restart, mtbf_s=mtbf)
        limit = np.where(dump > 0.0, 0.0, np.exp(-restart / mtbf))
    found: Array = np.where(tau > 0.0, share, limit)
    return found


def shares(
    *, interval_s: ArrayLike, checkpoint_s: ArrayLike, restart_s: ArrayLike, mtbf_s: ArrayLike
) -> dict[str, Array]:
    """Where the time goes, by share; the four add up to 1: ``goodput checkpoint restart lost_work``."""
    tau, dump, restart, mtbf = _floats(interval_s, checkpoint_s, restart_s, mtbf_s)
    useful = goodput(interval_s=tau, checkpoint_s=dump, restart_s=restart, mtbf_s=mtbf)
    writing = np.where(dump > 0.0, useful * dump / np.maximum(tau, _TINY), 0.0)
    restarting = -np.expm1(-restart / mtbf) * np.ones_like(useful)
    lost = np.maximum(1.0 - useful - writing - restarting, 0.0)
    return {"goodput": useful, "checkpoint": writing, "restart": restarting, "lost_work": lost}


def young_s(*, checkpoint_s: ArrayLike, mtbf_s: ArrayLike) -> Array:
    """Young's optimum sqrt(2 C M), right to first order in sqrt(C/M)."""
    dump, mtbf = _floats(checkpoint_s, mtbf_s)
    found: Array = np.sqrt(2.0 * dump * mtbf)
    return found


def daly_s(*, checkpoint_s: ArrayLike, mtbf_s: ArrayLike) -> Array:
    """Daly's optimum sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C for C < 2M, else M."""
    dump, mtbf = _floats(checkpoint_s, mtbf_s)
    half = dump / (2.0 * mtbf)
    series = np.sqrt(2.0 * dump * mtbf) * (1.0 + np.sqrt(half) / 3.0 + half / 9.0) - dump
    found: Array = np.where(half < 1.0, series, mtbf)
    return found


def optimum_s(*, checkpoint_s: ArrayLike, mtbf_s: ArrayLike) -> Array:
    """The exact optimum M (1 + W0(-e^(-1-C/M))) by Newton steps on x + C/M + ln(1-x) = 0, x = tau/M in (0, 1).

    That function is concave and falls, so from a start right of the root every step goes left and stays right of it.
    """
    dump, mtbf = _floats(checkpoint_s, mtbf_s)
    ratio = dump / mtbf
    # Both lie right of the root: the series of the logarithm ends low, and so does leaving out 1 - x beside ratio.
    x = np.minimum(np.sqrt(2.0 * ratio), 1.0 - np.exp(-1.0 - ratio))
    for _ in range(60):
        inside = (x > 0.0) & (x < 1.0)
        safe = np.where(inside, x, 0.5)
        step = np.where(inside, (safe + ratio + np.log1p(-safe)) * (1.0 - safe) / -safe, 0.0)
        new = x - step
        if np.all(np.abs(new - x) <= 1e-15 * x):
            break
        x = np.where((new > 0.0) & (new < x), new, x)
    found: Array = x * mtbf
    return found


def simulated_s(
    *, work_s: float, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float, runs: int, seed: int = 0
) -> Array:
    """Seconds of `runs` simulated jobs, one per entry: failures drawn one after the other on a running clock.

    The job computes `interval_s`, writes a checkpoint, and so on until work_s is done (whole segments); a failure
    throws it back to the last checkpoint and costs a restart, during which the next failure may already strike.
    """
    segments = max(round(work_s / interval_s), 1)
    times = np.empty(runs)
    for run, child in enumerate(np.random.SeedSequence(seed).spawn(runs)):
        draw = np.random.default_rng(child)
        now, done, failure = 0.0, 0, draw.exponential(mtbf_s)
        while done < segments:
            end = now + interval_s + checkpoint_s
            if end <= failure:
                now, done = end, done + 1
                continue
            now, failure = failure, failure + draw.exponential(mtbf_s)
            while now + restart_s > failure:
                now, failure = failure, failure + draw.exponential(mtbf_s)
            now += restart_s
        times[run] = now
    return times


def checkpoint_bytes(params: float, plan: Plan, *, autocast: bool = True) -> float:
    """Bytes of a checkpoint that training can go on from: N (E + S E [+ 2]).

    E: bytes of a master weight; S: optimizer states a weight (two for Adam); the 2 bytes are the 16-bit weights that a
    stack without autocast keeps beside the master ones. Adam: 12 N with autocast, 14 N without.
    """
    element = DTYPE_BYTES[plan.master_dtype]
    copies = 2.0 if not autocast and DTYPE_BYTES[plan.precision] < element else 0.0
    return float(params * (element * (1.0 + OPTIMIZER_STATES[plan.optimizer]) + copies))


def asked(scenario: Scenario) -> bool:
    """Whether the answer speaks of failures: a field of the group is given, or how long the job is."""
    return any(scenario.given(name) for name in (*FAILURE_FIELDS, *_LENGTH))


def terms(
    *,
    mtbf_s: ArrayLike,
    size_bytes: ArrayLike,
    rate_Bps: ArrayLike,
    restart_s: ArrayLike,
    interval_s: ArrayLike | None = None,
    duration_s: ArrayLike | None = None,
) -> dict[str, Array]:
    """Every figure of `failures` as arrays. mtbf_s: of the whole job; interval_s: the exact optimum unless given;
    duration_s: the time without failures, for the expected one (infinite where nothing is ever finished)."""
    mtbf, size, rate, restart = _floats(mtbf_s, size_bytes, rate_Bps, restart_s)
    dump = size / rate
    best = optimum_s(checkpoint_s=dump, mtbf_s=mtbf)
    interval = best if interval_s is None else np.asarray(interval_s, dtype=float)
    split = shares(interval_s=interval, checkpoint_s=dump, restart_s=restart, mtbf_s=mtbf)
    found = {
        "system_mtbf_s": mtbf,
        "failures_per_day": 86400.0 / mtbf,
        "checkpoint_bytes": size,
        "checkpoint_s": dump,
        "restart_s": restart,
        "checkpoint_interval_s": interval,
        "young_interval_s": young_s(checkpoint_s=dump, mtbf_s=mtbf),
        "daly_interval_s": daly_s(checkpoint_s=dump, mtbf_s=mtbf),
        "optimal_interval_s": best,
        "goodput": split["goodput"],
        "checkpoint_fraction": split["checkpoint"],
        "restart_fraction": split["restart"],
        "lost_work_fraction": split["lost_work"],
    }
    if duration_s is not None:
        with np.errstate(divide="ignore", over="ignore"):
            expected = np.asarray(duration_s, dtype=float) / split["goodput"]
        found |= {"expected_failures": expected / mtbf, "expected_duration_s": expected}
    return found


def failures(
    scenario: Scenario, *, plan: Plan, params: float, gpus: int, autocast: bool, figures: Mapping[str, float]
) -> tuple[dict[str, float], list[str], list[str]]:
    """(figures, assumptions, warnings) of a job. figures: those of `simkit.cost.cost`, for the length and the prices.

    Keys: system_mtbf_s, failures_per_day, checkpoint_bytes, checkpoint_s, checkpoint_interval_s, young_interval_s,
    daly_interval_s, optimal_interval_s, goodput, checkpoint_fraction, restart_fraction, lost_work_fraction, and for a
    job of known length expected_failures, expected_duration_s, expected_cost_usd, expected_energy_j.
    Raises InputError for a checkpoint size or bandwidth that is no positive quantity.
    """
    notes: list[str] = []
    warnings: list[str] = []
    mtbf_s, size, rate, restart = _inputs(scenario, plan, params, gpus, autocast, notes)
    interval = scenario.get("checkpoint_interval_s")
    arrays = terms(
        mtbf_s=mtbf_s, size_bytes=size, rate_Bps=rate, restart_s=restart, interval_s=interval,
        duration_s=figures.get("duration_s"),
    )  # fmt: skip
    found = {name: float(value) for name, value in arrays.items()}
    useful, dump = found["goodput"], found["checkpoint_s"]
    if interval is None:
        best = found["checkpoint_interval_s"]
        notes.append(f"checkpoint_interval_s = {best:.4g}: the optimum for these failures and this checkpoint")
    if useful < 0.5:
        warnings.append(
            f"failures leave {useful:.1%} of the time as useful work: "
            f"one every {format_s(mtbf_s)}, a checkpoint takes {format_s(dump)}"
        )
    if "expected_duration_s" in found:
        expected = found["expected_duration_s"]
        if "cost_usd_per_hour" in figures:
            found["expected_cost_usd"] = expected / 3600.0 * figures["cost_usd_per_hour"]
        if "power_w" in figures:
            found["expected_energy_j"] = expected * figures["power_w"]
    return found, notes, warnings


COLUMNS = ("goodput", "system_mtbf_s", "checkpoint_s", "checkpoint_interval_s")
JOB_COLUMNS = ("expected_failures", "expected_duration_s", "expected_cost_usd")
"""What a sweep says of failures, the latter where the length of the job is known."""


def columns(resolved: Resolved, money: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of `failures` at many points of a sweep: `COLUMNS` and `JOB_COLUMNS`. money: those of
    `simkit.cost.cost`, numbers or arrays. Raises InputError as `failures`."""
    scenario, gpus = resolved.scenario, resolved.cluster.gpus
    params, autocast = float(resolved.model.params), resolved.stack.autocast
    mtbf_s, size, rate, restart = _inputs(scenario, resolved.plan, params, gpus, autocast, [])
    found = terms(
        mtbf_s=mtbf_s, size_bytes=size, rate_Bps=rate, restart_s=restart,
        interval_s=scenario.get("checkpoint_interval_s"), duration_s=money.get("duration_s"),
    )  # fmt: skip
    out: dict[str, Any] = {name: found[name] for name in (*COLUMNS, *JOB_COLUMNS) if name in found}
    if "expected_duration_s" in out and "cost_usd_per_hour" in money:
        out["expected_cost_usd"] = out["expected_duration_s"] / 3600.0 * money["cost_usd_per_hour"]
    return out


def _inputs(
    scenario: Scenario, plan: Plan, params: float, gpus: int, autocast: bool, notes: list[str]
) -> tuple[float, float, float, float]:
    """(MTBF of the job in s, checkpoint bytes, bytes/s, restart s), with one note for each default."""
    hours = scenario.get("mtbf_hours", MTBF_HOURS)
    if not scenario.given("mtbf_hours"):
        notes.append(
            f"mtbf_hours = {hours:,.0f} a GPU: Llama 3 405B was interrupted 419 times in 54 days on 16,384 H100"
        )
    size = _positive(scenario, "checkpoint_bytes", "bytes") or checkpoint_bytes(params, plan, autocast=autocast)
    if not scenario.given("checkpoint_bytes"):
        notes.append(f"checkpoint_bytes = {size:.4g}: weights and optimizer, {size / params:.0f} bytes a parameter")
    rate = _positive(scenario, "checkpoint_bandwidth", "Bps") or CHECKPOINT_BPS_PER_GPU * gpus
    if not scenario.given("checkpoint_bandwidth"):
        each = format_Bps(CHECKPOINT_BPS_PER_GPU)
        notes.append(f"checkpoint_bandwidth = {format_Bps(rate)}: {each} a GPU, as in the run of Llama 3")
    restart = scenario.get("restart_s", RESTART_S)
    if not scenario.given("restart_s"):
        notes.append(f"restart_s = {restart:g}: MegaScale recovers within 10 minutes on average")
    return hours * 3600.0 / gpus, size, rate, float(restart)


def _positive(scenario: Scenario, name: str, dimension: str) -> float:
    """A quantity of the scenario, 0 where it is not given."""
    if not scenario.given(name):
        return 0.0
    text = scenario.get(name)
    value = parse(text, dimension, key=name, file=scenario.file)
    if value <= 0:
        raise InputError("is not greater than zero", file=scenario.file, key=name, value=text, hint=FIELDS[name].help)
    return value


def _floats(*values: ArrayLike) -> tuple[Any, ...]:
    return tuple(np.asarray(v, dtype=float) for v in values)
