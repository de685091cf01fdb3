"""Compressed data parallelism without DistributedDataParallel: an optimizer that exchanges gradients, then steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from simkit.kernels.compressors._core import State, make_state

MIB = 1024 * 1024


class FlatBucket:
    """Gradients of some parameters side by side in one buffer (`GradBucket`)."""

    def __init__(self, index: int, last: bool, params: list[torch.Tensor]) -> None:
        self._index, self._last, self._params = index, last, params
        first = params[0]
        self._buffer = torch.empty(sum(p.numel() for p in params), dtype=first.dtype, device=first.device)
        parts = self._buffer.split([p.numel() for p in params])
        self._gradients = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        return self._params

    def load(self) -> None:
        """Gradients in; a parameter without one sends zeros, as another rank may have one."""
        for p, g in zip(self._params, self._gradients, strict=True):
            g.zero_() if p.grad is None else g.copy_(p.grad)

    def store(self) -> None:
        """Gradients out."""
        for p, g in zip(self._params, self._gradients, strict=True):
            if p.grad is None:
                p.grad = g.clone()
            else:
                p.grad.copy_(g)


def fuse(params: Sequence[torch.Tensor], limit_bytes: float) -> list[FlatBucket]:
    """Buckets of up to limit_bytes of gradients, of one dtype and device each, the last parameter first."""
    groups: list[list[torch.Tensor]] = []
    size = 0
    for p in reversed(params):
        nbytes = p.numel() * p.element_size()
        alike = bool(groups) and (p.dtype, p.device) == (groups[-1][0].dtype, groups[-1][0].device)
        if not alike or size + nbytes > limit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += nbytes
    return [FlatBucket(i, i == len(groups) - 1, g) for i, g in enumerate(groups)]


class CompressedOptimizer:
    """Wraps an optimizer: ``step()`` exchanges the gradients of all its parameters by `method`, then steps.

        optimizer = CompressedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "acp-sgd", rank=4)

    Every rank must hold the same parameters at the start (``broadcast_parameters``). bucket_mb: MiB of gradients in a
    message before compression, parameters in reverse order as in DDP; other settings as in `make_hook`. Buckets overlap
    with one another, not with back-propagation. `state` carries the counts.
    Raises InputError for an unknown method or a setting out of its range.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        method: str,
        process_group: Any = None,
        *,
        bucket_mb: float = 25.0,
        **settings: Any,
    ) -> None:
        self.optimizer = optimizer
        self.state = make_state(method, process_group, **settings)
        self._group = process_group
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._buckets = fuse(params, bucket_mb * MIB)

    def broadcast_parameters(self, source: int = 0) -> None:
        """Every rank takes the parameters of rank `source` of the world."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        for bucket in self._buckets:
            for p in bucket.parameters():
                torch.distributed.broadcast(p.detach(), source, group=self._group)

    def exchange(self) -> None:
        """Replace every gradient by that of all ranks."""
        futures = []
        for bucket in self._buckets:
            bucket.load()
            futures.append(self.state(bucket))
        for bucket, future in zip(self._buckets, futures, strict=True):
            future.wait()
            bucket.store()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, then step. A closure is evaluated first, once: gradients must be whole before they are sent."""
        loss = None
        if closure is not None:
            loss = closure()
        with torch.no_grad():
            self.exchange()
        self.optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer does it."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the wrapped optimizer, for learning-rate schedules."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups


def exchange(states: Sequence[State], buckets: Sequence[Sequence[FlatBucket]]) -> None:
    """All ranks of a `LocalGroup` exchange one step: states[r] takes in buckets[r].

    Bucket by bucket, rank by rank, in this thread; the last bucket in a thread for each rank where a method waits for
    the messages of others.
    """
    columns = list(zip(*(b[:-1] for b in buckets), strict=True))
    futures = [state(b) for column in columns for state, b in _pairs(states, column)]
    ends = [b[-1] for b in buckets]
    if not states[0].waits:
        futures += [state(b) for state, b in _pairs(states, ends)]
    else:
        with ThreadPoolExecutor(len(states)) as pool:
            futures += list(pool.map(lambda pair: pair[0](pair[1]), _pairs(states, ends)))
    for future in futures:
        future.wait()


def _pairs(states: Sequence[State], buckets: Sequence[FlatBucket]) -> list[tuple[State, FlatBucket]]:
    return list(zip(states, buckets, strict=True))
