"""A peer of a decentralized job: one GPU with its own access line; from a cluster text or from a CSV.

A cluster text gives identical lines to all: ``peers_from_cluster("30x3080+20x4090", inter="wan-100mbps")``. A peers CSV
gives each row its own (`COLUMNS`); a row may stand for `count` equal peers. Cells are SI numbers or texts with a unit
(``100 Mb/s``, ``20ms``, ``10 GiB``); what a cell leaves empty the device profile fills in.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec import load
from simkit.spec.cluster import cluster as read_cluster
from simkit.spec.hardware import Cluster, Device, Link
from simkit.units import parse

MAX_PEERS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One GPU behind an access line; all numbers SI.

    name: unique. device: key of a device profile. flops: sustained FLOP/s for the job's precision. memory_bytes: as the
    driver reports it. up_Bps, down_Bps: the access line from and to the peer. latency_s: one way, to the backbone, so
    that a message between two peers takes the sum of theirs. relay: behind a firewall, traffic passes a relay.
    """

    name: str
    device: str
    flops: float
    memory_bytes: float
    up_Bps: float
    down_Bps: float
    latency_s: float = 0.0
    region: str = ""
    relay: bool = False
    price_usd_per_hour: float = 0.0
    power_w: float = 0.0


COLUMNS: Mapping[str, str] = {
    "flops": "flops",
    "memory_bytes": "bytes",
    "up_Bps": "Bps",
    "down_Bps": "Bps",
    "latency_s": "s",
    "price_usd_per_hour": "usd_per_hour",
    "power_w": "w",
}
"""The columns of a peers CSV that hold quantities, and their dimension. Beside them ``name device region relay`` and
``count``; ``device up_Bps down_Bps`` are required."""
_NAMES = tuple(f.name for f in fields(Peer))
_KNOWN = (*_NAMES, "count")
_REQUIRED = ("device", "up_Bps", "down_Bps")


Rate = Callable[[Device], float]
"""Sustained FLOP/s of a device for the job; what prices the job passes its own."""


def dense_peak(precision: str = "bf16") -> Rate:
    """The rate of the datasheet: dense, with fp32 accumulation; a dtype the device lacks runs at its fp32 rate."""

    def rate(device: Device) -> float:
        known = device.peak_flops
        return known.get(precision) or known.get("fp32") or max(known.values())

    return rate


def peers_from_cluster(
    cluster: str | Cluster,
    *,
    rate: Rate | None = None,
    inter: str | None = None,
    profiles: Iterable[str | Path] = (),
    calibration: bool = True,
) -> tuple[Peer, ...]:
    """One peer per GPU of a cluster (text or value), all behind the line between its nodes.

    A node of several GPUs shares its NICs evenly among them; a single node talks over its inner link. Half of the
    link's latency is each peer's way to the backbone. Names are ``DEVICE-NUMBER``. rate: sustained FLOP/s of a device,
    its dense bf16 peak where none is given. Raises InputError as
    `simkit.spec.cluster.cluster` does, and where no link joins the peers.

    >>> [p.name for p in peers_from_cluster("2x3080", inter="100Mb/s@20ms")]
    ['rtx3080-0', 'rtx3080-1']
    """
    if isinstance(cluster, Cluster):
        built = cluster
    else:
        built, _ = read_cluster(cluster, inter=inter, profiles=tuple(profiles), calibration=calibration)
    link, shared = built.inter, True
    if link is None:
        link, shared = built.intra, False
    if link is None and built.gpus > 1:
        raise InputError("joins its GPUs by nothing", key="cluster", value=built.spec, hint="give inter")
    found: list[Peer] = []
    width = len(str(built.gpus - 1))
    numbers: dict[str, int] = {}
    for group in built.groups:
        device = group.device
        flops = (rate or dense_peak())(device)
        share = built.nics_per_node / group.gpus_per_node if shared and link and link.scope != "gpu" else 1.0
        for _ in range(group.gpus):
            number = numbers.get(device.name, 0)
            numbers[device.name] = number + 1
            found.append(_peer(f"{device.name}-{number:0{width}d}", device, flops, link, share))
    return tuple(found)


def _peer(name: str, device: Device, flops: float, link: Link | None, share: float) -> Peer:
    return Peer(
        name=name,
        device=device.name,
        flops=flops,
        memory_bytes=device.memory_bytes,
        up_Bps=(link.up_Bps or link.Bps) * share if link else float("inf"),
        down_Bps=link.Bps * share if link else float("inf"),
        latency_s=link.latency_s / 2.0 if link else 0.0,
        price_usd_per_hour=device.rental_usd_per_hour or 0.0,
        power_w=device.power_w or 0.0,
    )


def read_peers(
    path: str | Path,
    *,
    rate: Rate | None = None,
    profiles: Iterable[str | Path] = (),
    calibration: bool = True,
) -> tuple[Peer, ...]:
    """The peers of a CSV file; its columns are the fields of `Peer` and `count`. rate: as in `peers_from_cluster`.

    Raises InputError naming the file, the line, the column and the value: an unknown column or device, a missing
    required one, a quantity that is none or not positive, a name twice, no peer at all.
    """
    file, found, names = str(path), [], set()
    devices: dict[str, tuple[Device, float]] = {}
    for line, row in _rows(file):
        where = f"{file}:{line}"
        key = row.get("device", "")
        if key not in devices:
            try:
                device = load.device(key, profiles=tuple(profiles), calibration=calibration)
            except InputError as error:
                raise InputError(error.what, file=where, key="device", value=key, hint=error.hint) from None
            devices[key] = device, (rate or dense_peak())(device)
        base = _of_row(row, *devices[key], where)
        count = _count(row.get("count", ""), where)
        for i in range(count):
            name = base["name"] or f"{base['device']}-{line}"
            name = name if count == 1 else f"{name}-{i:0{len(str(count - 1))}d}"
            if name in names:
                raise InputError("stands twice", file=where, key="name", value=name, hint="names must differ")
            names.add(name)
            found.append(Peer(**{**base, "name": name}))
        if len(found) > MAX_PEERS:
            raise InputError("holds too many peers", file=where, hint=f"at most {MAX_PEERS}")
    if not found:
        raise InputError("holds no peer", file=file, hint=f"columns: {', '.join(_KNOWN)}")
    return tuple(found)


def _rows(file: str) -> Iterable[tuple[int, dict[str, str]]]:
    """(line number, {column: cell}) of every row that is not empty."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle, strict=True)
            header = [cell.strip() for cell in next(reader, [])]
            for name in header:
                if name not in _KNOWN:
                    raise unknown("column", name, _KNOWN, file=file, key="column")
            for name in _REQUIRED:
                if name not in header:
                    raise InputError("is missing", file=file, key=f"column {name}", hint="give it for each peer")
            rows = []
            for cells in reader:
                if not any(cell.strip() for cell in cells) or cells[0].lstrip().startswith("#"):
                    continue
                if len(cells) != len(header):
                    raise InputError(f"has {len(cells)} cells for {len(header)} columns",
                                     file=f"{file}:{reader.line_num}", hint="quote cells that hold a comma")
                rows.append((reader.line_num, {k: c.strip() for k, c in zip(header, cells, strict=True)}))
            return rows
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file, hint="give a peers CSV") from None
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        raise InputError(f"is no CSV: {error}", file=file, hint="save it as UTF-8, comma separated") from None


def _of_row(row: Mapping[str, str], device: Device, flops: float, where: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": row.get("name", ""),
        "device": device.name,
        "region": row.get("region", ""),
        "relay": _flag(row.get("relay", ""), where),
        "flops": flops,
        "memory_bytes": device.memory_bytes,
        "latency_s": 0.0,
        "price_usd_per_hour": device.rental_usd_per_hour or 0.0,
        "power_w": device.power_w or 0.0,
    }
    for key, dimension in COLUMNS.items():
        text = row.get(key, "")
        if not text:
            if key in _REQUIRED:
                raise InputError("is empty", file=where, key=key, hint="give it with its unit, such as 100 Mb/s")
            continue
        number = parse(text, dimension, key=key, file=where)
        least = key in ("latency_s", "price_usd_per_hour", "power_w")
        if number < 0 or (number == 0 and not least):
            raise InputError("is not positive", file=where, key=key, value=text)
        values[key] = number
    return values


def _flag(text: str, where: str) -> bool:
    folded = text.lower()
    if folded in ("", "0", "false", "no"):
        return False
    if folded in ("1", "true", "yes"):
        return True
    raise InputError("is neither true nor false", file=where, key="relay", value=text, hint="write true or false")


def _count(text: str, where: str) -> int:
    if not text:
        return 1
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 7 and 1 <= int(text) <= MAX_PEERS):
        raise InputError("is no count", file=where, key="count", value=text, hint=f"1 to {MAX_PEERS}")
    return int(text)
