"""SALR: a pruned, bitmap-encoded base with low-rank adapters (arXiv 2601.16991; what the paper claims and what it does
not define is written beside each part). `simkit.kernels.convert(model, "salr")` applies it to a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from simkit.kernels.salr.linear import Adapter, SALRLinear
from simkit.kernels.salr.lowrank import parameter_groups, residual_step, residual_steps
from simkit.kernels.salr.masks import global_threshold, magnitude_mask, parse_sparsity, with_ties
from simkit.kernels.salr.peft import add_peft

__all__ = [
    "OPTIONS",
    "Adapter",
    "SALRLinear",
    "add_peft",
    "magnitude_mask",
    "parameter_groups",
    "prepare",
    "replace",
    "residual_step",
    "residual_steps",
]

OPTIONS = ("sparsity", "scope", "residual_rank", "train_residual", "quant", "adapter", "empty")


def prepare(modules: dict[str, nn.Linear], **options: Any) -> dict[str, Any]:
    """For a global mask: the threshold over all the layers, and how many weights each keeps."""
    parse_sparsity(options.get("sparsity", 0.5))
    if options.get("scope") != "global" or options.get("empty"):
        return {}
    # A layer at two paths counts once.
    once = {id(m): (n, m) for n, m in modules.items()}
    weights = {n: m.weight for n, m in once.values()}
    threshold, kept = global_threshold(weights, options.get("sparsity", 0.5))
    return {"threshold": threshold, "kept": {id(modules[n]): count for n, count in kept.items()}}


def replace(
    linear: nn.Linear,
    *,
    name: str,
    rank: int,
    alpha: float | None = None,
    empty: bool = False,
    threshold: float | None = None,
    kept: dict[int, int] | None = None,
    **options: Any,
) -> nn.Module:
    """`SALRLinear.from_linear` with its options; with `empty`, a layer into which a saved state is loaded."""
    if empty:
        weight = linear.weight
        return SALRLinear(
            linear.in_features, linear.out_features, linear.bias is not None, device=weight.device, dtype=weight.dtype
        )
    if threshold is not None and kept is not None:
        weight = linear.weight.detach()
        options["keep"] = with_ties(weight.abs().float(), threshold, kept[id(linear)])
    return SALRLinear.from_linear(linear, rank=rank, alpha=alpha, **options)
