"""How many parameters, bytes and FLOPs a model has, and how long its key-value cache grows.

Conventions, printed with the answer. One multiply-add is two FLOPs. Forward, per token:

    2 N_matmul + sum over layers of 2 s_eff heads (head_dim + value_dim)

N_matmul: elements of the matrices one token is multiplied with: top-k of the routed experts, the output head even
where it is tied, never an embedding look-up. s_eff: keys attended to: min(s, window) counted in full, and halved to
w (1 - w/(2 s)) with w = min(s, window) where the causal mask is taken into account; without a window this is s and s/2,
so 4 L h s and 2 L h s for heads x head_dim = h. Training is three times forward. Sources: PaLM, arXiv 2204.02311
appendix B; Megatron, arXiv 2104.04473 section 3.
"""

from __future__ import annotations

import math
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec.model import ConvSpec, Model, ProfiledSpec, Tensor, TracedSpec, TransformerSpec
from simkit.units import GB

DTYPE_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0,
    "nf4": 0.5, "int4": 0.5, "fp4": 0.5, "mxfp4": 4.25 / 8,
}
"""Bytes an element; mxfp4: 32 four-bit values share one 8-bit scale (OCP Microscaling Formats 1.0)."""

MATRIX_MODULES = frozenset({
    "attention.qkv", "attention.out", "cross_attention.qkv", "cross_attention.out", "mlp", "experts", "shared_expert",
    "linear",
})
"""Modules whose matrices take a data type below 16 bits; all else stays at 16 bits."""


def dtype_bytes(dtype: str, *, key: str = "dtype") -> float:
    """Bytes of one element. Raises InputError naming the nearest data type."""
    if dtype not in DTYPE_BYTES:
        raise unknown("data type", dtype, DTYPE_BYTES, key=key)
    return DTYPE_BYTES[dtype]


def count(
    model: Model, *, dtype: str | None = None, seq_len: int | None = None, causal_halved: bool = False
) -> dict[str, Any]:
    """Counts of `model`; keys carry their unit, absent means not applicable.

    dtype: of the weights, default that of the published checkpoint, else bf16; it always wins over the model's own.
    seq_len: at which attention is counted, default the model's. causal_halved: count only the unmasked half.
    `params` is the main model; multi-token-prediction blocks and vision towers stand in `extra_params`, stored buffers
    (bytes) in `buffers`. `params_no_embedding` leaves out embedding tables and an untied head.
    """
    weights = dtype or model.dtype or "bf16"
    spec = model.spec
    out: dict[str, Any] = {
        "model": model.name,
        "params": model.params,
        "params_active": model.params if model.params_active is None else model.params_active,
        "params_no_embedding": model.params - _embedding_params(model),
        "checkpoint_bytes": checkpoint_bytes(model, weights),
        "checkpoint_gb": checkpoint_bytes(model, weights) / GB,
        "dtype": weights,
        "by_module": by_module(model),
        "tensors": sum(t.repeat for t in model.tensors),
        "extra_params": dict(model.extra_params),
        "params_with_extra": model.params + sum(model.extra_params.values()),
        "buffers": dict(model.buffers),
    }
    if isinstance(spec, TransformerSpec) and spec.kind != "vit":
        length = _positive((model.default_seq_len or 0) if seq_len is None else seq_len)
        matmul = 2.0 * matmul_params(model)
        attention = attention_flops_per_token(spec, length, causal_halved=causal_halved)
        halved = "halved for the causal mask" if causal_halved and spec.causal else "counted in full"
        out |= {
            "seq_len": length,
            "flops_per_token_forward": matmul + attention,
            "matmul_flops_per_token_forward": matmul,
            "attention_flops_per_token_forward": attention,
            "flops_convention": f"embedding look-up excluded, head included, attention at seq_len {length} {halved}",
        }
        if spec.kind != "encoder":
            kv_dtype = "bf16" if dtype_bytes(weights) < 2 else weights
            out |= {"kv_bytes_per_token": kv_bytes_per_token(model, kv_dtype), "kv_dtype": kv_dtype}
    else:
        out["flops_per_sample_forward"] = flops_per_sample(model)
    out |= {"source": model.source, "notes": list(model.notes)}
    return {key: _whole(value) for key, value in out.items()}


def _whole(value: Any) -> Any:
    """A count that happens to be held as a float, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _positive(seq_len: int) -> int:
    if seq_len < 1:
        raise InputError("is below 1", key="seq_len", value=seq_len)
    return seq_len


def by_module(model: Model) -> dict[str, int]:
    """Parameters by part of the network; the parts sum to `params`."""
    out: dict[str, int] = {}
    for t in model.tensors:
        out[t.module] = out.get(t.module, 0) + t.numel
    return out


def checkpoint_bytes(model: Model, dtype: str) -> float:
    """Bytes of the parameters alone: params x element size.

    Below 16 bits only the matrices of attention and MLPs shrink (mxfp4: only the routed experts, as in gpt-oss); the
    rest stays at 2 bytes. Scales, where known, are in `Model.buffers`.
    """
    size = dtype_bytes(dtype)
    if size >= 2:
        return model.params * size
    small = sum(t.numel for t in model.tensors if _shrinks(t, dtype))
    return small * size + (model.params - small) * 2.0


def _shrinks(t: Tensor, dtype: str) -> bool:
    if dtype == "mxfp4":
        return t.role == "expert" and len(t.shape) == 2
    return t.module in MATRIX_MODULES and len(t.shape) == 2


def _embedding_params(model: Model) -> int:
    return sum(t.numel for t in model.tensors if t.role == "embedding" or (t.module == "head" and _is_vocab(model, t)))


def _is_vocab(model: Model, t: Tensor) -> bool:
    return isinstance(model.spec, TransformerSpec) and len(t.shape) == 2 and t.shape[0] == model.spec.vocab


def matmul_params(model: Model) -> int:
    """Elements that one token is multiplied with: active experts, and the head also where it is tied.

    Layers used once a sequence (pooler, classifier) are left out. Raises InputError for a network without tokens.
    """
    spec = model.spec
    if not isinstance(spec, TransformerSpec):
        raise InputError("works on no tokens", key="model", value=model.name)
    total = sum(
        math.prod(t.shape) * (min(spec.top_k, t.repeat) if t.role == "expert" else t.repeat)
        for t in model.tensors if len(t.shape) > 1 and t.role != "embedding" and not t.pooled
    )
    return total + (spec.vocab * spec.hidden if spec.tied and spec.has_vocab_head else 0)


def attended_keys(seq_len: float, window: int | None, *, causal_halved: bool) -> float:
    """Mean keys a query attends to: w = min(s, window), or w (1 - w/(2 s)) with the causal mask."""
    w = seq_len if window is None else min(seq_len, window)
    return w * (1 - w / (2 * seq_len)) if causal_halved else float(w)


def attention_flops_per_token(spec: TransformerSpec, seq_len: int, *, causal_halved: bool = False) -> float:
    """FLOPs of Q K^T and of the weighted sum of V, per token, summed over the layers.

    2 s_eff heads (head_dim + value_dim) each; a decoder block of an encoder-decoder attends to seq_len source tokens
    too. Bidirectional blocks are never halved.
    """
    per_key = 2.0 * spec.heads * (spec.head_dim + spec.value_dim)
    total = 0.0
    for i in range(spec.layers):
        halved = causal_halved and spec.causal and spec.kind == "decoder"
        total += per_key * attended_keys(seq_len, spec.attention_window(i), causal_halved=halved)
    own = attended_keys(seq_len, None, causal_halved=causal_halved)
    return total + spec.decoder_layers * per_key * (own + seq_len)


def flops_per_sample(model: Model) -> float:
    """Forward FLOPs of one sample at the reference size: an image, or what a trace was taken with."""
    spec = model.spec
    if isinstance(spec, ConvSpec):
        return sum(
            2.0 * layer.c_in / layer.groups * layer.c_out * layer.kernel**2 * layer.h_out * layer.w_out
            for layer in spec.layers if layer.op in ("conv", "linear")
        )
    if isinstance(spec, TracedSpec):
        return sum(2.0 * op.batch * op.m * op.n * op.k for op in spec.ops) / spec.batch
    if isinstance(spec, ProfiledSpec):
        # Seconds are known, products are not.
        return 0.0
    patches = (spec.image_size // spec.patch) ** 2
    tokens = patches + 1
    total = attention_flops_per_token(spec, tokens) * tokens
    for t in model.tensors:
        if len(t.shape) > 1 and t.role != "embedding":
            uses = 1 if t.pooled else patches if t.module == "conv" else tokens
            total += 2.0 * t.numel * uses
    return total


def kv_layer_values(spec: TransformerSpec) -> int:
    """Cached values per token and layer: kv_heads (head_dim + value_dim), or kv_lora_rank + rope width with MLA."""
    if spec.kv_lora_rank is not None:
        return spec.kv_lora_rank + spec.qk_rope_head_dim
    return spec.kv_heads * (spec.head_dim + spec.value_dim)


def kv_bytes_per_token(model: Model, kv_dtype: str = "bf16") -> float:
    """Bytes that one more token adds to the cache while no window is full; 0 where nothing is generated."""
    spec = model.spec
    if not isinstance(spec, TransformerSpec) or spec.kind in ("encoder", "vit"):
        return 0.0
    layers = spec.decoder_layers if spec.kind == "encoder-decoder" else spec.layers
    return layers * kv_layer_values(spec) * dtype_bytes(kv_dtype, key="kv_dtype")


def kv_cache_bytes(model: Model, tokens: float, kv_dtype: str = "bf16", *, source_tokens: float = 0) -> float:
    """Bytes of the cache of one sequence of `tokens`: a layer with a window keeps at most `window` of them.

    source_tokens: length of the encoded input, whose keys and values each decoder block of an encoder-decoder keeps.
    """
    spec = model.spec
    if not isinstance(spec, TransformerSpec) or spec.kind in ("encoder", "vit"):
        return 0.0
    per_layer = kv_layer_values(spec) * dtype_bytes(kv_dtype, key="kv_dtype")
    if spec.kind == "encoder-decoder":
        return spec.decoder_layers * per_layer * (tokens + source_tokens)
    windows = (spec.attention_window(i) for i in range(spec.layers))
    return per_layer * sum(tokens if w is None else min(tokens, w) for w in windows)
