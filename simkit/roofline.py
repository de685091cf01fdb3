"""Seconds for one operator on one device; every formula takes a column of operators at once.

An operator is a row of `Columns`. Its time is

    t = max(flops / (peak · e), bytes / (B · f)) + kernels · kernel_s

with e the fraction of the dense peak that its shape reaches (tiles, waves, depth) and f the fraction of the memory
bandwidth that streaming kernels reach. e and f come from the device's calibration; without one they take the priors
named in `PRIORS`, and the answer says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

KINDS = ("memory", "gemm", "conv", "attention", "qr")
"""What a row does: streams memory; a matrix product out[m,n] = in[m,k] w[k,n], `batch` copies; a convolution as an
implicit GEMM (m = batch·h·w, n = channels out, k = channels in per group · kernel²); fused attention; a thin QR."""
MEMORY, GEMM, CONV, ATTENTION, QR = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Operators as a struct of arrays; the last axis is the operator, axes before it are sweep points.

    kind: int codes of KINDS, shape (rows,). batch, m, n, k: of the matrix product, 0 where there is none.
    nbytes: bytes moved to and from device memory. kernels: launches. fp32: rows whose arithmetic stays fp32 under
    mixed precision (boolean). flops = 2·batch·m·n·k.
    """

    kind: NDArray[np.int8]
    batch: Array
    m: Array
    n: Array
    k: Array
    nbytes: Array
    kernels: Array

    @property
    def flops(self) -> Array:
        return 2.0 * self.batch * self.m * self.n * self.k

    def __len__(self) -> int:
        return int(self.kind.shape[-1])


def concat(parts: list[Columns]) -> Columns:
    """The rows of `parts`, one after the other."""
    return Columns(
        kind=np.concatenate([p.kind for p in parts], axis=-1),
        **{c: np.concatenate([getattr(p, c) for p in parts], axis=-1) for c in ("batch", "m", "n", "k", "nbytes", "kernels")},
    )
