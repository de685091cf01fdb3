"""`simkit calibrate`: from tables of measurements to the calibration tables of the profiles, reproducibly.

In this order, each stage with the results of the one before it held fixed:

1. links, from collectives (`simkit.calibrate_links`)
2. devices, from matrix products and streaming kernels (`simkit.calibrate_devices`), then priors for unmeasured devices
3. declared exceptions, from runs of data-parallel training (`simkit.calibrate_runs`) and of LLM training
   (`simkit.calibrate_training`)
4. 90 % intervals, from the residuals of all scored rows, by regime

The same tables give the same files, byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simkit import calibrate_devices, calibrate_links, calibrate_own, calibrate_runs, calibrate_training
from simkit.calibrate_links import fit_toml
from simkit.calibrate_runs import Fits, merged
from simkit.errors import InputError
from simkit.intervals import REGIMES
from simkit.spec import load, priors, profiles, stack
from simkit.spec.hardware import Device, Fit, Link

OPERATOR_TABLES = ("kernel_*.csv", "gemm_*.csv", "collective_*.csv")
TRAINING_TABLES = ("pretrain_*.csv",)
RUN_TABLES = (
    "dataparallel_ddlbench.csv",
    "dataparallel_dlperf.csv",
    "dataparallel_lambda.csv",
    "dataparallel_nvidia_dle.csv",
)
"""End-to-end tables of the declared exceptions; `dataparallel_acpsgd_table` is recalled, not read, and never fitted."""
NOT_FITTED = ("kernel_slidesparse_ratio.csv", "gemm_mamf.csv")
"""Times of an unstated form factor; an upper envelope of a search."""
LOW, HIGH = 0.05, 0.95
LEAST_ROWS = 8

Tables = dict[str, list[dict[str, str]]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a calibration found: fits by kind and name, priors, intervals by regime."""

    fits: Fits
    priors: Mapping[str, Fit]
    intervals: Mapping[str, tuple[float, float, int]]


def read_tables(folder: Path, patterns: Sequence[str]) -> Tables:
    """{stem: rows} of the tables of a folder. Raises InputError when it is none or holds none of them."""
    from simkit.validate import read_table

    if not folder.is_dir():
        raise InputError(
            "is no folder",
            key="data",
            value=str(folder),
            hint="give the folder with kernel_*.csv, gemm_*.csv, collective_*.csv",
        )
    files = sorted({f for pattern in patterns for f in folder.glob(pattern)})
    return {f.stem: read_table(f) for f in files if f.name not in NOT_FITTED}


def calibrate(folder: Path, *, say: Say = lambda line: None) -> Outcome:
    """Fits everything that the tables of `folder` allow; writes nothing. say: called with one line per stage."""
    operators = read_tables(folder, OPERATOR_TABLES)
    calibrate_devices.check(operators)
    devices = {name: load.device(name, calibration=False) for name in load.device_names()}
    links = calibrate_links.fit_links(operators)
    say(f"links: {len(links)} fitted")
    device_fits = calibrate_devices.fit_devices(operators, devices)
    pooled = calibrate_devices.fit_priors(device_fits, devices)
    say(f"devices: {len(device_fits)} fitted, {len(pooled)} priors")
    fits: Fits = {
        "devices": {k: dict(v) for k, v in device_fits.items()},
        "links": {k: dict(v) for k, v in links.items()},
        "stacks": {},
    }
    with priors.replaced(pooled):
        found = calibrate_runs.runs(read_tables(folder, RUN_TABLES))
        trained = calibrate_runs.runs(read_tables(folder, TRAINING_TABLES))
    fits, pooled = _data_parallel(found, fits, pooled, say)
    with priors.replaced(pooled):
        fits = merged(fits, calibrate_training.fit_training(trained, fits))
    pooled |= calibrate_training.pooled_sustained(fits, devices)
    # Once more, now that the clocks of devices under load are known.
    fits, pooled = _data_parallel(found, fits, pooled, say)
    with priors.replaced(pooled):
        say(f"LLM training: {calibrate_runs.summary(trained, fits)}")
        found = [*found, *trained]
        say(f"runs on several devices: {calibrate_runs.summary(found, fits, single=False)}")
        intervals = _intervals(found, fits)
    return Outcome(fits=fits, priors=pooled, intervals=intervals)


def own(folder: Path, root: Path) -> Outcome:
    """Fits the devices and links of a folder of one's own (``--profiles``) on the tables of `folder`, nothing else:
    no priors, no stacks, no intervals. Raises InputError where `root` is no folder of profiles."""
    if not root.is_dir():
        raise InputError("is no folder", key="--profiles", value=str(root), hint="one with devices/ or links/ in it")
    tables = read_tables(folder, OPERATOR_TABLES)
    where = (str(root),)
    devices = {p.stem: load.device(str(p), calibration=False) for p in sorted((root / "devices").glob("*.toml"))}

    def device(name: str) -> Device:
        """A device that has no profile takes that of any CPU: nothing of it but its slot enters the law of a link."""
        known = name if name in load.device_names(where) else "x86-cpu"
        return load.device(known, profiles=where, calibration=False)

    def link(name: str) -> Link:
        return load.link(name, profiles=where, calibration=False)

    mine = {p.stem for p in (root / "links").glob("*.toml")}
    links = calibrate_links.fit_links(tables, link=link, device=device)
    fits: Fits = {
        "devices": {name: calibrate_own.fit_own(tables, one) for name, one in devices.items()},
        "links": {
            name: {**found, **calibrate_own.fit_busy(tables, name)} for name, found in links.items() if name in mine
        },
        "stacks": {},
    }
    return Outcome(fits=fits, priors={}, intervals={})


def write_own(outcome: Outcome, root: Path) -> list[Path]:
    """Replaces what stands below the marker line of the profiles of `root` that have a fit."""
    written = []
    for kind in ("devices", "links"):
        for path in sorted((root / kind).glob("*.toml")):
            fits = outcome.fits.get(kind, {}).get(path.stem, {})
            written += _replace_below_marker(path, fits) if fits else []
    return written


def _data_parallel(
    found: Sequence[calibrate_runs.Run], fits: Fits, pooled: Mapping[str, Fit], say: Say
) -> tuple[Fits, dict[str, Fit]]:
    """The declared exceptions of data-parallel training, with all other fits held fixed."""
    with priors.replaced(pooled):
        fits = merged(fits, calibrate_runs.fit_compute(found, fits))
        say(f"runs on one device: {calibrate_runs.summary(found, fits, single=True)}")
        network, interference = calibrate_runs.fit_network(found, fits)
    return merged(fits, network), {**pooled, "interference": interference}


def _intervals(found: Sequence[calibrate_runs.Run], fits: Fits) -> dict[str, tuple[float, float, int]]:
    """{regime: (low, high, rows)} of measured over predicted time; a regime with few rows takes all rows."""
    ratios: dict[str, list[float]] = {}
    for error, regime in calibrate_runs.residuals(found, fits):
        for name in (regime, "all"):
            ratios.setdefault(name, []).append(1.0 / (1.0 + error))
    everything = ratios.pop("all", [])
    out = {}
    for regime in REGIMES:
        values = ratios.get(regime, [])
        values = values if len(values) >= LEAST_ROWS else everything
        if values:
            low, high = np.quantile(values, [LOW, HIGH])
            out[regime] = (min(float(low), 1.0), max(float(high), 1.0), len(values))
    return out


# -- writing -------------------------------------------------------------------------------------------------------


def write(outcome: Outcome, hwprofiles: Path | None = None, stacks: Path | None = None) -> list[Path]:
    """Replaces what stands below the marker line of each profile, and the interval file; one file at a time, whole or
    not at all. Profiles without a new fit lose an old one, so that the folder always holds one calibration."""
    root = hwprofiles or profiles.shipped()
    written = []
    for kind in ("devices", "links"):
        for path in sorted((root / kind).glob("*.toml")):
            written += _replace_below_marker(path, outcome.fits.get(kind, {}).get(path.stem, {}))
    for path in sorted((stacks or stack.FOLDER).glob("*.toml")):
        written += _replace_below_marker(path, outcome.fits.get("stacks", {}).get(path.stem, {}))
    written += _replace_below_marker(root / "priors.toml", outcome.priors)
    written += _write(root / "intervals.toml", _interval_text(outcome.intervals))
    return written


def _replace_below_marker(path: Path, fits: Mapping[str, Fit]) -> list[Path]:
    text = path.read_text(encoding="utf-8")
    facts = text.partition(profiles.MARKER)[0].rstrip("\n")
    if not fits and profiles.MARKER not in text:
        return []
    body = f"\n{fit_toml(fits)}".rstrip("\n") + "\n" if fits else ""
    return _write(path, f"{facts}\n\n{profiles.MARKER}\n{body.lstrip(chr(10)) if not fits else body}")


def _write(path: Path, text: str) -> list[Path]:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return []
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return [path]


def _interval_text(intervals: Mapping[str, tuple[float, float, int]]) -> str:
    lines = ["# 5 % and 95 % quantiles of measured/predicted time by regime; written by simkit calibrate."]
    for name, (low, high, rows) in intervals.items():
        lines += ["", f'[regime."{name}"]', f"low = {low:.4g}", f"high = {high:.4g}", f"rows = {rows}"]
    return "\n".join(lines) + "\n"


def forget() -> None:
    """Drops everything that was worked out from the profiles, after they changed."""
    from simkit import exchange, intervals, price
    from simkit.spec import resolve

    load.forget()
    priors.forget()
    stack._stack.cache_clear()
    intervals.factors.cache_clear()
    resolve.parse_cluster.cache_clear()
    price.pricing.cache_clear()
    exchange.collective_cost.cache_clear()


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """One flat dictionary per Fit, for printing: kind, name, fit, values, rows, mape, evidence."""
    out = []
    named: dict[str, Mapping[str, Mapping[str, Fit]]] = {**outcome.fits, "priors": {"priors": outcome.priors}}
    for kind, by_name in named.items():
        for name, fits in sorted(by_name.items()):
            for key, fit in sorted(fits.items()):
                out.append(
                    {
                        "kind": kind,
                        "name": name,
                        "fit": key,
                        "values": dict(fit.values),
                        "rows": fit.rows,
                        "mape": fit.mape,
                        "evidence": fit.evidence,
                        "dataset": list(fit.dataset),
                    }
                )
    return out
