"""Fits of one device to measured kernels: matrix products, fused attention, attention of decoding.

Two laboratories that measure one device differ by up to 30 % (clocks, power caps, what surrounds the kernel): each
keeps a ceiling of its own within a fit, the profile gets their median, and the note lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from simkit.errors import RefusedError
from simkit.operators import FLASH_ENGINE, Work, resident, work
from simkit.roofline import OPERAND_FLOP_PER_CLOCK, Array, Law, attention_seconds, matmul_seconds
from simkit.spec.hardware import Device, Fit
from simkit.spec.plan import DTYPE_BYTES
from simkit.spec.priors import flop_per_clock

Row = Mapping[str, str]
LEAST_ROWS = 4
LEAST_STREAMS = 8
"""Products bound by memory below which they tell no streaming rate of their own."""
GRAPH_REPLAYS = "kernel_aiconfigurator_gemm"
"""The table taken from CUDA-graph replays: its small products show the device's own time of a launch."""
FASTEST = 0.05
"""Quantile of the replayed products that stands for the fastest: one lucky row does not count."""
SKINNY, SKINNY_WEIGHT = 256.0, 0.3
"""Products of fewer rows are those of decoding; training has none, so they weigh less in a fit."""
SIXTEEN_BIT = ("bf16", "fp16")
"""One data path: fitted together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Kernels of one device and arithmetic as arrays. table, engine: of each row."""

    works: tuple[Work, ...]
    seconds: Array
    table: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.works)

    @property
    def tables(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.table)))

    def column(self, name: str) -> Array:
        return np.array([getattr(w, name) for w in self.works], dtype=float)

    def resident(self, name: str, device: Device) -> Array:
        return np.array([resident(getattr(w, name), device) for w in self.works])


def measured(tables: Mapping[str, Sequence[Row]], ops: tuple[str, ...]) -> dict[tuple[str, str], Measured]:
    """{(device, dtype): Measured} of all rows with a time whose operator is one of `ops`; 16-bit dtypes of a device
    under the first that it has."""
    found: dict[tuple[str, str], list[tuple[str, Work, float]]] = {}
    for table, rows in tables.items():
        for row in rows:
            if (row.get("op", "") or "gemm") not in ops or row.get("metric") != "time_s" or not row.get("value"):
                continue
            if (row.get("op", "") or "gemm") == "gemm" and not row.get("m"):
                continue
            dtype = row.get("dtype", "")
            if dtype not in DTYPE_BYTES or row.get("kv_dtype", dtype) not in ("", dtype):
                continue
            try:
                entry = (table, work(row), float(row["value"]))
            except RefusedError:
                continue
            found.setdefault((row["device"], dtype), []).append(entry)
    for device in sorted({d for d, _ in found}):
        if all((device, dtype) in found for dtype in SIXTEEN_BIT):
            found[device, SIXTEEN_BIT[0]] += found.pop((device, SIXTEEN_BIT[1]))
    return {
        key: Measured(
            works=tuple(e[1] for e in entries),
            seconds=np.array([e[2] for e in entries]),
            table=tuple(e[0] for e in entries),
        )
        for key, entries in sorted(found.items())
    }


# -- products ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """The rows of a fit, and which laboratory and which floor each belongs to."""

    data: Measured
    batch: Array
    m: Array
    n: Array
    k: Array
    stream_bytes: Array
    side_bytes: Array
    laboratory: NDArray[np.intp]
    floor: NDArray[np.intp]
    laboratories: list[str]
    floors: list[str]

    @classmethod
    def of(cls, data: Measured, device: Device) -> _Products:
        floor = [f"{t}/{w.engine}" for t, w in zip(data.table, data.works, strict=True)]
        laboratories, floors = sorted(set(data.table)), sorted(set(floor))
        return cls(
            data=data,
            **{c: data.column(c) for c in ("batch", "m", "n", "k")},
            stream_bytes=data.resident("nbytes", device),
            side_bytes=data.column("side_bytes"),
            laboratory=np.array([laboratories.index(t) for t in data.table]),
            floor=np.array([floors.index(f) for f in floor]),
            laboratories=laboratories,
            floors=floors,
        )

    def math_s(self, law: Law, ceilings: Array) -> Array:
        """Seconds on the arithmetic units, every laboratory at its own ceiling."""
        out = np.empty(self.data.size)
        for i, ceiling in enumerate(ceilings):
            at = self.laboratory == i
            out[at] = matmul_seconds(
                self.batch[at], self.m[at], self.n[at], self.k[at], replace(law, ceiling=float(ceiling))
            )
        return out


def fit_products(data: Measured, device: Device, dtype: str, fraction: float) -> tuple[Fit, float | None]:
    """(the ``gemm.<dtype>`` Fit, seconds of a launch where graph replays were measured).

    Fitted: one depth, one streaming fraction (where `LEAST_STREAMS` rows are bound by it, else `fraction`), a ceiling
    per laboratory and a time of launch per laboratory and engine; the last two kinds are nuisances, of which the
    profile keeps the median ceiling. A launch takes as long as the `FASTEST` replayed products, which do next to
    nothing.
    """
    rows = _Products.of(data, device)
    laboratories, floors = len(rows.laboratories), len(rows.floors)
    law = Law(
        peak_flops=device.peak_flops[dtype],
        ceiling=1.0,
        depth=100.0,
        sm_count=float(device.sm_count or 1),
        memory_Bps=device.memory_Bps * fraction,
        flop_per_clock=flop_per_clock(device, device.peak_flops[dtype]) or OPERAND_FLOP_PER_CLOCK,
    )
    streams = _count_streams(rows, law) >= LEAST_STREAMS

    def predicted(x: Array) -> Array:
        ceilings, floor_s = np.exp(x[2 : 2 + laboratories]), np.exp(x[2 + laboratories :])
        stream_Bps = device.memory_Bps * (np.exp(x[1]) if streams else fraction)
        math_s = rows.math_s(replace(law, depth=float(np.exp(x[0]))), ceilings)
        around_s = rows.side_bytes / law.memory_Bps + floor_s[rows.floor]
        return np.asarray(np.maximum(math_s, rows.stream_bytes / stream_Bps) + around_s)

    weight = np.where(rows.m >= SKINNY, 1.0, SKINNY_WEIGHT)
    low = np.concatenate([[0.0, np.log(0.4)], np.full(laboratories, -3.0), np.full(floors, np.log(1e-6))])
    high = np.concatenate([[7.0, np.log(0.95)], np.full(laboratories, 0.8), np.full(floors, -8.0)])
    starts = [
        np.concatenate([np.log([d, 0.8]), np.full(laboratories, np.log(c)), np.full(floors, np.log(4e-6))])
        for d, c in ((30.0, 0.6), (100.0, 0.9), (300.0, 1.1))
    ]
    x = _least(predicted, data.seconds, weight, starts, low, high)
    ceilings = np.exp(x[2 : 2 + laboratories])
    values = {"ceiling": median(map(float, ceilings)), "depth": float(np.exp(x[0]))}
    if streams:
        values["stream"] = float(np.exp(x[1]))
    error = np.abs(predicted(x) / data.seconds - 1.0)
    wide = rows.m >= SKINNY
    fit = Fit(
        name=f"gemm.{dtype}",
        values=values,
        dataset=data.tables,
        rows=data.size,
        valid={c: (float(v.min()), float(v.max())) for c, v in (("m", rows.m), ("n", rows.n), ("k", rows.k))},
        mape=float(error[wide].mean()) if wide.any() else float(error.mean()),
        note=_note(rows, ceilings, error, wide),
    )
    replayed = data.seconds[[t == GRAPH_REPLAYS for t in data.table]]
    return fit, float(np.quantile(replayed, FASTEST)) if replayed.size else None


def _note(rows: _Products, ceilings: Array, error: Array, wide: NDArray[np.bool_]) -> str:
    parts = ["mape over m >= 256"]
    if (~wide).any():
        parts[0] += f"; {float(error[~wide].mean()):.3f} below"
    if len(rows.laboratories) > 1:
        listed = ", ".join(f"{t} {c:.3f}" for t, c in zip(rows.laboratories, ceilings, strict=True))
        parts.append(f"within laboratories, whose median ceiling is kept: {listed}")
    return "; ".join(parts)


def _count_streams(rows: _Products, law: Law) -> int:
    math_s = matmul_seconds(rows.batch, rows.m, rows.n, rows.k, law)
    return int((rows.stream_bytes / law.memory_Bps > 1.2 * math_s).sum())


def _least(
    predicted: Callable[[Array], Array],
    seconds: Array,
    weight: Array,
    starts: Sequence[Array],
    low: Array,
    high: Array,
) -> Array:
    """The minimum of the weighted mean absolute log error within a box; the same every time."""
    from scipy.optimize import least_squares, minimize

    share, logs = weight / weight.sum(), np.log(seconds)

    def residual(x: Array) -> Array:
        return np.asarray((np.log(predicted(x)) - logs) * np.sqrt(share * len(logs)))

    def loss(x: Array) -> float:
        outside = float(np.maximum(low - x, 0.0).sum() + np.maximum(x - high, 0.0).sum())
        return float(share @ np.abs(np.log(predicted(np.clip(x, low, high))) - logs)) + outside

    options = {"xatol": 1e-4, "fatol": 1e-7, "maxiter": 250 * len(low)}

    def nearest(x: Array) -> Array:
        # Slopes first, then a simplex: twice, for the second frees a collapsed first one.
        x = least_squares(residual, x, bounds=(low, high), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=50).x
        for _ in range(2):
            x = np.clip(minimize(loss, x, method="Nelder-Mead", options=options).x, low, high)
        return np.asarray(x)

    return min((nearest(start) for start in starts), key=loss)


# -- attention -----------------------------------------------------------------------------------------------------


def fit_attention(data: Measured, device: Device, dtype: str, fraction: float) -> list[Fit]:
    """``attention.<dtype>`` from prefill rows and ``decode`` from decode rows: those with enough of them.

    An engine other than that of training (`FLASH_ENGINE`) keeps a rate of its own relative to it; where it alone was
    measured, its rate is taken.
    """
    fits = []
    prefill, decode = (_part(data, decode=d) for d in (False, True))
    if prefill.size >= LEAST_ROWS:
        fits.append(_fit_prefill(prefill, device, dtype, fraction))
    if decode.size >= LEAST_ROWS and dtype in SIXTEEN_BIT:
        fits.append(_fit_decode(decode, device))
    return fits


def _part(data: Measured, *, decode: bool) -> Measured:
    at = [i for i, w in enumerate(data.works) if w.decode is decode]
    return Measured(
        works=tuple(data.works[i] for i in at), seconds=data.seconds[at], table=tuple(data.table[i] for i in at)
    )


def _fit_prefill(data: Measured, device: Device, dtype: str, fraction: float) -> Fit:
    batch, m, n, k = (data.column(c) for c in ("batch", "m", "n", "k"))
    stream_Bps = device.memory_Bps * fraction
    side_s = data.column("side_bytes") / stream_Bps
    memory_s = data.resident("nbytes", device) / stream_Bps
    other = np.array([w.engine != FLASH_ENGINE for w in data.works])
    base = Law(
        peak_flops=device.peak_flops[dtype],
        ceiling=1.0,
        depth=0.0,
        sm_count=float(device.sm_count or 1),
        memory_Bps=stream_Bps,
        attention_ceiling=1.0,
    )

    def predicted(x: Array) -> Array:
        math_s = attention_seconds(batch, m, n, k, replace(base, attention_depth=float(np.exp(x[1]))))
        ratio = np.where(other & ~other.all(), np.exp(x[2]), 1.0)
        around_s = np.exp(x[3]) * side_s + np.exp(np.where(other, x[4], x[5]))
        return np.asarray(np.maximum(math_s / (np.exp(x[0]) * ratio), memory_s) + around_s)

    low, high = np.array([-3.0, 3.0, -1.5, -0.7, -13.5, -13.5]), np.array([0.7, 8.0, 1.5, 1.1, -10.5, -10.5])
    starts = [np.array([np.log(c), np.log(s0), -0.2, 0.5, -11.5, -11.5]) for c, s0 in ((0.6, 250.0), (0.5, 800.0))]
    x = _least(predicted, data.seconds, np.ones(data.size), starts, low, high)
    values = {"ceiling": float(np.exp(x[0])), "depth": float(np.exp(x[1]))}
    if other.any() and not other.all():
        values["other_engine"] = float(np.exp(x[2]))
    if side_s.any():
        values["passes"] = float(np.exp(x[3]))
    values |= {"launch_s": float(np.exp(x[4 if other.all() else 5]))}
    if "other_engine" in values:
        values["other_launch_s"] = float(np.exp(x[4]))
    error = np.abs(predicted(x) / data.seconds - 1.0)
    note = "head size 128, causal"
    if (long := n >= 2048).any():
        note += f"; mape {float(error[long].mean()):.3f} from 2048 keys on"
    return Fit(
        name=f"attention.{dtype}",
        values=values,
        dataset=data.tables,
        rows=data.size,
        valid={"kv_len": (float(n.min()), float(n.max())), "copies": (float(batch.min()), float(batch.max()))},
        mape=float(error.mean()),
        note=note,
    )


def _fit_decode(data: Measured, device: Device) -> Fit:
    nbytes = data.resident("nbytes", device)

    def predicted(x: Array) -> Array:
        return np.asarray(nbytes / (device.memory_Bps * np.exp(x[0])) + np.exp(x[1]))

    bounds = np.array([np.log(0.2), -15.0]), np.array([0.0, -10.0])
    x = _least(predicted, data.seconds, np.ones(data.size), [np.log([0.8, 1e-5])], *bounds)
    return Fit(
        name="decode",
        values={"fraction": float(np.exp(x[0])), "launch_s": float(np.exp(x[1]))},
        dataset=data.tables,
        rows=data.size,
        mape=float(np.mean(np.abs(predicted(x) / data.seconds - 1.0))),
        note="keys and values read once",
    )
