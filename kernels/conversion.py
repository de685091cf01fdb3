"""`convert` puts a method's layers in place of the linear layers of any model; `merge` takes them out again.

**The contract of a method.** ``lora-fa`` is the package ``simkit.kernels.lora_fa``, which offers

- ``replace(linear, *, name: str, rank: int, alpha: float | None = None, **options) -> nn.Module``: the layer that takes
  the place of `linear`, which always is an ``nn.Linear`` (a Conv1D of GPT-2 arrives as one). `name` is its path in the
  model. Its frozen parameters have ``requires_grad=False``; it may take over the tensors of `linear` without a copy.
- ``OPTIONS: tuple[str, ...]``: the names that `options` may have (`sparsity` too, where a method has one).
- ``prepare(modules: dict[str, nn.Linear], **options) -> dict``, if what one layer becomes depends on all of them (the
  threshold of a global mask): it sees the layers first, and what it returns is added to the options of every `replace`.
- A layer with ``merge() -> nn.Linear`` is understood by `merge` here.

The module is called `conversion` so that ``simkit.kernels.convert`` is the function whatever was imported first.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from simkit.errors import InputError, unknown

HEADS = ("lm_head", "embed_out")
"""Names by which models without `get_output_embeddings` call their output head."""


def methods() -> tuple[str, ...]:
    """The keys that `convert` takes as `method`: the folders here whose package defines `replace`."""
    found = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        source = Path(__file__).parent / module.name / "__init__.py"
        if module.ispkg and "replace" in source.read_text(encoding="utf-8"):
            found.append(module.name.replace("_", "-"))
    return tuple(sorted(found))


def _plugin(method: str) -> ModuleType:
    known = methods()
    if method not in known:
        raise unknown("method", method, known)
    return importlib.import_module(f"simkit.kernels.{method.replace('-', '_')}")


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: y = x W + b with W [in, out], told by its shape and name alone."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 2
        and hasattr(module, "nf")
    )


def as_linear(module: nn.Module) -> nn.Linear:
    """The same map as an ``nn.Linear``: itself, or for a Conv1D one with W^T [out, in]."""
    if isinstance(module, nn.Linear):
        return module
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, torch.Tensor)
    linear = nn.Linear(weight.shape[0], weight.shape[1], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=weight.requires_grad)
    if isinstance(bias, torch.Tensor):
        linear.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    return linear.train(module.training)


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """{path: layer}, a layer that is used twice under each of its paths.

    The projections of ``nn.MultiheadAttention`` are left out: it reads their weights and never calls them.
    """
    inside = {id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules()}
    named = model.named_modules(remove_duplicate=False)
    return {n: m for n, m in named if (isinstance(m, nn.Linear) or is_conv1d(m)) and id(m) not in inside}


def _is_head(model: nn.Module, name: str, layer: nn.Module, embeddings: set[int]) -> bool:
    get = getattr(model, "get_output_embeddings", None)
    if callable(get) and get() is layer:
        return True
    return name.rpartition(".")[2] in HEADS or id(layer.weight) in embeddings


def select(model: nn.Module, targets: str | Iterable[str]) -> dict[str, nn.Module]:
    """{path: linear layer} that `targets` name.

    ``"all-linear"`` is every one but the output head, as in PEFT: what `get_output_embeddings` returns, a layer that
    shares its weight with an ``nn.Embedding``, or one called as in `HEADS`. Else a list, or a text with commas, of
    names: a whole path or its end after a dot (``q_proj``). Raises InputError for a name without a layer, or if there
    is none.
    """
    linears = _linears(model)
    wanted = [t.strip() for t in targets.split(",")] if isinstance(targets, str) else list(targets)
    wanted = [t for t in wanted if t]
    if wanted == ["all-linear"]:
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        found = {n: m for n, m in linears.items() if not n or not _is_head(model, n, m, embeddings)}
    else:
        found = {}
        for target in wanted:
            hits = {n: m for n, m in linears.items() if n == target or n.endswith(f".{target}")}
            if not hits:
                ends = dict.fromkeys(n.rpartition(".")[2] for n in linears)
                raise unknown("linear layer of this model", target, [*ends, *linears, "all-linear"], key="targets")
            found.update(hits)
    if not found:
        raise InputError(
            "leaves no linear layer to convert", key="targets", value=targets, hint="name some of the model's layers"
        )
    return found


def _checked(plugin: ModuleType, method: str, sparsity: object, options: dict[str, Any]) -> dict[str, Any]:
    allowed = tuple(plugin.OPTIONS)
    if "sparsity" in allowed:
        options = {"sparsity": sparsity, **options}
    elif sparsity != 0.5:
        raise InputError(f"has no meaning for {method}", key="sparsity", value=sparsity, hint="leave it out")
    for key in options:
        if key not in allowed and key != "alpha":
            raise unknown(f"option of {method}", key, sorted({*allowed, "alpha"}), key="option")
    return options


def convert(
    model: nn.Module,
    method: str = "salr",
    sparsity: float | str = 0.5,
    rank: int = 16,
    targets: str | Iterable[str] = "all-linear",
    inplace: bool = False,
    *,
    freeze: bool = True,
    **options: Any,
) -> nn.Module:
    """The model with the layers of `method` in place of the linear layers that `targets` name (see `select`).

    `rank` is that of the task adapter; `sparsity` a fraction or ``"2:4"``, for the methods which prune; `options` are
    the method's own (its `OPTIONS`, and `alpha`). With `freeze`, every other parameter of the model stops asking for
    gradients, as fine-tuning wants. A model that is itself one linear layer is answered by the new layer. Without
    `inplace` the model is copied and left as it was. Raises InputError for an unknown method, target or option, naming
    the nearest valid one, before anything is changed.
    """
    plugin = _plugin(method)
    options = _checked(plugin, method, sparsity, dict(options))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise InputError("is no rank", key="rank", value=rank, hint="a whole number from 0")
    select(model, targets)
    if not inplace:
        model = copy.deepcopy(model)
    found = select(model, targets)
    linears = {id(m): as_linear(m) for m in found.values()}
    prepare = getattr(plugin, "prepare", None)
    if prepare is not None:
        options = {**options, **prepare({n: linears[id(m)] for n, m in found.items()}, **options)}
    # All are built before the first is put in place: an error leaves the model whole.
    new: dict[int, nn.Module] = {}
    for name, module in found.items():
        if id(module) not in new:
            new[id(module)] = plugin.replace(linears[id(module)], name=name, rank=rank, **options)
            new[id(module)].train(module.training)
    if freeze:
        ours = {id(p) for layer in new.values() for p in layer.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in ours:
                parameter.requires_grad_(False)
    return _put(model, {name: new[id(module)] for name, module in found.items()})


def merge(model: nn.Module, inplace: bool = False) -> nn.Module:
    """The model with every layer that has ``merge() -> nn.Linear`` folded into a dense ``nn.Linear``."""
    if not inplace:
        model = copy.deepcopy(model)
    done: dict[int, nn.Module] = {}
    found = {n: m for n, m in model.named_modules(remove_duplicate=False) if callable(getattr(m, "merge", None))}
    for layer in found.values():
        if id(layer) not in done:
            done[id(layer)] = layer.merge().train(layer.training)
    return _put(model, {name: done[id(layer)] for name, layer in found.items()})


def _put(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """The model with `layers` at their paths; the path "" is the model itself."""
    if "" in layers:
        return layers[""]
    for name, layer in layers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer)
    return model
