"""Bytes per device, itemised, the verdict, and the knob that would make it fit.

Data-parallel training keeps on every device (N parameters, E bytes of a master element, 4 for fp32):

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

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from simkit import plugins
from simkit.price import Compute
from simkit.program import RECOMPUTE, Program, basis
from simkit.spec.hardware import Device
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.units import MIB, format_bytes

OPTIMIZER_STATES = {"adamw": 2.0, "adam": 2.0, "lamb": 2.0, "sgd-momentum": 1.0, "sgd": 0.0, "none": 0.0}
FRAGMENTATION = 0.05
"""Reserved over allocated less one: assumed, typical of a warm caching allocator with static shapes."""
WORKSPACE_BYTES = 128 * MIB
"""cuBLAS (32 MiB a handle on Hopper, 8 elsewhere) and cuDNN scratch: assumed."""
CONTEXT_BYTES = {"volta": 420 * MIB, "turing": 420 * MIB, "pascal": 350 * MIB}
CONTEXT_DEFAULT_BYTES = 520 * MIB
"""CUDA context, loaded kernels and NCCL: assumed from the 0.3 GB of contexts since CUDA 11.7 plus library images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes per device, itemised, with the verdict. capacity_bytes is what a job can use: the driver's figure less the
    context and the reserve."""

    items_bytes: Mapping[str, float]
    allocated_bytes: float
    reserved_bytes: float
    device_bytes: float
    capacity_bytes: float
    fits: bool
    why_not: str = ""
    way_out: str = ""


def memory(
    program: Program,
    model: Model,
    *,
    plan: Plan,
    device: Device,
    compute: Compute,
    exchange_bytes: float,
    reserve_bytes: float,
) -> Memory:
    """The itemised memory of one rank. reserve_bytes: what the user wants kept free; compute: prices recomputation."""
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
    why = way_out = ""
    if not fits:
        why = f"needs {format_bytes(reserved)}, {device.title} offers {format_bytes(max(capacity, 0.0))}"
        way_out = _way_out(plan, capacity, needed, lambda recompute: replay_share(program, compute, recompute))
        way_out = way_out or _hopeless(plan, capacity, fixed, min(needed(1, r) for r in _stronger(plan)))
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
        way_out=way_out,
    )


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
    shapes = tuple((t.shape[0] * t.repeat, *t.shape[1:]) for t in model.tensors)
    return float(sum(module.memory_bytes(shapes, plan=plan, ranks=plan.dp).values()))


def _way_out(
    plan: Plan, capacity: float, needed: Callable[[float, str], float], added_share: Callable[[str], float]
) -> str:
    """The cheapest knob that brings the job under the capacity at the same global batch, as one sentence.

    needed(micro_batch, recompute): reserved bytes; added_share(recompute): what recomputation adds to the compute.
    """
    samples = int(plan.micro_batch * plan.grad_accum)
    sizes = [d for d in divisors(samples) if d <= plan.micro_batch]
    stronger = _stronger(plan)[1:]
    # A smaller micro-batch first, then recomputation at this one, then both.
    tries = [(d, plan.recompute) for d in sizes if d < plan.micro_batch]
    tries += [(sizes[0], r) for r in stronger] + [(d, r) for r in stronger for d in sizes[1:]]
    for micro_batch, recompute in tries:
        if needed(micro_batch, recompute) > capacity:
            continue
        parts = []
        if micro_batch < plan.micro_batch:
            parts.append(f"micro_batch={micro_batch} with grad_accum={samples // micro_batch}")
        if recompute == plan.recompute:
            return f"{parts[0]} fits"
        parts.append(f"recompute={recompute}")
        extra = added_share(recompute) - added_share(plan.recompute)
        return f"{' and '.join(parts)} fits; recomputation adds {extra:.0%} to the compute"
    return ""


def _stronger(plan: Plan) -> tuple[str, ...]:
    """The recomputation of the plan and every stronger one."""
    return RECOMPUTE[RECOMPUTE.index(plan.recompute) :]


def _hopeless(plan: Plan, capacity: float, fixed: Mapping[str, float], least_bytes: float) -> str:
    """What one sample a micro-batch and full recomputation still lack, and why."""
    states = fixed["weights"] + fixed["gradients"] + fixed["optimizer"]
    if states > capacity:
        over = format_bytes(states - capacity)
        return f"weights, gradients and optimizer alone are {over} over: take a larger card, or shard them"
    least = f"even micro_batch=1 with recompute=full needs {format_bytes(least_bytes)}"
    if fixed["exchange"] > states:
        share = format_bytes(fixed["exchange"])
        return f"{least}, {share} of it for {plan.method}: take another method or a larger card"
    return f"{least}: take a larger card or {'a shorter sequence' if plan.seq_len else 'smaller images'}"


def divisors(samples: int) -> list[int]:
    """Divisors, largest first; of a huge number those up to 1000 and their partners."""
    small = [d for d in range(1, min(math.isqrt(samples), 1000) + 1) if samples % d == 0]
    return sorted({*small, *(samples // d for d in small)}, reverse=True)
