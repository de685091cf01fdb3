"""Where ranks sit decides which links a collective crosses; the links decide its seconds.

A group of n ranks on N nodes, g of them on the fullest node, pays (f = 2 for all_reduce, else 1; w = share of the
buffer which the busiest rank sends; B' inside the node, B = what the node's NICs carry for this group):

    ring           a + f (n-N) a' + f (N-1) alpha + c-terms + w S max([g>1]/B', [N>1]/B)
    double-tree    a + f (g-1) a' + 2 floor(log2 N) alpha + c-terms + S max(min(g-1,2)/B', min(N-1,2)/B)
    hierarchical   the sum of both tiers, see collectives/hierarchical.py
    any other      steps (a' or alpha) + wire / min(B', B/g): every step may cross nodes, all ranks of a node at once

Each is latency + root sqrt(S) + bytes/B in S, so an array of sizes costs a few numpy operations. A chunk of a ring pays
every hop once: N-1 (all_reduce 2(N-1)) of them cross nodes, as in NCCL's tuner; the slowest hop sets the rate.
B: a GPU drives ceil(NICs/GPUs) NICs, sibling groups active at the same time share them, the GPU's PCIe slot caps it,
and without P2P (no GPUDirect) the rate of copies staged through host memory caps it once more.
Sources: NCCL 2.2x graph/tuning.cc; Thakur et al. 2005; the measurements named by each fitted link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from simkit import plugins
from simkit.collectives import hierarchical, ring
from simkit.collectives._common import ALL_OPS, Num, check, log2_floor, some
from simkit.collectives._law import STAGED, Law, latency_factor, law, slowest
from simkit.collectives._place import Placement, place
from simkit.errors import InputError
from simkit.spec.hardware import Cluster, Device, Link
from simkit.units import format_bytes

__all__ = [
    "CollectiveCost", "Placement", "collective", "place", "predict_row", "said_eager", "said_p2p", "seconds_fn",
    "slot_Bps",
]  # fmt: skip
_FREE = Law(evidence="one rank a node: no link inside the node is used")
_LOCAL = Law(evidence="one node: no network is used")
# Usable byte/s of one PCIe lane per generation: line rate after coding, PCI-SIG base specifications 1 to 6.
_PCIE_LANE_Bps: Mapping[int, float] = MappingProxyType(
    {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
)

_PCIE_LATENCY_s = 1e-6  # one ring step over PCIe, LL protocol: NCCL graph/tuning.cc


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What a collective costs and why. seconds has the shape of nbytes; alpha_s: all latency; Bps: bytes sent by the
    busiest rank over the time of the bytes. bound: what limits the largest size; evidence: one line a link used."""

    seconds: Num
    alpha_s: Num
    Bps: Num
    algorithm: str
    tier: str
    bound: str
    evidence: tuple[str, ...]
    kind: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """seconds(S) = latency_s + root sqrt(S) + S * per_byte_s for one algorithm."""

    algorithm: str
    latency_s: Num
    root: Num
    per_byte_s: Num

    def seconds(self, nbytes: Num) -> Num:
        t = self.latency_s + nbytes * self.per_byte_s
        if isinstance(self.root, np.ndarray) or self.root != 0.0:
            t = t + self.root * _root_of(nbytes)
        return t


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiers:
    """The two laws a group uses, the rates and the ramps they give it; 1/rate and ramp are 0 where the tier is not
    crossed."""

    intra: Law
    inter: Law
    intra_spB: Num
    inter_spB: Num
    intra_ramp: Num
    inter_ramp: Num


def _tiers(op: str, at: Placement, cluster: Cluster, engine: str) -> _Tiers:
    inside, across = _any(at.per_node > 1), _any(at.nodes > 1)
    if inside and cluster.intra is None:
        raise InputError("is needed by ranks of one node", key="intra", hint="name a link profile or RATE@LATENCY")
    if across and cluster.inter is None:
        raise InputError("is needed by ranks on several nodes", key="inter", hint="name a link profile or RATE@LATENCY")
    intra, intra_spB, intra_ramp = _FREE, 0.0, 0.0
    if inside and cluster.intra is not None:
        intra, intra_spB, intra_ramp = _inner(op, at, cluster, engine)
    inter, inter_spB, inter_ramp = _LOCAL, 0.0, 0.0
    if across and cluster.inter:
        inter = slowest([law(cluster.inter, op, d.name) for d in at.devices])
        inter_spB = _only(at.nodes > 1, 1 / _node_Bps(at, cluster, inter))
        inter_ramp = inter.ramp(at.nodes) * some(at.nodes)
    return _Tiers(
        intra=intra, inter=inter, intra_spB=intra_spB, inter_spB=inter_spB,
        intra_ramp=intra_ramp, inter_ramp=inter_ramp,
    )  # fmt: skip


def _any(truth: Any) -> bool:
    """`np.any`, without its cost for the one truth value that most groups have."""
    return truth if isinstance(truth, bool) else bool(np.any(truth))


def _many(first: Num, second: Num = 0) -> bool:
    return isinstance(first, np.ndarray) or isinstance(second, np.ndarray)


def _only(truth: Any, value: Num) -> Num:
    """The value where something is true, else 0; numbers stay numbers, which are ten times faster than arrays of
    one."""
    if isinstance(truth, bool):
        return value if truth else 0.0
    return np.where(truth, value, 0.0)[()]


def _least(first: Num, second: Num) -> Num:
    return np.minimum(first, second) if _many(first, second) else min(first, second)


def _most(first: Num, second: Num) -> Num:
    return np.maximum(first, second) if _many(first, second) else max(first, second)


def _root_of(value: Num) -> Num:
    return np.sqrt(value) if _many(value) else math.sqrt(value)


def _inner(op: str, at: Placement, cluster: Cluster, engine: str) -> tuple[Law, Num, Num]:
    """The law inside the node, its seconds per byte and its ramp; the same for every network between the nodes."""
    if cluster.intra is None:
        return _FREE, 0.0, 0.0
    found = _within.__wrapped__ if _many(at.per_node, cluster.intra.Bps) else _within
    answer: tuple[Law, Num, Num] = found(op, at.per_node, at.devices, cluster.intra, cluster.p2p, engine)
    return answer


@lru_cache(maxsize=1024)
def _within(
    op: str, per_node: Num, devices: tuple[Device, ...], link: Link, p2p: bool, engine: str
) -> tuple[Law, Num, Num]:
    found = slowest([_inner_law(op, per_node, p2p, device, link, engine) for device in devices])
    least = _most(per_node, 2)
    return found, _only(per_node > 1, 1 / found.rate_Bps(least)), found.ramp(least) * some(per_node)


def _inner_law(op: str, per_node: Num, p2p: bool, device: Device, link: Link, engine: str) -> Law:
    """The law inside the node; a bridge joins only `max_ranks` cards, a larger group also crosses the PCIe slots."""
    if link.max_ranks is None or np.max(per_node) <= link.max_ranks:
        staged = not p2p and link.transport == "pcie"
        return law(link, op, device.name, staged=staged, engine=engine)
    slot = f"PCIe {device.pcie_generation} x{device.pcie_lanes}"
    rate = slot_Bps(device)
    pcie = Link(name=f"{slot} (more than the {link.max_ranks} ranks of {link.name})", title=slot, scope="gpu", Bps=rate,
                latency_s=_PCIE_LATENCY_s, transport="pcie")  # fmt: skip
    return law(pcie, op, device.name, staged=not device.p2p)


def slot_Bps(device: Device) -> float:
    """Usable byte/s of the device's PCIe slot in one direction."""
    return _PCIE_LANE_Bps.get(device.pcie_generation, math.inf) * device.pcie_lanes


def _node_Bps(at: Placement, cluster: Cluster, inter: Law) -> Num:
    """What the NICs of a node carry for this group in one direction, in byte/s."""
    gpus = min(g.gpus_per_node for g in cluster.groups)
    nics = _least(cluster.nics_per_node / at.sharing, at.per_node * -(-cluster.nics_per_node // gpus))
    wide_area = cluster.inter is not None and cluster.inter.scope == "wan"
    rate = inter.rate_Bps(at.nodes) * (1 if wide_area else nics)
    bus_Bps = min(map(slot_Bps, at.devices), default=math.inf)
    rate = _least(rate, at.per_node * bus_Bps)
    if not cluster.p2p:
        up = np.ceil(nics) if _many(nics) else math.ceil(nics)
        rate = _least(rate, _least(at.per_node, up) * _host_Bps(at.devices, cluster.intra, bus_Bps))
    return rate


def _host_Bps(devices: tuple[Device, ...], intra: Link | None, bus_Bps: float) -> float:
    """The rate of one GPU's traffic through host memory: the staged law of the bus, or half of the slot's rate."""
    if intra is None or intra.transport != "pcie":
        return bus_Bps * STAGED[0]
    laws = [law(intra, "all_reduce", d.name, staged=True) for d in devices]
    return float(min(one.rate_Bps(2) for one in laws))


def _ring_line(op: str, at: Placement, t: _Tiers) -> _Line:
    f = latency_factor(op)
    share = ring.wire_bytes(op, ranks=at.ranks, nbytes=1.0)
    latency = t.intra.a_s * some(at.per_node) + f * ((at.ranks - at.nodes) * t.intra.step_s)
    latency = latency + f * (at.nodes - 1) * t.inter.step_s + t.inter.a_s * some(at.nodes)
    per_byte = share * _most(t.intra_spB, t.inter_spB)
    if op == "all_to_all":
        # Each rank keeps the blocks of its own node off the NICs; all ranks of the node share them for the rest.
        inner = (at.per_node - 1) / at.ranks * t.intra_spB
        outer = (at.ranks - at.per_node) / at.ranks * at.per_node * t.inter_spB
        per_byte = _most(inner, outer)
    return _Line(algorithm="ring", latency_s=latency, root=_root(at, t, share, share), per_byte_s=per_byte)


def _root(at: Placement, t: _Tiers, inner_share: Num, outer_share: Num) -> Num:
    return t.intra_ramp * _root_of(inner_share) + t.inter_ramp * _root_of(outer_share)


def _double_tree_line(op: str, at: Placement, t: _Tiers, cluster: Cluster) -> _Line:
    check(op, plugins.get("simkit.collectives", "double-tree").OPS, "double-tree")
    inner, outer = _least(at.per_node - 1, 2), _least(at.nodes - 1, 2)
    if cluster.intra is not None and cluster.intra.transport == "pcie":
        # Two nodes could exchange S instead of 2 S, and on NVLink nodes they do. On PCIe nodes the measured exchange of
        # two nodes is a ring's (4 RTX 2080 Ti each, 10 GbE: 1.15 GB/s of bus bandwidth), as NCCL's 2 S/B would have it.
        both = 2 * some(at.nodes)
        outer = np.where(at.per_node > 1, both, outer) if _many(at.per_node, outer) else both if inner else outer
    latency = t.intra.a_s * some(at.per_node) + 2 * (at.per_node - 1) * t.intra.step_s
    latency = latency + 2 * log2_floor(at.nodes) * t.inter.step_s + t.inter.a_s * some(at.nodes)
    per_byte = _most(inner * t.intra_spB, outer * t.inter_spB)
    return _Line(algorithm="double-tree", latency_s=latency, root=_root(at, t, inner, outer), per_byte_s=per_byte)


def _hierarchical_line(op: str, at: Placement, t: _Tiers) -> _Line:
    def price(nbytes: float, alpha: float, inner_alpha: float, spB: Num, inner_spB: Num) -> Num:
        with np.errstate(divide="ignore"):
            return hierarchical.seconds(
                op, ranks=at.nodes * at.per_node, nbytes=nbytes, alpha_s=alpha, Bps=1 / np.float64(spB * at.per_node),
                inner_ranks=at.per_node, inner_alpha_s=inner_alpha, inner_Bps=1 / np.float64(inner_spB),
            )  # fmt: skip

    share = ring.wire_bytes(op, ranks=at.per_node, nbytes=1.0)
    outer = ring.wire_bytes(op, ranks=at.nodes, nbytes=1.0)
    latency = price(0.0, t.inter.step_s, t.intra.step_s, 1.0, 1.0)
    latency = latency + t.intra.a_s * some(at.per_node) + t.inter.a_s * some(at.nodes)
    per_byte = price(1.0, 0.0, 0.0, t.inter_spB, t.intra_spB)
    return _Line(algorithm="hierarchical", latency_s=latency, root=_root(at, t, share, outer), per_byte_s=per_byte)


def _other_line(op: str, at: Placement, t: _Tiers, algorithm: str) -> _Line:
    module = plugins.get("simkit.collectives", algorithm)
    wire = module.wire_bytes(op, ranks=at.ranks, nbytes=1.0)
    step = np.where(at.nodes > 1, t.inter.step_s, t.intra.step_s)
    latency = t.intra.a_s * some(at.per_node) + t.inter.a_s * some(at.nodes) + module.steps(op, at.ranks) * step
    per_byte = wire * np.maximum(t.intra_spB, t.inter_spB * at.per_node)
    return _Line(algorithm=algorithm, latency_s=latency, root=_root(at, t, wire, wire), per_byte_s=per_byte)


def _lines(op: str, at: Placement, t: _Tiers, cluster: Cluster, algorithm: str | None) -> list[_Line]:
    """The candidates: the one asked for, or those NCCL's tuner would weigh."""
    key = (algorithm or "auto").replace("_", "-")
    special: dict[str, Callable[[], _Line]] = {
        "ring": lambda: _ring_line(op, at, t),
        "double-tree": lambda: _double_tree_line(op, at, t, cluster),
        "hierarchical": lambda: _hierarchical_line(op, at, t),
    }
    if key != "auto":
        return [special[key]() if key in special else _other_line(op, at, t, key)]
    found = [special["ring"]()]
    # A measured law of one node contains NCCL's own choice; a tree on top of it would be counted twice.
    fitted_node = t.intra.kind != "assumed" and not _any(at.nodes > 1)
    if op == "all_reduce" and not fitted_node:
        found.append(special["double-tree"]())
    return found


def _warnings(at: Placement, nbytes: Num, t: _Tiers) -> tuple[str, ...]:
    found = []
    for one, count in ((t.intra, at.per_node), (t.inter, at.ranks)):
        for key, value in (("bytes", nbytes), ("ranks", count)):
            low, high = one.valid.get(key, (0.0, math.inf))
            if np.any(np.asarray(value) > high) or np.any(np.asarray(value) < low):
                shown = format_bytes if key == "bytes" else "{:g}".format
                found.append(f"{one.evidence}: {key} outside the fitted {shown(low)} to {shown(high)}")
    return tuple(found)


def collective(
    op: str,
    *,
    nbytes: Num,
    cluster: Cluster,
    ranks: Num | Sequence[int] | Placement | None = None,
    stride: int = 1,
    algorithm: str | None = None,
    engine: str = "",
    eager: bool = False,
) -> CollectiveCost:
    """Prices one collective; the equations are at the head of this module.

    nbytes: nccl-tests convention, scalar or array; ranks, stride: see `place`, or a Placement; algorithm: a key of
    ``collectives/``, or None / "auto" for the fastest of those NCCL would weigh at each size; engine: prefers the fit
    of that inference engine's own kernels where the link has one; eager: the host launches each call and nothing hides
    it, so no call takes less than the fitted floor.
    Raises InputError for an unknown op or algorithm, ranks the cluster lacks, or a missing link.
    """
    check(op, ALL_OPS, "a collective")
    at = ranks if isinstance(ranks, Placement) else place(cluster, ranks, stride=stride)
    t = _tiers(op, at, cluster, engine)
    lines = _lines(op, at, t, cluster, algorithm)
    every = [line.seconds(nbytes) for line in lines]
    seconds = np.maximum(np.minimum.reduce(every), t.intra.floor_s if eager else 0.0)
    at_largest = [float(np.max(line.seconds(np.max(nbytes)))) for line in lines]
    best = lines[int(np.argmin(at_largest))]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = ring.wire_bytes(op, ranks=at.ranks, nbytes=1.0) / np.float64(best.per_byte_s)
    return CollectiveCost(
        seconds=seconds,
        alpha_s=best.latency_s,
        Bps=rate,
        algorithm=best.algorithm,
        tier=at.tier,
        bound=_bound(best, float(np.max(nbytes)), t),
        evidence=tuple(one.evidence for one in _crossed(t)),
        kind="assumed" if "assumed" in {one.kind for one in _crossed(t)} else "fitted",
        warnings=_warnings(at, nbytes, t),
    )


def _crossed(t: _Tiers) -> list[Law]:
    return [one for one in (t.intra, t.inter) if one is not _FREE and one is not _LOCAL]


def _bound(line: _Line, nbytes: float, t: _Tiers) -> str:
    if not np.any(line.per_byte_s):
        return "nothing: one rank"
    if np.max(line.latency_s) >= nbytes * np.max(line.per_byte_s):
        return "latency"
    crosses = np.any(t.inter_spB >= t.intra_spB)
    return f"bandwidth of {t.inter.link if crosses else t.intra.link}"


def seconds_fn(
    op: str,
    *,
    cluster: Cluster,
    ranks: Num | Sequence[int] | Placement | None = None,
    stride: int = 1,
    algorithm: str | None = None,
    engine: str = "",
) -> Callable[[Num], Num]:
    """The same as `collective(...).seconds` with everything but the bytes worked out beforehand: a few microseconds."""
    check(op, ALL_OPS, "a collective")
    at = ranks if isinstance(ranks, Placement) else place(cluster, ranks, stride=stride)
    lines = _lines(op, at, _tiers(op, at, cluster, engine), cluster, algorithm)
    first, rest = lines[0], lines[1:]

    def seconds(nbytes: Num) -> Num:
        best = first.seconds(nbytes)
        for line in rest:
            best = _least(best, line.seconds(nbytes))
        return best

    return seconds


def said_p2p(row: Mapping[str, str]) -> bool | None:
    """Whether the notes of a measured row say that GPUs copied peer to peer; None where they do not."""
    notes = row.get("notes", "").lower()
    if any(text in notes for text in ("no p2p", "p2p disabled", "p2p_disable", "host-staged")):
        return False
    return True if "p2p" in notes else None


def said_eager(row: Mapping[str, str]) -> bool:
    """Whether the notes of a measured row say that its time includes the launch by the host."""
    return "includes launch" in row.get("notes", "").lower()


def predict_row(row: Mapping[str, str], cluster: Cluster) -> tuple[float, str]:
    """(value, metric) of a row of a collective table; metric time_s (s) or busbw (byte/s, nccl-tests factor).

    Reads op, bytes, ranks, metric, and algorithm, engine and notes where there are any. Raises InputError for another
    metric.
    """
    p2p, size, ranks = said_p2p(row), float(row["bytes"]), int(row["ranks"])
    if row["metric"] not in ("time_s", "busbw"):
        raise InputError("is no metric of a collective", key="metric", value=row["metric"], hint="use time_s or busbw")
    engine = row.get("engine") or ""
    cost = collective(
        row["op"],
        nbytes=size,
        cluster=replace(cluster, p2p=cluster.p2p if p2p is None else p2p),
        ranks=ranks,
        engine="" if engine == "nccl" else engine,
        algorithm=row.get("algorithm") or None,
        eager=said_eager(row),
    )
    seconds = float(cost.seconds)
    if row["metric"] == "time_s":
        return seconds, "time_s"
    return float(ring.wire_bytes(row["op"], ranks=ranks, nbytes=size)) / seconds, "busbw"
