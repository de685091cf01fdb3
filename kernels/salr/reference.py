"""SALR in plain torch: the oracle of the fast paths, and the path where none of them runs.

    y = x W^T + (x A^T) B^T + bias,    W = decode(bits, values)

A [R, K] and B [N, R] hold the residual adapter and the active task adapters, concatenated along R, with each scale
already in B: n adapters cost two products instead of 2n.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simkit.kernels.salr.encoding import decode

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def salr_linear(
    x: Tensor, bits: Tensor, values: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """[M, K] -> [M, N]. Half precision is computed in fp32 and rounded once, as the fast paths do."""
    wide = WIDER.get(x.dtype, x.dtype)
    w = decode(bits, values, rows, x.shape[1]).to(wide)
    y = x.to(wide) @ w.t() + (x.to(wide) @ a.to(wide).t()) @ b.to(wide).t()
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype)


def input_gradient(gradient: Tensor, bits: Tensor, values: Tensor, columns: int) -> Tensor:
    """dL/dx of the sparse part alone: g W, [M, N] -> [M, K]."""
    wide = WIDER.get(gradient.dtype, gradient.dtype)
    w = decode(bits, values, gradient.shape[1], columns).to(wide)
    return (gradient.to(wide) @ w).to(gradient.dtype)
