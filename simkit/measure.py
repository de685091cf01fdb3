"""`simkit measure`: benchmarks of this machine, as rows that `simkit validate` scores and `simkit calibrate` fits.

A suite is a module ``simkit.measure_<name>`` whose `cases` lists what is to be measured and whose `TAKES` names the
options it reads (of `simkit.measure_checks.OF_SUITES`); a case runs and answers with samples. This module walks the
list, keeps every finished case at once (so that an interrupted run goes on where it stopped), and at the end writes the
profile of the machine with its fits.

    OUT/tables/<kind>_<machine>.csv    rows in the columns of the vocabulary
    OUT/devices/<machine>.toml         facts, and below the marker what was fitted on the rows
    OUT/links/<link>.toml              the same of a link (suite ``links``)
    OUT/sources.toml                   what "measured" means
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simkit import measure_checks
from simkit.errors import unknown
from simkit.measure_machine import Machine, machine, versions
from simkit.measure_store import Store, quantiles

SUITES = ("device", "links", "operators", "train", "inference")


@dataclass(frozen=True, slots=True)
class Samples:
    """What a case answers with: {metric: samples}, in the unit of the metric, and what else is to be said of it."""

    by_metric: Mapping[str, Sequence[float]]
    notes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure. id: unique within its table; fields: cells of its row; run: answers or raises
    `Skipped`."""

    id: str
    fields: Mapping[str, Any]
    run: Callable[[], Samples]
    notes: str = ""


class Skipped(Exception):  # noqa: N818 - not an error: a case that this machine cannot run
    """The machine cannot run this case, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may ask of a suite. device: ``cpu`` or ``cuda``; threads: of the CPU, 0 = all; name: of the profile.

    Of ``links``: ranks; link, its name; rate, where it is known; launch, a command before each rank's, with {rank};
    address, of rank 0. Of ``train`` and ``inference``: model, batch, seq_len;
    None = the suite's own list."""

    out: Path
    device: str = "cpu"
    threads: int = 1
    quick: bool = False
    name: str | None = None
    ranks: int | None = None
    link: str | None = None
    rate: str | None = None
    launch: str | None = None
    address: str | None = None
    model: str | None = None
    batch: int | None = None
    seq_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run left: cases measured now, kept from before, skipped (id: why); files written; whether it was cut
    short."""

    measured: int
    kept: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    interrupted: bool = False


Progress = Callable[[str, int, int], None]
"""Called with (what comes next, cases done, cases in all)."""


def suite(name: str) -> Any:
    """The module of a suite. Raises InputError with the nearest name for one that does not exist."""
    if name not in SUITES:
        raise unknown("suite", name, SUITES, see="simkit measure --help")
    return importlib.import_module(f"simkit.measure_{name}")


def measure(name: str, options: Options, *, progress: Progress = lambda what, done, total: None) -> Outcome:
    """Runs a suite; an interrupt (Ctrl-C) ends it early with everything measured so far on disk.

    Raises InputError, before anything is measured: an unknown suite, an option that it does not take, a folder that
    cannot be written, a table there that is none, torch missing.
    """
    module = suite(name)
    measure_checks.check(options, suite=name, takes=module.TAKES)
    with measure_checks.writable(options.out) as folder:
        host = machine(options)
        store = Store(folder / f"{module.TABLE}_{host.name}.csv")
        cases: list[Case] = module.cases(host, options)
    kept = sum(store.has(case.id) for case in cases)
    software = versions(options.device)
    skipped: dict[str, str] = {}
    measured, interrupted = 0, False
    for position, case in enumerate(cases):
        if store.has(case.id):
            continue
        progress(case.id, position, len(cases))
        try:
            samples = case.run()
        except Skipped as reason:
            skipped[case.id] = str(reason)
            continue
        except KeyboardInterrupt:
            interrupted = True
            break
        store.add(_rows(case, samples, host, software))
        measured += 1
    progress("profile", len(cases), len(cases))
    files = (store.path, *_profiles(module, host, options)) if len(store) else ()
    return Outcome(measured=measured, kept=kept, skipped=skipped, files=files, interrupted=interrupted)


def _rows(
    case: Case, samples: Samples, host: Machine, software: str
) -> list[dict[str, Any]]:
    """One row a metric: the median, with the 10th and 90th percentile, how often, when, on what and beside what."""
    rows = []
    for metric, values in samples.by_metric.items():
        middle, low, high = quantiles(values)
        rows.append(
            {
                "id": case.id if len(samples.by_metric) == 1 else f"{case.id}/{metric}",
                "source": f"simkit measure on {host.name}",
                "where": host.title,
                **case.fields,
                "metric": metric,
                "value": middle,
                "p10": low,
                "p90": high,
                "repeats": len(values),
                "date": host.date,
                "software": software,
                "load": host.load(),
                "notes": "; ".join(filter(None, (case.notes, samples.notes))),
            }
        )
    return rows


def _profiles(module: Any, host: Machine, options: Options) -> tuple[Path, ...]:
    """The profile files that this suite's rows allow."""
    from simkit import measure_profile

    return measure_profile.write(host, options, kind=module.TABLE)
