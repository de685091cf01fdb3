"""Models as rows of a CSV: our own zoo, and the two column sets in which measured tables name architectures.

``zoo``      columns are fields of TransformerSpec, all facts explicit;
``training`` model, layers, hidden, heads, kv_heads, ffn, vocab, tied, gated_mlp, positional, head_dim, notes;
``configs``  model, hf_id, model_type and Hugging Face keys (vocab_size, hidden_size, num_hidden_layers, …).

Any field of TransformerSpec may stand as a further column of a training table and wins over what `notes` imply.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from simkit.errors import InputError, unknown
from simkit.spec.model import Model, TransformerSpec

Row = Mapping[str, str]
REQUIRED = {"training": ("layers", "hidden", "heads", "vocab"), "configs": ("model_type", "hidden_size")}


@lru_cache(maxsize=64)
def read(path: str, stamp: int = 0) -> tuple[Row, ...]:
    """The rows of a table of models; `stamp` changes when the file does.

    Raises InputError where it is no CSV with the columns of either kind.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle)
            rows = tuple(reader)
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read ({type(error).__name__})", file=path, hint="give a CSV of models") from None
    if "model" not in columns or not any(set(need) <= set(columns) for need in REQUIRED.values()):
        raise InputError(
            "has not the columns of a table of models", file=path,
            hint="it needs model, layers, hidden, heads, kv_heads, ffn, vocab, tied, gated_mlp, positional "
            "or model, model_type, hidden_size, num_hidden_layers, num_attention_heads, vocab_size",
        )
    for line, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise InputError(f"has another number of cells than the header in line {line}", file=path)
    return rows


def to_model(row: Row, *, file: str, seq_len: int | None = None) -> Model:
    """The Model of one row of either column set."""
    from simkit.spec import convnets
    from simkit.spec.build import build

    name = row["model"].strip()
    if "layers" in row and not row["layers"].strip():
        if name in convnets.names():
            return convnets.build(name)
        raise unknown("image model", name, convnets.names(), file=file, key="model")
    spec = _training(row, file) if "layers" in row else _config(row, file)
    notes: tuple[str, ...] = (row["notes"],) if row.get("notes") else ()
    if spec.positional == "learned" and not (spec.max_positions or spec.position_rows):
        notes += ("the learned position table is as long as seq_len",)
    return build(spec, name=name, source=row.get("source") or file, notes=notes, seq_len=seq_len)


def spec_of(row: Row, *, file: str) -> TransformerSpec:
    """The spec of a zoo row: each cell that is filled is a field, each blank one its default."""
    return TransformerSpec(**explicit(row, file))


_HINTS = get_type_hints(TransformerSpec)
_FIELDS = {f.name: f for f in fields(TransformerSpec)}


def explicit(row: Row, file: str) -> dict[str, Any]:
    """The cells of `row` that are named like fields of TransformerSpec, parsed by the field's type."""
    out: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        text = (row.get(name) or "").strip()
        if not text:
            continue
        kind = _HINTS[name]
        if kind is bool:
            out[name] = boolean(text, file, name)
        elif kind is str:
            out[name] = text
        elif name == "heads_list":
            out[name] = tuple(text.split())
        else:
            out[name] = whole(text, file, name, least=0 if field.default is not MISSING else 1)
    return out


def boolean(text: str, file: str, key: str) -> bool:
    lowered = text.strip().lower()
    if lowered not in ("true", "false", "1", "0"):
        raise InputError("is no true or false", file=file, key=key, value=text)
    return lowered in ("true", "1")


def whole(text: str, file: str, key: str, *, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError("is no whole number", file=file, key=key, value=text) from None
    if not least <= value <= (10_000 if key in ("layers", "decoder_layers") else 10**9):
        raise InputError("is out of range", file=file, key=key, value=text)
    return value


def _family(notes: str, gated: bool, positional: str) -> str:
    """The family whose traits a training table's row shares, from what its notes say."""
    if "encoder" in notes or "mlm" in notes:
        return "bert"
    if gated:
        return "llama"
    if "squared relu" in notes:
        return "nemotron"
    if "parallel attention" in notes:
        return "phi"
    if "neox" in notes or "parallel residual" in notes:
        return "gpt_neox"
    return "mpt" if "no biases" in notes else "gpt2"


def _training(row: Row, file: str) -> TransformerSpec:
    from simkit.spec.families import families

    notes = (row.get("notes") or "").lower()
    given = explicit({k: v for k, v in row.items() if k not in ("positional", "model_type")}, file)
    gated = given.get("gated_mlp", False)
    text = (row.get("positional") or "").strip().lower() or ("rope" if gated else "learned")
    match = re.fullmatch(r"(rope|learned|alibi|none|relative)(?:-(\d+))?", text)
    if not match:
        raise InputError("is no kind of positions", file=file, key="positional", value=text,
                         hint="rope, alibi, none, learned or learned-2048")
    family = (row.get("model_type") or "").strip() or _family(notes, gated, match[1])
    if family not in families():
        raise unknown("model_type", family, families(), file=file)
    traits = dict(families()[family])
    traits.pop("defaults")
    heads_list = tuple(traits.pop("heads_list", ("lm",)))
    if "bias in q, k, v only" in notes:
        traits["qkv_bias"] = True
    elif "biases in attention" in notes:
        traits["qkv_bias"] = traits["out_bias"] = True
    if family == "bert":
        traits["token_types"] = 2
        given["tied"] = True
    merged: dict[str, Any] = {**traits, "heads_list": heads_list, "model_type": family, **given, "positional": match[1]}
    if match[2]:
        merged["max_positions"] = int(match[2])
    return _completed(merged, file)


def _completed(merged: dict[str, Any], file: str) -> TransformerSpec:
    """Fills kv_heads, head_dim and ffn where blank, and checks that the heads divide."""
    for key in ("layers", "hidden", "heads", "vocab"):
        if key not in merged:
            raise InputError("is blank", file=file, key=key)
    hidden, heads = merged["hidden"], merged["heads"]
    if not merged.get("head_dim") and hidden % heads:
        what = f"does not divide hidden = {hidden}"
        raise InputError(what, file=file, key="heads", value=heads, hint="give head_dim")
    merged["head_dim"] = merged.get("head_dim") or hidden // heads
    merged["kv_heads"] = merged.get("kv_heads") or heads
    merged["ffn"] = merged.get("ffn") or 4 * hidden
    if heads % merged["kv_heads"]:
        raise InputError(f"does not divide heads = {heads}", file=file, key="kv_heads", value=merged["kv_heads"])
    return TransformerSpec(**merged)


_TEXT = ("model", "hf_id", "model_type", "other", "source", "count_status", "notes")


def _config(row: Row, file: str) -> TransformerSpec:
    """Cells of Hugging Face keys; a blank cell takes the default of the family."""
    from simkit.spec.families import families, spec_from

    family = row["model_type"].strip()
    if family not in families():
        raise unknown("model_type", family, families(), file=file)
    given: dict[str, Any] = {}
    for key, cell in row.items():
        text = (cell or "").strip()
        if not text or key in _TEXT or key.startswith("published"):
            continue
        lowered = text.lower()
        given[key] = lowered == "true" if lowered in ("true", "false") else _number_or_text(text)
    if "first_k_dense" in given:
        given["first_k_dense_replace"] = given.pop("first_k_dense")
    given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
    if not isinstance(given.get("attention_bias"), bool):
        given.pop("attention_bias", None)
    if family == "t5" and given.get("tie_word_embeddings") is False:
        given["feed_forward_proj"] = "gated-gelu"
    if family == "qwen" and isinstance(given.get("intermediate_size"), int):
        given["intermediate_size"] *= 2
    if family == "mpt" and given.get("hidden_size"):
        given["expansion_ratio"] = given.get("intermediate_size", 4 * given["hidden_size"]) / given["hidden_size"]
    if family == "vit":
        given.setdefault("num_labels", 1000)
    if family in ("bert", "roberta", "distilbert"):
        given["tie_word_embeddings"] = True
        given["type_vocab_size"] = {"bert": 2, "roberta": 1, "distilbert": 0}[family]
    return spec_from(family, given, file=file)


def _number_or_text(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
