"""Bytes per device, itemised, the verdict, and the knob that would make it fit.

What a rank of sharded training keeps is in `simkit.memory_sharded`, stage by stage; the heaviest stage decides.
Plain data-parallel training keeps on every device (N parameters, E bytes of a master element, 4 for fp32):

    weights      N·E
    casts        N_matrix·2 where matrices are multiplied in 16 bits: autocast keeps the copies for the backward pass
    gradients    N·E
    optimizer    0 (SGD), N·E (momentum), 2·N·E (Adam, AdamW, LAMB)
    activations  what the forward pass keeps for the backward pass (`Program.kept_bytes`), less what is recomputed
    logits       logits, their log-softmax and their gradients
    exchange     buffers, error feedback, factors, gathered messages: `compressors/<method>.memory_bytes`
    workspace    cuBLAS and cuDNN scratch
    context      what the driver and the libraries take before the first tensor; not seen by the allocator

weights + gradients + optimizer are the 16 N bytes of ZeRO stage 0 under Adam. All items are taken to be alive at once,
at the start of back-propagation: gradients stay allocated between steps.
allocated = all but the context; reserved = allocated · (1 + fragmentation); device = reserved + context.
Sources: Rajbhandari et al., ZeRO (arXiv 1910.02054, section 3); Korthikanti et al. (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simkit import plugins
from simkit.memory_facts import FACTS, FRAGMENTATION, OPTIMIZER_STATES, WORKSPACE_BYTES
from simkit.memory_wayout import divisors, stronger, way_out
from simkit.price import Compute
from simkit.program import Program, basis
from simkit.roofline import Array
from simkit.spec.hardware import Device
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.units import MIB, format_bytes

if TYPE_CHECKING:
    from simkit.memory_sharded import StageMemory

CONTEXT_BYTES = {"volta": 420 * MIB, "turing": 420 * MIB, "pascal": 350 * MIB}
CONTEXT_DEFAULT_BYTES = 520 * MIB
"""CUDA context, loaded kernels and NCCL: assumed from the 0.3 GB of contexts since CUDA 11.7 plus library images."""
COMMUNICATOR_BYTES = 200 * MIB
"""Buffers of one NCCL communicator beyond the first: assumed, 16 to 24 channels of a few MiB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device, itemised, with the verdict. capacity_bytes is what a job can use, the driver's figure less the
    context and the reserve; reserved_bytes must stay within it. stage: the heaviest pipeline stage, whose items these
    are; stages: all of them."""

    items_bytes: Mapping[str, float]
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float
    capacity_bytes: float
    fits: bool
    why_not: str = ""
    advice: Callable[[], str] | None = None
    stage: int = 0
    stages: StageMemory | None = None

    @property
    def way_out(self) -> str:
        """The knob that would make it fit, looked for when it is asked for; empty where it fits or nobody looks."""
        return self.advice() if self.advice is not None else ""

    @property
    def room_bytes(self) -> float:
        """What device_bytes must stay within: the driver's figure less the reserve."""
        return self.capacity_bytes + self.device_bytes - self.reserved_bytes

    @property
    def per_stage(self) -> tuple[Mapping[str, float], ...]:
        """Items of every pipeline stage, with their sums allocated, reserved and device; one entry without stages."""
        outside = self.device_bytes - self.reserved_bytes
        if self.stages is None:
            return (self._entry(dict(self.items_bytes), self.allocated_bytes, self.reserved_bytes),)
        found = []
        for i in range(self.stages.reserved_bytes.shape[-1]):
            allocated, reserved = float(self.stages.allocated_bytes[i]), float(self.stages.reserved_bytes[i])
            items = self.stages.stage(i) | {"fragmentation": reserved - allocated, "context": outside}
            found.append(self._entry(items, allocated, reserved))
        return tuple(found)

    def _entry(self, items: dict[str, float], allocated: float, reserved: float) -> dict[str, float]:
        outside = self.device_bytes - self.reserved_bytes
        return items | {"allocated": allocated, "reserved": reserved, "device": reserved + outside}


def memory(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    device: Device,
    compute: Compute,
    exchange_bytes: float,
    reserve_bytes: float,
    step_s: Callable[[Plan], float] | None = None,
    advise: bool = True,
) -> Memory:
    """The itemised memory of one rank. reserve_bytes: what the user wants kept free; compute: prices recomputation;
    step_s: seconds of a step under another plan, for what the way out costs; advise: look for a way out."""
    weigh = _staged if staged(plan, model) else _plain
    return weigh(
        program,
        model,
        plan=plan,
        device=device,
        compute=compute,
        exchange_bytes=exchange_bytes,
        reserve_bytes=reserve_bytes,
        step_s=step_s,
        advise=advise,
    )


def _plain(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    device: Device,
    compute: Compute,
    exchange_bytes: float,
    reserve_bytes: float,
    step_s: Callable[[Plan], float] | None,
    advise: bool,
) -> Memory:
    """Plain data parallelism over any network."""
    element = DTYPE_BYTES[plan.master_dtype]
    gpu = device.kind == "gpu"
    n = float(model.params)
    fixed = {
        "weights": n * element,
        "casts": 2.0 * matrix_params(model) if DTYPE_BYTES[plan.precision] < element else 0.0,
        "gradients": n * element,
        "optimizer": n * element * OPTIMIZER_STATES[plan.optimizer],
        "exchange": exchange_bytes,
        "buffers": float(sum(model.buffers.values())),
        "workspace": float(WORKSPACE_BYTES) if gpu else 0.0,
    }
    fixed_bytes = sum(fixed.values())

    def moving(micro_batch: float, recompute: str) -> tuple[float, float]:
        """Activations and logits."""
        monomials = basis(micro_batch, plan.seq_len)
        return program.kept_bytes(monomials, recompute), float(monomials @ program.logits)

    def needed(micro_batch: float, recompute: str) -> float:
        return (fixed_bytes + sum(moving(micro_batch, recompute))) * (1.0 + FRAGMENTATION)

    activations, logits = moving(plan.micro_batch, plan.recompute)
    allocated = fixed_bytes + activations + logits
    reserved = allocated * (1.0 + FRAGMENTATION)
    context = float(CONTEXT_BYTES.get(device.architecture, CONTEXT_DEFAULT_BYTES)) if gpu else 0.0
    capacity = device.memory_bytes - context - reserve_bytes
    fits = reserved <= capacity
    why = out = ""
    if not fits:
        why = _why("needs", reserved, context, capacity, device)
    if not fits and advise:

        def fitting(p: Plan) -> bool:
            if staged(p, model):
                from simkit.memory_sharded import memory_of_stages

                room = device.memory_bytes - context_bytes(p, device) - reserve_bytes
                return _heaviest(memory_of_stages(program, model, p, exchange_bytes=exchange_bytes)) <= room
            return needed(p.micro_batch, p.recompute) <= capacity

        added = partial(replay_share, program, compute)
        out = way_out(plan, model.spec, fits=fitting, added_share=added, step_s=step_s)
        out = out or _hopeless(plan, capacity, fixed, context + min(needed(1, r) for r in stronger(plan)))
    items = {k: fixed[k] for k in ("weights", "casts", "gradients", "optimizer")}
    items |= {"activations": activations, "logits": logits}
    items |= {k: fixed[k] for k in ("exchange", "buffers", "workspace")}
    return Memory(
        items_bytes=items | {"fragmentation": reserved - allocated, "context": context},
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + context,
        capacity_bytes=capacity,
        fits=fits,
        why_not=why,
        advice=(lambda: out) if out else None,
    )


def staged(plan: Plan, model: Model) -> bool:
    """Whether the job is weighed stage by stage: any degree or ZeRO, or a stack with facts of its own."""
    spec = model.spec
    if not isinstance(spec, TransformerSpec) or spec.kind not in ("decoder", "encoder"):
        return False
    degrees = plan.tp * plan.pp * plan.cp * plan.ep > 1 or plan.zero > 0 or plan.offload != "none"
    return degrees or plan.stack in FACTS


def context_bytes(plan: Plan, device: Device) -> float:
    """What the driver and the libraries take: the context and one communicator a group of ranks."""
    if device.kind != "gpu":
        return 0.0
    groups = sum(n > 1 for n in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep))
    context = float(CONTEXT_BYTES.get(device.architecture, CONTEXT_DEFAULT_BYTES))
    return context + COMMUNICATOR_BYTES * max(groups - 1, 0)


def _heaviest(found: StageMemory) -> float:
    return float(found.reserved_bytes.max())


def _staged(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    device: Device,
    compute: Compute,
    exchange_bytes: float,
    reserve_bytes: float,
    step_s: Callable[[Plan], float] | None,
    advise: bool,
) -> Memory:
    # Sharded plans alone need it; a cold command should not pay for what it does not use.
    from simkit.memory_sharded import memory_of_stages

    workspace = float(WORKSPACE_BYTES) if device.kind == "gpu" else 0.0

    def weighed(p: Plan) -> StageMemory:
        return memory_of_stages(program, model, p, exchange_bytes=exchange_bytes, workspace_bytes=workspace)

    found = weighed(plan)
    stage = int(np.argmax(found.reserved_bytes))
    context = context_bytes(plan, device)
    allocated, reserved = float(found.allocated_bytes[stage]), float(found.reserved_bytes[stage])
    items = found.stage(stage) | {"fragmentation": reserved - allocated, "context": context}
    capacity = device.memory_bytes - context - reserve_bytes
    fits = reserved <= capacity
    why = out = ""
    if not fits:
        why = _why(_where(stage, plan), reserved, context, capacity, device)
    if not fits and advise:

        def fitting(p: Plan) -> bool:
            room = device.memory_bytes - context_bytes(p, device) - reserve_bytes
            return _heaviest(weighed(p)) <= room

        added = partial(replay_share, program, compute)
        out = way_out(plan, model.spec, fits=fitting, added_share=added, step_s=step_s)
        least = replace(plan, micro_batch=1, grad_accum=plan.micro_batch * plan.grad_accum, recompute="full")
        out = out or _hopeless(plan, capacity, items, context + _heaviest(weighed(least)))
    return Memory(
        items_bytes=items,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + context,
        capacity_bytes=capacity,
        fits=fits,
        why_not=why,
        advice=(lambda: out) if out else None,
        stage=stage,
        stages=found,
    )


def verdicts(
    program: Program, model: Model, *, plan: Plan, device: Device, exchange_bytes: float, reserve_bytes: float
) -> tuple[Array, NDArray[np.bool_], list[str]]:
    """(device_bytes, fits, why_not) of the heaviest stage at many points of a plan that is weighed stage by stage:
    micro_batch and grad_accum are arrays over them. The figures are those of `memory`."""
    from simkit.memory_sharded import memory_of_stages

    workspace = float(WORKSPACE_BYTES) if device.kind == "gpu" else 0.0
    found = memory_of_stages(program, model, plan, exchange_bytes=exchange_bytes, workspace_bytes=workspace)
    stage, reserved = found.reserved_bytes.argmax(axis=-1), found.reserved_bytes.max(axis=-1)
    context = context_bytes(plan, device)
    capacity = device.memory_bytes - context - reserve_bytes
    fits = reserved <= capacity
    why = [""] * len(fits)
    for i in np.flatnonzero(~fits).tolist():
        why[i] = _why(_where(int(stage[i]), plan), float(reserved[i]), context, capacity, device)
    return reserved + context, fits, why


@lru_cache(maxsize=256)
def matrix_params(model: Model) -> float:
    """Elements of the matrices that autocast multiplies with: no look-up, no vector; a tied table is the head."""
    spec = model.spec
    tied = isinstance(spec, TransformerSpec) and spec.tied and spec.has_vocab_head
    matrices = sum(t.numel for t in model.tensors if len(t.shape) > 1 and t.role != "embedding")
    return float(matrices + (spec.vocab * spec.hidden if tied and isinstance(spec, TransformerSpec) else 0))


def replay_share(program: Program, compute: Compute, recompute: str) -> float:
    """Seconds that recomputation adds, as a share of the forward and backward pass without it."""
    plain_s = compute.total(program.forward, backward=False) + compute.total(program.backward, backward=True)
    return float(program.replayed(recompute).sum(axis=0) @ compute.forward_s) / plain_s if plain_s else 0.0


@lru_cache(maxsize=256)
def exchange_bytes(model: Model, plan: Plan) -> float:
    """Device bytes that the gradient exchange keeps."""
    if plan.dp <= 1:
        return 0.0
    module = plugins.get("simkit.compressors", plan.method)
    return float(sum(module.memory_bytes(_shapes(model), plan=plan, ranks=plan.dp).values()))


@lru_cache(maxsize=64)
def _shapes(model: Model) -> tuple[tuple[int, ...], ...]:
    """The shapes of the gradients; equal experts stand as one tall matrix."""
    return tuple((t.shape[0] * t.repeat, *t.shape[1:]) for t in model.tensors)


def _where(stage: int, plan: Plan) -> str:
    return f"stage {stage} of {plan.pp} needs" if plan.pp > 1 else "needs"


def _why(where: str, reserved: float, context: float, capacity: float, device: Device) -> str:
    """Both figures with the context, as the driver shows them."""
    room = format_bytes(max(capacity + context, 0.0))
    return f"{where} {format_bytes(reserved + context)}, {device.title} offers {room}"


def _hopeless(plan: Plan, capacity: float, fixed: Mapping[str, float], least_bytes: float) -> str:
    """What one sample a micro-batch and full recomputation still lack, and why."""
    states = fixed["weights"] + fixed["gradients"] + fixed["optimizer"]
    if states > capacity:
        divided = plan.tp * plan.pp * plan.ep > 1 or plan.zero > 0
        divide = "divide them further (zero, tp, pp), over more cards if need be" if divided else "shard them"
        over = format_bytes(states - capacity)
        return f"weights, gradients and optimizer alone are {over} over: take a larger card, or {divide}"
    least = f"even micro_batch=1 with recompute=full needs {format_bytes(least_bytes)}"
    if fixed["exchange"] > states:
        share = format_bytes(fixed["exchange"])
        return f"{least}, {share} of it for {plan.method}: take another method or a larger card"
    return f"{least}: take a larger card or {'a shorter sequence' if plan.seq_len else 'smaller images'}"


__all__ = ["FRAGMENTATION", "OPTIMIZER_STATES", "Memory", "divisors", "memory"]
