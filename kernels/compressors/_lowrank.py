"""What Power-SGD and ACP-SGD share: matrices of equal shape as one batch, with their error and their factors.

A tensor of more than one dimension is a matrix M (rows = first dimension, cols = the rest), M ~ P Q^T with P rows x r,
Q cols x r and r = min(rank, rows, cols). Equal shapes of a bucket are one batched product and one batched QR: many
small products leave a GPU idle (PyTorch issue 74907).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from simkit.kernels.compressors._core import Bucket, Settings, State


@dataclass(slots=True)
class Kept:
    """What one matrix keeps between steps: error (rows, cols), P (rows, r), Q (cols, r). fp32, views of a `Batch`."""

    error: torch.Tensor
    P: torch.Tensor
    Q: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """b matrices of one shape. slots: their places in the bucket; total (b, rows, cols) is the error, then error +
    gradient; P (b, rows, r), Q (b, cols, r)."""

    slots: tuple[int, ...]
    total: torch.Tensor
    P: torch.Tensor
    Q: torch.Tensor

    def add(self, views: Sequence[torch.Tensor], keep: bool) -> None:
        """total <- error + gradient, or the gradient alone."""
        shape = self.total.shape[1:]
        matrices = [views[s].view(shape) for s in self.slots]
        if keep:
            for error, matrix in zip(self.total, matrices, strict=True):
                error.add_(matrix)
        else:
            torch._foreach_copy_(list(self.total), matrices)

    def write(self, views: Sequence[torch.Tensor], mean: torch.Tensor) -> None:
        """The rebuilt gradients (b, rows, cols) into their places."""
        torch._foreach_copy_([views[s].view(mean.shape[1:]) for s in self.slots], list(mean))


@dataclass(frozen=True, slots=True)
class Layout:
    """A bucket as batches, and the places of the tensors that are sent as they are."""

    batches: tuple[Batch, ...]
    rest: tuple[int, ...]


def orthonormal(factors: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis (b, n, r) of the columns of each factor, by Householder: also of ones without full rank."""
    return torch.linalg.qr(factors).Q


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols); (0, 0) for what has no second dimension or no elements."""
    if len(shape) < 2 or 0 in shape:
        return 0, 0
    cols = 1
    for n in shape[1:]:
        cols *= n
    return shape[0], cols


class LowRank(State):
    """Keeps, by parameter, what the factorisations need; lays a bucket out once and again when DDP rebuilds it."""

    def __init__(self, process_group: Any, settings: Settings) -> None:
        super().__init__(process_group, settings)
        self.kept: dict[torch.Tensor, Kept] = {}
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def factored(self, rows: int, cols: int, r: int) -> bool:
        """Whether a matrix is compressed at all."""
        return r > 0

    def layout(self, bucket: Bucket) -> Layout:
        """Batches of the bucket, made when it is first seen with these parameters."""
        key = tuple(id(p) for p in bucket.params)
        if key not in self._layouts:
            # A parameter belongs to one bucket: layouts that held one of these are of buckets that are no more.
            gone = [k for k in self._layouts if set(k) & set(key)]
            for k in gone:
                del self._layouts[k]
            self._layouts[key] = self._lay_out(bucket)
        return self._layouts[key]

    def _lay_out(self, bucket: Bucket) -> Layout:
        groups: dict[tuple[int, int, int], list[int]] = {}
        rest: list[int] = []
        for slot, param in enumerate(bucket.params):
            rows, cols = as_matrix(param.shape)
            r = min(self.settings.rank, rows, cols)
            if self.factored(rows, cols, r):
                groups.setdefault((rows, cols, r), []).append(slot)
            else:
                rest.append(slot)
        batches = tuple(self._batch(bucket, slots, r) for (_, _, r), slots in groups.items())
        return Layout(batches, tuple(rest))

    def _batch(self, bucket: Bucket, slots: list[int], r: int) -> Batch:
        params = [bucket.params[s] for s in slots]
        kept = [self._first(p, r) for p in params]
        batch = Batch(
            tuple(slots),
            torch.stack([k.error for k in kept]),
            torch.stack([k.P for k in kept]),
            torch.stack([k.Q for k in kept]),
        )
        for i, param in enumerate(params):
            self.kept[param] = Kept(batch.total[i], batch.P[i], batch.Q[i])
        return batch

    def _first(self, param: torch.Tensor, r: int) -> Kept:
        """What is kept of a parameter; at first no error, and factors that are the same on all ranks.

        Ranks meet parameters in the same order, so the number of those seen before seeds alike.
        """
        if param not in self.kept:
            rows, cols = as_matrix(param.shape)
            generator = torch.Generator().manual_seed(self.settings.seed + 1_000_003 * (len(self.kept) + 1))
            P, Q = (torch.randn(n, r, generator=generator).to(param.device) for n in (rows, cols))
            error = torch.zeros(rows, cols, device=param.device)
            self.kept[param] = Kept(error, P, Q)
        return self.kept[param]

    def message(self, factors: Sequence[torch.Tensor], bucket: Bucket, rest: Sequence[int]) -> torch.Tensor:
        """Factors and uncompressed tensors as one flat fp32 message, divided by the number of ranks."""
        parts = [f.flatten() for f in factors] + [bucket.views[s].float() for s in rest]
        flat = torch.cat(parts) if parts else bucket.buffer.new_empty(0, dtype=torch.float32)
        return flat.div_(self.group.size)

    def unpack(
        self, flat: torch.Tensor, factors: Sequence[torch.Tensor], bucket: Bucket, rest: Sequence[int]
    ) -> None:
        """The mean factors into `factors`, the mean of the others into the bucket."""
        at = 0
        for out in (*factors, *(bucket.views[s] for s in rest)):
            out.copy_(flat[at : at + out.numel()].view_as(out))
            at += out.numel()
