"""Blocks laid out on the stages of a pipeline: what one micro-batch takes on each stage, and of what it is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from simkit.parallel.pipeline import layers_per_stage
from simkit.price import Scales
from simkit.program import Program, kinds
from simkit.roofline import Array, Law
from simkit.spec.hardware import Cluster, Device, Group, Link
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import Plan
from simkit.spec.stack import Stack
from simkit.train_blocks import Blocks, Priced, blocks, column, exposed, taken
from simkit.train_messages import Lines
from simkit.train_offload import Offloaded, offloaded
from simkit.train_params import Gathered, Params, gathered, of_rank, owned, scattered, shard_ranks

Num = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What the stack does with sharded training: facts of `spec/stacks/*.toml`."""

    overlap: bool
    gather_dtype_bytes: float
    reduce_dtype_bytes: float
    host_kernel_s: float
    step_s: float
    interference: float
    memory_Bps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Seconds of each stage per micro-batch; accumulated_s: what adding up gradients takes of the backward pass;
    scattered_s: what scattering them adds, where they are sharded; offload_s: what copies to and from the host add;
    gathered: the collectives of sharded parameters."""

    forward_s: Array
    backward_s: Array
    accumulated_s: Array
    scattered_s: Array
    offload_s: Array
    gathered: Gathered | None

    def at(self, pair: Any) -> Stages:
        """The same at some of its points."""
        return Stages(
            forward_s=taken(self.forward_s, pair, 1),
            backward_s=taken(self.backward_s, pair, 1),
            accumulated_s=self.accumulated_s,
            scattered_s=taken(self.scattered_s, pair, 1),
            offload_s=taken(self.offload_s, pair, 1),
            gathered=None if self.gathered is None else self.gathered.at(pair),
        )

    def streamed(self, host: Offloaded) -> Stages:
        """The stages beside the PCIe slot, which carries both directions at once."""
        forward_s = host.passed(self.forward_s)
        backward_s = np.maximum(host.passed(self.backward_s), host.down_s)
        added = forward_s + backward_s - self.forward_s - self.backward_s
        return replace(self, forward_s=forward_s, backward_s=backward_s, offload_s=added)


class Laid(NamedTuple):
    """One micro-batch on its stages, before stages talk to each other and gradients are exchanged. terms: of the
    slowest stage; ideal_s: their sum; optimizer_s: once a step."""

    each: Blocks
    stages: Stages
    params: Params
    terms: dict[str, Num]
    ideal_s: Num
    optimizer_s: float


def laid_out(
    work: Priced,
    program: Program,
    model: Model,
    plan: Plan,
    stack: Stack,
    law: Law,
    traits: Traits,
    cluster: Cluster,
    device: Device,
    scales: Scales,
    optimizer_bytes: float,
) -> Laid:
    """The blocks of a micro-batch with their messages, on the stages of the pipeline."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    lines = Lines(plan=plan, cluster=cluster, scales=scales, scatter_gather=stack.scatter_gather)
    each = blocks(
        work, program, spec, plan, lines, traits.host_kernel_s * scales.host_s, rho=traits.interference
    )  # fmt: skip
    held = layers_per_stage(len(program.blocks.counts), plan.pp)
    placed = _placed(program, plan.pp)
    params = of_rank(model, tp=plan.tp, ep=plan.ep, held=tuple(held.tolist()))
    stages = stages_of(each, placed, held, plan, params, traits, lines, stack.accumulation_passes)
    host = offloaded(plan, params, held, cluster=cluster, device=device, on_host=stack.host_optimizer, scales=scales)
    optimizer_s = owned(plan, params) * optimizer_bytes / (law.memory_Bps * law.sustained)
    if host is not None:
        stages = stages.streamed(host)
        optimizer_s = host.optimizer_s + (0.0 if stack.host_optimizer else optimizer_s)
    terms, ideal_s = terms_of(each, placed, plan, stages)
    return Laid(each, stages, params, terms, ideal_s, optimizer_s)


laid_near = lru_cache(maxsize=1024)(laid_out)
"""The same from memory; for the clusters that `home` gives."""


def home(cluster: Cluster, plan: Plan) -> Cluster | None:
    """The cluster without the network between its nodes, one object for all networks, where nothing that `laid_out`
    prices crosses it: tensor, context and expert groups fit into a node, and parameters are not sharded."""
    span, nodes = plan.tp * plan.cp * plan.ep, {g.gpus_per_node for g in cluster.groups}
    if plan.zero >= 2 or len(nodes) > 1 or min(nodes) % span:
        return None
    return _home(cluster.groups, cluster.intra, cluster.nics_per_node, cluster.p2p)


@lru_cache(maxsize=256)
def _home(groups: tuple[Group, ...], intra: Link | None, nics_per_node: int, p2p: bool) -> Cluster:
    return Cluster(groups=groups, intra=intra, inter=None, nics_per_node=nics_per_node, p2p=p2p)


@lru_cache(maxsize=1024)
def _placed(program: Program, stages: int) -> Array:
    """Blocks of each kind on each stage, shape (stages, kinds)."""
    return kinds(program).held(layers_per_stage(len(program.blocks.counts), stages).tolist())


def stages_of(
    each: Blocks,
    placed: Array,
    held: Any,
    plan: Plan,
    params: Params,
    traits: Traits,
    lines: Lines,
    passes: float,
) -> Stages:
    """The blocks of each stage with its ends, and with the collectives of its parameters where they are sharded."""
    f, g = each.forward_all_s, each.backward_all_s
    found = None
    before, after = each.before, each.after
    if plan.zero >= 3 and plan.dp * plan.cp > 1:
        found = gathered(
            f, g, before, after, plan, params, lines, layers=int(held.sum()),
            gather_bytes=traits.gather_dtype_bytes, reduce_bytes=traits.reduce_dtype_bytes,
            interference=traits.interference,
        )  # fmt: skip
        f, g, before, after = found.forward_s, found.backward_s, found.before, found.after
    # Every micro-batch adds its gradients, or its share of them, to those before it.
    shards = shard_ranks(plan) if plan.zero >= 2 else 1
    accumulated = held * params.block * (passes * traits.reduce_dtype_bytes / traits.memory_Bps / shards)
    first, last = _ends(plan.pp)
    forward = f @ placed.T + column(before[0]) * first + column(after[0]) * last
    backward = g @ placed.T + accumulated + column(before[1]) * first + column(after[1]) * last
    sent_s = scattered(plan, params, lines, held, reduce_bytes=traits.reduce_dtype_bytes)
    if traits.overlap:
        sent_s = exposed(sent_s, backward, 0, traits.interference)
    return Stages(
        forward_s=forward, backward_s=backward + sent_s, accumulated_s=accumulated, scattered_s=sent_s,
        offload_s=0.0 * forward, gathered=found,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _ends(stages: int) -> tuple[Array, Array]:
    """1 for the first stage, and for the last."""
    places = np.eye(stages)
    return places[0], places[-1]


def _shares(each: Blocks, stage: Any, held: Array, plan: Plan) -> dict[str, Num]:
    """Seconds of the slowest stage's micro-batch by kind, before anything waits for sharded parameters. held: its
    blocks of each kind."""
    first, last = stage == 0, stage == plan.pp - 1

    def of(seconds: Num) -> Num:
        if held.ndim == 1 and np.ndim(seconds):
            return seconds @ held
        return (seconds * held).sum(axis=-1)

    forward, backward, recompute = of(each.forward_s), of(each.backward_s), of(each.recompute_s)
    sent = of(each.tp_forward_s + each.tp_backward_s)
    launched = of(each.forward_all_s + each.backward_all_s) - forward - backward - recompute - sent
    return {
        "forward": forward + first * each.before[0] + last * each.after[0],
        "backward": backward + first * each.before[1] + last * each.after[1],
        "recompute": recompute,
        "tp_comm": sent,
        "launch": np.maximum(launched, 0.0),
    }


def terms_of(each: Blocks, placed: Array, plan: Plan, stages: Stages) -> tuple[dict[str, Num], Num]:
    """(terms of the slowest stage for one micro-batch, their sum)."""
    total = stages.forward_s + stages.backward_s
    slowest = total.argmax(axis=-1)
    ideal = of_stage(total, slowest)
    share = _shares(each, slowest, placed[slowest], plan)
    share["accumulation"] = of_stage(stages.accumulated_s, slowest)
    share["exposed_comm"] = of_stage(stages.scattered_s, slowest)
    share["offload"] = of_stage(stages.offload_s, slowest)
    share["sharding"] = np.maximum(ideal - sum(share.values()), 0.0)
    return {f"{name}_s": seconds for name, seconds in share.items()}, ideal


def of_stage(values: Array, stage: Any) -> Num:
    """The values of one stage, of each point its own."""
    if values.ndim == 1:
        return values[stage]
    return np.take_along_axis(values, stage[..., None], axis=-1)[..., 0]
