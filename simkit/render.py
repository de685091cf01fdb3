"""A Report as data: the object of `--json`, and CSV. Text forms are in `simkit.render_tables` and `render_text`.

Keys carry their unit; an absent key means not applicable, never zero. Nothing that changes from run to run (time of
day, paths of the machine) enters, so the same input gives the same bytes.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simkit.render_tables import ratios, stem, to_html_fragment, to_markdown, verdict
from simkit.units import GIB

if TYPE_CHECKING:
    from simkit.report import Report

__all__ = ["plain", "rows_to_csv", "to_csv", "to_dict", "to_html_fragment", "to_json", "to_markdown", "to_text"]

PART_FIELDS = "name kind forward_s backward_s share count per"
COMPUTE_TERMS = ("forward_s", "backward_s", "optimizer_s")


_SUMS = frozenset({"allocated", "reserved", "device"})
RATES = ("iteration_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "mfu", "hfu")


def to_dict(report: Report) -> dict[str, Any]:
    """The object of `simkit predict --json`, ready for JSON: plain types, no NaN, absent keys left out.

    `breakdown`: the disjoint terms sum to iteration_time_s; `compute_s` beside them is the sum of forward, backward and
    optimizer. `layers`, `modules`, `operators`: where a micro-batch goes, for those in `report.shown`.
    `memory`: GiB per device by item. `peak_memory_gib` is what the driver shows (context included), and
    `memory_capacity_gib` what it must stay within.
    """
    memory = report.memory
    answer: dict[str, Any] = {name: getattr(report, name) for name in RATES}
    answer |= {
        "peak_allocated_gib": memory.allocated_bytes / GIB,
        "peak_reserved_gib": memory.reserved_bytes / GIB,
        "peak_memory_gib": memory.device_bytes / GIB,
        "memory_capacity_gib": memory.room_bytes / GIB,
        "fits": memory.fits,
        "why_not": memory.why_not or None,
        "way_out": memory.way_out or None,
        "breakdown": breakdown(report),
        "memory": {f"{stem(name)}_gib": value / GIB for name, value in memory.items_bytes.items()},
        "per_stage": per_stage(report),
        "interval_90": {name: list(bounds) for name, bounds in report.interval_90.items()},
        "bottleneck": report.bottleneck or None,
        "sensitivities": [_plain_fields(s, "name elasticity value note") for s in report.sensitivities],
        "ledger": [_plain_fields(t, "name seconds bound evidence note") for t in report.ledger],
        "groups": dict(report.groups) or None,
        "facts": dict(report.facts) or None,
        "assumptions": list(report.assumptions),
        "warnings": list(report.warnings),
        "scenario": dict(report.scenario),
        "versions": versions(tuple(str(p) for p in report.scenario.get("profiles") or ())),
    }
    answer |= dict(report.cost)
    answer |= {"goodput": dict(report.goodput) or None, "imported": dict(report.imported) or None}
    for by in report.shown:
        answer[by] = [_plain_fields(part, PART_FIELDS) for part in report.parts(by)]
    answer |= dict(report.extras)
    if report.beside:
        answer["beside"] = [_beside(report, other) for other in report.beside]
    clean: dict[str, Any] = plain(answer)
    return clean


def breakdown(report: Report) -> dict[str, float]:
    """The terms of the step plus `compute_s`, the sum of forward, backward and optimizer."""
    terms = dict(report.breakdown)
    computing = [terms[name] for name in COMPUTE_TERMS if name in terms]
    if computing and "compute_s" not in terms:
        terms["compute_s"] = math.fsum(computing)
    return terms


def per_stage(report: Report) -> list[dict[str, Any]]:
    """The memory of each pipeline stage; without a pipeline the whole model is stage 0, with its seconds."""
    stages = report.memory.per_stage
    if len(stages) > 1:
        return [
            {
                "stage": i,
                "peak_memory_gib": stage["device"] / GIB,
                "memory": {f"{stem(k)}_gib": v / GIB for k, v in stage.items() if k not in _SUMS},
            }
            for i, stage in enumerate(stages)
        ]
    computing = math.fsum(report.breakdown.get(name, 0.0) for name in ("forward_s", "backward_s"))
    return [{"stage": 0, "compute_s": computing, "peak_memory_gib": report.memory.device_bytes / GIB}]


def _beside(base: Report, other: Report) -> dict[str, Any]:
    short = {name: getattr(other, name) for name in RATES} | {
        "fits": other.fits,
        "why_not": other.memory.why_not or None,
    }
    return (
        short
        | dict(other.cost)
        | {
            "peak_memory_gib": other.memory.device_bytes / GIB,
            "scenario": dict(other.scenario),
            "ratios": ratios(base, other),
            "verdict": verdict(base, other),
        }
    )


def versions(profiles: tuple[str, ...] = ()) -> dict[str, str]:
    """{simkit, profiles}: the release, and a digest of every profile file the answer could have come from."""
    from simkit import __version__
    from simkit.spec.profiles import roots

    return {"simkit": __version__, "profiles": profiles_digest(roots(profiles))}


@lru_cache(maxsize=16)
def profiles_digest(folders: tuple[Path, ...]) -> str:
    """The first 12 hex digits of SHA-256 over names and bytes of all profile files of `folders`."""
    digest = hashlib.sha256()
    for root in folders:
        for file in sorted(root.rglob("*.toml"), key=lambda p: p.relative_to(root).as_posix()):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0")
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def plain(value: Any) -> Any:
    """Plain JSON types: numpy scalars and arrays unpacked, None and numbers that are not finite left out."""
    if hasattr(value, "tolist") and not isinstance(value, (str, bytes)):
        value = value.tolist()
    if isinstance(value, Mapping):
        kept = {str(k): plain(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [v for v in map(plain, value) if v is not None]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return str(value)


def to_json(value: Any) -> str:
    """JSON text with sorted keys, indented, without NaN; ends in a newline."""
    return json.dumps(plain(value), sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by a dot (``memory.weights_gib``), lists by `` | ``, an interval as ``.low``, ``.high``."""
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, Mapping):
            flat |= flatten(entry, f"{name}.")
        elif prefix == "interval_90." and isinstance(entry, list) and len(entry) == 2:
            flat |= {f"{name}.low": entry[0], f"{name}.high": entry[1]}
        elif isinstance(entry, list) and entry and isinstance(entry[0], Mapping):
            for index, item in enumerate(entry):
                flat |= flatten(item, f"{name}.{item.get('name', index)}.")
        elif isinstance(entry, list):
            flat[name] = " | ".join(map(str, entry))
        else:
            flat[name] = entry
    return flat


def to_csv(reports: Report | Sequence[Report]) -> str:
    """One header and one row a report; columns are the flattened keys of `to_dict`, in the order they first appear."""
    many = reports if isinstance(reports, Sequence) else (reports,)
    return rows_to_csv([_for_csv(report) for report in many])


_NO_COLUMNS = frozenset({"ledger", "beside", "per_stage", "imported", "layers", "modules", "operators"})


def _for_csv(report: Report) -> dict[str, Any]:
    return {k: v for k, v in to_dict(report).items() if k not in _NO_COLUMNS}


def rows_to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV text of mappings of any depth; a key that a row lacks is an empty cell."""
    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def to_text(report: Report, **options: Any) -> str:
    """The answer as a person reads it in a terminal; see `simkit.render_text.to_text`."""
    from simkit.render_text import to_text as render

    return render(report, **options)


def _plain_fields(item: Any, names: str) -> dict[str, Any]:
    found = {name: getattr(item, name) for name in names.split()}
    return {k: v for k, v in found.items() if v != ""}
