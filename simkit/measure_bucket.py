"""Gradients as DDP hands them to a hook, and a compressor that runs without a network, for timing it alone."""

from __future__ import annotations

from typing import Any


class Bucket:
    """The part of ``torch.distributed.GradBucket`` that the hooks use: one bucket, the last of its step."""

    def __init__(self, torch: Any, shapes: list[tuple[int, ...]], device: str) -> None:
        self._parameters = [torch.nn.Parameter(torch.zeros(s, device=device)) for s in shapes]
        self._buffer = torch.randn(sum(p.numel() for p in self._parameters), device=device)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Any:
        return self._buffer

    def parameters(self) -> list[Any]:
        return list(self._parameters)

    def gradients(self) -> list[Any]:
        """Views of the buffer, in the order of the parameters."""
        at, found = 0, []
        for p in self._parameters:
            found.append(self._buffer[at : at + p.numel()].view(p.shape))
            at += p.numel()
        return found


class Mirror:
    """A group of `size` ranks in which all others send what this one does; nothing travels."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def all_reduce(self, tensor: Any) -> Any:
        """The sum of `size` equal tensors, whose scale changes no time: the tensor as it is."""
        return _done([tensor], tensor)

    def all_gather(self, tensor: Any) -> tuple[Any, Any]:
        """(future, the tensor once per rank)."""
        return _done([tensor], tensor), tensor.expand(self.size, -1)


def _done(value: Any, tensor: Any) -> Any:
    from simkit.kernels.compressors._group import completed

    return completed(value, tensor.device)


def alone(method: str, ranks: int) -> tuple[Any, Any]:
    """(state, hook) of a compressor among `ranks` mirrored ranks."""
    from simkit.kernels.compressors import make_hook

    state, hook = make_hook(method, rank=4, density=0.01)
    state.group = Mirror(ranks)
    return state, hook
