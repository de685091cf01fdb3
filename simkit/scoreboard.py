"""The scoreboard: every shipped table scored, as the file `validation/scoreboard.md` that is committed.

`write` regenerates it; a test compares. The blind column is the same score with every calibration stripped.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from simkit.validate import score, summary

HEADER = """# Scoreboard

Mean (MAPE), median and 90th percentile of the absolute percentage error, mean error (bias, positive = too slow or too
large), share of rows inside the 90 % interval, and the MAPE with every calibration stripped (blind). Regenerate with
`simkit validate --scoreboard`.

| table | rows | refused | MAPE | median | p90 | bias | in interval | blind MAPE | use |
|---|--:|--:|--:|--:|--:|--:|--:|--:|---|
"""


def tables() -> dict[str, Mapping[str, Any]]:
    """The entries of ``validation/registry.toml`` by table."""
    text = files("simkit.validation").joinpath("registry.toml").read_text(encoding="utf-8")
    registry: dict[str, Mapping[str, Any]] = tomllib.loads(text)["table"]
    return registry


def path_of(table: str) -> Path:
    """The CSV of a shipped table."""
    return Path(str(files("simkit.validation").joinpath("measured", f"{table}.csv")))


def scoreboard() -> str:
    """The scoreboard of all shipped tables as Markdown."""
    lines = [HEADER.rstrip("\n")]
    for table, entry in tables().items():
        calibrated = summary(score([path_of(table)]))
        blind = summary(score([path_of(table)], calibration=False))
        cells = [
            table, str(calibrated["rows"]), str(len(calibrated["refused"])),
            *(_percent(calibrated[key]) for key in ("mape", "median_ape", "p90_ape", "bias", "coverage_90")),
            _percent(blind["mape"]), str(entry["use"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
