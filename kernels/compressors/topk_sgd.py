"""Top-k SGD with error feedback.

    a = g + e;   S = the k largest |a_i|;   send (i, a_i) for i in S;   e <- a with S set to 0
    g <- (1/W) sum_w scatter(sent by w)          k = max(1, ceil(density n)) per tensor

One all-gather per bucket of k fp32 values and k int32 places from each rank.

Selection. ``exact`` is torch.topk over all magnitudes. ``sampled`` takes a threshold from a sample of 1 % that should
let 1.5 k elements through, and lets torch.topk choose among those. All that is above a threshold which at least k pass
holds the k largest, so both keep the same elements; where fewer than k pass, the exact way is taken instead.
Sources: A. Aji, K. Heafield, EMNLP 2017; Y. Lin et al., "Deep gradient compression", ICLR 2018 (sampling).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from simkit.kernels.compressors._core import Bucket, Settings, State

SAMPLE = 0.01
MARGIN = 1.5
"""How much more than wanted the sampled threshold aims at, before the exact cut: a choice that keeps misses rare."""
LEAST_SAMPLE = 1024
"""Smaller samples miss the threshold of a density of 1 % too often; a tensor of up to this size is not sampled."""


def kept(numel: int, density: float) -> int:
    """How many of numel >= 1 elements are sent."""
    return min(max(1, math.ceil(density * numel)), numel)


def exact(magnitude: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the k largest."""
    return torch.topk(magnitude, k, sorted=False).indices


def sampled(magnitude: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """Places of the k largest, found among those above a threshold from a sample."""
    numel = magnitude.numel()
    size = max(LEAST_SAMPLE, math.ceil(SAMPLE * numel))
    if size >= numel or MARGIN * k >= numel:
        return exact(magnitude, k)
    sample = magnitude[torch.randint(numel, (size,), generator=generator, device=magnitude.device)]
    through = min(size, math.ceil(MARGIN * k * size / numel) + 1)
    threshold = torch.topk(sample, through, sorted=False).values.min()
    places = torch.nonzero(magnitude > threshold).flatten()
    if places.numel() < k:
        return exact(magnitude, k)
    return places[exact(magnitude[places], k)]


class Method(State):
    """Sends 8 k bytes of each tensor; keeps one fp32 copy of the gradients."""

    def __init__(self, process_group: Any, settings: Settings) -> None:
        super().__init__(process_group, settings)
        self.errors: dict[torch.Tensor, torch.Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.settings.seed)
        return self._generators[device]

    def _select(self, total: torch.Tensor) -> torch.Tensor:
        magnitude, k = total.abs(), kept(total.numel(), self.settings.density)
        if self.settings.selection == "exact":
            return exact(magnitude, k)
        return sampled(magnitude, k, self._generator(total.device))

    def exchange(self, bucket: Bucket) -> Any:
        """Select, gather, scatter."""
        with self.timed():
            values, places = [], []
            for param, view, offset in zip(bucket.params, bucket.views, bucket.offsets, strict=True):
                if not view.numel():
                    continue
                total = self._total(param, view)
                at = self._select(total)
                values.append(total[at])
                places.append((at + offset).to(torch.int32))
                total[at] = 0.0
            picked = torch.cat(values) if values else bucket.buffer.new_empty(0, dtype=torch.float32)
            count = picked.numel()
            payload = torch.cat([picked.view(torch.int32), *places])
        future, gathered = self.gather(payload)

        def decode(done: Any) -> torch.Tensor:
            done.value()
            with self.timed():
                # Rank by rank: places of one rank are all different, so no two sums race and every rank adds alike.
                mean = bucket.buffer.zero_()
                for row in gathered:
                    share = row[:count].view(torch.float32) / self.group.size
                    mean.index_add_(0, row[count:].long(), share.to(mean.dtype))
            return bucket.buffer

        return future.then(decode)

    def _total(self, param: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Gradient and kept error in fp32; what is left of it after selection is the next error."""
        if not self.settings.error_feedback:
            return view.to(torch.float32, copy=True)
        error = self.errors.get(param)
        if error is None:
            error = self.errors[param] = torch.zeros_like(view, dtype=torch.float32)
        return error.add_(view)
