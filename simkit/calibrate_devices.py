"""Fits devices from operator tables: ceilings of matrix products, the streaming rate, the time of a launch; then priors
for devices that nobody measured.

Rows: op ``gemm`` (dense, or no op column) with m, n, k, and op ``memory`` with bytes. The shape constants of the law
(tiles, `TAIL`, `OPERAND`) are the same for every device; per device and dtype two constants are fitted, ``ceiling`` and
``depth``, by least absolute log error, and per device one ``fraction`` of the datasheet bandwidth and one launch time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from simkit.errors import InputError
from simkit.roofline import Array, Law, matmul_seconds
from simkit.spec.hardware import Device, Fit
from simkit.spec.plan import DTYPE_BYTES
from simkit.spec.priors import DEFAULT_FRACTION, DEFAULT_KERNEL_S, POWER_EXPONENT, pools

Row = Mapping[str, str]
LEAST_ROWS = 4
STREAMING_BYTES = 256e6
"""Smaller buffers may sit in the second-level cache."""
GRAPH_REPLAYS = "kernel_aiconfigurator_gemm"
"""The table taken from CUDA-graph replays: its small products show the device's own time of a launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Measured matrix products of one device and dtype."""

    batch: Array
    m: Array
    n: Array
    k: Array
    seconds: Array
    tables: tuple[str, ...]
    replayed: bool

    @property
    def size(self) -> int:
        return len(self.seconds)


def products(tables: Mapping[str, Sequence[Row]]) -> dict[tuple[str, str], Products]:
    """{(device, dtype): Products} of all dense matrix products with a time."""
    found: dict[tuple[str, str], list[tuple[str, tuple[float, ...]]]] = {}
    for table, rows in tables.items():
        for row in rows:
            if row.get("op", "gemm") not in ("gemm", "") or row.get("sparsity", "none") not in ("", "none"):
                continue
            if row.get("metric") != "time_s" or not row.get("m") or row.get("dtype") not in DTYPE_BYTES:
                continue
            numbers = tuple(float(row.get(c) or 1.0) for c in ("batch", "m", "n", "k", "value"))
            found.setdefault((row["device"], row["dtype"]), []).append((table, numbers))
    out = {}
    for key, entries in sorted(found.items()):
        batch, m, n, k, seconds = np.array([e[1] for e in entries]).T
        names = tuple(sorted({e[0] for e in entries}))
        out[key] = Products(batch=batch, m=m, n=n, k=k, seconds=seconds, tables=names, replayed=GRAPH_REPLAYS in names)
    return out


def fit_devices(tables: Mapping[str, Sequence[Row]], devices: Mapping[str, Device]) -> dict[str, dict[str, Fit]]:
    """{device: {fit name: Fit}}; rows of devices without a profile are passed over."""
    fits: dict[str, dict[str, Fit]] = {name: {} for name in devices}
    for name, fit in fit_memory(tables, devices).items():
        fits[name]["memory"] = fit
    for (name, dtype), data in products(tables).items():
        device = devices.get(name)
        if device is None or dtype not in device.peak_flops or data.size < LEAST_ROWS:
            continue
        memory = fits[name].get("memory")
        fraction = memory["fraction"] if memory is not None else DEFAULT_FRACTION
        fits[name][f"gemm.{dtype}"], floor_s = fit_products(data, device, dtype, fraction)
        if data.replayed and dtype in ("bf16", "fp16"):
            fits[name]["kernel"] = Fit(
                name="kernel",
                values={"seconds": floor_s},
                dataset=data.tables,
                rows=data.size,
                note="floor of graph-replayed products",
            )
    return {name: found for name, found in fits.items() if found}


def fit_products(data: Products, device: Device, dtype: str, fraction: float) -> tuple[Fit, float]:
    """(the ``gemm.<dtype>`` Fit, seconds of a launch), by least mean absolute log error."""
    from scipy.optimize import minimize

    element = DTYPE_BYTES[dtype]
    stream_s = (
        data.batch * (data.m * data.k + data.k * data.n + data.m * data.n) * element / (device.memory_Bps * fraction)
    )

    def predicted(logs: Array) -> Array:
        ceiling, depth, floor_s = np.exp(logs)
        law = Law(
            peak_flops=device.peak_flops[dtype],
            ceiling=ceiling,
            depth=depth,
            sm_count=float(device.sm_count or 1),
            memory_Bps=device.memory_Bps * fraction,
        )
        return np.asarray(np.maximum(matmul_seconds(data.batch, data.m, data.n, data.k, law), stream_s) + floor_s)

    def loss(logs: Array) -> float:
        if not -3.0 < logs[0] < 0.8 or not 0.0 < logs[1] < 7.0 or not -16.0 < logs[2] < -9.0:
            return 1e3
        return float(np.mean(np.abs(np.log(predicted(logs) / data.seconds))))

    starts = [np.log([c, 60.0, 4e-6]) for c in (0.5, 0.8, 1.1)]
    best = min(
        (
            minimize(loss, s, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9, "maxiter": 2000})
            for s in starts
        ),
        key=lambda r: float(r.fun),
    )
    ceiling, depth, floor_s = np.exp(best.x)
    residual = np.abs(predicted(best.x) / data.seconds - 1.0)
    fit = Fit(
        name=f"gemm.{dtype}",
        values={"ceiling": float(ceiling), "depth": float(depth)},
        dataset=data.tables,
        rows=data.size,
        valid={c: (float(v.min()), float(v.max())) for c, v in (("m", data.m), ("n", data.n), ("k", data.k))},
        mape=float(residual.mean()),
    )
    return fit, float(floor_s)


def fit_memory(tables: Mapping[str, Sequence[Row]], devices: Mapping[str, Device]) -> dict[str, Fit]:
    """{device: ``memory`` Fit}: the median over tables of the median fraction of the datasheet bandwidth."""
    found: dict[str, dict[str, list[float]]] = {}
    for table, rows in tables.items():
        for row in rows:
            device = devices.get(row.get("device", ""))
            if row.get("op") != "memory" or device is None or row.get("metric") != "time_s" or not row.get("bytes"):
                continue
            nbytes, seconds = float(row["bytes"]), float(row["value"])
            if nbytes >= STREAMING_BYTES:
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
    fractions = [f["memory"]["fraction"] for f in fits.values() if "memory" in f]
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
