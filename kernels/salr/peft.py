"""A LoRA checkpoint of PEFT as one more adapter of a SALR model, whose base then is pruned and whose tasks are many."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from simkit.errors import InputError, unknown
from simkit.kernels.lora._peft import layer_settings, read_config, read_pairs
from simkit.kernels.salr.linear import SALRLinear


def add_peft(model: nn.Module, folder: str | Path, name: str = "default") -> list[str]:
    """Adds the pairs of a PEFT folder as the adapter `name` of the SALR layers at their paths; those paths, sorted.

    An adapter of that name is replaced. Raises InputError, before any layer is changed, for what
    `simkit.kernels.lora` refuses to read, a path that is no SALR layer of the model, or a shape that does not fit.
    """
    where = Path(folder)
    config, pairs = read_config(where), read_pairs(where)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SALRLinear)}
    for path, pair in pairs.items():
        if path not in layers:
            raise unknown("SALR layer of this model", path, layers, file=str(where), key="layer")
        layer, shape = layers[path], (pair["A"].shape[1], pair["B"].shape[0])
        if shape != (layer.in_features, layer.out_features):
            what = f"maps {shape[0]} to {shape[1]} features, the layer {layer.in_features} to {layer.out_features}"
            raise InputError(what, file=str(where), key=path)
    for path, pair in pairs.items():
        layer = layers[path]
        rank, alpha = layer_settings(config, path, pair["A"].shape[0])
        if name in layer.adapters:
            layer.remove_adapter(name)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        adapter = layer.add_adapter(name, rank, scale=scale)
        with torch.no_grad():
            adapter.lora_a.copy_(pair["A"])
            adapter.lora_b.copy_(pair["B"])
    return sorted(pairs)
