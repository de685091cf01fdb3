"""From the facts of a transformer to its trainable tensors, in the order torch registers them.

One linear layer of d_in inputs and d_out outputs is a (d_out, d_in) weight and, where the family has it, a (d_out,)
bias. GPT-2's Conv1D stores its weight transposed; it is given here with outputs first like everything else. A tied head
has no tensor. Blocks of an encoder-decoder are numbered through: encoder first, then decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from simkit.errors import InputError
from simkit.spec.layouts import Layout, layout
from simkit.spec.model import Tensor, TransformerSpec

DEFAULT_POSITIONS = 2048
"""Rows of a learned position table where neither the facts nor the scenario say how many (llm-foundry's default)."""


def tensors(spec: TransformerSpec, *, seq_len: int | None = None) -> tuple[Tensor, ...]:
    """The trainable tensors of `spec` in registration order.

    seq_len: length of a learned position table whose length the facts leave open. Raises InputError for a kind that
    is none of ``decoder encoder encoder-decoder vit``.
    """
    builders = {"decoder": _decoder, "encoder": _encoder, "vit": _vit, "encoder-decoder": _encoder_decoder}
    build = builders.get(spec.kind)
    if build is None:
        raise InputError("is no kind of transformer", key="kind", value=spec.kind, hint=f"one of {', '.join(builders)}")
    return tuple(build(spec, layout(spec), seq_len))


def position_rows(spec: TransformerSpec, seq_len: int | None = None) -> int:
    """Rows of the learned position table; 0 where positions are not learned."""
    if spec.positional != "learned":
        return 0
    return spec.position_rows or spec.max_positions or seq_len or DEFAULT_POSITIONS


def _linear(
    name: str, d_out: int, d_in: int, module: str, layer: int, bias: bool, *, role: str = "dense", repeat: int = 1
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (d_out, d_in), module, layer, role, repeat)
    if bias:
        yield Tensor(f"{name}.bias", (d_out,), module, layer, role, repeat)


def _norm(name: str, width: int, bias: bool, layer: int = -1) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "norm", layer)
    if bias:
        yield Tensor(f"{name}.bias", (width,), "norm", layer)


def _table(name: str, rows: int, width: int) -> Tensor:
    return Tensor(f"{name}.weight", (rows, width), "embedding", role="embedding")


def _qkv(spec: TransformerSpec, names: Layout, prefix: str, layer: int) -> dict[str, list[Tensor]]:
    """Attention parts by the keys of `attention_order`, for one projection per role or one fused for all three."""
    widths = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim)
    module, h, bias = "attention.qkv", spec.hidden, spec.qkv_bias
    parts: dict[str, list[Tensor]] = {}
    if len(names.qkv) == 1:
        parts["q"] = list(_linear(prefix + names.qkv[0], sum(widths), h, module, layer, bias))
    else:
        for key, name, width in zip("qkv", names.qkv, widths, strict=True):
            parts[key] = list(_linear(prefix + name, width, h, module, layer, bias))
    return parts


def _mla(spec: TransformerSpec, prefix: str, layer: int) -> list[Tensor]:
    """Low-rank query and joint key-value compression (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19)."""
    h, heads, module, bias = spec.hidden, spec.heads, "attention.qkv", spec.qkv_bias
    kv_rank = spec.kv_lora_rank or 0
    at = f"{prefix}self_attn."
    out: list[Tensor] = []
    if spec.q_lora_rank:
        out += _linear(f"{at}q_a_proj", spec.q_lora_rank, h, module, layer, bias)
        out += _norm(f"{at}q_a_layernorm", spec.q_lora_rank, False, layer)
        out += _linear(f"{at}q_b_proj", heads * spec.head_dim, spec.q_lora_rank, module, layer, False)
    else:
        out += _linear(f"{at}q_proj", heads * spec.head_dim, h, module, layer, False)
    out += _linear(f"{at}kv_a_proj_with_mqa", kv_rank + spec.qk_rope_head_dim, h, module, layer, bias)
    out += _norm(f"{at}kv_a_layernorm", kv_rank, False, layer)
    up_width = heads * (spec.qk_nope_head_dim + spec.value_dim)
    out += _linear(f"{at}kv_b_proj", up_width, kv_rank, module, layer, False)
    out += _linear(f"{at}o_proj", h, heads * spec.value_dim, "attention.out", layer, spec.out_bias)
    return out


def _attention(spec: TransformerSpec, names: Layout, prefix: str, layer: int) -> list[Tensor]:
    if spec.mla:
        return _mla(spec, prefix, layer)
    parts = _qkv(spec, names, prefix, layer)
    parts["out"] = list(
        _linear(prefix + names.out, spec.hidden, spec.heads * spec.value_dim, "attention.out", layer, spec.out_bias)
    )
    if spec.qk_norm:
        parts["qk_norm"] = [t for name in names.qk_norm for t in _norm(prefix + name, spec.head_dim, False, layer)]
    if spec.attention_sinks:
        parts["sinks"] = [Tensor(prefix + names.sinks, (spec.heads,), "attention.sinks", layer)]
    order = names.attention_order + tuple(p for p in parts if p not in names.attention_order)
    return [t for part in order for t in parts.get(part, ())]


def _mlp(
    spec: TransformerSpec, names: tuple[str, ...], order: tuple[int, ...], width: int, layer: int, module: str = "mlp",
    *, bias: bool, role: str = "dense", repeat: int = 1,
) -> list[Tensor]:
    """Two matrices, or with a gate three (GLU variants, arXiv 2002.05202); two names and a gate: fused."""
    h = spec.hidden
    if spec.gated_mlp and len(names) == 2:
        shapes = [(2 * width, h), (h, width)]
    elif spec.gated_mlp:
        shapes = [(width, h), (width, h), (h, width)]
    else:
        names, shapes = names[-2:], [(width, h), (h, width)]
    out = [
        list(_linear(name, d_out, d_in, module, layer, bias, role=role, repeat=repeat))
        for name, (d_out, d_in) in zip(names, shapes, strict=True)
    ]
    if len(order) == len(out):
        out = [out[i] for i in order]
    return [t for part in out for t in part]


def _moe(spec: TransformerSpec, names: Layout, prefix: str, layer: int) -> list[Tensor]:
    h = spec.hidden
    router = [Tensor(f"{prefix}{names.router}.weight", (spec.experts, h), "router", layer)]
    if spec.router_bias:
        router.append(Tensor(prefix + names.router_bias, (spec.experts,), "router", layer))
    expert_names = tuple(prefix + name for name in names.expert)
    parts: dict[str, list[Tensor]] = {
        "router": router,
        "experts": _mlp(
            spec, expert_names, (), spec.moe_ffn, layer, "experts", bias=spec.expert_bias, role="expert",
            repeat=spec.experts,
        ),
    }
    if spec.shared_ffn:
        shared = tuple(f"{prefix}{names.shared}.{p}" for p in ("gate_proj", "up_proj", "down_proj"))
        parts["shared"] = _mlp(spec, shared, (), spec.shared_ffn, layer, "shared_expert", bias=spec.mlp_bias)
    if spec.shared_gate:
        parts["shared_gate"] = [Tensor(f"{prefix}{names.shared_gate}.weight", (1, h), "router", layer)]
    order = names.moe_order + tuple(p for p in parts if p not in names.moe_order)
    return [t for part in order for t in parts.get(part, ())]


def block(spec: TransformerSpec, names: Layout, index: int) -> list[Tensor]:
    """The tensors of repeated block `index` in registration order."""
    prefix = names.block.format(index)
    parts: dict[str, list[Tensor]] = {"attention": _attention(spec, names, prefix, index)}
    if spec.moe_layer(index):
        parts["mlp"] = _moe(spec, names, prefix, index)
    else:
        mlp = tuple(prefix + name for name in names.mlp)
        parts["mlp"] = _mlp(spec, mlp, names.mlp_order, spec.ffn, index, bias=spec.mlp_bias)
    for i in range(spec.norms_per_layer):
        name = names.norms[i] if i < len(names.norms) else f"norm_{i + 1}"
        parts[f"norm{i}"] = list(_norm(prefix + name, spec.hidden, spec.norm_bias, index))
    order = names.block_order + tuple(p for p in parts if p not in names.block_order)
    return [t for part in order for t in parts.get(part, ())]


def _embeddings(spec: TransformerSpec, names: Layout, seq_len: int | None) -> Iterator[Tensor]:
    yield _table(names.embed, spec.vocab, spec.hidden)
    rows = position_rows(spec, seq_len)
    if rows:
        yield _table(names.position or "model.embed_positions", rows, spec.hidden)
    if spec.token_types:
        yield _table(names.embed.replace("word_embeddings", "token_type_embeddings"), spec.token_types, spec.hidden)
    if spec.embedding_norm:
        yield from _norm(names.embed_norm or "model.embed_norm", spec.hidden, spec.norm_bias)


def _decoder(spec: TransformerSpec, names: Layout, seq_len: int | None) -> Iterator[Tensor]:
    yield from _embeddings(spec, names, seq_len)
    last_norm = list(_norm(names.final_norm, spec.hidden, spec.norm_bias)) if spec.final_norm else []
    if names.final_norm_first:
        yield from last_norm
    for index in range(spec.layers):
        yield from block(spec, names, index)
    if not names.final_norm_first:
        yield from last_norm
    if spec.has_vocab_head and not spec.tied:
        yield Tensor(f"{names.head}.weight", (spec.vocab, spec.hidden), "head")
    if spec.has_vocab_head and spec.head_bias:
        yield Tensor(f"{names.head}.bias", (spec.vocab,), "head")
    yield from _classifier(spec, "score", bias=False)


def _classifier(spec: TransformerSpec, name: str, *, bias: bool) -> Iterator[Tensor]:
    if "classifier" in spec.heads_list:
        yield from _linear(name, spec.classes, spec.hidden, "head", -1, bias)


def _encoder(spec: TransformerSpec, names: Layout, seq_len: int | None) -> Iterator[Tensor]:
    yield from _embeddings(spec, names, seq_len)
    for index in range(spec.layers):
        yield from block(spec, names, index)
    h = spec.hidden
    if "pooler" in spec.heads_list:
        yield from _linear(f"{names.embed.partition('.')[0]}.pooler.dense", h, h, "head", -1, True)
    if "mlm" in spec.heads_list:
        yield from _masked_lm(spec)
    if "nsp" in spec.heads_list:
        yield from _linear("cls.seq_relationship", 2, h, "head", -1, True)
    yield from _classifier(spec, "classifier", bias=True)


def _masked_lm(spec: TransformerSpec) -> Iterator[Tensor]:
    """dense h -> h, LayerNorm, then the tied (vocab, h) decoder with a bias of its own."""
    bias, dense, norm = {
        "roberta": ("lm_head.bias", "lm_head.dense", "lm_head.layer_norm"),
        "distilbert": ("vocab_projector.bias", "vocab_transform", "vocab_layer_norm"),
    }.get(
        spec.model_type,
        ("cls.predictions.bias", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    )
    last = [Tensor(bias, (spec.vocab,), "head")]
    transform = [*_linear(dense, spec.hidden, spec.hidden, "head", -1, True), *_norm(norm, spec.hidden, True)]
    yield from (transform + last if spec.model_type == "distilbert" else last + transform)
    if not spec.tied:
        yield Tensor(bias.replace(".bias", ".decoder.weight"), (spec.vocab, spec.hidden), "head")


def _vit(spec: TransformerSpec, names: Layout, seq_len: int | None) -> Iterator[Tensor]:
    """Dosovitskiy et al., arXiv 2010.11929: (image/patch)^2 patches and one class token."""
    h = spec.hidden
    rows = spec.position_rows or (spec.image_size // spec.patch) ** 2 + 1
    yield Tensor("vit.embeddings.cls_token", (1, 1, h), "embedding", role="embedding")
    yield Tensor(names.position, (1, rows, h), "embedding", role="embedding")
    yield Tensor(f"{names.embed}.weight", (h, spec.channels, spec.patch, spec.patch), "conv")
    yield Tensor(f"{names.embed}.bias", (h,), "conv")
    for index in range(spec.layers):
        yield from block(spec, names, index)
    yield from _norm(names.final_norm, h, spec.norm_bias)
    if "pooler" in spec.heads_list:
        yield from _linear("vit.pooler.dense", h, h, "head", -1, True)
    yield from _classifier(spec, names.head, bias=True)


def _encoder_decoder(spec: TransformerSpec, names: Layout, seq_len: int | None) -> Iterator[Tensor]:
    """T5 (arXiv 1910.10683): one relative-position table per stack, held by its first block; RMSNorm; no biases."""
    yield _table("shared", spec.vocab, spec.hidden)
    yield from _t5_stack(spec, "encoder", spec.layers, 0, cross=False)
    yield from _t5_stack(spec, "decoder", spec.decoder_layers, spec.layers, cross=True)
    if not spec.tied:
        yield Tensor("lm_head.weight", (spec.vocab, spec.hidden), "head")


def _t5_stack(spec: TransformerSpec, stack: str, count: int, first: int, *, cross: bool) -> Iterator[Tensor]:
    h, inner = spec.hidden, spec.heads * spec.head_dim
    for i in range(count):
        at, index = f"{stack}.block.{i}.layer.", first + i
        attentions = (("0.SelfAttention", "attention"), ("1.EncDecAttention", "cross_attention"))
        for name, module in attentions[: 2 if cross else 1]:
            for role in "qkv":
                yield from _linear(f"{at}{name}.{role}", inner, h, f"{module}.qkv", index, spec.qkv_bias)
            yield from _linear(f"{at}{name}.o", h, inner, f"{module}.out", index, spec.out_bias)
            if i == 0 and module == "attention" and spec.relative_buckets:
                yield _table(f"{at}{name}.relative_attention_bias", spec.relative_buckets, spec.heads)
            yield from _norm(f"{at}{name[0]}.layer_norm", h, spec.norm_bias, index)
        last = f"{at}{2 if cross else 1}."
        mlp = ("wi_0", "wi_1", "wo") if spec.gated_mlp else ("wi", "wo")
        names = tuple(f"{last}DenseReluDense.{name}" for name in mlp)
        yield from _mlp(spec, names, (), spec.ffn, index, bias=spec.mlp_bias)
        yield from _norm(f"{last}layer_norm", h, spec.norm_bias, index)
    yield from _norm(f"{stack}.final_layer_norm", h, spec.norm_bias)


def active_params(spec: TransformerSpec, items: Iterable[Tensor]) -> int:
    """Parameters one token touches: of each routed-expert tensor top_k instead of `repeat`; both embeddings counted."""
    return sum(math.prod(t.shape) * (min(spec.top_k, t.repeat) if t.role == "expert" else t.repeat) for t in items)


def mtp_tensors(spec: TransformerSpec) -> list[Tensor]:
    """Multi-token-prediction blocks as DeepSeek-V3 stores them (arXiv 2412.19437 section 2.2).

    Each: a block like the last one, an embedding and a head of its own, two norms in front of the (h, 2h) projection
    that joins hidden state and embedding, and a norm before the head.
    """
    h, names = spec.hidden, layout(spec)
    out: list[Tensor] = []
    for i in range(spec.mtp_layers):
        index = spec.layers + i
        at = names.block.format(index)
        out.append(Tensor(f"{at}embed_tokens.weight", (spec.vocab, h), "embedding", index, "embedding"))
        for name in ("enorm", "hnorm", "shared_head.norm"):
            out += _norm(at + name, h, False, index)
        out.append(Tensor(f"{at}eh_proj.weight", (h, 2 * h), "mtp_projection", index))
        out += block(spec, names, index)
        out.append(Tensor(f"{at}shared_head.head.weight", (spec.vocab, h), "head", index))
    return out


def block_scales(items: Iterable[Tensor], side: int = 128) -> int:
    """Scales of side x side block quantisation: ceil(rows/side) ceil(cols/side) per matrix of attention and MLPs.

    Embeddings, norms, routers, heads and the multi-token projection stay unquantised (DeepSeek-V3's FP8 checkpoint).
    """
    parts = ("attention.qkv", "attention.out", "mlp", "experts", "shared_expert")
    return sum(
        math.prod(math.ceil(d / side) for d in t.shape) * t.repeat
        for t in items if t.module in parts and len(t.shape) == 2
    )
