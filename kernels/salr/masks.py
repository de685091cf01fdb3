"""Which weights stay: static magnitude masks of a frozen matrix W [out, in].

A mask is a bool tensor, True where the weight is kept. Counts are exact: of `n` weights `round(sparsity n)` are
dropped, the smallest in magnitude, equal magnitudes in the order in which they lie. `scope` says among which weights
the smallest are sought: ``"matrix"``, each ``"row"``, or all the matrices of a model (``"global"``, see
`global_threshold`). N:M patterns (``"2:4"``) keep the N largest of each M consecutive weights of a row. The mask is
taken from W alone and never changes, which SALR (arXiv 2601.16991, theorem 2) shows to be the choice of least error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from simkit.errors import InputError

SCOPES = ("matrix", "row", "global")


def parse_sparsity(sparsity: float | str) -> float | tuple[int, int]:
    """A fraction in [0, 1], or (n, m) of ``"n:m"`` where n of m are kept. Raises InputError for anything else."""
    text = str(sparsity).strip()
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match:
        n, m = int(match[1]), int(match[2])
        if 0 <= n <= m and m > 0:
            return n, m
    else:
        try:
            fraction = float(text)
        except ValueError:
            fraction = -1.0
        if 0.0 <= fraction <= 1.0:
            return fraction
    raise InputError(
        "is no sparsity", key="sparsity", value=sparsity, hint="a fraction from 0 to 1, or N:M such as 2:4"
    )


def _largest(magnitude: Tensor, dropped: int) -> Tensor:
    """The mask of a 1-D tensor without its `dropped` smallest; among equals the first are kept."""
    if dropped <= 0:
        return torch.ones_like(magnitude, dtype=torch.bool)
    if dropped >= magnitude.numel():
        return torch.zeros_like(magnitude, dtype=torch.bool)
    threshold = magnitude.kthvalue(dropped).values
    return with_ties(magnitude, threshold, magnitude.numel() - dropped)


def with_ties(magnitude: Tensor, threshold: Tensor | float, kept: int) -> Tensor:
    """Everything above `threshold`, and of what equals it as many, in order, as make `kept`."""
    keep = magnitude > threshold
    missing = kept - int(keep.sum())
    if missing > 0:
        flat = keep.view(-1)
        flat[(magnitude.reshape(-1) == threshold).nonzero().flatten()[:missing]] = True
    return keep


def magnitude_mask(weight: Tensor, sparsity: float | str, scope: str = "matrix") -> Tensor:
    """The mask of one matrix [out, in]; ``scope="global"`` of a single matrix is that of the matrix."""
    pattern = parse_sparsity(sparsity)
    magnitude = weight.detach().abs()
    if magnitude.dtype in (torch.float16, torch.bfloat16):
        magnitude = magnitude.float()
    if isinstance(pattern, tuple):
        return _n_of_m(magnitude, *pattern)
    if scope not in SCOPES:
        raise InputError("is no scope of a mask", key="scope", value=scope, hint=f"one of {', '.join(SCOPES)}")
    if scope != "row":
        return _largest(magnitude.reshape(-1), round(pattern * magnitude.numel())).view_as(magnitude)
    columns = magnitude.shape[1]
    dropped = round(pattern * columns)
    if dropped in (0, columns):
        return torch.full_like(magnitude, dropped == 0, dtype=torch.bool)
    threshold = magnitude.kthvalue(dropped, dim=1, keepdim=True).values
    keep, ties = magnitude > threshold, magnitude == threshold
    missing = (columns - dropped) - keep.sum(1, keepdim=True)
    return keep | (ties & (ties.cumsum(1) <= missing))


def _n_of_m(magnitude: Tensor, n: int, m: int) -> Tensor:
    rows, columns = magnitude.shape
    short = -columns % m
    padded = torch.nn.functional.pad(magnitude, (0, short), value=-1.0).view(rows, -1, m)
    best = padded.sort(dim=2, descending=True, stable=True).indices[..., :n]
    keep = torch.zeros(padded.shape, dtype=torch.bool, device=magnitude.device).scatter_(2, best, True)
    return keep.view(rows, -1)[:, :columns]


def global_threshold(weights: Mapping[str, Tensor], sparsity: float | str) -> tuple[float, dict[str, int]]:
    """The magnitude below which the fraction `sparsity` of all weights lies, and {name: how many weights are kept}.

    Two passes of a histogram over the bits of the magnitudes (which order like the numbers), so that no copy of all
    weights is ever made. Weights equal to the threshold are kept in the order of the mapping until the count is exact.
    """
    pattern = parse_sparsity(sparsity)
    if isinstance(pattern, tuple):
        raise InputError(
            "has no global mask", key="sparsity", value=sparsity, hint="an N:M pattern is local: leave out scope"
        )
    total = sum(w.numel() for w in weights.values())
    dropped = round(pattern * total)
    if dropped == 0:
        return -1.0, {name: w.numel() for name, w in weights.items()}

    def bits(weight: Tensor) -> Tensor:
        return weight.detach().abs().float().reshape(-1).view(torch.int32)

    counts = sum(torch.bincount(bits(w) >> 16, minlength=1 << 15).cpu() for w in weights.values())
    assert isinstance(counts, Tensor)
    high = int((counts.cumsum(0) >= dropped).nonzero()[0])
    below = int(counts[:high].sum())
    inner = torch.zeros(1 << 16, dtype=torch.int64)
    for w in weights.values():
        b = bits(w)
        inner += torch.bincount(b[(b >> 16) == high] & 0xFFFF, minlength=1 << 16).cpu()
    low = int((inner.cumsum(0) >= dropped - below).nonzero()[0])
    threshold = float(torch.tensor((high << 16) | low, dtype=torch.int32).view(torch.float32))
    above = {name: int((w.detach().abs().float() > threshold).sum()) for name, w in weights.items()}
    spare, kept = total - dropped - sum(above.values()), {}
    for name, w in weights.items():
        ties = min(spare, int((w.detach().abs().float() == threshold).sum()))
        kept[name] = above[name] + ties
        spare -= ties
    return threshold, kept
