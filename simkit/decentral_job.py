"""A network on peers, before anybody is told what to hold: units priced on every kind of device.

A stage that holds units i..j-1 takes, on one device,

    forward  hosted(sum of the units' kernels, sum of their launches)      backward the same, plus what it replays

and needs  states(i, j) + in_flight · kept(i, j)  bytes with (as in `simkit.memory`; E bytes of a master element)

    full training    N (E + E + E·moments) + 2 N_matrix under autocast + what the exchange of gradients keeps
    LoRA             2 N frozen + A (E + E + E·moments), A = r·(inputs + outputs) of every matrix of the blocks;
                     no weight gradients, no casts; two thin products a matrix, whose bytes are counted

Context, workspace and fragmentation come off what a device offers. Everything is a matrix over (i, j), so that a
placement asks no formula. Sources: `simkit.memory`; Hu et al., LoRA (arXiv 2106.09685, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from simkit import roofline
from simkit.evaluate import HOST_KERNEL_S, workload
from simkit.memory import CONTEXT_BYTES, CONTEXT_DEFAULT_BYTES, FRAGMENTATION
from simkit.memory_facts import OPTIMIZER_STATES, WORKSPACE_BYTES
from simkit.opgraph import Units, units
from simkit.price import Pricing, compute, hosted, pricing
from simkit.program import SCORES, Program, basis
from simkit.roofline import Array, Columns
from simkit.spec import load
from simkit.spec.hardware import Device
from simkit.spec.model import Model
from simkit.spec.peers import Peer, Rate
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.spec.resolve import Resolved
from simkit.spec.stack import Stack
from simkit.units import GIB

Ints = NDArray[np.int64]

SIDE = 8192.0
"""Side of the square product whose rate is a device's sustained one: large enough for every device at hand."""
FROZEN_BYTES = 2.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kind:
    """One kind of device. forward_s, backward_s, optimizer_s: (n+1, n+1) seconds of units i..j-1 of a micro-batch, and
    of their step; room_bytes: what a job can use; memory_Bps: streaming rate."""

    device: Device
    priced: Pricing
    forward_s: Array
    backward_s: Array
    optimizer_s: Array
    room_bytes: float
    memory_Bps: float


def sustained(stack: Stack, precision: str, *, calibration: bool = True, fp16_accumulate: bool = False) -> Rate:
    """Sustained FLOP/s of a device: the rate of a square product of `SIDE`, by the law of its pricing."""

    def rate(device: Device) -> float:
        law = pricing(device, precision, stack, fp16_accumulate=fp16_accumulate, calibration=calibration).law
        one, side = np.ones(1), np.full(1, SIDE)
        return float(2.0 * SIDE**3 / roofline.matmul_seconds(one, side, side, side, law)[0])

    return rate


def spread(per_unit: Array) -> Array:
    """(..., n) per unit -> (..., n+1, n+1) sums over i..j-1, 0 below the diagonal."""
    zero = np.zeros((*per_unit.shape[:-1], 1))
    running = np.concatenate([zero, np.cumsum(per_unit, axis=-1)], axis=-1)
    found: Array = np.maximum(running[..., None, :] - running[..., :, None], 0.0)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A network at one micro-batch. lora_rank: 0 = all weights train."""

    model: Model
    program: Program
    plan: Plan
    stack: Stack
    calibrated: bool
    reserve_bytes: float
    lora_rank: int = 0
    exchange_copies: float = 0.0
    """Bytes per trained element that the exchange of gradients keeps."""

    @cached_property
    def element_bytes(self) -> float:
        return max(DTYPE_BYTES[self.plan.precision], 2.0)

    @cached_property
    def units(self) -> Units:
        return units(self.program, self.model, micro_batch=float(self.plan.micro_batch),
                     seq_len=float(self.plan.seq_len), element_bytes=self.element_bytes)  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.units)

    @cached_property
    def cut_bytes(self) -> Array:
        """(n+1,) bytes of what crosses the cut before each unit, as it is computed; 0 at the ends."""
        return np.concatenate([[0.0], self.units.crossing_bytes, [0.0]])

    @cached_property
    def adapters(self) -> Array:
        """Elements of the adapters of each unit: r · (inputs + outputs) of every matrix inside the blocks."""
        found = np.zeros(self.count)
        if self.lora_rank:
            owner = self.unit_of_tensors
            for at, tensor in enumerate(self.model.tensors):
                if tensor.layer >= 0 and len(tensor.shape) > 1 and tensor.role != "embedding":
                    rest = tensor.numel / tensor.shape[0] / tensor.repeat
                    found[owner[at]] += self.lora_rank * (tensor.shape[0] + rest) * tensor.repeat
        return found

    @cached_property
    def unit_of_tensors(self) -> Ints:
        """The unit that holds each tensor of the model."""
        nodes = np.array(self.program.node_ends)[:, 1]
        place = len(self.program.backward.order) - self.program.ready
        node = np.searchsorted(nodes, place)
        unit = np.searchsorted(self.units.first, node, side="right") - 1
        found = np.zeros(len(self.model.tensors), dtype=np.int64)
        found[self.program.tensor_index] = unit
        return found

    @cached_property
    def trained(self) -> Array:
        """(n+1, n+1) trained elements of units i..j-1, a tied table that stands elsewhere included."""
        if self.lora_rank:
            return spread(self.adapters)
        found = spread(self.units.elements)
        found[1:, -1] += self.units.head_table[-1]
        found[-1, -1] = 0.0
        return found

    @cached_property
    def state_bytes(self) -> Array:
        """(n+1, n+1) weights, gradients, optimizer, exchange and the logits, with fragmentation."""
        plan, n = self.plan, self.count
        element = DTYPE_BYTES[plan.master_dtype]
        per_trained = element * (2.0 + OPTIMIZER_STATES[plan.optimizer]) + self.exchange_copies
        found = self.trained * per_trained
        if self.lora_rank:
            frozen = spread(self.units.elements)
            frozen[1:, -1] += self.units.head_table[-1]
            found = found + FROZEN_BYTES * frozen
        elif DTYPE_BYTES[plan.precision] < element:
            casts = spread(self.units.matrices)
            casts[:-1, -1] += self.units.head_table[-1]
            found = found + 2.0 * casts
        found[:n, n] += float(basis(plan.micro_batch, plan.seq_len) @ self.program.logits)
        return np.asarray(found * (1.0 + FRAGMENTATION))

    @cached_property
    def kept_bytes(self) -> Array:
        """(n+1, n+1) activations of one micro-batch, with fragmentation; recomputed units keep what enters them, and
        the largest is there in full while it is replayed (counted once in `replay_bytes`)."""
        u = self.units
        kept = np.where(self._replays, np.minimum(u.boundary_bytes, u.kept_bytes), u.kept_bytes)
        return spread(kept) * (1.0 + FRAGMENTATION)

    @cached_property
    def replay_bytes(self) -> float:
        """The largest unit in full, where units are recomputed."""
        u = self.units
        dropped = np.where(self._replays, u.kept_bytes, 0.0)
        return float(dropped.max()) * (1.0 + FRAGMENTATION)

    @cached_property
    def _replays(self) -> NDArray[np.bool_]:
        """Units whose forward pass is run again: those inside the blocks, under full recomputation."""
        names = np.array([n[0].isdigit() for n in self.units.names])
        return names & (self.plan.recompute == "full")

    @cached_property
    def activation_bytes(self) -> float:
        """Activations of one micro-batch through the whole network."""
        return float(self.kept_bytes[0, -1])

    def kind(self, device: Device) -> Kind:
        """The units on one device."""
        plan = self.plan
        priced = pricing(device, plan.precision, self.stack, fp16_accumulate=plan.fp16_accumulate,
                         calibration=self.calibrated)  # fmt: skip
        cost = compute(self.program, micro_batch=plan.micro_batch, seq_len=plan.seq_len, law=priced.law)
        f, b = self.program.forward, self.program.backward
        eager = self.stack.calibration.get("eager") if self.calibrated else None
        launch_s = eager.get("host_kernel_s", HOST_KERNEL_S) if eager is not None else HOST_KERNEL_S
        keep_f, keep_b = self._kept_rows
        forward = self.units.forward_rows * keep_f
        backward = self.units.backward_rows * keep_b
        memory_Bps = priced.law.memory_Bps * priced.law.sustained
        extra, launches = self._adapter_work(memory_Bps)
        forward_s = hosted(spread(forward @ cost.forward_s + extra),
                           spread(forward @ f.kernels + 2.0 * launches) * launch_s)  # fmt: skip
        replayed = np.where(self._replays, 1.0, 0.0)
        scores = f.coefficients[4][SCORES] > 0.0
        rows = forward * (scores if plan.recompute == "selective" else replayed[:, None])
        backward_s = hosted(spread(backward @ cost.backward_s + rows @ cost.forward_s + 2.0 * extra),
                            spread(backward @ b.kernels + rows @ f.kernels + 4.0 * launches) * launch_s)  # fmt: skip
        context = float(CONTEXT_BYTES.get(device.architecture, CONTEXT_DEFAULT_BYTES)) if device.kind == "gpu" else 0.0
        workspace = float(WORKSPACE_BYTES) * (1.0 + FRAGMENTATION) if device.kind == "gpu" else 0.0
        step_s = self.trained * (self.stack.optimizer_bytes[plan.optimizer] / memory_Bps)
        return Kind(
            device=device, priced=priced, forward_s=forward_s, backward_s=backward_s, optimizer_s=step_s,
            room_bytes=device.memory_bytes - context - workspace - self.reserve_bytes - self.replay_bytes,
            memory_Bps=memory_Bps,
        )  # fmt: skip

    @cached_property
    def _kept_rows(self) -> tuple[Array, Array]:
        """1 for the rows that run: a frozen weight has no gradient and needs no cast."""
        f, b = self.program.forward, self.program.backward
        if not self.lora_rank:
            return np.ones(len(f)), np.ones(len(b))
        out = (".wgrad", ".bias_grad", ".grad_cast", ".cast")
        return tuple(np.array([not n.endswith(out) for n in side.names], dtype=float) for side in (f, b))  # type: ignore[return-value]

    def _adapter_work(self, memory_Bps: float) -> tuple[Array, Array]:
        """(seconds, matrices) of the adapters of each unit, forward: both thin products read and write activations."""
        zero = np.zeros(self.count)
        if not self.lora_rank:
            return zero, zero
        tokens = float(self.plan.micro_batch * max(self.plan.seq_len, 1))
        matrices = zero.copy()
        owner = self.unit_of_tensors
        for at, tensor in enumerate(self.model.tensors):
            if tensor.layer >= 0 and len(tensor.shape) > 1 and tensor.role != "embedding":
                matrices[owner[at]] += 1.0
        moved = self.element_bytes * (tokens * self.adapters / self.lora_rank + self.adapters)
        return moved / memory_Bps, matrices


@lru_cache(maxsize=64)
def _capacity(device: str, profiles: tuple[str, ...], calibration: bool) -> Device:
    return load.device(device, profiles=profiles, calibration=calibration)


def devices_of(peers: Sequence[Peer], resolved: Resolved) -> dict[str, Device]:
    """{name: device} of the peers; those of the cluster are the same objects."""
    known = {d.name: d for d in resolved.cluster.devices}
    calibrated = bool(resolved.scenario.get("calibration", True))
    for name in dict.fromkeys(p.device for p in peers):
        if name not in known:
            known[name] = _capacity(name, resolved.scenario.profiles, calibrated)
    return {name: known[name] for name in dict.fromkeys(p.device for p in peers)}


def job(resolved: Resolved, plan: Plan, *, lora_rank: int = 0, exchange_copies: float = 0.0) -> Job:
    """The job of a resolved scenario under a plan whose micro-batch is settled."""
    return Job(
        model=resolved.model, program=workload(resolved.model, replace(plan, dp=1), resolved.stack), plan=plan,
        stack=resolved.stack, calibrated=bool(resolved.scenario.get("calibration", True)),
        reserve_bytes=float(resolved.scenario.get("memory_reserve_gib", 0.0)) * GIB, lora_rank=lora_rank,
        exchange_copies=exchange_copies,
    )  # fmt: skip


__all__ = ["Columns", "Job", "Kind", "devices_of", "job", "spread", "sustained"]
