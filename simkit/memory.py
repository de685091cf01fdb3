"""Bytes per device, itemised, the verdict, and the knob that would make it fit.

Data-parallel training keeps on every device (N parameters, E bytes of an fp32 element):

    weights      N·E, and N·2 of their 16-bit copies under mixed precision
    gradients    N·E
    optimizer    0 (SGD), N·E (momentum), 2·N·E (Adam, AdamW, LAMB)
    activations  what the forward pass keeps for the backward pass (`Op.saved`); full recomputation keeps block inputs only
    logits       logits, their fp32 copy and their gradient
    exchange     buffers, error feedback, factors, gathered messages: `compressors/<method>.memory_bytes`
    workspace    cuBLAS and cuDNN scratch
    context      what the driver and the libraries take before the first tensor; not seen by the allocator

allocated = all but the context; reserved = allocated · (1 + fragmentation); device = reserved + context.
Sources: Rajbhandari et al., ZeRO (arXiv 1910.02054, section 3); Korthikanti et al. (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from simkit import plugins
from simkit.price import Compute
from simkit.program import Program
from simkit.spec.hardware import Device
from simkit.spec.model import ConvSpec, Model, TransformerSpec
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.units import GIB, MIB, format_bytes

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


def memory(program: Program, model: Model, *, plan: Plan, device: Device, compute: Compute, exchange_bytes: float, reserve_bytes: float) -> Memory:
    """The itemised memory of one rank. reserve_bytes: what the user wants kept free."""
    n = float(model.params)
    mixed = DTYPE_BYTES[plan.precision] < 4.0
    activations = _activations(model, plan, float(compute.saved_bytes))
    items = {
        "weights": n * DTYPE_BYTES[plan.master_dtype] + (2.0 * n if mixed else 0.0),
        "gradients": n * DTYPE_BYTES[plan.master_dtype],
        "optimizer": n * 4.0 * OPTIMIZER_STATES[plan.optimizer],
        "activations": activations,
        "logits": float(compute.logits_bytes),
        "exchange": exchange_bytes,
        "buffers": float(sum(model.buffers.values())),
        "workspace": float(WORKSPACE_BYTES) if device.kind == "gpu" else 0.0,
    }
    allocated = sum(items.values())
    context = float(CONTEXT_BYTES.get(device.architecture, CONTEXT_DEFAULT_BYTES)) if device.kind == "gpu" else 0.0
    reserved = allocated * (1.0 + FRAGMENTATION)
    items["fragmentation"] = reserved - allocated
    items["context"] = context
    capacity = device.memory_bytes - context - reserve_bytes
    fits = reserved <= capacity
    why = "" if fits else f"needs {format_bytes(reserved)}, {device.title} offers {format_bytes(max(capacity, 0.0))}"
    return Memory(
        items_bytes=items,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + context,
        capacity_bytes=capacity,
        fits=fits,
        why_not=why,
        way_out="" if fits else _way_out(items, capacity, plan),
    )


@lru_cache(maxsize=256)
def exchange_bytes(model: Model, plan: Plan) -> float:
    """Device bytes that the gradient exchange keeps."""
    if plan.dp <= 1:
        return 0.0
    module = plugins.get("simkit.compressors", plan.method)
    shapes = tuple((t.shape[0] * t.repeat, *t.shape[1:]) for t in model.tensors)
    return float(sum(module.memory_bytes(shapes, plan=plan, ranks=plan.dp).values()))


def _activations(model: Model, plan: Plan, saved: float) -> float:
    """Full recomputation keeps the input of every block and, while one block is recomputed, what that block saves."""
    if plan.recompute != "full":
        return saved
    if isinstance(model.spec, TransformerSpec):
        blocks = model.spec.layers + model.spec.decoder_layers
        inputs = blocks * plan.micro_batch * max(plan.seq_len, 1) * model.spec.hidden * DTYPE_BYTES[plan.precision]
        return min(saved, inputs + saved / max(blocks, 1))
    if isinstance(model.spec, ConvSpec):
        return float(saved * 2.0 / max(len(model.spec.layers), 1) ** 0.5)
    return saved


def _way_out(items: dict[str, float], capacity: float, plan: Plan) -> str:
    """The cheapest knob that brings the job under the capacity, as one sentence."""
    scaling = items["activations"] + items["logits"]
    fixed = sum(v for k, v in items.items() if k not in ("activations", "logits", "context", "fragmentation"))
    room = capacity / (1.0 + FRAGMENTATION) - fixed
    if room > 0 and plan.micro_batch > 1 and scaling / plan.micro_batch <= room:
        largest = int(room / (scaling / plan.micro_batch))
        return f"micro_batch={largest} fits"
    if room > 0 and plan.recompute == "none":
        return "recompute=full, with micro_batch=1, may fit"
    short = (fixed - capacity) / GIB
    if short > 0:
        return f"weights, gradients and optimizer alone are {short:.1f} GiB over: take a larger card, sgd instead of {plan.optimizer}, or shard"
    return "a card with more memory, or a shorter sequence"
