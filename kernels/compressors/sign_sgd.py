"""Sign-SGD with majority vote: s_w = sign(g_w); g <- sign(sum_w s_w), a tie is 0.

One bit per element, each tensor padded to words of 32, gathered from all ranks: N/32 bytes from each. The result is a
direction of -1, 0 and 1: the learning rate is the size of the step, some hundredths of that of SGD.

A sign of one bit has no zero, so an element that is 0 on every rank (the row of a word that nobody saw) would be pushed
one way for ever. Here a zero votes up on one half of the ranks and down on the other, and the halves swap every step:
such votes cancel at once where ranks are even in number, and over two steps where they are not.

With `momentum` each rank takes the sign of its running mean of gradients instead (Signum, section 3 of the paper), for
which it keeps one fp32 copy of them.

Packing: 8 bytes of 0 or 1 are one 64-bit word x; bits 56 to 63 of x · 0x0102040810204080 are those eight, as partial
products never meet. Counting: a table turns a byte back into a word of 8 counters, and words are added, up to 255 ranks
a round. No error feedback, as in the paper.
Sources: J. Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019.
"""

from __future__ import annotations

from typing import Any

import torch

from simkit.kernels.compressors._core import Bucket, Settings, State, flat_sizes

WORD = 32
GATHER_BITS = 0x0102040810204080
COUNTER_LIMIT = 255


def pack(bits: torch.Tensor) -> torch.Tensor:
    """uint8 of 0 and 1, a multiple of 8 of them -> uint8 with bit i of byte j = bits[8 j + i]."""
    words = bits.view(torch.int64) * GATHER_BITS
    return (words >> 56).to(torch.uint8)


def count(packed: torch.Tensor) -> torch.Tensor:
    """Votes (W, bytes) of W <= 255 ranks -> how many set each bit, uint8 (8 bytes,)."""
    table = _table(packed.device)
    total = table[packed[0].long()]
    for row in packed[1:]:
        total += table[row.long()]
    return total.view(torch.uint8)


def _table(device: torch.device) -> torch.Tensor:
    bytes_ = torch.arange(256, dtype=torch.int64, device=device)
    bits = (bytes_[:, None] >> torch.arange(8, device=device)) & 1
    return bits.to(torch.uint8).contiguous().view(torch.int64).flatten()


class Method(State):
    """Sends 4 ceil(n / 32) bytes of each tensor of n elements; keeps nothing, or with momentum its running mean."""

    def __init__(self, process_group: Any, settings: Settings) -> None:
        super().__init__(process_group, settings)
        self.means: dict[torch.Tensor, torch.Tensor] = {}

    def _voted(self, param: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """What the sign is taken of."""
        beta = self.settings.momentum
        if not beta:
            return view
        mean = self.means.get(param)
        if mean is None:
            mean = self.means[param] = torch.zeros_like(view, dtype=torch.float32)
        return mean.mul_(beta).add_(view, alpha=1.0 - beta)

    def exchange(self, bucket: Bucket) -> Any:
        """Pack, gather, count."""
        begins = flat_sizes([-(-v.numel() // WORD) * WORD for v in bucket.views])
        with self.timed():
            bits = torch.zeros(begins[-1], dtype=torch.uint8, device=bucket.buffer.device)
            zero_is_up = (self.group.rank + self.step) % 2 == 0
            for param, view, at in zip(bucket.params, bucket.views, begins, strict=False):
                value = self._voted(param, view)
                vote = value.ge(0) if zero_is_up else value.gt(0)
                bits[at : at + view.numel()] = vote
            packed = pack(bits)
        future, votes = self.gather(packed)

        def decode(done: Any) -> torch.Tensor:
            done.value()
            with self.timed():
                total = sum(count(part).to(torch.int32) for part in votes.split(COUNTER_LIMIT))
                vote = torch.sign(2 * total - self.group.size)
                for view, at in zip(bucket.views, begins, strict=False):
                    view.copy_(vote[at : at + view.numel()])
            return bucket.buffer

        return future.then(decode)
