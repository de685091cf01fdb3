"""The runs of the testbed, predicted by simkit's own line from the profiles that `simkit measure` wrote, and scored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from simkit.predict import predict_scenario
from simkit.spec import profiled
from simkit.spec.model import Model
from simkit.spec.scenario import Scenario

HERE = Path(__file__).resolve().parent
PROFILES = HERE / "profiles"
RESULTS = HERE / "results"
MIB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One run: what was measured (median of the iterations), what simkit says, how quiet the machine was."""

    name: str
    method: str
    mbps: int
    ranks: int
    measured_s: float
    predicted_s: float
    quiet: bool = True
    extra: Mapping[str, float] | None = None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


def link(mbps: int) -> str:
    """Name of the profile of the shaped link of that rate."""
    return f"shaped-{mbps}mbps"


def exchange_fields(case: Mapping[str, Any], mbps: int, ranks: int, device: str) -> dict[str, Any]:
    """The scenario of a case but for its network."""
    bucket = case["bucket_bytes"]
    fields: dict[str, Any] = {
        "cluster": f"{ranks}x1x{device}",
        "inter": link(mbps),
        "nics_per_node": 1,
        "p2p": True,
        "method": case["method"],
        "algorithm": "ring",
        "precision": "fp32",
        "overlap": "wfbp",
        "fusion": "all" if bucket is None else "none" if bucket == 0 else "bucket",
        "grad_accum": 1,
    }
    if bucket:
        fields["bucket_mb"] = bucket / MIB
    for key in ("rank", "density"):
        if key in case:
            fields[key] = case[key]
    return fields


def emulated_model(case: Mapping[str, Any]) -> Model:
    """The network of an emulated case: its seconds are known."""
    layers = list(reversed(case["layers"]))
    share = case["forward_s"] / len(layers)
    return profiled.to_model(
        {
            profiled.KEY: 1,
            "name": f"emulated-{case['name'].partition('/')[0]}",
            "device": "emulator",
            "tensors": {f"layer{i}": layer["shape"] for i, layer in enumerate(layers)},
            "ops": [
                {"name": f"layer{i}", "forward_s": share, "backward_s": layer["backward_s"], "tensors": [f"layer{i}"]}
                for i, layer in enumerate(layers)
            ],
        },
        file="cases.py",
    )


def predicted_s(model: Model, fields: Mapping[str, Any], *, profiles: Path = PROFILES) -> float:
    """Seconds of an iteration by Scenario -> Report."""
    base = Scenario.of(dict(fields) | {"model": model.name}, profiles=(str(profiles),))
    scenario = Scenario(values=base.values, profiles=base.profiles, network=model)
    return float(predict_scenario(scenario, beside=False).iteration_time_s)


def emulated(results: Path = RESULTS, profiles: Path = PROFILES) -> Iterator[Scored]:
    """Every recorded run with emulated compute."""
    for path in sorted(results.glob("emulated-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for run in record["runs"]:
            case = run["case"]
            fields = exchange_fields(case, record["mbps"], run["ranks"], "emulator")
            fields |= {"micro_batch": 1, "optimizer": "none"}
            yield Scored(
                name=case["name"],
                method=case["method"],
                mbps=record["mbps"],
                ranks=run["ranks"],
                measured_s=median(run["seconds"]),
                predicted_s=predicted_s(emulated_model(case), fields, profiles=profiles),
            )


# -- real training -------------------------------------------------------------------------------------------------

HOST, RANK = "testbed-host", "testbed-rank"
QUIET = 1.15
"""A pair of steps is quiet where the twin's step took at most this many times its processor seconds x ranks / cores."""
LEAST_PAIRS = 5
"""Quiet pairs below which a run is not quiet."""


def write_rank(profiles: Path, *, ranks: int, cores: int) -> Path:
    """The profile of a rank from that of the host's core: `ranks` of one thread each share `cores`."""
    from simkit.calibrate_links import fit_toml
    from simkit.measure_store import write_text
    from simkit.spec import load
    from simkit.spec.hardware import Fit
    from simkit.spec.profiles import MARKER

    host = profiles / "devices" / f"{HOST}.toml"
    share = max(1.0, ranks / cores)
    fits = dict(load.device(str(host)).calibration)
    fits["kernel"] = replace(fits["kernel"], values={"seconds": fits["kernel"]["seconds"] * share})
    note = f"{ranks} ranks of one thread share {cores} cores"
    fits["sustained"] = Fit(name="sustained", values={"factor": 1.0 / share}, evidence="assumed", note=note)
    facts = host.read_text(encoding="utf-8").partition(MARKER)[0].rstrip("\n")
    path = profiles / "devices" / f"{RANK}.toml"
    write_text(path, f"{facts}\n\n{MARKER}\n{fit_toml(fits)}")
    return path


def quiet_pairs(run: Mapping[str, Any]) -> int:
    """How many pairs of a recorded run were quiet."""
    return len(_quiet(run))


def _quiet(run: Mapping[str, Any]) -> list[float]:
    """Wall seconds of the exchanging step of every quiet pair."""
    share = max(1.0, run["ranks"] / run["cores"])
    columns = zip(run["alone_s"], run["cpu_s"], run["step_s"], strict=True)
    return [step for alone, cpu, step in columns if alone <= QUIET * share * cpu]


def trained(results: Path = RESULTS, profiles: Path = PROFILES) -> Iterator[Scored]:
    """Every recorded run of real training. Without enough quiet pairs it is not quiet, and all of them are taken."""
    for path in sorted(results.glob("train-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        for run in record["runs"]:
            case, still = run["case"], _quiet(run)
            fields = exchange_fields(case, record["mbps"], run["ranks"], RANK)
            fields |= {"micro_batch": case["batch"], "optimizer": "sgd-momentum"}
            # Wall over processor seconds of the twin: ranks / cores, and what sharing a core costs beside.
            share = median(run["alone_s"]) / median(run["cpu_s"])
            model = profiled.to_model(run["profile"] | {"time_share": share}, file=path.name)
            quiet = len(still) >= LEAST_PAIRS
            yield Scored(
                name=case["name"],
                method=case["method"],
                mbps=record["mbps"],
                ranks=run["ranks"],
                measured_s=median(still if quiet else run["step_s"]),
                predicted_s=predicted_s(model, fields, profiles=profiles),
                quiet=quiet,
                extra={"alone_s": median(run["alone_s"]), "cpu_s": median(run["cpu_s"]), "quiet_pairs": len(still)},
            )


def table(found: list[Scored]) -> str:
    """The runs as a table in Markdown."""
    lines = ["| Mb/s | ranks | case | measured ms | predicted ms | error |", "|--:|--:|---|--:|--:|--:|"]
    lines += [
        f"| {s.mbps} | {s.ranks} | {s.name} | {s.measured_s * 1e3:.1f} | {s.predicted_s * 1e3:.1f} | "
        f"{s.error:+.1%}{'' if s.quiet else ' (not quiet)'} |"
        for s in found
    ]
    return "\n".join(lines)
