"""Operators of a PyTorch trace as rows: products, fused attention and streams by the shapes of their inputs.

    product      aten::mm addmm bmm baddbmm linear …       out[m, n] = in[m, k] w[k, n], `batch` copies
    attention    the forward of scaled_dot_product_attention in its fused forms, and of flash_attn, causal
    stream       element by element: all inputs read, the result written (PyTorch, TensorIterator)

Shapes are ``Input Dims``, dtypes ``Input type``, plain arguments ``Concrete Inputs`` (torch.profiler with
record_shapes=True). A reason in words stands for what is no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

DTYPES = {
    "float": ("fp32", 4.0), "c10::half": ("fp16", 2.0), "half": ("fp16", 2.0), "c10::bfloat16": ("bf16", 2.0),
    "bfloat16": ("bf16", 2.0), "c10::float8_e4m3fn": ("fp8", 1.0), "c10::float8_e5m2": ("fp8", 1.0),
    "signed char": ("int8", 1.0), "unsigned char": ("", 1.0), "bool": ("", 1.0), "int": ("", 4.0),
    "long int": ("", 8.0), "long": ("", 8.0), "double": ("", 8.0),
}  # fmt: skip
"""Type of an input -> (dtype of the tables, empty where they have none; bytes of an element)."""
PRODUCTS = {
    "aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2), "aten::_addmm_activation": (1, 2),
    "aten::bmm": (0, 1), "aten::baddbmm": (1, 2), "aten::_scaled_mm": (0, 1), "aten::matmul": (0, 1),
}  # fmt: skip
"""Positions of the two factors."""
STREAMS = frozenset({
    "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "relu", "relu_", "gelu", "silu", "silu_",
    "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "pow", "addcmul", "addcdiv", "lerp", "where", "clone", "abs", "dropout",
    "threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward", "native_layer_norm",
    "_softmax", "_log_softmax",
})  # fmt: skip
COPIES = frozenset({"copy_", "_to_copy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Where a fused attention has what it needs: layout of q, k, v (``bhsd`` or ``bshd``), position of the causal
    flag, and the values of the flag that mean a causal mask."""

    layout: str
    causal: int
    true: tuple[str, ...] = ("True", "true", "1")


ATTENTION: Mapping[str, Fused] = {
    "aten::_scaled_dot_product_flash_attention": Fused(layout="bhsd", causal=4),
    "aten::_scaled_dot_product_efficient_attention": Fused(layout="bhsd", causal=6),
    "aten::_scaled_dot_product_cudnn_attention": Fused(layout="bhsd", causal=6),
    "aten::_flash_attention_forward": Fused(layout="bshd", causal=8),
    "aten::_efficient_attention_forward": Fused(layout="bshd", causal=9, true=("1", "2")),
    "aten::_cudnn_attention_forward": Fused(layout="bhsd", causal=10),
    "flash_attn::_flash_attn_forward": Fused(layout="bshd", causal=5),
}
"""Arguments as PyTorch declares them (aten/src/ATen/native/native_functions.yaml) and flash_attn does."""

Cells = dict[str, Any]


def cells(name: str, args: Mapping[str, Any], kernels: Sequence[str]) -> Cells | str:
    """The cells of a row for one call of an operator, or why there is none. kernels: names of what it launched."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return "its operator has no shapes (record with record_shapes=True)"
    types = [str(t).lower() for t in types]
    try:
        if name in PRODUCTS:
            return _product(dims, types, *PRODUCTS[name], kernels)
        if name == "aten::linear":
            return _linear(dims, types, kernels)
        if name in ATTENTION:
            return _attention(ATTENTION[name], dims, types, args.get("Concrete Inputs"))
        plain = name.removeprefix("aten::")
        if plain in STREAMS | COPIES:
            return _stream(plain, dims, types)
    except (IndexError, TypeError, ValueError):
        return "its operator's shapes are not those of its kind"
    return f"{name} has no row in the tables"


def _dtype(text: str, kernels: Sequence[str]) -> str:
    dtype = DTYPES.get(text, ("", 0.0))[0]
    tensor_cores = any("tf32" in k.lower() or "s1688gemm" in k.lower() or "_s1688" in k.lower() for k in kernels)
    return "tf32" if dtype == "fp32" and tensor_cores else dtype


def _product(dims: Any, types: Sequence[str], one: int, two: int, kernels: Sequence[str]) -> Cells | str:
    a, b = dims[one], dims[two]
    dtype = _dtype(types[one], kernels)
    if not dtype:
        return f"a product of {types[one]} has no row in the tables"
    if len(a) < 2 or len(b) != len(a) or a[-1] != b[-2] or min((*a, *b)) < 1:
        return "its operator's shapes are not those of its kind"
    batch, k, n = prod(a[:-2]), a[-1], b[-1]
    return {"op": "gemm", "dtype": dtype, "batch": batch if batch > 1 else None, "m": a[-2], "n": n, "k": k}


def _linear(dims: Any, types: Sequence[str], kernels: Sequence[str]) -> Cells | str:
    a, w = dims[0], dims[1]
    dtype = _dtype(types[0], kernels)
    if not dtype:
        return f"a product of {types[0]} has no row in the tables"
    if len(w) != 2 or a[-1] != w[1] or min((*a, *w)) < 1:
        return "its operator's shapes are not those of its kind"
    return {"op": "gemm", "dtype": dtype, "m": prod(a[:-1]), "n": w[0], "k": w[1]}


def _attention(fused: Fused, dims: Any, types: Sequence[str], concrete: Any) -> Cells | str:
    q, keys, values = dims[0], dims[1], dims[2]
    if len(q) != 4 or len(keys) != 4 or len(values) != 4:
        return "attention over packed sequences has no row in the tables"
    dtype = DTYPES.get(types[0], ("", 0.0))[0]
    if not dtype:
        return f"attention of {types[0]} has no row in the tables"
    batch, (length, heads) = q[0], (q[1], q[2]) if fused.layout == "bshd" else (q[2], q[1])
    kv_len, kv_heads = (keys[1], keys[2]) if fused.layout == "bshd" else (keys[2], keys[1])
    if length > 1:
        if not isinstance(concrete, list) or len(concrete) <= fused.causal or not str(concrete[fused.causal]).strip():
            return "attention that does not say whether its mask is causal"
        if str(concrete[fused.causal]).strip() not in fused.true:
            return "attention without a causal mask has no row in the tables"
    if q[3] != values[3]:
        return "attention with values of another width has no row in the tables"
    return {
        "op": "attention_decode" if length == 1 else "attention_prefill", "dtype": dtype, "kv_dtype": dtype,
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": q[3], "q_len": length, "kv_len": kv_len,
    }  # fmt: skip


def _stream(name: str, dims: Any, types: Sequence[str]) -> Cells | str:
    """Bytes of the inputs that are tensors and of the result, whose shape is that of the largest of them."""
    tensors = [
        (prod(d), DTYPES[t][1]) for d, t in zip(dims, types, strict=False)
        if isinstance(d, list) and d and t in DTYPES and all(isinstance(x, int) for x in d)
    ]  # fmt: skip
    if not tensors:
        return "its operator has no tensor whose size is known"
    if name in COPIES:
        # copy_(to, from): what is there is not read.
        nbytes = sum(n * e for n, e in tensors[:2])
        return {"op": "memory", "bytes": f"{nbytes:.15g}"} if len(tensors) > 1 else "a copy that names one tensor alone"
    most = max(n for n, _ in tensors)
    element = next(e for n, e in tensors if n == most)
    return {"op": "memory", "bytes": f"{sum(n * e for n, e in tensors) + most * element:.15g}"}
