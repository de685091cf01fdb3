"""An answer in words: what bounds each term, what holds the job back, and who talks over what.

The link of a group follows from where its ranks sit (`simkit.collectives._place`), never from how many they are.
"""

from __future__ import annotations

from functools import lru_cache

from simkit.evaluate import Evaluation, is_sharded
from simkit.network import place
from simkit.report import Term
from simkit.spec.hardware import Cluster
from simkit.spec.plan import Plan
from simkit.spec.resolve import Resolved

_RANK = ("datasheet", "fitted", "end-to-end", "assumed")


# -- the ledger --------------------------------------------------------------------------------------------------------


def ledger(found: Evaluation, resolved: Resolved, math: float, network_bound: str) -> tuple[Term, ...]:
    """Every term with what bounds it and the weakest evidence it rests on."""
    evidence, plan, cluster = found.pricing.evidence, resolved.plan, resolved.cluster
    compute_bound = f"{math:.0%} arithmetic, {1 - math:.0%} memory"
    weakest = _weakest(evidence["ceiling"], evidence["memory"], evidence["stack"])
    network = network_evidence(cluster)
    device = (compute_bound, weakest)
    bounds = {
        "forward_s": device,
        "backward_s": device,
        "recompute_s": device,
        "compression_s": ("memory and launches", weakest),
        "tp_comm_s": (f"{_where(cluster, plan.tp * plan.cp, 1)} between ranks of a block", network),
        "launch_s": ("launches by the host", evidence["stack"]),
        "accumulation_s": ("memory", evidence["memory"]),
        "sharding_s": (network_bound, network),
        "offload_s": ("PCIe slot", "assumed"),
        "straggler_s": ("the slowest node", "assumed"),
        "bubble_s": ("fill, drain and messages of the pipeline", _weakest(weakest, network)),
        "exposed_comm_s": (network_bound, network),
        "optimizer_s": ("memory", evidence["memory"]),
        "host_s": ("host", evidence["stack"]),
    }
    if plan.offload != "none":
        where = "processors of the host" if resolved.stack.host_optimizer else "PCIe slot"
        bounds["optimizer_s"] = (where, "end-to-end" if resolved.stack.host_optimizer else "assumed")
    unknown = ("", "assumed")
    return tuple(
        Term(name=k, seconds=v, bound=bounds.get(k, unknown)[0], evidence=bounds.get(k, unknown)[1])
        for k, v in found.breakdown.items()
    )


def _weakest(*kinds: str) -> str:
    return max(kinds, key=lambda k: _RANK.index(k) if k in _RANK else len(_RANK))


@lru_cache(maxsize=1024)
def network_evidence(cluster: Cluster) -> str:
    """The weakest evidence of the links that the cluster uses."""
    used = [
        link
        for link, on in (
            (cluster.intra, any(g.gpus_per_node > 1 for g in cluster.groups)),
            (cluster.inter, cluster.nodes > 1),
        )
        if link is not None and on
    ]
    kinds = [
        max((f.evidence for f in link.calibration.values()), key=_RANK.index) if link.calibration else "assumed"
        for link in used
    ]
    return _weakest(*kinds) if kinds else "datasheet"


def network_bound(found: Evaluation, resolved: Resolved) -> str:
    """Whether latency or bandwidth of which link bounds the exchange of gradients and parameters."""
    plan = resolved.plan
    replicas = plan.dp * plan.cp
    if replicas <= 1:
        return "nothing"
    name = _where(resolved.cluster, replicas, plan.tp)
    # What the same messages would take with no bytes in them.
    busy = found.exchange.comm_s
    latency = found.exchange.latency_s / busy if busy else 0.0
    return f"latency of {name}" if latency > 0.5 else f"bandwidth of {name}"


# -- groups ------------------------------------------------------------------------------------------------------------


def groups(resolved: Resolved) -> dict[str, str]:
    """{degree: its size, how many such groups there are, and the links they cross}; groups of one rank are left out."""
    plan, cluster = resolved.plan, resolved.cluster
    if cluster.gpus == 1:
        return {}
    if not is_sharded(plan):
        return {"dp": f"{plan.dp} ranks over {_links(cluster, plan.dp, 1)}"}
    inner = plan.tp * plan.cp
    found = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, plan.tp),
        "dp": (plan.dp, inner),
        "pp": (plan.pp, plan.world // plan.pp),
    }
    words = {name: _group(cluster, plan, *at) for name, at in found.items() if at[0] > 1}
    if plan.zero and plan.dp * plan.cp > 1:
        ranks = plan.shard_group * plan.cp
        what = {1: "optimizer states", 2: "optimizer states and gradients"}.get(plan.zero, "all states")
        same = ranks == plan.dp
        words["zero"] = f"{what} over {'the dp group' if same else _group(cluster, plan, ranks, plan.tp)}"
    return words


def _group(cluster: Cluster, plan: Plan, ranks: int, stride: int) -> str:
    many = plan.world // ranks
    return f"{ranks} ranks, {many} group{'s' if many > 1 else ''}, over {_links(cluster, ranks, stride)}"


@lru_cache(maxsize=4096)
def _links(cluster: Cluster, ranks: int, stride: int) -> str:
    """The links that `ranks` ranks `stride` apart cross."""
    at = place(cluster, ranks, stride=stride)
    parts = []
    if cluster.intra is not None and at.per_node > 1:
        staged = "" if cluster.p2p else " (staged through host memory, no P2P)"
        parts.append(f"{cluster.intra.title} inside a node{staged}")
    if cluster.inter is not None and at.nodes > 1:
        parts.append(f"{cluster.nics_per_node} x {cluster.inter.title} a node")
    return " and ".join(parts) or "nothing"


@lru_cache(maxsize=4096)
def _where(cluster: Cluster, ranks: int, stride: int) -> str:
    """The slowest tier that a group crosses, by its title."""
    at = place(cluster, min(ranks, cluster.gpus), stride=stride)
    link = cluster.inter if at.nodes > 1 else cluster.intra
    return link.title if link is not None else "the network"


# -- what holds the job back -------------------------------------------------------------------------------------------

_WORDS = {
    "compression_s": "gradient compression",
    "optimizer_s": "the optimizer's memory traffic",
    "host_s": "the host",
    "launch_s": "the host, which launches kernels slower than the device runs them",
    "accumulation_s": "memory traffic of adding up gradients",
    "offload_s": "copies to and from host memory over the PCIe slot",
}


def bottleneck(found: Evaluation, resolved: Resolved, math: float, network_bound: str) -> str:
    """The largest part of the step, and what bounds it."""
    terms, plan, end_s = dict(found.breakdown), resolved.plan, found.end_s
    waits = ("exposed_comm_s", "sharding_s", "tp_comm_s", "bubble_s")
    computing = ("forward_s", "backward_s", "recompute_s")
    compute = sum(terms.get(k, 0.0) for k in computing)
    rest = {k: v for k, v in terms.items() if k not in computing}
    name, largest = max(rest.items(), key=lambda item: item[1], default=("", 0.0))
    share = f"{largest / end_s:.0%} of the step"
    if compute > largest or (compute == largest and name not in waits):
        what = "arithmetic rate" if math >= 0.5 else "memory bandwidth"
        of_it = f"{math:.0%} of it bound by arithmetic"
        return f"{what} of {found.device.title}: compute is {compute / end_s:.0%} of the step, {of_it}"
    if name == "exposed_comm_s":
        return f"{network_bound}: {share} waits for it"
    if name == "sharding_s":
        return f"{network_bound}: {share} waits for sharded parameters"
    if name == "tp_comm_s":
        return f"messages inside a block over {_where(resolved.cluster, plan.tp * plan.cp, 1)}: {share}"
    if name == "bubble_s":
        return f"pipeline of {plan.pp} stages with {plan.grad_accum} micro-batches: {share} is bubble"
    if name == "optimizer_s" and plan.offload != "none":
        return f"the optimizer in host memory: {share}"
    return f"{_WORDS.get(name, name)}: {share}"


__all__ = ["bottleneck", "groups", "ledger", "network_bound", "network_evidence"]
