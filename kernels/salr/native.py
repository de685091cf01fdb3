"""Finds the compiled kernels (native.cpp) and calls them with the addresses of tensors. No compiler, no kernels: see
`available`."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ISAS = {"portable": 0, "avx2": 1, "avx512": 2, "avx512bf16": 3}
VERSION = 1
_ERRORS = {1: "no memory", 2: "the CPU lacks these instructions", 3: "no kernel for this dtype"}


class NativeError(RuntimeError):
    """A native kernel refused."""


def _candidates() -> list[Path]:
    """The library that SIMKIT_SALR_LIB names (nothing, if it is empty), else what the installation built beside this
    file."""
    named = os.environ.get("SIMKIT_SALR_LIB")
    if named is not None:
        return [Path(named)] if named else []
    folder = Path(__file__).parent
    return sorted(p for ending in ("so", "dylib", "pyd") for p in folder.glob(f"_native*.{ending}"))


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where none was built or it does not load. torch is loaded first: both share one OpenMP
    pool."""
    for path in _candidates():
        try:
            lib = ctypes.CDLL(str(path))
            if lib.salr_version() != VERSION:
                continue
        except (OSError, AttributeError):
            continue
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        lib.salr_linear.argtypes = [integer, integer, *[pointer] * 8, *[long] * 4, integer]
        lib.salr_decode.argtypes = [integer, integer, *[pointer] * 3, long, long, pointer, integer]
        lib.salr_dense.argtypes = [integer, pointer, pointer, pointer, long, long, integer]
        lib.salr_stream.argtypes = [pointer, long, integer]
        lib.salr_stream.restype = ctypes.c_float
        lib.salr_huge.argtypes = [pointer, long]
        return lib
    return None


@cache
def isa() -> str:
    """The best instruction set that this CPU and the library share; "portable" has no product, only decoding."""
    lib = library()
    return "none" if lib is None else {number: name for name, number in ISAS.items()}[lib.salr_isa()]


def available(dtype: torch.dtype) -> bool:
    """Whether `linear` runs here for this dtype."""
    return dtype in DTYPES and isa() not in ("none", "portable")


def _chosen() -> int:
    """SIMKIT_SALR_ISA picks an instruction set by its name; else the library chooses."""
    name = os.environ.get("SIMKIT_SALR_ISA", "")
    return ISAS.get(name, -1)


def _threads(work: int) -> int:
    """As many as torch uses, but one where waking others takes longer than the work (weights times rows of x)."""
    return torch.get_num_threads() if work >= 1 << 18 else 1


def _checked(status: int) -> None:
    if status:
        raise NativeError(_ERRORS.get(status, f"status {status}"))


def linear(
    x: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """`reference.salr_linear` on the CPU; all tensors contiguous and of x's dtype, on as many threads as torch uses."""
    lib = library()
    assert lib is not None
    m, k = x.shape
    y = torch.empty((m, rows), dtype=x.dtype)
    _checked(
        lib.salr_linear(
            DTYPES[x.dtype],
            _chosen(),
            bits.data_ptr(),
            values.data_ptr(),
            offsets.data_ptr(),
            x.data_ptr(),
            a.data_ptr(),
            b.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            m,
            rows,
            k,
            a.shape[0],
            _threads(m * rows * k),
        )
    )
    return y


def decode(bits: Tensor, values: Tensor, offsets: Tensor, rows: int, columns: int) -> Tensor:
    """`encoding.decode` for values of 2 or 4 bytes."""
    lib = library()
    assert lib is not None
    dense = torch.empty((rows, columns), dtype=values.dtype)
    addresses = (bits.data_ptr(), values.data_ptr(), offsets.data_ptr())
    size, threads = values.element_size(), _threads(rows * columns)
    _checked(lib.salr_decode(size, _chosen(), *addresses, rows, columns, dense.data_ptr(), threads))
    return dense


def dense_vector(x: Tensor) -> Tensor:
    """x as `dense` wants it: float, for a bfloat16 matrix with the even and the odd columns of each 16 apart."""
    wide = x.detach().float().clone()
    if x.dtype == torch.bfloat16:
        whole = x.numel() // 64 * 64
        wide[:whole] = wide[:whole].view(-1, 8, 2).transpose(1, 2).reshape(-1)
    return wide


def dense(weight: Tensor, vector: Tensor, out: Tensor) -> None:
    """out = W x by the benchmark's own dense kernel; `vector` from `dense_vector`."""
    lib = library()
    assert lib is not None
    n, k = weight.shape
    pointers = (weight.data_ptr(), vector.data_ptr(), out.data_ptr())
    _checked(lib.salr_dense(DTYPES[weight.dtype], *pointers, n, k, torch.get_num_threads()))


def stream(data: Tensor) -> float:
    """Sums a float tensor: what reading memory alone takes."""
    lib = library()
    assert lib is not None
    return float(lib.salr_stream(data.data_ptr(), data.numel(), torch.get_num_threads()))


def huge(*tensors: Tensor) -> None:
    """Asks the kernel to hold these CPU tensors in huge pages (Linux); nothing happens where it will not."""
    lib = library()
    if lib is None:
        return
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= 1 << 22:
            lib.salr_huge(tensor.data_ptr(), tensor.numel() * tensor.element_size())
