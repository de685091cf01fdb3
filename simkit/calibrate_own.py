"""Fits of a machine of one's own (`simkit measure`), beside what `calibrate_devices` and `calibrate_links` fit:
its launch, its point-wise operators, its convolutions, and what communication costs its processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from simkit.calibrate_devices import fit_devices
from simkit.operators import COMPRESS, EAGER_ENGINE, compression_s, predict_law, seconds_of, work
from simkit.roofline import GEMM
from simkit.spec.hardware import Device, Fit

Row = Mapping[str, str]
TINY_BYTES = 4096.0
"""A ``memory`` row below this is a launch."""
RATE_BYTES = 1e6
"""A collective from this size on tells what a second of communication costs the processor."""


def times(rows: Sequence[Row], op: str) -> list[tuple[Row, float]]:
    """The rows of an operator that hold seconds, with them."""
    return [(row, float(row["value"])) for row in rows if row.get("op") == op and row.get("metric") == "time_s"]


def fit_own(tables: Mapping[str, Sequence[Row]], device: Device) -> dict[str, Fit]:
    """The fits of one device: those of `simkit.calibrate_devices`, and what a machine of one's own also tells: its
    launch, its convolutions, its point-wise operators."""
    fits = dict(fit_devices(tables, {device.name: device}).get(device.name, {}))
    rows = {table: [r for r in rows if r.get("device") == device.name] for table, rows in tables.items()}
    # Each with the ones before it held fixed.
    for found in _later(rows, device, fits):
        fits[found.name] = found
    return fits | _compressors(rows, device, fits)


def _later(tables: Mapping[str, Sequence[Row]], device: Device, fits: Mapping[str, Fit]) -> Iterator[Fit]:
    """One fit after the other; `fits` grows while this goes on."""
    for find in (_launch, _eager, _conv):
        found = find(tables, device, fits)
        if found is not None:
            yield found


def _launch(tables: Mapping[str, Sequence[Row]], device: Device, fits: Mapping[str, Fit]) -> Fit | None:
    """What an operator costs however small."""
    found = [(t, s) for t, rows in tables.items() for r, s in times(rows, "memory") if float(r["bytes"]) < TINY_BYTES]
    if not found:
        return None
    return _fit("kernel", {"seconds": median(s for _, s in found)}, found, note="operators of 64 elements")


def _eager(tables: Mapping[str, Sequence[Row]], device: Device, fits: Mapping[str, Fit]) -> Fit | None:
    """Seconds of point-wise operators relative to their bytes at the streaming rate, launches apart."""
    rate = device.memory_Bps * (fits["memory"]["fraction"] if "memory" in fits else 1.0)
    launch_s = fits["kernel"]["seconds"] if "kernel" in fits else 0.0
    found = [
        (table, (seconds - launch_s) * rate / float(row["bytes"]))
        for table, rows in tables.items()
        for row, seconds in times(rows, "memory")
        if row.get("engine") == EAGER_ENGINE
    ]
    if not found:
        return None
    return _fit("eager", {"elementwise": median(v for _, v in found)}, found, note="norms, activations, sums")


def _conv(tables: Mapping[str, Sequence[Row]], device: Device, fits: Mapping[str, Fit]) -> Fit | None:
    """Convolutions relative to the products of their shape."""
    trial = replace(device, calibration=dict(fits))
    law = predict_law(trial, "fp32")
    found = []
    for table, rows in tables.items():
        for row, seconds in times(rows, "conv"):
            done = work(row)
            found.append((table, seconds / seconds_of(replace(done, kind=GEMM), trial, law)))
    return _fit("conv", {"fp32": median(v for _, v in found)}, found) if found else None


def _fit(name: str, values: dict[str, float], found: Sequence[tuple[str, float]], note: str = "") -> Fit:
    middle = next(iter(values.values()))
    return Fit(
        name=name,
        values=values,
        dataset=tuple(sorted({table for table, _ in found})),
        rows=len(found),
        mape=float(np.mean([abs(middle / v - 1.0) for _, v in found])),
        note=note,
    )


def _compressors(
    tables: Mapping[str, Sequence[Row]], device: Device, fits: Mapping[str, Fit]
) -> dict[str, Fit]:
    """Seconds of each compressor relative to what `simkit.compressors` counts: implementations differ from those that
    the counts are of, and a CPU works where a GPU moves bytes."""
    law = predict_law(replace(device, calibration=dict(fits)), "fp32")
    found: dict[str, list[tuple[str, float]]] = {}
    for table, rows in tables.items():
        for row in rows:
            if row.get("op", "").startswith(COMPRESS) and row.get("metric") == "time_s":
                ratio = float(row["value"]) / compression_s(row, law)
                found.setdefault(f"compress.{row['op'][len(COMPRESS) :]}", []).append((table, ratio))
    return {
        name: _fit(name, {"factor": median(v for _, v in ratios)}, ratios) for name, ratios in sorted(found.items())
    }


def fit_busy(tables: Mapping[str, Sequence[Row]], link: str) -> dict[str, Fit]:
    """What a second of communication over a link costs the rank in processor seconds: TCP is worked by the CPU itself.
    From rows whose notes say for how much of the time the processor was busy."""
    found = []
    for table, rows in tables.items():
        for row in rows:
            words = row.get("notes", "").split()
            if row.get("inter") == link and words[:2] == ["processor", "busy"] and float(row["bytes"]) >= RATE_BYTES:
                found.append((table, float(words[2])))
    if not found:
        return {}
    note = "processor seconds of a rank per second of a collective"
    return {"interference": _fit("interference", {"seconds_per_second": median(v for _, v in found)}, found, note)}
