"""From the keys of a public configuration to a TransformerSpec: aliases, defaults and the quirks of each family.

The traits of a family and the defaults of its configuration class are facts and stand in ``zoo/families.toml``; here
are the names that different families give to one quantity, and the few rules that no table can hold.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from simkit.errors import InputError
from simkit.spec.model import TransformerSpec

KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "decoder_layers": ("num_decoder_layers",),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads"),
    "head_dim": ("head_dim", "d_kv", "kv_channels"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "hidden_dim"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "max_positions": (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "n_ctx",
        "max_sequence_length",
    ),
    "token_types": ("type_vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k", "moe_topk"),
    "moe_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "first_k_dense": ("first_k_dense_replace",),
    "moe_period": ("decoder_sparse_step", "moe_layer_freq"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "window": ("sliding_window",),
    "window_period": ("sliding_window_pattern", "_sliding_window_pattern"),
    "relative_buckets": ("relative_attention_num_buckets",),
    "image_size": ("image_size",),
    "patch": ("patch_size",),
    "channels": ("num_channels",),
    "mtp_layers": ("num_nextn_predict_layers",),
}
"""Field of TransformerSpec -> the keys which carry it, the most common first."""

MAY_BE_ZERO = frozenset({"token_types", "first_k_dense", "shared_experts", "mtp_layers", "experts", "shared_ffn"})
LIMIT = {"layers": 10_000, "decoder_layers": 10_000}
_PLAIN = (
    "token_types", "first_k_dense", "moe_period", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "relative_buckets", "image_size", "patch", "channels", "mtp_layers",
    "max_positions",
)


@cache
def families() -> dict[str, dict[str, Any]]:
    """``zoo/families.toml`` with every `like` resolved."""
    raw = tomllib.loads((Path(__file__).parent / "zoo" / "families.toml").read_text(encoding="utf-8"))

    def resolve(name: str) -> dict[str, Any]:
        own = dict(raw[name])
        base = resolve(own.pop("like")) if "like" in own else {}
        defaults = own.get("defaults", {})
        # A family may call a quantity by another name than the one it is like: the inherited name must not win.
        renamed = {k for keys in KEYS.values() if any(k in defaults for k in keys) for k in keys}
        inherited = {k: v for k, v in base.get("defaults", {}).items() if k not in renamed}
        return {**base, **own, "defaults": {**inherited, **defaults}}

    return {name: resolve(name) for name in raw}


class Config:
    """A configuration as given, over the defaults of its family; answers by field, whatever the key is called."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], *, file: str = "") -> None:
        self.given, self.defaults, self.file = given, defaults, file

    def raw(self, key: str) -> Any:
        """The value of a literal key, a null included, else the family's default, else None."""
        return self.given[key] if key in self.given else self.defaults.get(key)

    def key(self, field: str) -> str:
        """The key under which `field` is given, or its usual name."""
        return next((k for k in KEYS[field] if k in self.given), KEYS[field][0])

    def flag(self, key: str) -> bool:
        """A yes-or-no key; absent or null means no."""
        value = self.raw(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.error("is no true or false", key, value)

    def error(self, what: str, key: str, value: object = None, hint: str = "") -> InputError:
        return InputError(what, file=self.file, key=key, value=value, hint=hint)

    def number(self, field: str) -> int | None:
        """A whole number; None where it is null, or absent without a default. Raises InputError for anything else."""
        for source in (self.given, self.defaults):
            present = [k for k in KEYS[field] if k in source]
            if present:
                key = next((k for k in present if source[k] is not None), present[0])
                return None if source[key] is None else self._whole(field, key, source[key])
        return None

    def need(self, field: str) -> int:
        """Like `number`, but its absence is bad input."""
        value = self.number(field)
        if value is None:
            raise self.error("is missing", KEYS[field][0], hint=f"give one of {', '.join(KEYS[field])}")
        return value

    def _whole(self, field: str, key: str, value: object) -> int:
        least = 0 if field in MAY_BE_ZERO else 1
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error("is no whole number", key, value, f"write it as an integer, e.g. {key}: 4096")
        if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
            raise self.error("is no whole number", key, value, "write it as an integer")
        if not least <= value <= LIMIT.get(field, 10**9):
            raise self.error(f"is outside {least} to {LIMIT.get(field, 10**9)}", key, value)
        return int(value)


def head_dim(config: Config, hidden: int, heads: int) -> int:
    """The width of one head as given, else hidden / heads; never a fraction."""
    given = config.number("head_dim")
    if given is not None:
        return given
    if hidden % heads:
        raise config.error(
            f"does not divide {config.key('hidden')} = {hidden}", config.key("heads"), heads,
            "give head_dim where it is not hidden/heads",
        )
    return hidden // heads


def spec_from(model_type: str, given: Mapping[str, Any], *, file: str = "") -> TransformerSpec:
    """The TransformerSpec of a flat configuration of a known family.

    Raises InputError for a missing, non-integral, negative or contradictory value, naming file, key and way out.
    """
    traits = dict(families()[model_type])
    config = Config(given, traits.pop("defaults"), file=file)
    hidden, heads = config.need("hidden"), config.need("heads")
    fields: dict[str, Any] = {"model_type": model_type, **traits}
    fields["heads_list"] = tuple(traits.get("heads_list", ("lm",)))
    fields |= {"layers": config.need("layers"), "hidden": hidden, "heads": heads}
    mla = config.number("kv_lora_rank") is not None
    fields["head_dim"] = (
        config.need("qk_nope_head_dim") + config.need("qk_rope_head_dim") if mla else head_dim(config, hidden, heads)
    )
    fields["kv_heads"] = heads if mla else config.number("kv_heads") or heads
    fields["ffn"] = config.number("ffn") or 4 * hidden
    fields["vocab"] = 0 if traits.get("kind") == "vit" else config.need("vocab")
    tied = config.raw("tie_word_embeddings")
    fields["tied"] = True if tied is None else config.flag("tie_word_embeddings")
    fields |= {name: value for name in _PLAIN if (value := config.number(name)) is not None}
    _experts(config, fields)
    _window(config, fields)
    _biases(config, fields)
    RULES.get(model_type, _no_rule)(config, fields)
    if fields["heads"] % fields["kv_heads"]:
        raise config.error(
            f"does not divide {config.key('heads')} = {heads}", config.key("kv_heads"), fields["kv_heads"],
            "query heads must be a multiple of key-value heads",
        )
    return TransformerSpec(**fields)


def _experts(config: Config, fields: dict[str, Any]) -> None:
    experts = config.number("experts") or 0
    if not experts:
        return
    top_k = config.need("top_k")
    if top_k > experts:
        raise config.error(f"exceeds {config.key('experts')} = {experts}", config.key("top_k"), top_k)
    width = config.number("moe_ffn") or fields["ffn"]
    shared = config.number("shared_ffn") or (config.number("shared_experts") or 0) * width
    fields |= {"experts": experts, "top_k": top_k, "moe_ffn": width, "shared_ffn": shared}


def _window(config: Config, fields: dict[str, Any]) -> None:
    window = config.number("window")
    if window is None or config.raw("use_sliding_window") is False:
        fields["window_period"] = 1
        return
    fields["window"] = window
    period = config.number("window_period")
    kinds = config.raw("layer_types")
    if isinstance(kinds, list) and kinds:
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        period = full[0] + 1 if full else 1
        if len(full) == len(kinds):
            del fields["window"]
        elif full != list(range(period - 1, len(kinds), period)) and full:
            raise config.error("mixes full and sliding attention without a period", "layer_types", hint="not supported")
    if period is not None:
        fields["window_period"] = period


_ATTENTION_BIAS = frozenset({
    "llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_neox", "smollm3",
})
"""Families whose configuration has the key attention_bias, which covers q, k, v and o."""


def _biases(config: Config, fields: dict[str, Any]) -> None:
    if fields["model_type"] in _ATTENTION_BIAS and config.raw("attention_bias") is not None:
        fields["qkv_bias"] = fields["out_bias"] = config.flag("attention_bias")
    if config.raw("mlp_bias") is not None:
        fields["mlp_bias"] = config.flag("mlp_bias")


def _no_rule(config: Config, fields: dict[str, Any]) -> None:
    pass


def _falcon(config: Config, fields: dict[str, Any]) -> None:
    """New decoders have two norms and grouped heads; old ones one key-value head if multi_query, else all heads."""
    grouped = config.number("kv_heads")
    new = config.flag("new_decoder_architecture") or ("multi_query" not in config.given and (grouped or 1) > 1)
    bias = config.flag("bias")
    fields |= {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}
    if new:
        fields["kv_heads"] = grouped or fields["heads"]
    else:
        fields["kv_heads"] = 1 if config.flag("multi_query") else fields["heads"]
    fields["parallel_residual"] = new or config.flag("parallel_attn")
    norms = config.raw("num_ln_in_parallel_attn") or (2 if new else 1)
    fields["norms_per_layer"] = norms if fields["parallel_residual"] else 2
    if config.flag("alibi"):
        fields["positional"] = "alibi"


def _chatglm(config: Config, fields: dict[str, Any]) -> None:
    if config.raw("multi_query_attention") is False and "multi_query_attention" in config.given:
        fields["kv_heads"] = fields["heads"]
    fields["qkv_bias"] = config.flag("add_qkv_bias") or config.flag("add_bias_linear")
    fields["out_bias"] = fields["mlp_bias"] = config.flag("add_bias_linear")


def _qwen1(config: Config, fields: dict[str, Any]) -> None:
    """config.json prints twice the width of the gated MLP."""
    if fields["ffn"] % 2:
        raise config.error("is odd", config.key("ffn"), fields["ffn"], "Qwen-1 prints twice the MLP width")
    fields["ffn"] //= 2


def _mpt(config: Config, fields: dict[str, Any]) -> None:
    """The MLP width is expansion_ratio times hidden; attention facts are nested in attn_config."""
    attention = config.raw("attn_config") or {}
    ratio = config.raw("expansion_ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or ratio * fields["hidden"] % 1:
        raise config.error("gives no whole MLP width", "expansion_ratio", ratio, "write it as 4")
    fields["ffn"] = int(ratio * fields["hidden"])
    if isinstance(attention, dict):
        if attention.get("attn_type") == "multiquery_attention":
            fields["kv_heads"] = 1
        fields["kv_heads"] = int(attention.get("kv_n_heads") or fields["kv_heads"])
        if attention.get("alibi") is False:
            fields["positional"] = "rope" if attention.get("rope") else "learned"
    if not config.flag("no_bias"):
        fields |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_bias": True}


def _opt(config: Config, fields: dict[str, Any]) -> None:
    """Positions start at 2, so that the table has two rows more; opt-350m's narrower embedding is not covered."""
    fields["position_rows"] = fields["max_positions"] + 2
    narrow = config.raw("word_embed_proj_dim")
    if narrow is not None and narrow != fields["hidden"]:
        what = f"differs from hidden_size = {fields['hidden']}"
        raise config.error(what, "word_embed_proj_dim", narrow, "not supported")


def _t5(config: Config, fields: dict[str, Any]) -> None:
    fields["decoder_layers"] = config.number("decoder_layers") or fields["layers"]
    form = str(config.raw("feed_forward_proj"))
    fields["gated_mlp"] = form.startswith("gated-")
    fields["activation"] = form.removeprefix("gated-")


def _vit(config: Config, fields: dict[str, Any]) -> None:
    """A bare ViTModel carries a pooler, a classifier none; 2 classes where the file names none, as in transformers."""
    if fields["image_size"] % fields["patch"]:
        raise config.error(f"does not divide image_size = {fields['image_size']}", "patch_size", fields["patch"])
    fields["max_positions"] = (fields["image_size"] // fields["patch"]) ** 2 + 1
    labels = config.raw("id2label")
    fields["classes"] = len(labels) if isinstance(labels, dict) else config.raw("num_labels") or 2
    architectures = config.raw("architectures")
    if isinstance(architectures, list) and "ViTModel" in architectures:
        fields["heads_list"], fields["classes"] = ("pooler",), 0


def _multi_query(config: Config, fields: dict[str, Any]) -> None:
    if config.flag("multi_query"):
        fields["kv_heads"] = 1


def _deepseek_v2(config: Config, fields: dict[str, Any]) -> None:
    if config.raw("topk_method") == "noaux_tc":
        fields["router_bias"] = True


def _use_bias(config: Config, fields: dict[str, Any]) -> None:
    """One key for every linear layer of the blocks."""
    bias = config.flag("use_bias")
    fields |= {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bias}


def _stablelm(config: Config, fields: dict[str, Any]) -> None:
    fields["qkv_bias"] = config.flag("use_qkv_bias")
    if config.flag("use_parallel_residual"):
        fields |= {"parallel_residual": True, "norms_per_layer": 1}


def _internlm2(config: Config, fields: dict[str, Any]) -> None:
    bias = config.flag("bias")
    fields |= {"qkv_bias": bias, "out_bias": bias}


def _gpt_neox(config: Config, fields: dict[str, Any]) -> None:
    if config.raw("use_parallel_residual") is not None:
        fields["parallel_residual"] = config.flag("use_parallel_residual")


RULES: Mapping[str, Callable[[Config, dict[str, Any]], None]] = {
    "falcon": _falcon, "chatglm": _chatglm, "qwen": _qwen1, "mpt": _mpt, "opt": _opt, "t5": _t5, "vit": _vit,
    "gpt_bigcode": _multi_query, "deepseek_v2": _deepseek_v2, "gpt_neox": _gpt_neox,
    "starcoder2": _use_bias, "stablelm": _stablelm, "internlm2": _internlm2,
}
