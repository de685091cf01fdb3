"""What autograd keeps for the backward pass: counted on a real run, and by formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from simkit.errors import unknown

METHODS = ("lora", "lora-fa")


class SavedBytes:
    """Counts, in ``with SavedBytes(model) as saved: loss = …``, the bytes of the tensors kept for the backward pass.

    Every storage counts once, whole, however many tensors share it; parameters and buffers of `model` do not count, nor
    do sparse tensors. `nbytes` is the sum, `tensors` the number of storages. References are held until the end, since a
    freed address would be counted once for two tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        held: Iterable[torch.Tensor] = (*model.parameters(), *model.buffers())
        self._ours = {t.untyped_storage().data_ptr() for t in held}
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks: Any = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout == torch.strided:
            at = tensor.untyped_storage().data_ptr()
            if at and at not in self._ours:
                self._seen[at] = tensor
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes kept so far."""
        return sum(t.untyped_storage().nbytes() for t in self._seen.values())

    @property
    def tensors(self) -> int:
        """Storages kept so far."""
        return len(self._seen)

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


@dataclass(frozen=True, slots=True)
class AdaptedInput:
    """A tensor that adapted linear layers read. features: its last dimension; linears: how many layers read it (query,
    key and value read one); kept: whether another operation keeps it anyway (the output of scaled-dot-product
    attention, the input of a norm)."""

    features: int
    linears: int = 1
    kept: bool = False


def saved_bytes(
    method: str, inputs: Sequence[AdaptedInput], *, tokens: int, rank: int, element_bytes: int = 4
) -> int:
    """Bytes that adapters make autograd keep, without dropout and in one dtype.

        lora      tokens · element_bytes · (features of each input not kept anyway, shared ones once + rank · linears)
        lora-fa   tokens · element_bytes · rank · linears

    LoRA needs the input of the layer for the gradient of A; a frozen A and W need none, so what is left is A x. With
    dropout LoRA keeps besides, for each layer, the dropped input and its mask; LoRA-FA draws the mask again.
    Raises InputError for another method. Source: L. Zhang et al., arXiv 2308.03303.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    projected = sum(i.linears * rank for i in inputs)
    whole = sum(i.features for i in inputs if not i.kept) if method == "lora" else 0
    return tokens * element_bytes * (whole + projected)
