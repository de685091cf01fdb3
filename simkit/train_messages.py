"""Messages of model parallelism in seconds: whom a rank talks to, how far apart they stand, how much goes over the
wire.

Ranks are numbered tensor-parallel first, then context, data and pipeline parallel (Megatron-LM's default order), so
that a
tensor-parallel group is a run of neighbours and the groups of data parallelism stand `tp` apart and share the NICs.

    tensor     b·s·h/cp elements: all-reduce, or all-gather and reduce-scatter under sequence parallelism
    ring       keys and values of b·s/cp tokens to the next rank, cp - 1 times
    expert     b·s/cp tokens, top_k copies each: all-to-all over ep ranks
    stage      one activation to the next stage: the whole tensor from each tensor-parallel rank, its share under
    sequence
               parallelism
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from simkit import network
from simkit.price import Scales
from simkit.spec.hardware import Cluster, Group, Link
from simkit.spec.plan import DTYPE_BYTES, Plan

Num = Any


def group_cost(op: str, cluster: Cluster, ranks: int, stride: int, algorithm: str) -> Any:
    """Seconds of a collective over `ranks` ranks that stand `stride` apart, as a function of bytes.

    Rates and latencies of the links may be arrays; such answers are not kept.
    """
    if ranks <= 1:
        return _nothing
    at = network.place(cluster, ranks, stride=stride)
    if at.nodes == 1 and not _varies(cluster.intra):
        return _inside(op, at, cluster.intra, cluster.p2p, algorithm)
    if _varies(cluster.intra) or _varies(cluster.inter):
        return _between.__wrapped__(op, at, cluster, algorithm)
    return _between(op, at, cluster, algorithm)


def _varies(link: Link | None) -> bool:
    return link is not None and isinstance(link.Bps, np.ndarray)


@lru_cache(maxsize=4096)
def _between(op: str, at: network.Placement, cluster: Cluster, algorithm: str) -> Any:
    return network.seconds_fn(op, cluster=cluster, ranks=at, algorithm=None if algorithm == "auto" else algorithm)


@lru_cache(maxsize=4096)
def _inside(op: str, at: network.Placement, intra: Link | None, p2p: bool, algorithm: str) -> Any:
    """Within one node: the same whatever the network between nodes."""
    node = Cluster(
        groups=tuple(Group(nodes=1, gpus_per_node=at.per_node, device=device) for device in at.devices),
        intra=intra, inter=None, p2p=p2p,
    )  # fmt: skip
    return _between.__wrapped__(op, at, node, algorithm)


def _nothing(nbytes: Num) -> Num:
    return 0.0 * nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Prices the messages of one rank under a plan on a cluster; its micro-batch and its links may be arrays over
    points, and the seconds then are."""

    plan: Plan
    cluster: Cluster
    scales: Scales
    scatter_gather: bool = False

    def cost(self, op: str, ranks: int, stride: int) -> Any:
        """Seconds of a collective over `ranks` ranks `stride` apart, as a function of bytes, under the scales."""
        cost = group_cost(op, self.cluster, ranks, stride, self.plan.algorithm)
        scales = self.scales
        if scales.network_Bps == 1.0 and scales.network_latency == 1.0:
            return cost
        latency_s = cost(0.0)
        return lambda n: latency_s * scales.network_latency + (cost(n) - latency_s) / scales.network_Bps

    def _tokens(self) -> Num:
        return self.plan.micro_batch * self.plan.seq_len / self.plan.cp

    def tensor_message(self, width_bytes: float) -> Num:
        """One exchange of a block's activations over the tensor-parallel ranks."""
        plan, nbytes = self.plan, self._tokens() * width_bytes
        ops = ("all_gather", "reduce_scatter") if plan.sp > 1 else ("all_reduce",)
        return sum(self.cost(op, plan.tp, 1)(nbytes) for op in ops)

    def ring_message(self, width_bytes: float) -> Num:
        """Keys and values round the context-parallel ring."""
        plan = self.plan
        hop = self.cost("send_recv", min(plan.cp, 2), plan.tp)
        return (plan.cp - 1) * hop(self._tokens() * width_bytes)

    def expert_message(self, width_bytes: float) -> Num:
        """Tokens to their experts, or back: one all-to-all over the expert-parallel ranks."""
        plan = self.plan
        return self.cost("all_to_all", plan.ep, plan.tp)(self._tokens() * width_bytes / plan.sp)

    def stage_message(self, hidden: int) -> Num:
        """One activation, or its gradient, to the next stage.

        With scatter and gather (Narayanan et al., arXiv 2104.04473, section 4.1) each of the tensor-parallel ranks
        sends its share, and they put it together again by an all-gather inside their node.
        """
        plan = self.plan
        whole = self._tokens() * hidden * DTYPE_BYTES[plan.precision] / plan.sp
        apart = self.scatter_gather and plan.sp == 1
        hop = self.cost("send_recv", min(plan.pp, 2), plan.world // plan.pp)
        gathered = self.cost("all_gather", plan.tp, 1)(whole) if apart and plan.pp > 1 else 0.0
        return hop(whole / plan.tp if apart else whole) + gathered
