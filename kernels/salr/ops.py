"""The operators as `torch.library` custom ops: `simkit::salr_linear` and `simkit::salr_input_gradient`.

Each has a fake kernel, so that ``torch.compile`` traces through it, and picks its path when it runs: the compiled
kernels on an x86 CPU, Triton on a CUDA device, plain torch elsewhere. Gradients reach x, A, B and the bias; W stays as
it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simkit.kernels.salr import native, reference
from simkit.kernels.salr.encoding import GROUP, PAD, WORD

BAND = 2048
"""Rows of W that are dense at once while a gradient is computed: what the backward pass needs beside the encoded
weight."""


def run(
    x: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """y [M, N] of `reference.salr_linear` by the fastest path that serves these tensors."""
    if x.device.type == "cpu" and native.available(x.dtype):
        x, a, b = x.contiguous(), a.to(x.dtype).contiguous(), b.to(x.dtype).contiguous()
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        return native.linear(x, bits, values, offsets, a, b, bias, rows)
    if x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16, torch.float32):
        from simkit.kernels.salr import gpu

        if gpu.available():
            return gpu.linear(x, bits, values, offsets, a, b, bias, rows)
    return reference.salr_linear(x, bits, values, a, b, bias, rows)


@torch.library.custom_op("simkit::salr_linear", mutates_args=())
def salr_linear(
    x: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """y [M, N] = x W^T + (x A^T) B^T + bias (`reference.salr_linear`), W [rows, K] in the bitmap format."""
    return run(x, bits, values, offsets, a, b, bias, rows)


@salr_linear.register_fake
def _(
    x: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    return x.new_empty((x.shape[0], rows))


@torch.library.custom_op("simkit::salr_input_gradient", mutates_args=())
def salr_input_gradient(gradient: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, columns: int) -> Tensor:
    """g W, [M, N] -> [M, K], a band of `BAND` rows of W at a time."""
    rows = gradient.shape[1]
    out = gradient.new_zeros((gradient.shape[0], columns))
    for start in range(0, rows, BAND):
        stop = min(start + BAND, rows)
        groups = slice(start // GROUP, -(-stop // GROUP))
        out += gradient[:, start:stop] @ dense(
            bits[groups], values, offsets[groups.start : groups.stop + 1], stop - start, columns
        )
    return out


@salr_input_gradient.register_fake
def _(gradient: Tensor, bits: Tensor, values: Tensor, offsets: Tensor, columns: int) -> Tensor:
    return gradient.new_empty((gradient.shape[0], columns))


def dense(bits: Tensor, values: Tensor, offsets: Tensor, rows: int, columns: int) -> Tensor:
    """W [rows, columns] of these groups; `offsets` point into all of `values`."""
    if bits.device.type == "cpu" and native.library() is not None and values.element_size() in (2, 4):
        return native.decode(bits.contiguous(), values, offsets.contiguous(), rows, columns)
    from simkit.kernels.salr.encoding import decode

    return decode(bits, values[int(offsets[0]) : int(offsets[-1]) + PAD], rows, columns)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, bits, values, offsets, a, b, bias, _ = inputs
    ctx.save_for_backward(x, bits, values, offsets, a, b)
    ctx.has_bias = bias is not None


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    x, bits, values, offsets, a, b = ctx.saved_tensors
    gradient = gradient.contiguous()
    through = gradient @ b.to(gradient.dtype)
    gx = ga = gb = bias = None
    if ctx.needs_input_grad[0]:
        gx = torch.ops.simkit.salr_input_gradient(gradient, bits, values, offsets, x.shape[1]) + through @ a.to(x.dtype)
    if ctx.needs_input_grad[4]:
        ga = (through.t() @ x).to(a.dtype)
    if ctx.needs_input_grad[5]:
        gb = (gradient.t() @ (x @ a.to(x.dtype).t())).to(b.dtype)
    if ctx.has_bias and ctx.needs_input_grad[6]:
        bias = gradient.sum(0)
    return gx, None, None, None, ga, gb, bias, None


salr_linear.register_autograd(_backward, setup_context=_setup)

assert GROUP * WORD == 256  # what native.cpp and gpu.py have built in
