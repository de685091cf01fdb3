"""Collectives that return futures, over a process group or, where there is none, over one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def completed(value: Any, device: torch.device) -> Any:
    """A future that holds `value` already; on a GPU it carries the work queued on the current stream."""
    future = new_future(device)
    future.set_result(value)
    return future


def new_future(device: torch.device) -> Any:
    """An open future; for a GPU, whoever waits for it waits for the stream that set it."""
    return torch.futures.Future(devices=[device] if device.type == "cuda" else [])


class Group:
    """`size` ranks. Both collectives are asynchronous and answer with a future."""

    def __init__(self, process_group: Any = None) -> None:
        self._group = process_group
        self._ready = dist.is_available() and dist.is_initialized()
        self.size: int = dist.get_world_size(process_group) if self._ready else 1
        self.rank: int = dist.get_rank(process_group) if self._ready else 0

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Sum `tensor` over the ranks, in place."""
        if not self._ready:
            return completed([tensor], tensor.device)
        return dist.all_reduce(tensor, group=self._group, async_op=True).get_future()

    def all_gather(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """(future, out) with out of shape (size, numel): what every rank gave, by rank. `tensor` is flat."""
        if not self._ready:
            return completed([tensor], tensor.device), tensor.view(1, -1)
        out = tensor.new_empty((self.size, tensor.numel()))
        future = dist.all_gather(list(out), tensor, group=self._group, async_op=True).get_future()
        return future, out
