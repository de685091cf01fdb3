"""Adapters of PEFT: a folder of ``adapter_config.json`` and ``adapter_model.safetensors``, written and read.

Keys are PEFT's: ``base_model.model.`` + the path of the layer + ``.lora_A.weight`` (r, in) or ``.lora_B.weight``
(out, r). Rank, alpha, rsLoRA and dropout stand in the configuration, those of single layers in rank_pattern and
alpha_pattern. Source: PEFT 0.17, peft/tuners/lora/config.py and peft/utils/save_and_load.py.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simkit.errors import InputError
from simkit.kernels.conversion import convert
from simkit.kernels.lora._layer import LoRALinear, lora_layers

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"^base_model\.model\.(?P<layer>.*)\.lora_(?P<side>[AB])\.weight$")
UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "a bias in the adapters",
    "alora_invocation_tokens": "aLoRA",
}


def save_peft(model: nn.Module, folder: str | os.PathLike[str], *, base_model: str | None = None) -> None:
    """Write the adapters of a model so that PEFT loads them; both files appear whole or not at all.

    base_model: what PEFT is told the base is called. Raises InputError for a model without LoRA layers, or with some
    that differ in rsLoRA or dropout, for which PEFT has one setting.
    """
    from safetensors.torch import save_file

    layers = lora_layers(model)
    if not layers:
        raise InputError("has no LoRA layer", key="model", hint="convert(model, method='lora') makes some")
    config = _config(layers, base_model)
    tensors = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A.detach().cpu().contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B.detach().cpu().contiguous()
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    half = target / f"{WEIGHTS}.tmp"
    save_file(tensors, str(half), metadata={"format": "pt"})
    half.replace(target / WEIGHTS)
    text = target / f"{CONFIG}.tmp"
    text.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    text.replace(target / CONFIG)


def _config(layers: Mapping[str, LoRALinear], base_model: str | None) -> dict[str, Any]:
    shared = {(layer.rslora, layer.dropout) for layer in layers.values()}
    if len(shared) > 1:
        raise InputError("differ between layers, but PEFT has one for all", key="rslora, dropout", value=sorted(shared))
    rslora, dropout = shared.pop()
    rank = Counter(layer.rank for layer in layers.values()).most_common(1)[0][0]
    alpha = Counter(layer.alpha for layer in layers.values()).most_common(1)[0][0]
    return {
        "alpha_pattern": {n: layer.alpha for n, layer in layers.items() if layer.alpha != alpha},
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {n: layer.rank for n, layer in layers.items() if layer.rank != rank},
        "target_modules": sorted(layers),
        "task_type": None,
        "use_dora": False,
        "use_rslora": rslora,
    }


def load_peft(
    model: nn.Module, folder: str | os.PathLike[str], *, method: str = "lora", inplace: bool = False
) -> nn.Module:
    """The model with the adapters of a PEFT folder.

    A plain model is converted by `method` (``lora``, ``lora-fa``) where the folder has adapters; one with LoRA layers
    takes the values, if it has the same layers and ranks. Without `inplace` the model is copied and left as it was.
    Raises InputError, before anything is changed, for a file that is missing or malformed, for what is no LoRA adapter
    of linear layers (DoRA, embeddings, a trained bias), or for layers or shapes that the model does not have.
    """
    where = Path(folder)
    config = read_config(where)
    pairs = read_pairs(where)
    settings = {name: layer_settings(config, name, pair["A"].shape[0]) for name, pair in pairs.items()}
    _check_shapes(model, pairs, where)
    present = lora_layers(model)
    if present:
        _check_present(present, pairs, settings, where)
        out = model if inplace else _copy(model)
    else:
        out = _converted(model, settings, config, method, inplace)
    layers = lora_layers(out)
    with torch.no_grad():
        for name, pair in pairs.items():
            layers[name].lora_A.copy_(pair["A"])
            layers[name].lora_B.copy_(pair["B"])
    return out


def _copy(model: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(model)


def _converted(
    model: nn.Module, settings: Mapping[str, tuple[int, float]], config: dict[str, Any], method: str, inplace: bool
) -> nn.Module:
    """The model with fresh adapters: one conversion for each rank and alpha that occurs."""
    options = {"dropout": float(config.get("lora_dropout") or 0.0), "rslora": bool(config.get("use_rslora"))}
    out = model if inplace else _copy(model)
    kinds: dict[tuple[int, float], list[str]] = {}
    for name, kind in settings.items():
        kinds.setdefault(kind, []).append(name)
    trainable = {id(p) for p in out.parameters()}
    for (rank, alpha), names in kinds.items():
        out = convert(out, method, rank=rank, alpha=alpha, targets=names, inplace=True, freeze=False, **options)
    for parameter in out.parameters():
        if id(parameter) in trainable:
            parameter.requires_grad_(False)
    return out


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, checked to be of a LoRA that a linear layer can have."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=str(path)) from None
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", file=str(path)) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise InputError("is no LoRA adapter", file=str(path), key="peft_type", value=kind)
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise InputError(f"asks for {what}, which is not supported", file=str(path), key=key, value=config[key])
    if config.get("bias", "none") != "none":
        raise InputError("trains biases, which is not supported", file=str(path), key="bias", value=config["bias"])
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise InputError("is not a number above 0", file=str(path), key=key, value=value)
    return config


def read_pairs(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """{path of the layer: {"A": (r, in), "B": (out, r)}} of adapter_model.safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    try:
        tensors = load_file(str(path))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or 'no such file'})", file=str(path)) from None
    except SafetensorError as error:
        raise InputError(f"is not a safetensors file ({error})", file=str(path)) from None
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = KEY.match(key)
        if match is None:
            raise InputError("is no adapter of a linear layer", file=str(path), key=key)
        pairs.setdefault(match["layer"], {})[match["side"]] = tensor
    for name, pair in pairs.items():
        if set(pair) != {"A", "B"} or pair["A"].ndim != 2 or pair["A"].shape[0] != pair["B"].shape[-1]:
            raise InputError("lacks a matching pair of lora_A and lora_B", file=str(path), key=name)
    if not pairs:
        raise InputError("has no adapter", file=str(path))
    return pairs


def layer_settings(config: dict[str, Any], name: str, rank: int) -> tuple[int, float]:
    """(rank, alpha) of a layer. A pattern is an expression that matches the end of a path, as in PEFT."""
    alpha = float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = float(value)
            break
    return rank, alpha


def _check_shapes(model: nn.Module, pairs: Mapping[str, dict[str, torch.Tensor]], folder: Path) -> None:
    modules = dict(model.named_modules())
    file = str(folder / WEIGHTS)
    for name, pair in pairs.items():
        module: Any = modules.get(name)
        if module is None:
            raise InputError("is no layer of the model", file=file, key=name, hint="load it into its own base model")
        shape = _features(module)
        found = (pair["A"].shape[1], pair["B"].shape[0])
        if shape != found:
            raise InputError(f"maps {found[0]} to {found[1]} features, the model {shape}", file=file, key=name)


def _features(module: Any) -> tuple[int, int] | None:
    """(in, out) of a linear layer, a LoRA layer or a Conv1D."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    return (weight.shape[0], weight.shape[1]) if weight is not None and weight.ndim == 2 else None


def _check_present(
    present: Mapping[str, LoRALinear],
    pairs: Mapping[str, Any],
    settings: Mapping[str, tuple[int, float]],
    folder: Path,
) -> None:
    if set(present) != set(pairs):
        odd = sorted(set(present) ^ set(pairs))[0]
        raise InputError("has an adapter in the model or in the file, not in both", file=str(folder), key=odd)
    for name, layer in present.items():
        rank, alpha = settings[name]
        scale = alpha / (rank**0.5 if layer.rslora else rank)
        if rank != layer.rank or abs(scale - layer.scale) > 1e-6 * scale:
            raise InputError(
                f"has rank {rank} and scale {scale:g}, the model {layer.rank} and {layer.scale:g}",
                file=str(folder),
                key=name,
            )
