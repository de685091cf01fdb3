"""Reads a Hugging Face ``config.json`` into a Model, with the defaults that `transformers` fills in.

Parameters follow from the configuration alone; no weights and no network are needed. The vocabulary is that of the
configuration, never that of a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simkit.errors import InputError, nearest
from simkit.spec.build import build
from simkit.spec.families import KEYS, families, spec_from
from simkit.spec.model import Model, TransformerSpec

NESTED = ("text_config", "llm_config", "language_config")


def from_config(config: Mapping[str, Any] | str | Path, *, name: str = "") -> Model:
    """The Model that a configuration describes.

    config: the parsed object, the path of a ``config.json`` or of the folder that holds it.
    Raises InputError for unreadable or truncated JSON, unknown model types and values that make no model.
    """
    file = ""
    if not isinstance(config, Mapping):
        path = Path(config)
        config, file = _read(path)
        name = name or (path.name if path.is_dir() else path.resolve().parent.name)
    given, notes = _unwrap(config, file)
    model_type, note = _family(given, file)
    if note:
        notes.append(note)
    if model_type == "resnet":
        return _resnet(given, file)
    spec = spec_from(model_type, given, file=file)
    extra = _vision(config, spec, file)
    if any(k in config for k in ("vision_config", "audio_config")) and not extra:
        notes.append("only the text part is counted; the vision or audio tower is left out")
    label = name or str(config.get("_name_or_path") or model_type)
    return build(spec, name=label, source=file or "config", extra=extra, notes=tuple(notes),
                 dtype=_dtype(given, config), fp8_block=_fp8_block(config))


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    """The JSON object of a file or of the ``config.json`` in a folder, and the name errors should carry."""
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            hint = "give the folder of a downloaded model"
            raise InputError("holds no config.json", file=str(path.parent), hint=hint)
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=_no_constant)
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read ({type(error).__name__})"
        raise InputError(what, file=str(path), hint="give a config.json") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"is no valid JSON at line {error.lineno} column {error.colno} ({error.msg})", file=str(path),
            hint="is the file complete?",
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"is no valid JSON ({error})", file=str(path)) from None
    if not isinstance(config, dict):
        raise InputError("is no JSON object", file=str(path), hint="give a model's config.json")
    return config, str(path)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not finite")


def _unwrap(config: Mapping[str, Any], file: str) -> tuple[Mapping[str, Any], list[str]]:
    """The text part of a multimodal configuration, over those outer keys that also govern it."""
    for key in NESTED:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise InputError("is no JSON object", file=file, key=key, value=inner)
        outer = {k: config[k] for k in ("tie_word_embeddings", "model_type") if k in config}
        if str(outer.get("model_type", "")) not in families():
            outer.pop("model_type", None)
        return {**outer, **inner}, [f"read from {key}"]
    return config, []


def _family(given: Mapping[str, Any], file: str) -> tuple[str, str]:
    """The known family, or llama with a note where an unknown one has all its keys."""
    model_type = given.get("model_type")
    if isinstance(model_type, str) and (model_type in families() or model_type == "resnet"):
        return model_type, ""
    alike = all(any(k in given for k in KEYS[f]) for f in ("hidden", "layers", "heads", "ffn", "vocab"))
    if alike and "rms_norm_eps" in given and not given.get("is_encoder_decoder"):
        what = f"model_type {model_type!r} is not known" if model_type else "model_type is absent"
        return "llama", f"{what}; read as a Llama-like decoder (RMSNorm, gated MLP, rope)"
    if model_type is None:
        raise InputError("is missing", file=file, key="model_type", hint=f"one of {', '.join(sorted(families()))}")
    close = nearest(str(model_type), families())
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InputError("is not supported", file=file, key="model_type", value=model_type,
                     hint=f"{hint}supported: {', '.join(sorted([*families(), 'resnet']))}")


def _dtype(given: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    for source in (given, config):
        value = source.get("torch_dtype") or source.get("dtype")
        if isinstance(value, str):
            return names.get(value.removeprefix("torch."), "")
    return ""


def _fp8_block(config: Mapping[str, Any]) -> int:
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and quantised.get("quant_method") == "fp8":
        side = quantised.get("weight_block_size")
        if isinstance(side, list) and side and isinstance(side[0], int) and side[0] > 0:
            return side[0]
    return 0


def _vision(config: Mapping[str, Any], spec: TransformerSpec, file: str) -> Mapping[str, int]:
    """SigLIP tower and projector of Gemma 3: patches with bias, positions, blocks of two norms, a last norm."""
    if config.get("model_type") != "gemma3" or not isinstance(config.get("vision_config"), Mapping):
        return {}
    size = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14,
    }
    for key, value in size.items():
        size[key] = config["vision_config"].get(key, value)
        if isinstance(size[key], bool) or not isinstance(size[key], int) or size[key] < 1:
            raise InputError("is no whole number", file=file, key=f"vision_config.{key}", value=size[key])
    h, f = size["hidden_size"], size["intermediate_size"]
    embedding = h * 3 * size["patch_size"] ** 2 + h + h * (size["image_size"] // size["patch_size"]) ** 2
    per_block = 4 * (h * h + h) + 2 * h * f + f + h + 2 * 2 * h
    return {
        "vision_tower": embedding + size["num_hidden_layers"] * per_block + 2 * h,
        "projector": h * spec.hidden + h,
    }


def _resnet(given: Mapping[str, Any], file: str) -> Model:
    from simkit.spec.convnets import RESNETS, resnet

    depths, bottleneck = given.get("depths", [3, 4, 6, 3]), given.get("layer_type", "bottleneck") == "bottleneck"
    for name, (wide, blocks) in RESNETS.items():
        if list(blocks) == depths and wide == bottleneck:
            return resnet(name)
    hint = f"one of {', '.join(RESNETS)}"
    raise InputError("matches no known ResNet", file=file, key="depths", value=depths, hint=hint)
