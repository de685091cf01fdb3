"""Collectives that return futures: over a process group, over ranks inside this process, or over one rank."""

from __future__ import annotations

import threading
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


class LocalGroup:
    """One of `size` ranks inside this process: experiments without other processes or sockets.

        states = [make_hook("acp-sgd", group)[0] for group in LocalGroup.ranks(4)]

    `simkit.kernels.compressors.exchange` lets all of them take in their buckets. Collectives of a rank meet those of
    the others in the order in which they are issued; sums are taken in the order of ranks.
    """

    def __init__(self, rank: int, size: int, shared: _Meeting) -> None:
        self.rank, self.size, self._shared, self._issued = rank, size, shared, 0

    @classmethod
    def ranks(cls, size: int) -> list[LocalGroup]:
        """The groups of all ranks."""
        shared = _Meeting(size)
        return [cls(r, size, shared) for r in range(size)]

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Sum `tensor` over the ranks, in place."""

        def finish(tensors: list[torch.Tensor]) -> None:
            total = torch.stack(tensors).sum(0)
            for t in tensors:
                t.copy_(total)

        return self._shared.join(self.rank, self._next(), tensor, finish)

    def all_gather(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """(future, out) with out of shape (size, numel): what every rank gave, by rank."""
        out = tensor.new_empty((self.size, tensor.numel()))

        def finish(tensors: list[torch.Tensor]) -> None:
            torch.stack([t.flatten() for t in tensors], out=out)

        return self._shared.join(self.rank, self._next(), tensor, finish, own=True), out

    def _next(self) -> int:
        self._issued += 1
        return self._issued


class _Meeting:
    """Where the messages of all ranks with one number come together."""

    def __init__(self, size: int) -> None:
        self._size, self._lock = size, threading.Lock()
        self._waiting: dict[int, dict[int, tuple[torch.Tensor, Any, Any, bool]]] = {}

    def join(self, rank: int, number: int, tensor: torch.Tensor, finish: Any, own: bool = False) -> Any:
        """A future that is set once all ranks have joined; `finish` runs once, or for each rank if `own`."""
        future = new_future(tensor.device)
        with self._lock:
            here = self._waiting.setdefault(number, {})
            here[rank] = tensor, finish, future, own
            full = len(here) == self._size
            if full:
                del self._waiting[number]
        if full:
            ranks = [here[r] for r in range(self._size)]
            tensors = [t for t, _, _, _ in ranks]
            for _, each, _, _ in ranks if own else ranks[:1]:
                each(tensors)
            for _, _, done, _ in ranks:
                done.set_result(None)
        return future
