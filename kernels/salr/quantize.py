"""Holding the kept values in fewer bits: ``int8`` and ``nf4``, both in blocks of 64 with one fp32 scale.

nf4 is the 4-bit code whose 16 levels are quantiles of a normal distribution scaled to [-1, 1] (QLoRA, arXiv 2305.14314,
appendix E); two codes share a byte. The kernels read plain values, so a quantised layer unpacks them for each call: it
saves memory, not time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simkit.errors import unknown

BLOCK = 64
KINDS = ("none", "int8", "nf4")
# fmt: off
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


class Packed(NamedTuple):
    """Values as they are held: themselves without scales; int8 with scales [blocks]; uint8 pairs of nf4 codes with
    scales."""

    values: Tensor
    scales: Tensor | None


def pack(values: Tensor, kind: str) -> Packed:
    """Raises InputError for a kind that is not one of `KINDS`."""
    if kind not in KINDS:
        raise unknown("quantisation", kind, KINDS, key="quant")
    if kind == "none":
        return Packed(values, None)
    blocks = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    peaks = blocks.abs().amax(1, keepdim=True)
    unit = blocks / peaks.clamp_min(torch.finfo(torch.float32).tiny)
    if kind == "int8":
        return Packed((unit * 127).round().to(torch.int8).view(-1), peaks.view(-1))
    levels = torch.tensor(LEVELS, device=values.device)
    edges = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(unit, edges).to(torch.uint8).view(-1, 2)
    return Packed(codes[:, 0] | (codes[:, 1] << 4), peaks.view(-1))


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, up to a block longer than what was packed."""
    if packed.scales is None:
        return packed.values
    if packed.values.dtype == torch.int8:
        unit = packed.values.float() / 127
    else:
        codes = torch.stack([packed.values & 15, packed.values >> 4], dim=1).view(-1).long()
        unit = torch.tensor(LEVELS, device=codes.device)[codes]
    return (unit.view(-1, BLOCK) * packed.scales[:, None]).view(-1).to(dtype)
