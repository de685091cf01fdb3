"""What `devices` and `links` share: a profile as data, and as text with the source of every fact."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simkit.commands import _output
from simkit.errors import InputError, unknown

if TYPE_CHECKING:
    from simkit.spec.hardware import Device, Fit, Link


def matching(kind: str, text: str | None, names: Sequence[str]) -> list[str]:
    """The names that contain `text`. Raises InputError where none does."""
    found = [n for n in names if not text or text.lower().replace(" ", "") in n]
    if not found:
        raise unknown(kind, text, names, see=f"simkit {kind}s")
    return found


def as_data(item: Device | Link) -> dict[str, Any]:
    """Every field of the profile that is known, SI units, without the path of the file."""
    from simkit.render import plain

    data = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.name not in ("file", "calibration")}
    data["calibration"] = {name: _fit(fit) for name, fit in item.calibration.items()}
    found: dict[str, Any] = plain(data)
    return found


def _fit(fit: Fit) -> dict[str, Any]:
    return {f.name: getattr(fit, f.name) for f in dataclasses.fields(fit) if f.name != "name"}


def emit_data(items: Sequence[Device | Link], *, as_json: bool) -> None:
    from simkit.render import rows_to_csv, to_json

    rows = [as_data(item) for item in items]
    _output.emit(
        to_json(rows)
        if as_json
        else rows_to_csv([{k: v for k, v in r.items() if k not in ("sources", "calibration")} for r in rows])
    )


def show(item: Device | Link, folders: tuple[str, ...], *, as_json: bool, as_csv: bool) -> None:
    """Prints one profile: every fact with its source, then what was fitted, on which data."""
    if as_json or as_csv:
        from simkit.render import to_json

        if as_csv:
            emit_data([item], as_json=False)
        else:
            _output.emit(to_json(as_data(item) | {"references": _references(item, folders)}))
        return
    data = as_data(item)
    rows = [
        (key, _text(key, value), _source_of(item, key))
        for key, value in data.items()
        if key not in ("sources", "calibration", "peak_flops")
    ]
    for dtype, rate in data.get("peak_flops", {}).items():
        rows.append((f"peak.{dtype}", _text(f"peak_flops_{dtype}", rate), item.sources.get(f"peak.{dtype}", "")))
    _output.emit(_output.listing(("fact", "value", "source"), rows))
    _output.emit("")
    for key, entry in _references(item, folders).items():
        _output.emit(
            f"{key}: " + ", ".join(entry[k] for k in ("title", "publisher", "date", "url", "note") if entry.get(k))
        )
    for name, fit in item.calibration.items():
        values = ", ".join(f"{k} {v:.4g}" for k, v in fit.values.items())
        error = "" if fit.mape is None else f", MAPE {fit.mape:.1%}"
        rows_of = f"{fit.rows} rows of {', '.join(fit.dataset) or 'no table'}"
        _output.emit(f"fitted {name}: {values} ({fit.evidence}, {rows_of}{error})")


ALIASES = {
    "memory_bytes": "memory",
    "memory_nominal_bytes": "memory_nominal",
    "memory_Bps": "memory_bandwidth",
    "l2_bytes": "l2",
    "power_w": "power",
    "idle_power_w": "idle_power",
    "boost_hz": "boost_clock",
    "base_hz": "base_clock",
    "launch_price_usd": "launch_price",
    "rental_usd_per_hour": "rental_price",
    "peak_flops_fp16_accumulate": "peak.fp16_accumulate",
    "Bps": "rate",
    "up_Bps": "up_rate",
    "latency_s": "latency",
}
"""Field -> key of the profile file under which its source stands."""


def _source_of(item: Device | Link, field: str) -> str:
    return item.sources.get(ALIASES.get(field, field), "")


def _references(item: Device | Link, folders: tuple[str, ...]) -> dict[str, Mapping[str, str]]:
    from simkit.spec import load

    found = {}
    for key in sorted(set(item.sources.values())):
        try:
            found[key] = load.source(key, profiles=folders)
        except InputError:
            continue  # "user" and "default" name no document
    return found


def _text(key: str, value: Any) -> str:
    from simkit import units

    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if key == "memory_nominal_bytes":
        return f"{value / units.GB:g} GB"
    for suffix, show_as in (("_bytes", units.format_bytes), ("Bps", units.format_Bps), ("_s", units.format_s)):
        if key.endswith(suffix):
            return show_as(value)
    if key.startswith("peak_flops"):
        return units.format_flops(value).replace("FLOP", "OP" if key.endswith("int8") else "FLOP")
    if key.endswith("_hz"):
        return f"{value / 1e9:.4g} GHz"
    for suffix, unit in (("_w", " W"), ("_usd", " USD"), ("_per_hour", " USD/h")):
        if key.endswith(suffix):
            return f"{value:g}{unit}"
    return f"{value:g}"
