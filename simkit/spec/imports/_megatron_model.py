"""The network that Megatron-LM's architecture flags spell out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simkit.errors import InputError
from simkit.spec.build import build
from simkit.spec.imports._common import Draft
from simkit.spec.model import TransformerSpec

Flags = Mapping[str, str | None]
NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads")
TOKENIZERS = {
    "gpt2bpetokenizer": 50257, "llama2tokenizer": 32000, "bertwordpiecelowercase": 30522, "bertwordpiececase": 28996,
}  # fmt: skip
"""Rows of the vocabulary a tokenizer brings where no --vocab-size is given (GPT-2, Llama 2, BERT uncased and cased)."""
ACTIVATIONS = {"--swiglu": "silu", "--squared-relu": "relu2", "--openai-gelu": "gelu", "--onnx-safe": "gelu"}
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none", "alibi": "alibi", "yarn": "rope"}
NUMBERS = {
    "--num-layers": "layers", "--hidden-size": "hidden", "--num-attention-heads": "heads", "--ffn-hidden-size": "ffn",
    "--kv-channels": "head_dim", "--num-query-groups": "kv_heads", "--max-position-embeddings": "max_positions",
    "--num-experts": "experts", "--moe-router-topk": "top_k", "--moe-ffn-hidden-size": "moe_ffn",
    "--moe-shared-expert-intermediate-size": "shared_ffn", "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_nope_head_dim", "--qk-pos-emb-head-dim": "qk_rope_head_dim", "--v-head-dim": "v_head_dim",
    "--mtp-num-layers": "mtp_layers", "--num-key-value-heads": "kv_heads",
}  # fmt: skip
WORDS = (
    "--vocab-size", "--make-vocab-size-divisible-by", "--normalization", "--position-embedding-type",
    "--tokenizer-type",
    "--moe-layer-freq", "--hidden-dropout", "--attention-dropout", "--window-size", "--padded-vocab-size",
)  # fmt: skip
SWITCHES = (
    "--group-query-attention", "--swiglu", "--squared-relu", "--openai-gelu", "--onnx-safe", "--disable-bias-linear",
    "--add-qkv-bias", "--untie-embeddings-and-output-weights", "--multi-latent-attention", "--qk-layernorm",
    "--use-rotary-position-embeddings", "--no-position-embedding",
)  # fmt: skip
FLAGS = frozenset((*NUMBERS, *WORDS, *SWITCHES))


def network(draft: Draft, flags: Flags, text: str) -> None:
    """Puts the model into `draft`, or why it is not complete.

    Raises InputError for values that make no network, naming the flag.
    """
    given = [f for f in flags if f in FLAGS]
    missing = [f for f in NEEDED if flags.get(f) is None]
    if len(missing) == len(NEEDED):
        for flag in given:
            draft.ignore(flag, flags[flag] or "", f"needs {', '.join(NEEDED)} beside it")
        return
    if missing:
        what = "is not given, or not set in the file, but other parts of the architecture are"
        draft.incomplete = draft.error(what, missing[0], hint=f"give {missing[0]} a number, or --model")
        for flag in given:
            draft.ignore(flag, flags[flag] or "", f"the architecture lacks {missing[0]}")
        return
    fields = _fields(draft, flags, encoder="pretrain_bert" in text)
    try:
        spec = TransformerSpec(**fields)
        name = f"megatron-{spec.layers}l-{spec.hidden}h-{spec.heads}a"
        draft.network = build(spec, name=name, source=draft.file)
    except InputError as error:
        raise draft.error(error.what, error.key or "--num-layers", error.value, error.hint) from None
    draft.put("model", name, "--num-layers, --hidden-size, …", "the architecture of the file")
    for flag in given:
        _told(draft, flag, flags[flag], fields)


def _fields(draft: Draft, flags: Flags, *, encoder: bool) -> dict[str, Any]:
    numbers = {name: draft.whole(f, flags[f]) for f, name in NUMBERS.items() if flags.get(f) is not None}
    hidden, heads = numbers["hidden"], numbers["heads"]
    gated, bias = "--swiglu" in flags, "--disable-bias-linear" not in flags
    rms = str(flags.get("--normalization") or "LayerNorm").lower() == "rmsnorm"
    if "head_dim" not in numbers and hidden % heads:
        raise draft.error(
            f"does not divide --hidden-size {hidden}", "--num-attention-heads", heads, "or give --kv-channels"
        )
    if "--group-query-attention" not in flags and "--num-key-value-heads" not in flags:
        numbers.pop("kv_heads", None)
    kv_heads = numbers.get("kv_heads", heads)
    if heads % kv_heads:
        raise draft.error(f"does not divide --num-attention-heads {heads}", "--num-query-groups", kv_heads)
    fields: dict[str, Any] = {
        "head_dim": hidden // heads, "ffn": (int(4 * hidden * 2 / 3) // 64) * 64 if gated else 4 * hidden,
        **numbers, "kv_heads": kv_heads, "gated_mlp": gated, "activation": _activation(flags),
        "norm": "rmsnorm" if rms else "layernorm", "norm_bias": not rms,
        "qkv_bias": bias or "--add-qkv-bias" in flags, "out_bias": bias, "mlp_bias": bias, "expert_bias": bias,
        "tied": "--untie-embeddings-and-output-weights" not in flags, "qk_norm": "--qk-layernorm" in flags,
        "vocab": _vocab(draft, flags), "positional": _positional(draft, flags), "heads_list": ("lm",),
    }  # fmt: skip
    dropout = any(_number(draft, flags, f, 0.1) > 0 for f in ("--hidden-dropout", "--attention-dropout"))
    fields["model_type"] = "gpt2" if dropout and not gated else "llama" if gated or rms else "gpt_neox"
    _latent(flags, fields)
    _moe(draft, flags, fields)
    _window(draft, flags, fields)
    if encoder:
        fields |= {"kind": "encoder", "causal": False, "heads_list": ("pooler", "mlm", "nsp"), "model_type": "bert"}
        fields["token_types"] = 2
    return fields


def _number(draft: Draft, flags: Flags, flag: str, default: float) -> float:
    text = flags.get(flag)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise draft.error("is not a number", flag, text) from None


def _activation(flags: Flags) -> str:
    return next((name for flag, name in ACTIVATIONS.items() if flag in flags), "gelu")


def _positional(draft: Draft, flags: Flags) -> str:
    if "--use-rotary-position-embeddings" in flags:
        return "rope"
    text = str(flags.get("--position-embedding-type") or "learned_absolute").lower()
    if "--no-position-embedding" in flags:
        return "none" if text == "learned_absolute" else POSITIONS.get(text, "rope")
    if text not in POSITIONS:
        raise draft.error(
            "is no kind of positions", "--position-embedding-type", text, f"one of {', '.join(POSITIONS)}"
        )
    return POSITIONS[text]


def _vocab(draft: Draft, flags: Flags) -> int:
    """Rows of the embedding: the vocabulary padded to a multiple of make-vocab-size-divisible-by · tp."""
    if flags.get("--padded-vocab-size") is not None:
        return draft.whole("--padded-vocab-size", flags["--padded-vocab-size"])
    text, key = flags.get("--vocab-size"), "--vocab-size"
    if text is not None:
        rows = draft.whole(key, text)
    else:
        kind = str(flags.get("--tokenizer-type") or "GPT2BPETokenizer")
        rows = TOKENIZERS.get(kind.lower(), TOKENIZERS["gpt2bpetokenizer"])
        sure = "" if kind.lower() in TOKENIZERS else ", taken for lack of better"
        draft.open(key, "", f"the tokenizer decides: {rows} ({kind if not sure else 'GPT-2'}){sure}")
    multiple = draft.whole("--make-vocab-size-divisible-by", flags.get("--make-vocab-size-divisible-by") or 128)
    multiple *= int(draft.get("tp", 1))
    return -(-rows // multiple) * multiple


def _latent(flags: Flags, fields: dict[str, Any]) -> None:
    """Multi-head latent attention, with the defaults of MLATransformerConfig: rank 512, heads of 128 + 64 and 128."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if "--multi-latent-attention" not in flags:
        for name in names:
            fields.pop(name, None)
        return
    defaults = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    for name, value in defaults.items():
        fields.setdefault(name, value)
    fields["head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    fields |= {"kv_heads": fields["heads"], "model_type": "deepseek_v3", "qk_norm": False}


def _moe(draft: Draft, flags: Flags, fields: dict[str, Any]) -> None:
    """Every layer routes, or as --moe-layer-freq says: a period N, or a pattern such as ([0]*3+[1]*58)."""
    if not fields.get("experts"):
        for name in ("experts", "top_k", "moe_ffn", "shared_ffn"):
            fields.pop(name, None)
        return
    fields.setdefault("top_k", 2)
    fields.setdefault("moe_ffn", fields["ffn"])
    if fields["top_k"] > fields["experts"]:
        raise draft.error(f"exceeds --num-experts {fields['experts']}", "--moe-router-topk", fields["top_k"])
    if fields["model_type"] not in ("deepseek_v3",):
        fields["model_type"] = "mixtral"
    text = (flags.get("--moe-layer-freq") or "1").replace(" ", "")
    pattern = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?", text)
    if pattern:
        fields["first_k_dense"] = int(pattern[1])
    elif text.isdigit() and int(text) > 0:
        fields["moe_period"] = int(text)
    else:
        raise draft.error("is no pattern that simkit reads", "--moe-layer-freq", text, "write N or ([0]*K+[1]*M)")


def _window(draft: Draft, flags: Flags, fields: dict[str, Any]) -> None:
    """--window-size (W,0): a token sees itself and the W before it."""
    text = flags.get("--window-size")
    if text is None:
        return
    found = re.match(r"\(?\s*(\d+)", text)
    if not found:
        raise draft.error("is no window", "--window-size", text, "write (W,0)")
    fields["window"] = int(found[1]) + 1


def _told(draft: Draft, flag: str, text: str | None, fields: Mapping[str, Any]) -> None:
    """One line of the ledger for a flag that went into the network."""
    extra = {
        "--vocab-size": "vocab", "--make-vocab-size-divisible-by": "vocab", "--padded-vocab-size": "vocab",
        "--tokenizer-type": "vocab", "--normalization": "norm", "--position-embedding-type": "positional",
        "--moe-layer-freq": "first_k_dense" if "first_k_dense" in fields else "moe_period", "--window-size": "window",
        "--group-query-attention": "kv_heads", "--swiglu": "gated_mlp", "--squared-relu": "activation",
        "--openai-gelu": "activation", "--onnx-safe": "activation", "--disable-bias-linear": "mlp_bias",
        "--add-qkv-bias": "qkv_bias", "--untie-embeddings-and-output-weights": "tied", "--qk-layernorm": "qk_norm",
        "--multi-latent-attention": "kv_lora_rank", "--use-rotary-position-embeddings": "positional",
        "--no-position-embedding": "positional", "--hidden-dropout": "model_type", "--attention-dropout": "model_type",
    }  # fmt: skip
    name = NUMBERS.get(flag) or extra[flag]
    if name in fields:
        draft.part(name, fields[name], flag, True if text is None else text)
    else:
        draft.ignore(flag, text or "", "off without the flag that switches it on")
