"""Any `nn.Module` as a Model: its forward pass is run on the meta device, where tensors have shapes but no values.

The pass is recorded with two and with three samples; what differs grows with the batch, what does not is fixed. (One
sample alone is special: transposes become free and other code paths are taken.) Matrix products count 2·m·n·k FLOPs
per copy; fused attention counts 4·B·H·S_q·S_k·D, masked or not.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec.model import Model, Tensor, TracedOp, TracedSpec
from simkit.spec.trace_inputs import TOKENS, Inputs, candidates

BATCHES = (2, 3)
SIDES = ("batch", "m", "n", "k")
HINT = "give the module a method example_inputs(batch) that returns its inputs"
GATHERS = ("embedding", "index_select", "gather", "index")
"""Operators that read as much as they write, whatever the size of the table."""
NO_WORK = ("empty", "detach", "lift", "new_empty", "sym_size")


def from_callable(target: str) -> Model:
    """The network that ``package.module:callable`` returns or, being a class, is.

    The callable takes no arguments and is called under ``torch.device("meta")``, with the working directory importable.
    Its inputs come from ``example_inputs(batch)`` or ``simkit_input`` (method or attribute of the module: a tensor, a
    tuple or a dict of keywords); without either, tokens, images and vectors are tried in the order its first layer
    suggests.
    Raises InputError where torch is missing, the target cannot be imported or called, or no input runs.
    """
    try:
        import torch
    except ImportError:
        raise InputError(
            "needs torch", key="model", value=target, hint="pip install 'simkit-perf[kernels]'"
        ) from None
    with contextlib.redirect_stdout(sys.stderr):
        module = _instance(torch, target)
        return from_module(module, name=target)


def module_of(target: str) -> Any:
    """The network of ``package.module:callable`` with weights, in memory. Raises InputError as `from_callable`."""
    try:
        import torch
    except ImportError:
        raise InputError(
            "needs torch", key="model", value=target, hint="pip install 'simkit-perf[kernels]'"
        ) from None
    if ":" not in target:
        raise InputError("is no module:callable", key="model", value=target, hint="such as my_models:network")
    with contextlib.redirect_stdout(sys.stderr):
        return _instance(torch, target, device="cpu")


def from_module(module: Any, *, name: str) -> Model:
    """The Model of an instance of `nn.Module`; it is moved to the meta device and holds no values afterwards."""
    import torch

    module = _to_meta(module)
    names = _parameter_names(module)
    fewer, label, given = _first_that_runs(torch, module, names, name)
    try:
        more = _record(torch, module, names, given(BATCHES[1]))
    except Exception:
        more = []
    notes = [f"traced on the meta device with {label}"]
    if [op[:2] for op in fewer] != [op[:2] for op in more]:
        notes.append("the operators depend on the batch: all of them are taken to grow with it")
        more = []
    ops = [_per_sample(op, more[i] if more else None) for i, op in enumerate(fewer)]
    tensors = _tensors(torch, module)
    used = {t for op in ops for t in op.tensors}
    unused = tuple(t.name for t in tensors if t.name not in used)
    if unused:
        notes.append(f"{len(unused)} parameters take no part in the forward pass: {', '.join(unused[:3])}")
        ops.append(TracedOp(kind="memory", name="unused", scales="", tensors=unused))
    buffers = {n: float(b.numel() * b.element_size()) for n, b in module.named_buffers()}
    image, tokens = label.startswith("images"), label.startswith("tokens")
    return Model(
        name=name, workload="traced", tensors=tensors, source=f"traced from {name}", notes=tuple(notes),
        spec=TracedSpec(ops=tuple(ops), buffer_elements=sum(b.numel() for _, b in module.named_buffers())),
        buffers=MappingProxyType({"buffers": sum(buffers.values())} if buffers else {}),
        input_kind="images" if image else "tokens" if tokens else "samples",
        default_seq_len=TOKENS if tokens else None,
    )


def _to_meta(module: Any) -> Any:
    """Moves to the meta device and ties again what was tied: torch gives each use a parameter of its own there."""
    owners: dict[int, list[tuple[Any, str]]] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((part, name))
    module = module.to("meta")
    for (part, name), *others in owners.values():
        for other, alias in others:
            other._parameters[alias] = part._parameters[name]
    return module


def _instance(torch: Any, target: str, *, device: str = "meta") -> Any:
    """Imports and calls the target; anything that goes wrong there is bad input."""
    path, _, attribute = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise InputError(f"cannot be imported ({_reason(error)})", key="model", value=target,
                         hint="modules are looked up in the working directory and in the environment") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n))]
            raise unknown(f"attribute of {path}", part, public, key="model")
        found = getattr(found, part)
    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        hint = "name a class or a function without arguments"
        raise InputError("is not callable", key="model", value=target, hint=hint)
    try:
        with torch.device(device):
            module = found()
    except (Exception, SystemExit) as error:
        raise InputError(f"cannot be called without arguments ({_reason(error)})", key="model", value=target) from None
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"returns a {type(module).__name__}, not an nn.Module", key="model", value=target)
    return module


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def _first_that_runs(
    torch: Any, module: Any, names: dict[int, str], name: str
) -> tuple[list[tuple[Any, ...]], str, Inputs]:
    """The trace of the smaller batch, what was fed, and how to make that for another batch."""
    reasons: list[str] = []
    for label, make in candidates(torch, module):
        try:
            return _record(torch, module, names, make(BATCHES[0])), label, make
        except Exception as error:
            reasons.append(f"{label}: {_reason(error)}")
    what = f"runs with none of the {len(reasons)} inputs tried ({reasons[0]})"
    raise InputError(what, key="model", value=name, hint=HINT)


Raw = tuple[Any, ...]
"""(name, kind, (batch, m, n, k), read, written, parameter names)"""


def _parameter_names(module: Any) -> dict[int, str]:
    """Storage of each parameter -> its name: views share the storage, so uses are found through transposes."""
    return {p.untyped_storage()._cdata: n for n, p in module.named_parameters()}


def _tensors(torch: Any, module: Any) -> tuple[Tensor, ...]:
    kinds: list[Tensor] = []
    owners = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        owner = owners[name.rpartition(".")[0]]
        table = isinstance(owner, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        part = "embedding" if table else "linear"
        if "Norm" in type(owner).__name__:
            part = "norm"
        elif "Conv" in type(owner).__name__:
            part = "conv"
        kinds.append(Tensor(name, tuple(parameter.shape), part, role="embedding" if table else "dense"))
    return tuple(kinds)


def _record(torch: Any, module: Any, names: dict[int, str], inputs: Any) -> list[Raw]:
    """The operators of one forward pass on the meta device or, where a network asks for the kind of its device
    (autocast, device checks), on tensors that pretend to be on a CPU."""
    try:
        return _recorded(torch, module, names, lambda: _call(module, inputs))
    except Exception as error:
        try:
            return _pretend(torch, module, inputs)
        except Exception:
            raise error from None


def _pretend(torch: Any, module: Any, inputs: Any) -> list[Raw]:
    """The same with fake tensors, which have a device but, like meta tensors, no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(t: Any) -> Any:
            return torch.empty(t.shape, dtype=t.dtype, device="cpu") if isinstance(t, torch.Tensor) else t

        held = {n: fake(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
        names = {held[n].untyped_storage()._cdata: n for n, _ in module.named_parameters()}
        keywords = {k: fake(v) for k, v in inputs.items()} if isinstance(inputs, dict) else {}
        values = () if keywords else tuple(map(fake, inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
        call = torch.func.functional_call
        return _recorded(torch, module, names, lambda: call(module, held, values, keywords))


def _recorded(torch: Any, module: Any, names: dict[int, str], run: Callable[[], Any]) -> list[Raw]:
    """The operators that `run` dispatches, in training mode, where the fused paths of inference are off."""
    from torch.utils._python_dispatch import TorchDispatchMode

    out: list[Raw] = []
    path: list[str] = []
    whole = [0]

    class Dispatch(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not whole[0]:
                raw = _operator(torch, func, args, kwargs or {}, result, names, path)
                if raw is not None:
                    out.append(raw)
            return result

    def as_one(function: Any, describe: Callable[..., Raw]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            whole[0] += 1
            try:
                result = function(*args, **kwargs)
            finally:
                whole[0] -= 1
            if not whole[0] and result is not args[0]:
                out.append(describe(path, args, kwargs, result))
            return result

        return call

    functional = torch.nn.functional
    kept = {name: getattr(functional, name) for name in ("scaled_dot_product_attention", "dropout")}
    hooks = [hook for name, part in module.named_modules() for hook in _watch(part, name, path)]
    module.train()
    try:
        functional.scaled_dot_product_attention = as_one(kept["scaled_dot_product_attention"], _attention)
        functional.dropout = as_one(kept["dropout"], _dropout)
        with Dispatch():
            run()
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)
        for hook in hooks:
            hook.remove()
    return out


def _watch(part: Any, name: str, path: list[str]) -> tuple[Any, Any]:
    """Hooks which keep `path` at the module that is running."""

    def leave(*_: Any) -> None:
        path.pop()

    return (
        part.register_forward_pre_hook(lambda *_: path.append(name)),
        part.register_forward_hook(leave, always_call=True),
    )


def _call(module: Any, inputs: Any) -> None:
    if isinstance(inputs, dict):
        module(**inputs)
    elif isinstance(inputs, (tuple, list)):
        module(*inputs)
    else:
        module(inputs)


def _place(path: Sequence[str], name: str) -> str:
    inner = path[-1] if path else ""
    return f"{inner}.{name}" if inner else name


def _flat(torch: Any, value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in _flat(torch, v)]
    return [t for v in value.values() for t in _flat(torch, v)] if isinstance(value, dict) else []


def _elements(t: Any) -> float:
    """Four-byte elements behind a tensor; a broadcast dimension is read once. Floating point counts one each, since the
    precision is chosen later; integers and masks by their size."""
    held = t.untyped_storage().nbytes() / t.element_size()
    size = 1.0 if t.is_floating_point() else t.element_size() / 4.0
    return float(min(t.numel(), held)) * size


def _operator(
    torch: Any, func: Any, args: Any, kwargs: Any, result: Any, names: dict[int, str], path: Sequence[str]
) -> Raw | None:
    """One dispatched operator, or None where it moves nothing: a view, an allocation, a counter of a batch norm."""
    name = func.__name__.partition(".")[0]
    ins, outs = _flat(torch, (args, kwargs)), _flat(torch, result)
    if not outs or name.startswith(NO_WORK) or all(t.dim() == 0 for t in outs):
        return None
    storages = {t.untyped_storage()._cdata for t in ins}
    mutable = func._schema.is_mutable
    if not mutable and all(t.untyped_storage()._cdata in storages for t in outs):
        return None
    tensors = tuple(dict.fromkeys(
        names[t.untyped_storage()._cdata] for t in ins if t.untyped_storage()._cdata in names
    ))
    shape, kind = _product(name, args, result)
    written = sum(_elements(t) for t in outs)
    read = written if name in GATHERS else sum(_elements(t) for t in ins)
    return _place(path, name), kind, shape, read, written, tensors


def _product(name: str, args: Any, result: Any) -> tuple[tuple[float, float, float, float], str]:
    """(batch, m, n, k) and kind of an operator; zeros where it multiplies no matrices."""
    if name in ("mm", "addmm"):
        a, b = args[-2:] if name == "mm" else args[1:3]
        return (1.0, float(a.shape[0]), float(b.shape[1]), float(a.shape[1])), "gemm"
    if name in ("bmm", "baddbmm"):
        a, b = args[:2] if name == "bmm" else args[1:3]
        return (float(a.shape[0]), float(a.shape[1]), float(b.shape[2]), float(a.shape[2])), "gemm"
    if name in ("mv", "addmv"):
        a = args[0] if name == "mv" else args[1]
        return (1.0, float(a.shape[0]), 1.0, float(a.shape[1])), "gemm"
    if name == "convolution":
        x, w, transposed, groups = args[0], args[1], args[6], args[8]
        kernel = math.prod(w.shape[2:])
        if transposed:
            positions = x.shape[0] * math.prod(x.shape[2:])
            return (float(groups), float(positions), float(w.shape[1] * kernel), float(x.shape[1] // groups)), "conv"
        positions = result.shape[0] * math.prod(result.shape[2:])
        return (float(groups), float(positions), float(w.shape[0] // groups), float(w.shape[1] * kernel)), "conv"
    return (0.0, 0.0, 0.0, 0.0), "memory"


def _attention(path: Sequence[str], args: Any, kwargs: Any, result: Any) -> Raw:
    """softmax(Q K^T) V as one operator: B·H copies of S_q x S_k with inner dimension D + D_v."""
    q, k, v = (args[i] if i < len(args) else kwargs[key] for i, key in enumerate(("query", "key", "value")))
    copies = float(math.prod(q.shape[:-2]))
    shape = (copies, float(q.shape[-2]), float(k.shape[-2]), float(q.shape[-1] + v.shape[-1]))
    return _place(path, "attention"), "attention", shape, sum(_elements(t) for t in (q, k, v)), _elements(result), ()


def _dropout(path: Sequence[str], args: Any, kwargs: Any, result: Any) -> Raw:
    """One kernel: reads its input, writes its output and a mask of one byte an element."""
    n = _elements(result)
    return _place(path, "dropout"), "memory", (0.0, 0.0, 0.0, 0.0), n, 1.25 * n, ()


def _per_sample(fewer: Raw, more: Raw | None) -> TracedOp:
    """Joins the two traces: amount(b) = fixed + b · per sample, and which one of batch, m, n, k grows."""
    name, kind, shape, read, written, tensors = fewer
    low, high = BATCHES
    if more is None:
        per_read, per_written = read / low, written / low
        grown = {"attention": "batch", "memory": ""}.get(kind, "m")
    else:
        per_read, per_written = ((b - a) / (high - low) for a, b in ((read, more[3]), (written, more[4])))
        per_read, per_written = max(0.0, per_read), max(0.0, per_written)
        grown = next((key for key, a, b in zip(SIDES, shape, more[2], strict=True) if b > a), "")
    one = {key: size / low if key == grown else size for key, size in zip(SIDES, shape, strict=True)}
    return TracedOp(
        kind=kind, name=name, **one, read_elements=per_read, write_elements=per_written,
        fixed_elements=max(0.0, read + written - low * (per_read + per_written)), scales=grown, tensors=tensors,
    )
