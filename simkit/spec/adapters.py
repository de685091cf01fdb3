"""The tensors that low-rank adapters add to a model (LoRA, arXiv 2106.09685).

A linear layer of d_in inputs and d_out outputs gains A of (rank, d_in) and B of (d_out, rank): rank (d_in + d_out)
parameters. LoRA-FA (arXiv 2308.03303) trains B alone.
"""

from __future__ import annotations

from simkit.errors import InputError, unknown
from simkit.spec.model import Model, Tensor

ALL_LINEAR = "all-linear"
LINEAR_MODULES = frozenset({
    "attention.qkv", "attention.out", "cross_attention.qkv", "cross_attention.out", "mlp", "experts", "shared_expert",
    "linear",
})
"""What ``all-linear`` covers: the matrices of attention and MLPs, not embeddings, heads, convolutions or routers."""


def target_tensors(model: Model, targets: str | tuple[str, ...] = ALL_LINEAR) -> tuple[Tensor, ...]:
    """The weight matrices that adapters attach to, in registration order.

    targets: ``all-linear`` or the last part of the layers' names (``q_proj``, ``v_proj``, ``c_attn``, …), as a tuple
    or joined by commas. Raises InputError for a name that no linear layer of the model has, listing those it has.
    """
    names = tuple(t.strip() for t in targets.split(",") if t.strip()) if isinstance(targets, str) else targets
    linear = [t for t in model.tensors if t.module in LINEAR_MODULES and len(t.shape) == 2]
    if not linear:
        raise InputError("has no linear layer that an adapter could attach to", key="model", value=model.name)
    if ALL_LINEAR in names:
        return tuple(linear)
    known = dict.fromkeys(_last(t) for t in linear)
    for name in names:
        if name not in known:
            raise unknown("linear layer of this model", name, [*known, ALL_LINEAR], key="lora_targets")
    if not names:
        hint = f"{ALL_LINEAR} or some of {', '.join(known)}"
        raise InputError("names no layer", key="lora_targets", value=targets, hint=hint)
    return tuple(t for t in linear if _last(t) in names)


def _last(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight").rpartition(".")[2]


def lora_tensors(model: Model, *, rank: int, targets: str | tuple[str, ...] = ALL_LINEAR) -> tuple[Tensor, ...]:
    """A and B of every target, A first, each with the layer, role and repeat of the matrix it adapts."""
    if rank < 1:
        raise InputError("is below 1", key="lora_rank", value=rank)
    out: list[Tensor] = []
    for t in target_tensors(model, targets):
        stem = t.name.removesuffix(".weight")
        d_out, d_in = t.shape
        out.append(Tensor(f"{stem}.lora_A.weight", (rank, d_in), t.module, t.layer, t.role, t.repeat))
        out.append(Tensor(f"{stem}.lora_B.weight", (d_out, rank), t.module, t.layer, t.role, t.repeat))
    return tuple(out)


def lora_params(model: Model, *, rank: int, targets: str | tuple[str, ...] = ALL_LINEAR) -> int:
    """Trainable parameters of the adapters: sum of rank (d_in + d_out) over the targets."""
    return sum(t.numel for t in lora_tensors(model, rank=rank, targets=targets))
