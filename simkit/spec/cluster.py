"""Reading a cluster: ``[NODESx]GPUSxDEVICE``, several joined by ``+``, and the links that a reader would assume.

=================== =====================================================================================
``1x8xh100``        one node of eight, exactly as written
``50x3080``         fifty machines: one number is GPUs, grouped by the `gpus_per_node` of the device
``32xA100``         four nodes of eight
``4xdgx-a100``      four machines of that kind
``h100``            one GPU; ``dgx-a100``: one machine
``30x3080+20x4090`` a mixed cluster
=================== =====================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from simkit.errors import InputError, unknown
from simkit.spec import load
from simkit.spec import profiles as store
from simkit.spec.hardware import Cluster, Device, Group, Link
from simkit.spec.load import Machine

MAX_GPUS = 1_000_000
_SHAPE = "write it as [NODESx]GPUSxDEVICE, such as 1x8xh100 or 50x3080"
_LONGEST = 60
"""Characters of a part that is worth guessing at."""
_COUNT = re.compile(r"\s*([0-9]+)\s*[xX×]\s*")
_DIGITS = 9  # longer numbers exceed MAX_GPUS anyhow, and int() refuses very long ones with a traceback

# What nodes with this kind of device are usually joined by: (form factor, architecture) -> (link, NICs per node).
_USUAL_INTER: dict[tuple[str, str], tuple[str, int]] = {
    ("sxm", "volta"): ("ib-edr", 4),
    ("sxm", "ampere"): ("ib-hdr", 8),
    ("sxm", "hopper"): ("ib-ndr", 8),
    ("sxm", "blackwell"): ("ib-ndr", 8),
    ("superchip", "hopper"): ("ib-ndr", 1),
    ("superchip", "blackwell"): ("ib-ndr", 4),
    ("soc", "blackwell"): ("200gbe-rdma", 1),
    ("oam", "cdna2"): ("200gbe-rdma", 4),
    ("oam", "cdna3"): ("400gbe-rdma", 8),
    ("oam", "cdna4"): ("400gbe-rdma", 8),
    ("oam", "gaudi2"): ("100gbe-rdma", 24),
    ("oam", "gaudi3"): ("200gbe-rdma", 24),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """One joined part as it was written: its counts, its device, and the machine where it names one."""

    counts: tuple[int, ...]
    device: Device
    machine: Machine | None


def cluster(
    text: str,
    *,
    gpus_per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    nics_per_node: int | None = None,
    p2p: bool | None = None,
    profiles: Iterable[str | Path] = (),
    calibration: bool = True,
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster that a text and the given links describe, and a line for every default that was filled in.

    With one number the GPUs are grouped by `gpus_per_node` (given, or of the device): fewer than that are one node,
    more must divide. `intra` and `inter` name link profiles or a RATE@LATENCY; where they are absent the machine says,
    then the device (inside a node) or what such nodes usually have (between nodes). A single node has no `inter`.
    Raises InputError: malformed text, unknown device or link, counts that do not divide, 1 <= GPUs <= 1,000,000.
    """
    folders = tuple(profiles)
    _check(gpus_per_node, nics_per_node, p2p)
    _check_texts(text, intra)
    # The environment may name further folders: their roots are part of the question.
    inside = _inside(text, gpus_per_node, intra, folders, calibration, store.roots(folders))
    parts, groups, inner = inside.parts, inside.groups, inside.intra
    notes = list(inside.notes)
    nodes = sum(g.nodes for g in groups)
    outer, nics = _inter(parts, groups, inter, nics_per_node, folders, calibration, notes) if nodes > 1 else (None, 1)
    if nodes == 1 and inter is not None:
        outer = load.link(inter, profiles=folders, calibration=calibration, key="inter")
        nics = nics_per_node or 1
    built = Cluster(groups=groups, intra=inner, inter=outer, nics_per_node=nics, p2p=_p2p(parts, inner, p2p, notes))
    notes += inside.defaults
    return built, tuple(dict.fromkeys(notes))


@dataclass(frozen=True, slots=True, eq=False)
class _Inside:
    """What the text says whatever joins the nodes, with the lines to state before and after those of the network."""

    parts: tuple[_Part, ...]
    groups: tuple[Group, ...]
    intra: Link | None
    notes: tuple[str, ...]
    defaults: tuple[str, ...]


@store.remembered
def _inside(text: str, gpus_per_node: int | None, intra: str | None, folders: tuple[str | Path, ...],
            calibration: bool, roots: tuple[Path, ...]) -> _Inside:
    parts = tuple(_part(piece, text, folders, calibration) for piece in _pieces(text))
    notes: list[str] = []
    groups = tuple(_group(part, text, gpus_per_node, notes) for part in parts)
    total = sum(g.gpus for g in groups)
    if not 1 <= total <= MAX_GPUS:
        raise InputError(f"has {total} GPUs", key="cluster", value=text, hint=f"1 to {MAX_GPUS} are possible")
    inner = _intra(parts, groups, intra, folders, calibration, notes)
    return _Inside(parts, groups, inner, tuple(notes), tuple(_profile_defaults(parts)))


def _check(gpus_per_node: object, nics_per_node: object, p2p: object) -> None:
    for key, value in (("gpus_per_node", gpus_per_node), ("nics_per_node", nics_per_node)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024):
            raise InputError("is no count", key=key, value=value, hint="give a whole number from 1 to 1024")
    if p2p is not None and not isinstance(p2p, bool):
        raise InputError("is neither true nor false", key="p2p", value=p2p, hint="give true or false")


def _check_texts(text: object, intra: object) -> None:
    """Raises InputError for what is no text, before it becomes part of a key."""
    if not isinstance(text, str):
        _pieces(text)
    if intra is not None and not isinstance(intra, str):
        store.locate("link", intra, key="intra")


def _pieces(text: object) -> list[str]:
    if not isinstance(text, str) or not text.strip():
        raise InputError("names no device", key="cluster", value=text, hint=_SHAPE)
    pieces = text.split("+")
    if any(not piece.strip() for piece in pieces):
        raise InputError("has an empty part", key="cluster", value=text, hint=_SHAPE)
    return pieces


def _part(piece: str, text: str, folders: tuple[str | Path, ...], calibration: bool) -> _Part:
    """Splits leading counts off, so that an x inside a name (rtx4090) stays where it is."""
    counts: list[int] = []
    rest = piece
    while match := _COUNT.match(rest):
        if len(match[1]) > _DIGITS:
            raise InputError("has too large a count", key="cluster", value=text, hint=f"at most {MAX_GPUS} GPUs")
        counts.append(int(match[1]))
        rest = rest[match.end():]
    name = rest.strip()
    if len(counts) > 2:
        raise InputError("has more than two counts", key="cluster", value=text, hint=_SHAPE)
    if 0 in counts:
        raise InputError("has a count of zero", key="cluster", value=text, hint=_SHAPE)
    if not name:
        raise InputError("names no device", key="cluster", value=text, hint=_SHAPE)
    if store.find("device", name, folders) is None and store.find("machine", name, folders) is not None:
        found = load.machine(name, profiles=folders)
        return _Part(tuple(counts), load.device(found.device, profiles=folders, calibration=calibration), found)
    if store.find("device", name, folders) is None:
        if meant := _meant(piece.strip(), folders):
            hint = f"did you mean {meant}? {_SHAPE}"
            raise InputError("is not how a cluster is written", key="cluster", value=text, hint=hint)
        known = (*load.device_names(folders), *load.machine_names(folders))
        raise unknown("device", name, known, key="cluster", see="simkit devices")
    return _Part(tuple(counts), load.device(name, profiles=folders, calibration=calibration), None)


def _meant(piece: str, folders: tuple[str | Path, ...]) -> str:
    """The right way to write `8*h100`, `8h100`, `2x8 h100`, `h100 x 8`; empty where no such thing was meant."""
    if len(piece) > _LONGEST:
        return ""
    before = re.fullmatch(r"((?:\d+\s*[xX×]\s*)?\d+)[\s*:,;/-]*(.+)", piece)
    after = re.fullmatch(r"(.+?)[\s*:,;/]*[xX×*:,;/\s]\s*(\d+)", piece)
    found = [(before[1], before[2])] if before else []
    found += [(after[2], after[1])] if after else []
    for counts, name in found:
        if store.find("device", name, folders) is not None:
            return f"{re.sub(r'[^0-9]+', 'x', counts)}x{name}"
    return ""


def _group(part: _Part, text: str, gpus_per_node: int | None, notes: list[str]) -> Group:
    counts, name = part.counts, part.device.name
    if part.machine is not None:
        own = part.machine.gpus_per_node
        if len(counts) == 2 or (gpus_per_node is not None and gpus_per_node != own):
            raise InputError(f"asks for another number of GPUs than the {own} of {part.machine.name}", key="cluster",
                             value=text, hint=f"write {(counts or (1,))[0]}x{part.machine.name}, or name the device")
        return Group(nodes=counts[0] if counts else 1, gpus_per_node=own, device=part.device)
    if len(counts) == 2:
        nodes, each = counts
        if gpus_per_node is not None and gpus_per_node != each:
            raise InputError(f"contradicts {each} GPUs per node in cluster {text!r}", key="gpus_per_node",
                             value=gpus_per_node, hint=f"leave one out, or write {nodes * each}x{name}")
        return Group(nodes=nodes, gpus_per_node=each, device=part.device)
    gpus = counts[0] if counts else 1
    each = gpus_per_node or part.device.gpus_per_node
    if gpus < each:
        return Group(nodes=1, gpus_per_node=gpus, device=part.device)
    if gpus % each:
        divisor = next(d for d in range(each, 0, -1) if gpus % d == 0)
        raise InputError(f"does not fill nodes of {each} GPUs", key="cluster", value=text,
                         hint=f"write all three, such as {gpus // divisor}x{divisor}x{name}, or give gpus_per_node")
    if gpus_per_node is None and gpus > 1:
        word = "node" if gpus == each else "nodes"
        notes.append(f"cluster = {gpus // each}x{each}x{name}: {gpus} GPUs as {gpus // each} {word} of {each}")
    return Group(nodes=gpus // each, gpus_per_node=each, device=part.device)


def _intra(parts: tuple[_Part, ...], groups: tuple[Group, ...], intra: str | None, folders: tuple[str | Path, ...],
           calibration: bool, notes: list[str]) -> Link | None:
    """The link inside a node: given, of the machine, or of the device; the slowest of a mixed cluster."""
    widest = max(group.gpus_per_node for group in groups)
    if intra is not None:
        given = load.link(intra, profiles=folders, calibration=calibration, key="intra")
        if given.max_ranks is not None and widest > given.max_ranks:
            reach = f"{given.name} joins {given.max_ranks} GPUs only"
            notes.append(f"intra = {reach}; larger groups are priced as if it joined all")
        return given
    named: dict[str, _Part] = {}
    for part, group in zip(parts, groups, strict=True):
        if group.gpus_per_node > 1:
            named.setdefault(_inner_name(part, group, folders, calibration, notes), part)
    if not named:
        return None
    links = {n: load.link(n, profiles=folders, calibration=calibration, key="intra") for n in named}
    slowest = min(links, key=lambda n: (links[n].Bps, n))
    why = "the slowest of a mixed cluster" if len(links) > 1 else f"usual for {named[slowest].device.name}"
    if named[slowest].machine is None or len(links) > 1:
        notes.append(f"intra = {links[slowest].name} ({why})")
    return links[slowest]


def _inner_name(part: _Part, group: Group, folders: tuple[str | Path, ...], calibration: bool,
                notes: list[str]) -> str:
    """The link of the machine or device; its slot where a bridge does not reach all GPUs of the node."""
    name = part.machine.intra if part.machine else part.device.intra
    found = load.link(name, profiles=folders, calibration=calibration, key="intra")
    if found.max_ranks is None or group.gpus_per_node <= found.max_ranks:
        return name
    device = part.device
    notes.append(f"{name} joins {found.max_ranks} GPUs of {device.name}: a node of {group.gpus_per_node} is on PCIe")
    return f"pcie{device.pcie_generation}x{device.pcie_lanes}"


def _usual(device: Device) -> tuple[str, int]:
    """The network that nodes of this device usually have."""
    other = ("1gbe", 1) if device.gpus_per_node == 1 else ("100gbe-rdma", 1)
    return _USUAL_INTER.get((device.form_factor, device.architecture), other)


def _inter(parts: tuple[_Part, ...], groups: tuple[Group, ...], inter: str | None, nics_per_node: int | None,
           folders: tuple[str | Path, ...], calibration: bool, notes: list[str]) -> tuple[Link, int]:
    """The link between nodes and its NICs per node: given, of the machine, or usual for such nodes."""
    if inter is not None:
        chosen = load.link(inter, profiles=folders, calibration=calibration, key="inter")
        if nics_per_node is not None:
            return chosen, nics_per_node
        nics = min(_nics(part, group, chosen) for part, group in zip(parts, groups, strict=True))
        notes.append(f"nics_per_node = {nics}")
        return chosen, nics
    options: list[tuple[float, str, int, Link, _Part]] = []
    for part in parts:
        m = part.machine
        name, nics = (m.inter, m.nics_per_node) if m else _usual(part.device)
        found = load.link(name, profiles=folders, calibration=calibration, key="inter")
        options.append((min(found.Bps, found.up_Bps or found.Bps) * nics, found.name, nics, found, part))
    _, name, nics, chosen, part = min(options, key=lambda o: o[:2])
    mixed = len({o[1] for o in options}) > 1
    if part.machine is None or mixed:
        why = "the slowest of a mixed cluster" if mixed else f"usual for nodes of {part.device.name}"
        notes.append(f"inter = {name}, nics_per_node = {nics_per_node or nics} ({why})")
    return chosen, nics_per_node or nics


def _nics(part: _Part, group: Group, link: Link) -> int:
    """NICs per node for a link the user named without their number: as many as such nodes have of that class."""
    if link.scope == "gpu":
        return group.gpus_per_node
    if part.machine is not None and part.machine.inter == link.name:
        return part.machine.nics_per_node
    return _usual(part.device)[1] if link.transport == "rdma" else 1


def _p2p(parts: tuple[_Part, ...], intra: Link | None, p2p: bool | None, notes: list[str]) -> bool:
    """False where traffic inside a node goes over PCIe and a device (or machine) refuses peer-to-peer copies."""
    if p2p is not None:
        return p2p
    if intra is None or intra.transport != "pcie":
        return True
    refusing = [part.device.name for part in parts if not _allows(part)]
    if refusing:
        notes.append(f"p2p = false ({', '.join(dict.fromkeys(refusing))}: copies inside a node go through host memory)")
    return not refusing


def _allows(part: _Part) -> bool:
    if part.machine is not None and part.machine.p2p is not None:
        return part.machine.p2p
    return part.device.p2p


def _profile_defaults(parts: tuple[_Part, ...]) -> list[str]:
    """A line for every device whose own profile left facts out."""
    lines = []
    for part in parts:
        left_out = [key for key, origin in part.device.sources.items() if origin == load.DEFAULT]
        if left_out:
            filled = ", ".join(f"{key} = {str(getattr(part.device, key)).lower()}" for key in left_out)
            lines.append(f"device {part.device.name}: {filled} (not in its profile)")
    return lines
