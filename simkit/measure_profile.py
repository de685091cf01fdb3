"""The profile that measured rows become: facts above the marker, and below it the fits of `simkit calibrate`.

A CPU has no datasheet of its sustained rates, so its peak is the fastest matrix product that was measured and its
bandwidth the fastest stream; the fits are fractions of those. A card that the package knows keeps its datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simkit.calibrate_own import Row, times
from simkit.measure_machine import Machine, versions
from simkit.measure_store import write_text
from simkit.spec import load, profiles
from simkit.validate import read_table

if TYPE_CHECKING:
    from simkit.measure import Options

STREAMING_BYTES = 256e6
SOURCE = "measured"


def write(host: Machine, options: Options, *, kind: str) -> tuple[Path, ...]:
    """Writes the profiles that the tables of the folder allow, and says which files; the device's only where products
    and streams were measured. Below the marker stands what ``simkit calibrate --profiles`` makes of the same tables."""
    from simkit import calibrate

    folder = options.out / "tables"
    tables = read_all(folder)
    facts = {options.out / "devices" / f"{host.name}.toml": _facts(tables, host)}
    if kind == "collective":
        from simkit.measure_links import facts_of_links

        facts |= facts_of_links(tables, options)
    for path, text in facts.items():
        if text is not None:
            write_text(path, text)
    load.forget()
    calibrate.write_own(calibrate.own(folder, options.out), options.out)
    load.forget()
    return (_sources(host, options), *(path for path, text in facts.items() if text is not None))


def read_all(folder: Path) -> dict[str, list[dict[str, str]]]:
    """{stem: rows} of the operator tables of a folder."""
    return {path.stem: read_table(path) for path in sorted(folder.glob("*.csv"))}


def _sources(host: Machine, options: Options) -> Path:
    path = options.out / "sources.toml"
    lines = [
        f"[{SOURCE}]",
        'title = "simkit measure"',
        f'publisher = "this machine: {host.title}"',
        f'date = "{host.date}"',
        f'note = "{versions(options.device)}; the fastest median of its kind"',
        "",
        "[operating-system]",
        'title = "what the operating system reports"',
        f'publisher = "this machine: {host.title}"',
        f'date = "{host.date}"',
    ]
    write_text(path, "\n".join(lines) + "\n")
    return path


def _of_device(tables: Mapping[str, Sequence[Row]], name: str) -> list[Row]:
    return [row for rows in tables.values() for row in rows if row.get("device") == name]


def _facts(tables: Mapping[str, Sequence[Row]], host: Machine) -> str | None:
    """The TOML of the facts; None where no product or no stream was measured yet."""
    if host.shipped:
        path = profiles.find("device", host.shipped)
        assert path is not None
        return path.read_text(encoding="utf-8").partition(profiles.MARKER)[0].rstrip("\n") + "\n"
    rows = _of_device(tables, host.name)
    streams = [float(r["bytes"]) / t for r, t in times(rows, "memory") if float(r["bytes"]) >= STREAMING_BYTES]
    peaks: dict[str, float] = {}
    for row, seconds in times(rows, "gemm"):
        flops = 2.0 * float(row["batch"]) * float(row["m"]) * float(row["n"]) * float(row["k"])
        peaks[row["dtype"]] = max(peaks.get(row["dtype"], 0.0), flops / seconds)
    if not streams or not peaks:
        return None
    facts: list[tuple[str, str, str]] = [
        ("memory", f'"{host.memory_bytes / 2**20:.0f} MiB"', "operating-system"),
        ("memory_bandwidth", f'"{max(streams) / 1e9:.5g} GB/s"', SOURCE),
        ("sm_count", str(host.processors), "operating-system"),
    ]
    if host.cache_bytes:
        facts.append(("l2", f'"{host.cache_bytes / 2**20:g} MiB"', "operating-system"))
    if host.clock_hz:
        facts.append(("boost_clock", f'"{host.clock_hz / 1e9:.4g} GHz"', "operating-system"))
    lines = ["[device]", f'title = "{host.title}"', f'kind = "{"gpu" if host.device == "cuda" else "cpu"}"']
    lines += [f'architecture = "{host.architecture or "unknown"}"', 'intra = "pcie4x16"', "gpus_per_node = 1"]
    lines += [f"{key} = {value}" for key, value, _ in facts]
    lines += ["", "[device.peak]", *(f'{k} = "{v / 1e12:.5g} TFLOP/s"' for k, v in sorted(peaks.items()))]
    lines += ["", "[device.sources]", *(f'{key} = "{source}"' for key, _, source in facts)]
    lines += [f'"peak.{k}" = "{SOURCE}"' for k in sorted(peaks)]
    return "\n".join(lines) + "\n"
