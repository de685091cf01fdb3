"""Scores predictions against measured tables.

The error of a time or a memory is predicted/measured - 1, of a rate measured/predicted - 1, so that "too slow" is
positive
in both. A row that cannot be predicted is refused with its reason and counted; a row without a value is predicted and
not scored.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkit.errors import InputError, RefusedError, SimkitError, unknown
from simkit.spec.scenario import FIELDS, Scenario

TIMES = frozenset({"iteration_time_s", "time_s", "ttft_s", "tpot_s", "peak_memory_gib"})
RATES = frozenset(
    {"tokens_per_s_per_gpu", "samples_per_s", "tokens_per_s", "tflops_per_gpu", "mfu", "output_tokens_per_s", "busbw"}
)
METRICS = TIMES | RATES | {"fits"}
MEMORY_KINDS = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "device": "device_bytes"}
_PROSE = frozenset({"id", "source", "where", "metric", "value", "notes", "memory_kind"})
_RUN = frozenset({"p10", "p90", "repeats", "date", "software", "load"})
"""How a row was measured (`simkit measure`): quantiles beside the median, repetitions, versions, the busy processes."""
_OPERATOR = frozenset(
    {
        "op",
        "bytes",
        "ranks",
        "device",
        "dtype",
        "m",
        "n",
        "k",
        "batch",
        "heads",
        "kv_heads",
        "head_dim",
        "q_len",
        "kv_len",
        "sparsity",
        "engine",
    }
)
LATER = frozenset(
    {
        "peft",
        "lora_rank",
        "lora_targets",
        "lora_dropout",
        "sparsity",
        "quant",
        "batch",
        "prompt_len",
        "output_len",
        "concurrency",
        "request_rate",
        "engine",
        "kv_dtype",
        "peers",
        "churn",
        "backup_pool",
    }
)
"""Columns of the vocabulary that simkit reads but does not model yet: a row that needs one is refused."""
OVER_PEERS = frozenset({"decentralized", "local-sgd"})
"""Methods that model more of the vocabulary than ordinary jobs (`simkit.methods`)."""
NEUTRAL = frozenset({"", "none", "false", "0", "1", "1f1b"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One scored row. error: None where it is refused or has no value."""

    file: str
    id: str
    source: str
    device: str
    metric: str
    value: float | None
    predicted: float | None
    low: float | None
    high: float | None
    refused: str = ""

    @property
    def error(self) -> float | None:
        if self.predicted is None or self.value is None:
            return None
        if self.metric in RATES:
            return self.value / self.predicted - 1.0
        return self.predicted / self.value - 1.0

    @property
    def covered(self) -> bool | None:
        if self.value is None or self.low is None or self.high is None:
            return None
        return self.low <= self.value <= self.high


def validate(
    files: Iterable[str | Path],
    *,
    models: tuple[str, ...] = (),
    profiles: tuple[str, ...] = (),
    calibration: bool = True,
) -> dict[str, Any]:
    """Predicts every row of the CSV files and sums up the errors (the object of design section 6)."""
    return summary(score(files, models=models, profiles=profiles, calibration=calibration))


def score(
    files: Iterable[str | Path],
    *,
    models: tuple[str, ...] = (),
    profiles: tuple[str, ...] = (),
    calibration: bool = True,
) -> list[Row]:
    """One Row per line of the files, in their order. Raises InputError for a file that is no such table."""
    rows: list[Row] = []
    for file in map(Path, files):
        for line in read_table(file):
            rows.append(_scored(line, file.name, tuple(map(str, models)), tuple(map(str, profiles)), calibration))
    return rows


def read_table(path: Path) -> list[dict[str, str]]:
    """The lines of a measured table. Raises InputError: unreadable, not UTF-8, a directory, no header, an unknown
    column (with the nearest known one), a line with too many or too few cells, a metric nobody knows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise InputError("is a directory, not a table", file=str(path), hint="give a CSV file") from None
    except FileNotFoundError:
        raise InputError("does not exist", file=str(path), hint="give a CSV file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", file=str(path)) from None
    try:
        lines = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise InputError(f"is not valid CSV: {error}", file=path.name) from None
    if not lines or "metric" not in lines[0]:
        raise InputError(
            "has no column metric",
            file=path.name,
            hint="one row = one scenario and one metric, see `simkit validate --help`",
        )
    header = [name.strip() for name in lines[0]]
    known = _PROSE | _RUN | _OPERATOR | LATER | frozenset(FIELDS)
    for name in header:
        if name not in known:
            raise unknown("column", name, known, file=path.name)
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        if not any(c.strip() for c in cells):
            continue
        if len(cells) != len(header):
            raise InputError(f"line {number} has {len(cells)} cells, the header {len(header)}", file=path.name)
        rows.append(dict(zip(header, (c.strip() for c in cells), strict=True)))
    return rows


def _scored(
    line: dict[str, str], file: str, models: tuple[str, ...], profiles: tuple[str, ...], calibration: bool
) -> Row:
    metric = line.get("metric", "")
    device = line.get("device") or line.get("cluster", "").split("+")[0].lstrip("0123456789x")
    if line.get("cluster"):
        device = line["cluster"].split("+")[0].split("x", 2)[-1]
    common = {
        "file": file,
        "id": line.get("id", ""),
        "source": line.get("source", ""),
        "device": device,
        "metric": metric,
    }
    try:
        value = _value(line, file)
        predicted, low, high = predict_line(line, models=models, profiles=profiles, calibration=calibration, file=file)
    except SimkitError as error:
        return Row(**common, value=None, predicted=None, low=None, high=None, refused=str(error))
    return Row(**common, value=value, predicted=predicted, low=low, high=high)


def _value(line: Mapping[str, str], file: str) -> float | None:
    metric, text = line.get("metric", ""), line.get("value", "")
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS, file=file)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise InputError("is not a number", file=file, key="value", value=text) from None
    if not math.isfinite(value) or value < 0 or (value == 0 and metric != "fits"):
        raise InputError("is not a positive number", file=file, key="value", value=text)
    return value


def predict_line(
    line: Mapping[str, str], *, models: tuple[str, ...], profiles: tuple[str, ...], calibration: bool, file: str = ""
) -> tuple[float, float | None, float | None]:
    """(predicted, low, high) of one row. Raises InputError or RefusedError with the reason."""
    if line.get("op") or all(line.get(side) for side in ("m", "n", "k")):
        from simkit.operators import predict_operator

        return predict_operator(line, profiles=profiles, calibration=calibration)
    over_peers = line.get("method", "") in OVER_PEERS
    for name in LATER if not over_peers else LATER - frozenset(FIELDS):
        if line.get(name, "").lower() not in NEUTRAL:
            raise RefusedError(f"{name} = {line[name]} is not modelled yet")
    fields = {k: v for k, v in line.items() if k in FIELDS and v}
    if not calibration:
        fields["calibration"] = "false"
    from simkit.predict import predict_scenario

    scenario = Scenario.of(fields, file=file, profiles=profiles, models=models)
    report = predict_scenario(scenario, beside=False, as_ran=True)
    metric = line["metric"]
    if metric == "peak_memory_gib":
        kind = MEMORY_KINDS.get(line.get("memory_kind", "") or "device")
        if kind is None:
            raise unknown("memory_kind", line.get("memory_kind"), MEMORY_KINDS, file=file)
        value = float(getattr(report.memory, kind)) / 2.0**30
        return value, value * 0.9, value * 1.1
    if metric == "fits":
        return float(report.fits), None, None
    if metric in ("mfu", "tflops_per_gpu"):
        if report.mfu is None:
            raise RefusedError(f"{metric} does not apply")
        scale = 1.0 if metric == "mfu" else float(report.facts["peak_flops_per_gpu"]) / 1e12
        time = report.iteration_time_s
        low_s, high_s = report.interval_90["iteration_time_s"]
        return report.mfu * scale, report.mfu * scale * time / high_s, report.mfu * scale * time / low_s
    predicted = getattr(report, metric, None)
    if predicted is None and metric in report.extras:
        predicted = report.extras[metric]
        low, high = report.extras.get("interval_90", {}).get(metric, (None, None))
        return float(predicted), low, high
    if predicted is None:
        raise RefusedError(f"{metric} does not apply to this row")
    low, high = report.interval_90.get(metric, (None, None))
    return float(predicted), low, high


# -- summing up ----------------------------------------------------------------------------------------------------


def summary(rows: list[Row]) -> dict[str, Any]:
    """rows, predicted, refused, the scores over all rows, and the same by metric, source, device and file."""
    files = _by(rows, "file")
    means = [s["mape"] for s in files.values() if s.get("mape") is not None]
    return {
        "rows": len(rows),
        "predicted": sum(r.predicted is not None for r in rows),
        "refused": [{"id": r.id, "reason": r.refused} for r in rows if r.refused],
        **{k: v for k, v in _scores(rows).items() if k != "rows"},
        "by_metric": _by(rows, "metric"),
        "by_source": _by(rows, "source"),
        "by_device": _by(rows, "device"),
        "by_file": files,
        "mean_over_files": sum(means) / len(means) if means else None,
    }


def _by(rows: list[Row], key: str) -> dict[str, dict[str, Any]]:
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(getattr(row, key) or "-", []).append(row)
    return {name: _scores(parts[name]) for name in sorted(parts)}


def _scores(rows: list[Row]) -> dict[str, Any]:
    errors = [e for r in rows if (e := r.error) is not None]
    covered = [c for r in rows if (c := r.covered) is not None]
    sizes = sorted(abs(e) for e in errors)
    return {
        "rows": len(rows),
        "mape": sum(sizes) / len(sizes) if sizes else None,
        "median_ape": quantile(sizes, 0.5),
        "p90_ape": quantile(sizes, 0.9),
        "bias": sum(errors) / len(errors) if errors else None,
        "coverage_90": sum(covered) / len(covered) if covered else None,
    }


def quantile(ordered: list[float], q: float) -> float | None:
    """Linear interpolation between order statistics, as numpy's default."""
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def write_rows(rows: list[Row], path: Path) -> None:
    """``id, metric, predicted, low, high, refused`` in the order of the input; the file appears whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "metric", "predicted", "low", "high", "refused"])
        for r in rows:
            writer.writerow(
                [r.id, r.metric, *("" if v is None else repr(v) for v in (r.predicted, r.low, r.high)), r.refused]
            )
    temporary.replace(path)
