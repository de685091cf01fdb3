"""The tensors that low-rank adapters add to a model (LoRA, arXiv 2106.09685).

A linear layer of d_in inputs and d_out outputs gains A of (rank, d_in) and B of (d_out, rank): rank (d_in + d_out)
parameters. LoRA-FA (arXiv 2308.03303) trains B alone. A fused layer of which only some parts are adapted (query and
value of a fused query-key-value projection) gains one pair for each part, as in LitGPT and loralib's MergedLinear.
"""

from __future__ import annotations

from dataclasses import dataclass

from simkit.errors import InputError, unknown
from simkit.spec.layouts import layout
from simkit.spec.model import Model, Tensor, TransformerSpec

ALL_LINEAR = "all-linear"
LINEAR_MODULES = frozenset({
    "attention.qkv", "attention.out", "cross_attention.qkv", "cross_attention.out", "mlp", "experts", "shared_expert",
    "linear",
})
"""What ``all-linear`` covers: the matrices of attention and MLPs, not embeddings, heads, convolutions or routers."""
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Llama's names, understood as roles for every family, whatever it calls or fuses them."""


@dataclass(frozen=True, slots=True)
class Target:
    """A matrix, or the `rows` outputs of it that play the part `role`, which one pair of adapters attaches to."""

    tensor: Tensor
    rows: int
    role: str = ""


def targets_of(model: Model, targets: str | tuple[str, ...] = ALL_LINEAR) -> tuple[Target, ...]:
    """What adapters attach to, in registration order.

    targets: ``all-linear``, `ROLES`, or the last part of the layers' own names (``c_attn``, ``query_key_value``, …), as
    a tuple or joined by commas or spaces. A role that a family lacks (the gate of an ungated MLP) is passed over while
    another one matches. Raises InputError for any other name, listing those the model has.
    """
    names = tuple(targets.replace(",", " ").split()) if isinstance(targets, str) else targets
    linear = [t for t in model.tensors if t.module in LINEAR_MODULES and len(t.shape) == 2]
    if not linear:
        raise InputError("has no linear layer that an adapter could attach to", key="model", value=model.name)
    known = dict.fromkeys(_last(t) for t in linear)
    listed = f"{ALL_LINEAR} or some of {', '.join(known)}"
    if not names:
        raise InputError("names no layer", key="lora_targets", value=targets, hint=listed)
    for name in names:
        if name not in known and name not in ROLES and name != ALL_LINEAR:
            raise unknown("linear layer of this model", name, [*known, *ROLES, ALL_LINEAR], key="lora_targets")
    wanted = set(names)
    out = [target for t in linear for target in _parts(model, t, wanted)]
    if not out:
        raise InputError("matches no layer of this model", key="lora_targets", value=" ".join(names), hint=listed)
    return tuple(out)


def _parts(model: Model, tensor: Tensor, wanted: set[str]) -> list[Target]:
    """The whole matrix where all of it is wanted, else its wanted slices."""
    if ALL_LINEAR in wanted or _last(tensor) in wanted:
        return [Target(tensor, tensor.shape[0])]
    roles = _roles(model, tensor)
    hit = [(role, rows) for role, rows in roles if role in wanted]
    if len(hit) == len(roles):
        return [Target(tensor, tensor.shape[0])] if hit else []
    return [Target(tensor, rows, role) for role, rows in hit]


def _roles(model: Model, tensor: Tensor) -> list[tuple[str, int]]:
    """(role, outputs) of the parts of a matrix, by its place among the names of its family."""
    spec = model.spec
    if not isinstance(spec, TransformerSpec) or spec.mla:
        return []
    rows, last = tensor.shape[0], _last(tensor)
    if tensor.module.endswith("attention.out"):
        return [("o_proj", rows)]
    if tensor.module.endswith("attention.qkv"):
        widths = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim)
        names = ("q", "k", "v") if spec.kind == "encoder-decoder" else _lasts(layout(spec).qkv)
        parts = list(zip(ROLES[:3], widths, strict=True))
        return parts if len(names) == 1 else [part for name, part in zip(names, parts, strict=True) if name == last]
    names = _mlp_names(spec, tensor)
    if last == names[-1]:
        return [("down_proj", rows)]
    if spec.gated_mlp and len(names) == 2:
        return [("gate_proj", rows // 2), ("up_proj", rows // 2)]
    return [("gate_proj" if spec.gated_mlp and last == names[0] else "up_proj", rows)]


def _mlp_names(spec: TransformerSpec, tensor: Tensor) -> tuple[str, ...]:
    """(gate, up, down), (up, down) or, fused, (gate_up, down) as the family calls them."""
    names = layout(spec)
    if spec.kind == "encoder-decoder":
        return ("wi_0", "wi_1", "wo") if spec.gated_mlp else ("wi", "wo")
    if tensor.module == "shared_expert":
        return ("gate_proj", "up_proj", "down_proj")
    return _lasts(names.expert if tensor.module == "experts" else names.mlp)


def _lasts(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.rpartition(".")[2] for name in names)


def _last(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight").rpartition(".")[2]


def lora_tensors(model: Model, *, rank: int, targets: str | tuple[str, ...] = ALL_LINEAR) -> tuple[Tensor, ...]:
    """A and B of every target, A first, each with the layer, role and repeat of the matrix it adapts."""
    if rank < 1:
        raise InputError("is below 1", key="lora_rank", value=rank)
    out: list[Tensor] = []
    for target in targets_of(model, targets):
        t = target.tensor
        stem = t.name.removesuffix(".weight") + (f".{target.role}" if target.role else "")
        out.append(Tensor(f"{stem}.lora_A.weight", (rank, t.shape[1]), t.module, t.layer, t.role, t.repeat))
        out.append(Tensor(f"{stem}.lora_B.weight", (target.rows, rank), t.module, t.layer, t.role, t.repeat))
    return tuple(out)


def lora_params(model: Model, *, rank: int, targets: str | tuple[str, ...] = ALL_LINEAR) -> int:
    """Trainable parameters of the adapters: sum of rank (d_in + d_out) over the targets."""
    return sum(t.numel for t in lora_tensors(model, rank=rank, targets=targets))
