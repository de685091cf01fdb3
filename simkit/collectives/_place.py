"""Where the ranks of a group sit in a cluster; ranks are numbered node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from simkit.collectives._common import Num
from simkit.errors import InputError
from simkit.spec.hardware import Cluster, Device, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a group sits: its size, the nodes it touches, the ranks on the fullest of them, and who shares the NICs.

    sharing: how many groups use the NICs of one node at the same time. ranks, nodes, per_node may be arrays.
    """

    ranks: Num
    nodes: Num
    per_node: Num
    sharing: Num = 1
    devices: tuple[Device, ...] = ()

    @property
    def tier(self) -> str:
        """``intra``, ``inter`` or ``intra+inter``; ``none`` for one rank."""
        parts = [name for name, used in (("intra", self.per_node), ("inter", self.nodes)) if np.any(used > 1)]
        return "+".join(parts) or "none"


def place(cluster: Cluster, ranks: Num | Sequence[int] | None = None, *, stride: int = 1) -> Placement:
    """Finds the nodes of a group of ranks; ranks are numbered node by node.

    ranks: None = all GPUs; a size (or an array of sizes) = ranks 0, stride, 2 stride, ...; a list or tuple = these rank
    numbers. With a stride the `stride` sibling groups are taken to communicate at the same time and share the NICs, as
    data-parallel groups do when tensor-parallel ranks are neighbours.
    Raises InputError for ranks the cluster does not have.
    """
    if isinstance(ranks, (list, tuple)):
        return _place_list(cluster, ranks)
    if ranks is None and stride == 1 and len(cluster.groups) == 1:
        # What every step asks for, without arrays of one number: all the GPUs of equal nodes.
        (group,) = cluster.groups
        return Placement(
            ranks=group.gpus, nodes=group.nodes, per_node=group.gpus_per_node, devices=(group.device,)
        )
    if isinstance(ranks, int):
        return _place_once(cluster.groups, ranks, stride)
    return _place(cluster, ranks, stride)


@lru_cache(maxsize=4096)
def _place_once(groups: tuple[Group, ...], ranks: int, stride: int) -> Placement:
    """Where ranks sit has nothing to do with the links, which differ from question to question."""
    return _place(Cluster(groups=groups, intra=None, inter=None), ranks, stride)


def _place(cluster: Cluster, ranks: Num | None, stride: int) -> Placement:
    size: Num = cluster.gpus if ranks is None else ranks
    plain = isinstance(size, int)
    outside = np.less(size, 1) | ((np.asarray(size) - 1) * stride >= cluster.gpus) if not plain else False
    if not 1 <= size <= 1 + (cluster.gpus - 1) // stride if plain else np.any(outside):
        what = f"does not fit {cluster.gpus} GPUs of {cluster.spec}" + (f" with stride {stride}" if stride > 1 else "")
        raise InputError(what, key="ranks", value=ranks, hint="use 1 up to the GPUs of the cluster")
    if len({g.gpus_per_node for g in cluster.groups}) > 1 and np.ndim(size) == 0:
        return _place_list(cluster, range(0, int(size) * stride, stride), sharing=stride)
    gpus = min(g.gpus_per_node for g in cluster.groups)
    # Numbers stay numbers: what follows from them is ten times faster than for arrays of one.
    least, most = (min, max) if plain else (np.minimum, np.maximum)
    per_node = least(size, max(1, gpus // stride))
    nodes = most(-(-size // per_node), 1)
    return Placement(
        ranks=size, nodes=nodes, per_node=per_node, sharing=min(stride, gpus), devices=_used(cluster, size, stride)
    )


def _used(cluster: Cluster, size: Num, stride: int) -> tuple[Device, ...]:
    last = (size - 1 if isinstance(size, int) else int(np.max(size) - 1)) * stride
    found, first = [], 0
    for group in cluster.groups:
        if first <= last:
            found.append(group.device)
        first += group.gpus
    return tuple(found)


def _place_list(cluster: Cluster, ranks: Sequence[int], *, sharing: int = 1) -> Placement:
    sizes = np.concatenate([np.full(g.nodes, g.gpus_per_node) for g in cluster.groups])
    kinds = np.repeat(np.arange(len(cluster.groups)), [g.nodes for g in cluster.groups])
    where = np.asarray(ranks, dtype=np.int64)
    if where.size == 0 or where.min() < 0 or where.max() >= cluster.gpus:
        raise InputError(f"names ranks outside 0..{cluster.gpus - 1}", key="ranks", value=list(ranks))
    node = np.searchsorted(np.cumsum(sizes), where, side="right")
    nodes, counts = np.unique(node, return_counts=True)
    devices = tuple(cluster.groups[k].device for k in np.unique(kinds[nodes]))
    return Placement(
        ranks=int(where.size),
        nodes=int(nodes.size),
        per_node=int(counts.max()),
        sharing=min(sharing, int(sizes[nodes].min())),
        devices=devices,
    )
