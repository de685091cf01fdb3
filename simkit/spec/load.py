"""Devices, links and machines by name, from the shipped profiles and the user's own.

>>> device("RTX 3080").peak_flops["fp16"]
59500000000000.0
>>> link("25Gb/s@30us").Bps
3125000000.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec import profiles as store
from simkit.spec.hardware import Device, Fit, Link
from simkit.spec.profiles import Table
from simkit.units import parse

Profiles = Iterable[str | Path]
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")
SCOPES = ("gpu", "nic", "wan")
TRANSPORTS = ("nvlink", "xgmi", "pcie", "rdma", "tcp", "tcpxo", "wan")
DEFAULT = "default"  # the source of a value that a user's profile left out
_NO_FITS: Mapping[str, Fit] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A whole node as it is sold: which device, how many, and the links inside and between nodes.

    gpus_per_nic: how many GPUs sit behind one NIC; None where the vendor does not say. p2p: None = as the device.
    """

    name: str
    title: str
    device: str
    gpus_per_node: int
    intra: str
    inter: str
    nics_per_node: int = 1
    gpus_per_nic: int | None = None
    p2p: bool | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    file: str = ""


def device_names(profiles: Profiles = ()) -> tuple[str, ...]:
    """The stems of all device profiles, sorted, the user's among them."""
    return store.names("device", profiles)


def link_names(profiles: Profiles = ()) -> tuple[str, ...]:
    """The stems of all link profiles, sorted, the user's among them."""
    return store.names("link", profiles)


def machine_names(profiles: Profiles = ()) -> tuple[str, ...]:
    """The stems of all machine profiles, sorted, the user's among them."""
    return store.names("machine", profiles)


def device(name: str, *, profiles: Profiles = (), calibration: bool = True) -> Device:
    """The device of that stem or alias (``rtx3080``, ``RTX 3080``, ``3080``), or of a path ending in ``.toml``.

    profiles: folders of the user's own files, which win over the shipped ones. calibration=False leaves the fits out.
    Raises InputError: no such device (with the nearest names), or a fault of the file.
    """
    path = store.locate("device", name, tuple(profiles))
    return _device(path, calibration)


def link(name: str, *, profiles: Profiles = (), calibration: bool = True, key: str = "inter") -> Link:
    """The link of that stem or alias, or the one that ``RATE@LATENCY`` describes: ``25Gb/s@30us``, ``100Mb/s@20ms``.

    A described link is one NIC per node, both directions at that rate, without calibration. key: the field that
    errors name. Raises InputError: no such link, a rate without a latency, a rate or latency that is no quantity.
    """
    if isinstance(name, str) and store.find("link", name.strip(), tuple(profiles)) is None:
        described = _described(name, key)
        if described is not None:
            return described
    return _link(store.locate("link", name, tuple(profiles), key=key), calibration)


def machine(name: str, *, profiles: Profiles = ()) -> Machine:
    """The machine of that stem or alias, such as ``dgx-a100``. Raises InputError as `device`."""
    return _machine(store.locate("machine", name, tuple(profiles)))


def source(key: str, *, profiles: Profiles = ()) -> Mapping[str, str]:
    """The entry of ``sources.toml`` (title, publisher, date, url, page, note) under a key that a profile names."""
    known: dict[str, Any] = {}
    for root in reversed(store.roots(tuple(profiles))):
        if (root / "sources.toml").is_file():
            known.update(store.read(root / "sources.toml"))
    if key not in known or not isinstance(known[key], dict):
        raise unknown("source", key, known)
    return MappingProxyType({str(k): str(v) for k, v in known[key].items()})


@lru_cache(maxsize=512)
def _described(name: str, key: str) -> Link | None:
    """The Link of a RATE@LATENCY, None where the text is neither that nor a bare rate."""
    text = name.strip()
    rate, at, latency = text.partition("@")
    if not at:
        if re.fullmatch(r"[0-9.]+\s*[kMGT]?i?(?:[bB](?:it)?/s|bps)", text):
            raise InputError("is a rate without a latency", key=key, value=name, hint=f"write it as '{text}@30us'")
        return None
    for part, example in ((rate, "25Gb/s@30us"), (latency, "100Mb/s@20ms")):
        if not re.search(r"[A-Za-z]\s*$", part):
            raise InputError("lacks a unit", key=key, value=name, hint=f"write it as {example!r}")
    rate_Bps = parse(rate, "Bps", key=key)
    latency_s = parse(latency, "s", key=key)
    if rate_Bps <= 0:
        raise InputError("has a rate that is not greater than zero", key=key, value=name, hint="as in '25Gb/s@30us'")
    if latency_s < 0:
        raise InputError("has a negative latency", key=key, value=name, hint="as in '25Gb/s@30us'")
    sources = MappingProxyType({"rate": "user", "latency": "user"})
    return Link(name=text, title=text, scope="nic", Bps=rate_Bps, latency_s=latency_s, transport="tcp", sources=sources)


@lru_cache(maxsize=512)
def _device(path: Path, calibration: bool) -> Device:
    data = store.read(path)
    _only(data, path, "device")
    top = Table(data.get("device"), file=path, name="device")
    peak = _peak(top, path)
    half = peak.pop("fp16_accumulate", None)
    memory_bytes = top.quantity("memory", "bytes", low=2**26, high=2**44)
    built = Device(
        name=path.stem,
        title=top.text("title"),
        vendor=top.text("vendor", "unknown"),
        kind=top.text("kind", "gpu", one_of=("gpu", "cpu", "accelerator")),
        architecture=top.text("architecture", "unknown"),
        form_factor=top.text("form_factor", "pcie"),
        year=top.integer("year", 0, low=1990, high=2100),
        peak_flops=MappingProxyType(peak),
        peak_flops_fp16_accumulate=half,
        memory_bytes=memory_bytes,
        memory_nominal_bytes=top.quantity("memory_nominal", "bytes", memory_bytes, low=2**26, high=2**44),
        memory_Bps=top.quantity("memory_bandwidth", "Bps", low=1e8, high=1e15),
        l2_bytes=top.optional("l2", "bytes", low=2**10, high=2**40),
        sm_count=top.integer("sm_count") if "sm_count" in top.data else None,
        boost_hz=top.optional("boost_clock", "hz", low=1e7, high=2e10),
        base_hz=top.optional("base_clock", "hz", low=1e7, high=2e10),
        power_w=top.optional("power", "w", low=0.1, high=1e5),
        idle_power_w=top.optional("idle_power", "w", low=0.01, high=1e5),
        launch_price_usd=top.optional("launch_price", "usd"),
        rental_usd_per_hour=top.optional("rental_price", "usd_per_hour"),
        rental_date=top.text("rental_date", ""),
        p2p=top.flag("p2p", False),
        pcie_generation=top.integer("pcie_generation", 4, high=9),
        pcie_lanes=top.integer("pcie_lanes", 16, high=32),
        gpus_per_node=top.integer("gpus_per_node", 1, high=1024),
        intra=top.text("intra", "pcie4x16"),
        aliases=top.strings("aliases"),
        sources=_sources(top, ("p2p", "pcie_generation", "pcie_lanes", "gpus_per_node", "intra")),
        calibration=store.calibration(data.get("calibration"), file=path) if calibration else _NO_FITS,
        file=str(path),
    )
    top.asked += ["sm_count"]
    top.done()
    return built


def _peak(top: Table, path: Path) -> dict[str, float]:
    """The peaks of a device by dtype in FLOP/s; at least one of DTYPES."""
    table = Table(top.table("peak"), file=path, name="device.peak")
    peak: dict[str, float] = {}
    for dtype in (*DTYPES, "fp16_accumulate"):
        value = table.optional(dtype, "flops", low=1e8, high=1e18)
        if value is not None:
            peak[dtype] = value
    table.done()
    if not any(dtype in peak for dtype in DTYPES):
        raise InputError("names no dtype", file=str(path), key="[device.peak]", hint=f"give one of {', '.join(DTYPES)}")
    return peak


def _share(top: Table) -> float | None:
    """``usable``, a share of 1."""
    top.asked += ["usable"]
    value = top.data.get("usable")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value <= 1.0:
        raise InputError("is no share between 0 and 1", file=str(top.file), key="usable", value=value)
    return float(value)


@lru_cache(maxsize=512)
def _link(path: Path, calibration: bool) -> Link:
    data = store.read(path)
    _only(data, path, "link")
    top = Table(data.get("link"), file=path, name="link")
    built = Link(
        name=path.stem,
        title=top.text("title"),
        scope=top.text("scope", one_of=SCOPES),
        Bps=top.quantity("rate", "Bps", low=1e2, high=1e15),
        latency_s=top.quantity("latency", "s", zero=True, high=60.0),
        up_Bps=top.optional("up_rate", "Bps", low=1e2, high=1e15),
        usable=_share(top),
        duplex=top.flag("duplex", True),
        switched=top.flag("switched", True),
        p2p=top.flag("p2p", True),
        transport=top.text("transport", "tcp", one_of=TRANSPORTS),
        max_ranks=top.integer("max_ranks", low=2) if "max_ranks" in top.data else None,
        aliases=top.strings("aliases"),
        sources=_sources(top, ("duplex", "switched", "p2p", "transport")),
        calibration=store.calibration(data.get("calibration"), file=path) if calibration else _NO_FITS,
        file=str(path),
    )
    top.asked += ["max_ranks"]
    top.done()
    return built


@lru_cache(maxsize=512)
def _machine(path: Path) -> Machine:
    data = store.read(path)
    _only(data, path, "machine")
    top = Table(data.get("machine"), file=path, name="machine")
    built = Machine(
        name=path.stem,
        title=top.text("title"),
        device=top.text("device"),
        gpus_per_node=top.integer("gpus_per_node", high=1024),
        intra=top.text("intra"),
        inter=top.text("inter"),
        nics_per_node=top.integer("nics_per_node", 1, high=1024),
        gpus_per_nic=top.integer("gpus_per_nic", high=1024) if "gpus_per_nic" in top.data else None,
        p2p=top.flag("p2p") if "p2p" in top.data else None,
        aliases=top.strings("aliases"),
        sources=_sources(top, ("nics_per_node",)),
        file=str(path),
    )
    top.asked += ["gpus_per_nic", "p2p"]
    top.done()
    return built


def _sources(top: Table, stated: tuple[str, ...]) -> Mapping[str, str]:
    """The sources of a profile, with DEFAULT under each key of `stated` that was left out."""
    return MappingProxyType(store.sources(top) | {key: DEFAULT for key in stated if key in top.absent})


def _only(data: Mapping[str, Any], path: Path, kind: str) -> None:
    """Refuses a file whose tables are not those of its kind."""
    tables = (kind, "calibration") if kind != "machine" else (kind,)
    for key in data:
        if key not in tables:
            hint = f"a {kind} profile holds {' and '.join(f'[{t}]' for t in tables)}"
            raise InputError("is no table of this kind of profile", file=str(path), key=f"[{key}]", hint=hint)


def forget() -> None:
    """Drops what was cached, after a profile was written."""
    store.forget()
    for cached in (_device, _link, _machine):
        cached.cache_clear()
