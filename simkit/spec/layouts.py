"""What each family calls its parameters, and in which order torch registers them.

Names are those of the public Hugging Face modules; the order is that of ``named_parameters()``: a module's own
parameters before those of its children. Registration order decides which gradients share a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from simkit.spec.model import TransformerSpec

SEPARATE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parameter names of one family, relative to `block` inside a layer.

    qkv: one fused name or three (query, key, value, in this order). mlp: (up, down), (gate, up, down) or, fused,
    (gate_up, down). block_order: parts of a block; attention_order: parts of the attention; mlp_order: indices of
    `mlp` in registration order. norms: one name per entry ``norm0``, ``norm1``, … of block_order.
    """

    embed: str = "model.embed_tokens"
    position: str = ""
    embed_norm: str = ""
    block: str = "model.layers.{}."
    qkv: tuple[str, ...] = SEPARATE
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    attention_order: tuple[str, ...] = ("q", "k", "v", "out", "qk_norm")
    mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    mlp_order: tuple[int, ...] = ()
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    block_order: tuple[str, ...] = ("attention", "mlp", "norm0", "norm1")
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.bias"
    expert: tuple[str, ...] = ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj")
    shared: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    moe_order: tuple[str, ...] = ("router", "experts", "shared", "shared_gate")
    final_norm: str = "model.norm"
    final_norm_first: bool = False
    """Whether the last norm is registered before the blocks (OPT)."""
    head: str = "lm_head"


LLAMA = Layout()
_GPT2 = Layout(
    embed="transformer.wte", position="transformer.wpe", block="transformer.h.{}.", qkv=("attn.c_attn",),
    out="attn.c_proj", attention_order=("q", "out"), mlp=("mlp.c_fc", "mlp.c_proj"), norms=("ln_1", "ln_2"),
    block_order=("norm0", "attention", "norm1", "mlp"), final_norm="transformer.ln_f",
)
_FALCON = Layout(
    embed="transformer.word_embeddings", block="transformer.h.{}.", qkv=("self_attention.query_key_value",),
    out="self_attention.dense", attention_order=("q", "out"), mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    norms=("input_layernorm", "post_attention_layernorm"), block_order=("attention", "mlp", "norm1", "norm0"),
    final_norm="transformer.ln_f",
)
_GEMMA2 = replace(
    LLAMA,
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    block_order=("attention", "mlp", "norm0", "norm1", "norm2", "norm3"),
)

_BERT = Layout(
    embed="bert.embeddings.word_embeddings", position="bert.embeddings.position_embeddings",
    embed_norm="bert.embeddings.LayerNorm", block="bert.encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"), out="attention.output.dense",
    mlp=("intermediate.dense", "output.dense"), norms=("attention.output.LayerNorm", "output.LayerNorm"),
    block_order=("attention", "norm0", "mlp", "norm1"), final_norm="",
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType({
    "llama": LLAMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "mixtral": replace(
        LLAMA, router="block_sparse_moe.gate",
        expert=("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3", "block_sparse_moe.experts.*.w2"),
    ),
    "deepseek_v2": replace(
        LLAMA, shared="mlp.shared_experts", router_bias="mlp.gate.e_score_correction_bias",
        moe_order=("experts", "router", "shared"),
    ),
    "gpt_oss": replace(
        LLAMA, router="mlp.router", router_bias="mlp.router.bias", attention_order=("sinks", "q", "k", "v", "out"),
        expert=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "gpt2": _GPT2,
    "gptj": replace(
        _GPT2, position="", qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"), out="attn.out_proj",
        attention_order=("k", "v", "q", "out"), mlp=("mlp.fc_in", "mlp.fc_out"), norms=("ln_1",),
        block_order=("norm0", "attention", "mlp"),
    ),
    "gpt_neox": Layout(
        embed="gpt_neox.embed_in", block="gpt_neox.layers.{}.", qkv=("attention.query_key_value",),
        out="attention.dense", attention_order=("q", "out"), mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        block_order=("norm0", "norm1", "attention", "mlp"), final_norm="gpt_neox.final_layer_norm", head="embed_out",
    ),
    "bloom": replace(
        _FALCON, embed_norm="transformer.word_embeddings_layernorm",
        block_order=("norm0", "attention", "norm1", "mlp"),
    ),
    "falcon": _FALCON,
    "falcon_one_norm": replace(_FALCON, norms=("input_layernorm",), block_order=("attention", "mlp", "norm0")),
    "falcon_two_norms": replace(
        _FALCON, norms=("ln_attn", "ln_mlp"), block_order=("attention", "mlp", "norm0", "norm1"),
    ),
    "opt": Layout(
        embed="model.decoder.embed_tokens", position="model.decoder.embed_positions", block="model.decoder.layers.{}.",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), out="self_attn.out_proj",
        attention_order=("k", "v", "q", "out"), mlp=("fc1", "fc2"), norms=("self_attn_layer_norm", "final_layer_norm"),
        block_order=("attention", "norm0", "mlp", "norm1"), final_norm="model.decoder.final_layer_norm",
        final_norm_first=True,
    ),
    "starcoder2": replace(LLAMA, mlp=("mlp.c_fc", "mlp.c_proj")),
    "internlm2": replace(
        LLAMA, embed="model.tok_embeddings", qkv=("attention.wqkv",), out="attention.wo", attention_order=("q", "out"),
        mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"), norms=("attention_norm", "ffn_norm"),
        head="output",
    ),
    "phi": replace(
        LLAMA, out="self_attn.dense", mlp=("mlp.fc1", "mlp.fc2"), norms=("input_layernorm",),
        block_order=("attention", "mlp", "norm0"), final_norm="model.final_layernorm",
    ),
    "phi3": replace(
        LLAMA, qkv=("self_attn.qkv_proj",), attention_order=("out", "q"), mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    ),
    "mpt": Layout(
        embed="transformer.wte", position="transformer.wpe", block="transformer.blocks.{}.", qkv=("attn.Wqkv",),
        out="attn.out_proj", attention_order=("q", "out"), mlp=("ffn.up_proj", "ffn.down_proj"),
        norms=("norm_1", "norm_2"), block_order=("norm0", "attention", "norm1", "mlp"), final_norm="transformer.norm_f",
    ),
    "baichuan": replace(
        LLAMA, qkv=("self_attn.W_pack",), attention_order=("q", "out"), mlp_order=(0, 2, 1),
    ),
    "chatglm": Layout(
        embed="transformer.embedding.word_embeddings", block="transformer.encoder.layers.{}.",
        qkv=("self_attention.query_key_value",), out="self_attention.dense", attention_order=("q", "out"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), block_order=("norm0", "attention", "norm1", "mlp"),
        final_norm="transformer.encoder.final_layernorm", head="transformer.output_layer",
    ),
    "qwen": replace(_GPT2, position="", mlp=("mlp.w2", "mlp.w1", "mlp.c_proj"), mlp_order=(1, 0, 2)),
    "bert": _BERT,
    "roberta": replace(
        _BERT, embed="roberta.embeddings.word_embeddings", position="roberta.embeddings.position_embeddings",
        embed_norm="roberta.embeddings.LayerNorm", block="roberta.encoder.layer.{}.",
    ),
    "distilbert": Layout(
        embed="distilbert.embeddings.word_embeddings", position="distilbert.embeddings.position_embeddings",
        embed_norm="distilbert.embeddings.LayerNorm", block="distilbert.transformer.layer.{}.",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"), out="attention.out_lin",
        mlp=("ffn.lin1", "ffn.lin2"), norms=("sa_layer_norm", "output_layer_norm"),
        block_order=("attention", "norm0", "mlp", "norm1"), final_norm="",
    ),
    "vit": Layout(
        embed="vit.embeddings.patch_embeddings.projection", position="vit.embeddings.position_embeddings",
        block="vit.encoder.layer.{}.", out="attention.output.dense",
        qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        mlp=("intermediate.dense", "output.dense"), norms=("layernorm_before", "layernorm_after"),
        final_norm="vit.layernorm", head="classifier",
    ),
})

_ALIASES: Mapping[str, str] = MappingProxyType({
    "gpt3": "gpt2", "gpt_bigcode": "gpt2", "deepseek_v3": "deepseek_v2", "kimi_k2": "deepseek_v2",
})


def layout(spec: TransformerSpec) -> Layout:
    """The names of the family of `spec`; a family without names of its own is named as Llama is."""
    key = _ALIASES.get(spec.model_type, spec.model_type)
    if key == "falcon" and spec.parallel_residual:
        key = "falcon_one_norm" if spec.norms_per_layer == 1 else "falcon_two_norms"
    return LAYOUTS.get(key, LLAMA)
