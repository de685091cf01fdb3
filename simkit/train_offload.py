"""Offload to host memory: what crosses the PCIe slot of a GPU, and what the host computes.

With n elements of optimizer state a rank owns, N_s elements of its stage, S of the slot:

    optimizer   gradients go down micro-batch by micro-batch beside back-propagation (2 n bytes at S); the host updates
                30 bytes an element (fp32 weight and both moments read and written, gradient read, 16-bit copy written)
                with the threads each rank has; 16-bit weights come back (2 n at S)
    params      besides, the weights of a rank (its shard under ZeRO-3) come up for each forward and backward pass, the
                next block beside the compute of one: a pass of L blocks that computes for F seconds and fetches for U
                takes max(F + U_1, U + F/L), U_1 the fetch of the first block, which nothing hides. What comes back
                after the update is counted here too: it is then the host's copy into the buffers that are fetched
                (assumed to take as long)

A stack that updates on the device (`host_optimizer` = false) streams the state through it instead: 12 bytes an element
each way at once, no work for the host.
Sources: Ren et al., ZeRO-Offload (arXiv 2101.06840), sections 4 and 5; Rajbhandari et al., ZeRO-Infinity (arXiv
2104.07857), sections 4.1 (weights are loaded twice a micro-batch, forward and backward) and 6.2 (prefetch).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simkit.network import slot_Bps
from simkit.price import Scales
from simkit.roofline import Array
from simkit.spec.hardware import Cluster, Device
from simkit.spec.plan import Plan
from simkit.train_params import Params, owned, shard_ranks
from simkit.units import format_Bps

PINNED = 0.8
"""Share of the slot's rate that copies from and to pinned memory reach: assumed, as NCCL's staged copies and CUDA's
bandwidthTest do."""
HOST_ADAM_BYTES = 30.0
HOST_Bps = 100e9
"""Rate at which the processors of a node carry those bytes for a single rank, which has all of them: assumed, half of
what eight channels of DDR4-3200 in each of two sockets move (ZeRO-Offload's CPU-Adam is bound by memory)."""
THREAD_Bps = 1.4e9
"""The same for each of several ranks, to which launchers give one thread (torchrun sets OMP_NUM_THREADS=1). End to end,
of a public table of LLaMA-7B on 8 A800 (DeepSpeed 0.14.2): offload adds 20.1 s (ZeRO-2) and 16.8 s (ZeRO-3) to a step,
202 GB of state over eight ranks."""
STATE_BYTES = 12.0
"""fp32 master weight and two moments, one direction."""
WEIGHT_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """Seconds. optimizer_s: from the last gradient to the new weights, but for work of the device; down_s, up_s: of the
    slot per stage and micro-batch; first_s: of it, the weights of one block; blocks: of each stage."""

    optimizer_s: float
    down_s: Array
    up_s: Array
    first_s: Array
    blocks: Array

    def passed(self, compute_s: Array) -> Array:
        """A pass of each stage beside its weights as they come up, a block ahead."""
        found: Array = np.maximum(compute_s + self.first_s, self.up_s + compute_s / self.blocks)
        return found


def offloaded(
    plan: Plan,
    params: Params,
    held: NDArray[np.int64],
    *,
    cluster: Cluster,
    device: Device,
    on_host: bool,
    scales: Scales,
) -> Offloaded | None:
    """None where nothing is offloaded. on_host: the host runs the optimizer."""
    if plan.offload == "none":
        return None
    slot = PINNED * slot_Bps(device) * scales.network_Bps
    state = owned(plan, params)
    stage = np.asarray(held, dtype=float) * params.block
    stage[0] += params.before
    stage[-1] += params.after
    if on_host:
        ranks = max(g.gpus_per_node for g in cluster.groups)
        rate = THREAD_Bps if ranks > 1 else HOST_Bps
        update_s = state * HOST_ADAM_BYTES / rate * scales.host_s + state * WEIGHT_BYTES / slot
        down_s = stage * WEIGHT_BYTES / slot / (shard_ranks(plan) if plan.zero >= 2 else 1)
    else:
        update_s = state * STATE_BYTES / slot
        down_s = 0.0 * stage
    shards = shard_ranks(plan) if plan.zero >= 3 else 1
    each_s = WEIGHT_BYTES / shards / slot if plan.offload == "params" else 0.0
    blocks = np.maximum(np.asarray(held, dtype=float), 1.0)
    return Offloaded(
        optimizer_s=update_s,
        down_s=down_s,
        up_s=stage * each_s,
        first_s=params.block * each_s + 0.0 * stage,
        blocks=blocks,
    )


def assumptions(plan: Plan, *, cluster: Cluster, device: Device, on_host: bool) -> list[str]:
    """The rates that an answer with offload rests on, and where they are from."""
    if plan.offload == "none":
        return []
    slot = format_Bps(PINNED * slot_Bps(device))
    notes = [f"offload: the PCIe slot carries {slot} each way, {PINNED:.0%} of its rate, as pinned copies do (assumed)"]
    if not on_host:
        return [*notes, "offload: the state streams through the device, which updates it; the host computes nothing"]
    if max(g.gpus_per_node for g in cluster.groups) > 1:
        notes.append(
            f"offload: the host updates {format_Bps(THREAD_Bps)} a GPU: one thread a rank, as launchers set; from a "
            "public table of LLaMA-7B on 8 A800 under DeepSpeed 0.14.2, end to end"
        )
    else:
        notes.append(
            f"offload: the host updates {format_Bps(HOST_Bps)}: half of what two sockets of eight DDR4-3200 channels "
            "move (assumed)"
        )
    return [*notes, "offload: the host has the memory for what moves there (not checked)"]
