"""`simkit calibrate --device NAME --link NAME`: one's own measurements into one's own profile.

Files of any format of `simkit.readers` become rows; the rows of the device are fitted as the shipped devices are
(`simkit.calibrate_devices`), those of the link as the shipped links (`simkit.calibrate_links`). What was not measured
keeps the fit that the profile had. Facts are copied, never changed: the profile goes to a folder of the user's, in
force with ``--profiles``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simkit import readers
from simkit.calibrate_devices import STREAMING_BYTES, fit_devices
from simkit.calibrate_kernels import LEAST_ROWS, SIXTEEN_BIT
from simkit.calibrate_links import fit_links, fit_toml
from simkit.collectives.ring import OPS
from simkit.errors import InputError, SimkitError
from simkit.operators import KERNELS
from simkit.readers import Asked, Read
from simkit.spec import load, profiles
from simkit.spec.hardware import Device, Fit, Link

_STEM = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
CACHES = 4.0
"""Caches full that a buffer must hold to tell the rate of the memory."""

TOO_FAST = 1.1
"""A ceiling that clocks above the datasheet's do not explain."""

Tables = dict[str, list[dict[str, str]]]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was read and fitted. fits: {"devices" | "links": {name: {fit: Fit}}}, new ones alone; profiles: {path in a
    folder of profiles: text}; lacking: what the rows do not tell, one line each."""

    reads: list[Read] = field(default_factory=list)
    fits: dict[str, dict[str, dict[str, Fit]]] = field(default_factory=dict)
    profiles: dict[str, str] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, float]:
        """The pace of launching of the first trace that tells it."""
        return next((r.facts for r in self.reads if "host_kernel_s" in r.facts), {})


def calibrate_user(
    paths: Sequence[str | Path],
    *,
    device: str = "",
    link: str = "",
    gpus_per_node: int | None = None,
    nics_per_node: int | None = None,
    folders: tuple[str, ...] = (),
) -> Outcome:
    """Reads and fits; writes nothing. device, link: profiles to fit; a link may be new, as NAME=RATE@LATENCY.

    Raises InputError: an unknown device or link, a file that cannot be read, nothing that could be fitted.
    """
    if not device and not link:
        raise InputError("is missing", key="--device or --link", hint="name the profile that the measurements are of")
    machine = load.device(device, profiles=folders, calibration=False) if device else None
    wire, facts = _link(link, folders) if link else (None, "")
    name = wire.name if wire is not None else ""
    asked = Asked(
        device=machine.name if machine is not None else "", link=name, gpus_per_node=gpus_per_node,
        nics_per_node=nics_per_node, profiles=folders,
    )  # fmt: skip
    out = Outcome(reads=[readers.read(path, asked) for path in readers.files(paths)])
    tables = _tables(out.reads)
    if machine is not None:
        out.fits["devices"] = {machine.name: _device_fits(tables, machine, out)}
    if wire is not None:
        out.fits["links"] = {wire.name: _link_fits(tables, wire, folders, out)}
    if not any(fits for by_name in out.fits.values() for fits in by_name.values()):
        raise InputError("told too little for any fit", key="--data", hint="; ".join(out.lacking))
    if machine is not None and out.fits["devices"][machine.name]:
        _add(out, "device", machine.name, out.fits["devices"][machine.name], "", folders)
    if wire is not None and out.fits["links"][wire.name]:
        _add(out, "link", wire.name, out.fits["links"][wire.name], facts, folders)
    return out


def _link(text: str, folders: tuple[str, ...]) -> tuple[Link, str]:
    """(the link, the text of its facts where it is new)."""
    name, equals, described = text.partition("=")
    if not equals:
        if "@" in text:
            hint = f"give the link a name of its own: my-link={text}"
            raise InputError("describes a link, and names none", key="--link", value=text, hint=hint)
        return load.link(text, profiles=folders, calibration=False, key="--link"), ""
    if not _STEM.fullmatch(name):
        hint = "use lower-case letters, digits and dashes"
        raise InputError("is no profile name", key="--link", value=name, hint=hint)
    if profiles.find("link", name, folders) is not None:
        raise InputError("is a link already", key="--link", value=name, hint=f"leave ={described} out, or another name")
    one = load.link(described, profiles=folders, key="--link")
    rate, _, latency = described.partition("@")
    facts = f'[link]\ntitle = "{name}"\nscope = "nic"\nrate = "{rate.strip()}"\nlatency = "{latency.strip()}"\n'
    return Link(
        name=name, title=name, scope="nic", Bps=one.Bps, latency_s=one.latency_s, transport=one.transport
    ), facts  # fmt: skip


def _tables(reads: Sequence[Read]) -> Tables:
    """{name: rows}; two files of one name are told apart."""
    out: Tables = {}
    for one in reads:
        stem = one.file.split(".")[0] or one.file
        name, number = stem, 2
        while name in out:
            name, number = f"{stem}-{number}", number + 1
        out[name] = one.rows
    return out


# -- devices ---------------------------------------------------------------------------------------------------------


def _device_fits(tables: Tables, device: Device, out: Outcome) -> dict[str, Fit]:
    mine: Tables = {t: [r for r in rows if _is(r, device.name) and _op(r) in KERNELS] for t, rows in tables.items()}
    others = Counter(r.get("device", "") for rows in tables.values() for r in rows if not _is(r, device.name))
    for name, count in sorted(others.items()):
        out.lacking.append(f"rows of another device, {name}: {count}")
    least = min(STREAMING_BYTES, CACHES * device.l2_bytes) if device.l2_bytes else STREAMING_BYTES
    fits = fit_devices(mine, {device.name: device}, streaming_bytes=least).get(device.name, {})
    launch = [r for r in out.reads if "kernel_s" in r.facts]
    if launch and "kernel" not in fits:
        fits["kernel"] = Fit(
            name="kernel", values={"seconds": min(r.facts["kernel_s"] for r in launch)},
            dataset=tuple(r.file.split(".")[0] for r in launch), rows=int(sum(r.facts["kernels"] for r in launch)),
            note="the fastest twentieth of the kernels of traces",
        )  # fmt: skip
    _lacking(mine, fits, device, least, out)
    for name, fit in fits.items():
        if fit.get("ceiling", 0.0) > TOO_FAST:
            asks = "is it this device, this dtype, and a dense product?"
            out.lacking.append(f"{name}: {fit['ceiling']:.2f} times the peak of the datasheet; {asks}")
    return fits


def _lacking(mine: Tables, fits: Mapping[str, Fit], device: Device, least: float, out: Outcome) -> None:
    """One line a kind of rows that was read and not fitted."""
    counts: Counter[tuple[str, str]] = Counter()
    for rows in mine.values():
        for r in rows:
            dtype = r.get("dtype", "")
            counts[_op(r), SIXTEEN_BIT[0] if dtype in SIXTEEN_BIT else dtype] += 1
    for (op, dtype), count in sorted(counts.items()):
        key = {"gemm": "gemm", "memory": "memory", "attention_prefill": "attention", "attention_decode": "decode"}[op]
        names = {key} if key in ("memory", "decode") else {f"{key}.{d}" for d in {dtype, *SIXTEEN_BIT} if d}
        if dtype not in SIXTEEN_BIT and key not in ("memory", "decode"):
            names = {f"{key}.{dtype}"}
        if names & set(fits):
            continue
        if key == "memory":
            why = f"none moves {least / 1e6:.0f} MB, which leaves the cache"
        elif dtype not in device.peak_flops and SIXTEEN_BIT[1] not in device.peak_flops:
            why = f"{device.name} states no {dtype} peak"
        else:
            why = f"{LEAST_ROWS} are needed"
        kind = f"{op} in {dtype}" if dtype and key != "memory" else op
        out.lacking.append(f"rows of {kind}: {count}; {why}")


def _is(r: Mapping[str, str], device: str) -> bool:
    return r.get("device") == device


def _op(r: Mapping[str, str]) -> str:
    return r.get("op", "") or "gemm"


# -- links -----------------------------------------------------------------------------------------------------------


def _link_fits(tables: Tables, wire: Link, folders: tuple[str, ...], out: Outcome) -> dict[str, Fit]:
    def named(name: str) -> Link:
        if name == wire.name or not name:
            return wire
        return load.link(name, profiles=folders)

    def device(name: str) -> Device:
        return load.device(name, profiles=folders, calibration=False)

    mine: Tables = {}
    for table, rows in tables.items():
        kept = [r for r in rows if _op(r) in OPS and wire.name in (r.get("intra"), r.get("inter"))]
        # What lies inside the nodes is the device's usual link, with the fit that it has.
        mine[table] = [r if r.get("intra") or not r.get("inter") else r | {"intra": device(r["device"]).intra}
                       for r in kept]  # fmt: skip
    try:
        fits = fit_links(mine, link=named, device=device, thorough=True).get(wire.name, {})
    except SimkitError as error:
        out.lacking.append(f"link {wire.name}: {error}")
        return {}
    counts = Counter(_op(r) for rows in mine.values() for r in rows)
    for op, count in sorted(counts.items()):
        if not any(name.startswith(op) for name in fits):
            need = "8 between nodes, or two of 16 MB inside one, are needed"
            out.lacking.append(f"rows of {op} over {wire.name}: {count}; {need}")
    if not counts:
        out.lacking.append(f"no collective over {wire.name}")
    return fits


# -- writing ---------------------------------------------------------------------------------------------------------


def _add(out: Outcome, kind: str, name: str, fits: Mapping[str, Fit], facts: str, folders: tuple[str, ...]) -> None:
    """The text of a profile: its facts, the fits it had, and the new ones over them."""
    kept: Mapping[str, Fit] = {}
    if not facts:
        path = profiles.locate(kind, name, folders)
        facts = path.read_text(encoding="utf-8").partition(profiles.MARKER)[0]
        old: Device | Link = load.device(name, profiles=folders) if kind == "device" else load.link(
            name, profiles=folders
        )
        kept = old.calibration
    body = fit_toml({**kept, **fits}).lstrip("\n")
    out.profiles[f"{kind}s/{name}.toml"] = f"{facts.rstrip()}\n\n{profiles.MARKER}\n\n{body}"


def write(outcome: Outcome, folder: str | Path) -> list[Path]:
    """Puts the profiles into a folder, each whole or not at all. Raises InputError where that cannot be."""
    written = []
    for name, text in outcome.profiles.items():
        path = Path(folder) / name
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True) if partial.parent.is_dir() else None
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"cannot be written ({reason})", file=str(path), hint="give another --out") from None
        written.append(path)
    load.forget()
    return written


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """One flat dictionary a new Fit, as `simkit.calibrate.rows_of` makes them."""
    return [
        {
            "kind": kind, "name": name, "fit": key, "values": dict(fit.values), "rows": fit.rows, "mape": fit.mape,
            "evidence": fit.evidence, "dataset": list(fit.dataset), "note": fit.note,
            "valid": {k: list(v) for k, v in fit.valid.items()},
        }
        for kind, by_name in outcome.fits.items()
        for name, fits in by_name.items()
        for key, fit in sorted(fits.items())
    ]  # fmt: skip


__all__ = ["Outcome", "calibrate_user", "rows_of", "write"]
