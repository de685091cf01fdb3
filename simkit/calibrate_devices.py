"""Fits devices from operator tables: matrix products, fused attention, the streaming rate, the time of a launch; then
the priors for devices that nobody measured.

Rows: op ``gemm`` (dense, or no op column) with m, n, k; ``memory`` with bytes; ``attention_prefill`` and
``attention_decode``. The shape constants of the laws (`simkit.roofline`) are the same for every device; fitted, by
least mean absolute log error, are per device

    gemm.<dtype>       ceiling, depth, stream (fraction of the datasheet bandwidth at which products stream)
    attention.<dtype>  ceiling, depth; of the benchmark: passes, launch_s, and other_engine (a rate relative to it)
    decode             fraction, launch_s
    memory, kernel     fraction; seconds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from simkit.calibrate_kernels import GRAPH_REPLAYS, LEAST_ROWS, SIXTEEN_BIT, Row, fit_attention, fit_products, measured
from simkit.errors import InputError
from simkit.spec.hardware import Device, Fit
from simkit.spec.priors import (
    DEFAULT_ATTENTION_DEPTH,
    DEFAULT_ATTENTION_SHARE,
    DEFAULT_FRACTION,
    DEFAULT_KERNEL_S,
    POWER_EXPONENT,
    pools,
)

LEAST_DEVICES = 3
"""Measured devices below which an architecture has no pool of its own."""
STREAMING_BYTES = 256e6
"""Smaller buffers may sit in the second-level cache."""


def fit_devices(
    tables: Mapping[str, Sequence[Row]], devices: Mapping[str, Device], *, streaming_bytes: float = STREAMING_BYTES
) -> dict[str, dict[str, Fit]]:
    """{device: {fit name: Fit}}; rows of devices without a profile are passed over. streaming_bytes: smaller buffers
    tell no streaming rate."""
    fits: dict[str, dict[str, Fit]] = {name: {} for name in devices}
    for name, fit in fit_memory(tables, devices, streaming_bytes=streaming_bytes).items():
        fits[name]["memory"] = fit
    fractions = {n: f["memory"]["fraction"] if "memory" in f else DEFAULT_FRACTION for n, f in fits.items()}
    for (name, dtype), data in measured(tables, ("gemm",)).items():
        device = devices.get(name)
        if device is None or dtype not in device.peak_flops or data.size < LEAST_ROWS:
            continue
        fits[name][f"gemm.{dtype}"], floor_s = fit_products(data, device, dtype, fractions[name])
        if floor_s is not None and dtype in SIXTEEN_BIT:
            note = "the fastest of the graph-replayed products"
            fits[name]["kernel"] = Fit(
                name="kernel", values={"seconds": floor_s}, dataset=(GRAPH_REPLAYS,), rows=data.size, note=note
            )
    for (name, dtype), data in measured(tables, ("attention_prefill", "attention_decode")).items():
        device = devices.get(name)
        if device is None or dtype not in device.peak_flops:
            continue
        for fit in fit_attention(data, device, dtype, fractions[name]):
            fits[name][fit.name] = fit
    return {name: found for name, found in fits.items() if found}


# -- streams -------------------------------------------------------------------------------------------------------


def fit_memory(
    tables: Mapping[str, Sequence[Row]], devices: Mapping[str, Device], *, streaming_bytes: float = STREAMING_BYTES
) -> dict[str, Fit]:
    """{device: ``memory`` Fit}: the median over tables of the median fraction of the datasheet bandwidth."""
    found: dict[str, dict[str, list[float]]] = {}
    for table, rows in tables.items():
        for row in rows:
            device = devices.get(row.get("device", ""))
            if row.get("op") != "memory" or device is None or row.get("metric") != "time_s" or not row.get("bytes"):
                continue
            nbytes, seconds = float(row["bytes"]), float(row["value"])
            if nbytes >= streaming_bytes:
                found.setdefault(row["device"], {}).setdefault(table, []).append(nbytes / seconds / device.memory_Bps)
    out = {}
    for name, by_table in sorted(found.items()):
        middles = [median(v) for v in by_table.values()]
        everything = [v for values in by_table.values() for v in values]
        fraction = min(median(middles), 0.95)
        out[name] = Fit(
            name="memory",
            values={"fraction": fraction},
            dataset=tuple(sorted(by_table)),
            rows=len(everything),
            mape=float(np.mean([abs(v / fraction - 1.0) for v in everything])),
        )
    return out


# -- priors --------------------------------------------------------------------------------------------------------


def fit_priors(fits: Mapping[str, Mapping[str, Fit]], devices: Mapping[str, Device]) -> dict[str, Fit]:
    """Pooled constants for devices without a table: per architecture, and over all; the power law of `spec.priors`."""
    out: dict[str, Fit] = {}
    ceilings: dict[str, list[tuple[Device, str, Fit]]] = {}
    for name, device_fits in fits.items():
        for key, fit in device_fits.items():
            kind, _, dtype = key.partition(".")
            if kind == "gemm" and dtype in ("fp32", "fp16", "bf16") and fit.evidence == "fitted":
                for pool in pools(devices[name], dtype):
                    ceilings.setdefault(pool, []).append((devices[name], dtype, fit))
    caps = {
        a: max((f["ceiling"] for _, _, f in ceilings.get(f"gemm.{a}", [])), default=1.0) for a in ("fp32", "tensor")
    }
    for pool, members in sorted(ceilings.items()):
        out[pool] = _pooled(pool, members, caps[pool.split(".")[1]])
    out |= _attention(fits, devices)
    fractions = [f["memory"]["fraction"] for f in fits.values() if "memory" in f]
    for architecture in sorted({devices[n].architecture for n in fits}):
        mine = [f["memory"] for n, f in fits.items() if "memory" in f and devices[n].architecture == architecture]
        own = [one["fraction"] for one in mine]
        if len(own) >= LEAST_DEVICES:
            name = f"memory.{architecture}"
            note = "median over measured devices of the architecture"
            out[name] = Fit(name=name, values={"fraction": median(own)}, rows=len(own), note=note)
    launches = [f["kernel"]["seconds"] for f in fits.values() if "kernel" in f]
    out["memory"] = Fit(
        name="memory",
        values={"fraction": median(fractions) if fractions else DEFAULT_FRACTION},
        rows=len(fractions),
        note="median over measured devices",
    )
    out["kernel"] = Fit(
        name="kernel",
        values={"seconds": median(launches) if launches else DEFAULT_KERNEL_S},
        rows=len(launches),
        note="median over measured devices",
    )
    return out


def _attention(fits: Mapping[str, Mapping[str, Fit]], devices: Mapping[str, Device]) -> dict[str, Fit]:
    """``attention`` and ``attention.<architecture>``: the share of the ceiling of 16-bit products that fused attention
    reaches, and its depth; ``decode``: the fraction of the memory bandwidth that decoding reaches."""
    listed: dict[str, list[tuple[str, Fit, float]]] = {}
    for name, found in fits.items():
        fused = next((found[f"attention.{d}"] for d in SIXTEEN_BIT if f"attention.{d}" in found), None)
        gemm = next((found[f"gemm.{d}"] for d in SIXTEEN_BIT if f"gemm.{d}" in found), None)
        if fused is not None and gemm is not None:
            for pool in ("attention", f"attention.{devices[name].architecture}"):
                listed.setdefault(pool, []).append((name, fused, fused["ceiling"] / gemm["ceiling"]))
    out = {
        pool: Fit(
            name=pool,
            values={
                "share": median(share for _, _, share in members),
                **{c: median(f[c] for _, f, _ in members) for c in ("depth", "passes", "launch_s")},
            },
            rows=len(members),
            note=f"pooled over {', '.join(n for n, _, _ in members)}",
            dataset=tuple(sorted({t for _, f, _ in members for t in f.dataset})),
        )
        for pool, members in sorted(listed.items())
    }
    out.setdefault(
        "attention", Fit(name="attention", values={"share": DEFAULT_ATTENTION_SHARE, "depth": DEFAULT_ATTENTION_DEPTH})
    )
    decoding = [f["decode"] for f in fits.values() if "decode" in f]
    if decoding:
        values = {c: median(f[c] for f in decoding) for c in ("fraction", "launch_s")}
        out["decode"] = Fit(name="decode", values=values, rows=len(decoding), note="median over measured devices")
    return out


def _pooled(pool: str, listed: Sequence[tuple[Device, str, Fit]], cap: float) -> Fit:
    """The median ceiling at the median power per TFLOP/s, never above the highest ceiling of any device; over all
    devices, whose silicon differs too much for one power law, the median alone."""
    values = {
        "ceiling": median(fit["ceiling"] for _, _, fit in listed),
        "depth": median(fit["depth"] for _, _, fit in listed),
    }
    powered = [(d.power_w / (d.peak_flops[dtype] / 1e12), fit["ceiling"]) for d, dtype, fit in listed if d.power_w]
    if pool.count(".") > 1 and powered:
        reference = median(u for u, _ in powered)
        # Every member is brought to the same power per TFLOP/s first, so that one law passes through all.
        at_reference = median(c * (reference / u) ** POWER_EXPONENT for u, c in powered)
        values |= {
            "ceiling": min(at_reference, cap),
            "watt_per_tflops": reference,
            "exponent": POWER_EXPONENT,
            "cap": cap,
        }
    names = sorted({d.name for d, _, _ in listed})
    tables = tuple(sorted({t for _, _, f in listed for t in f.dataset}))
    return Fit(name=pool, values=values, rows=len(listed), note=f"pooled over {', '.join(names)}", dataset=tables)


def known(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """Names of all devices that occur in the tables."""
    return sorted({row["device"] for rows in tables.values() for row in rows if row.get("device")})


def check(tables: Mapping[str, Sequence[Row]]) -> None:
    """Raises InputError when no table holds an operator row."""
    if not any(rows for rows in tables.values()):
        raise InputError(
            "holds no operator table",
            key="data",
            hint="give a folder with kernel_*.csv, gemm_*.csv or collective_*.csv",
        )
