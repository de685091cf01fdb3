"""What the methods share: the view of a bucket, the counts of a step, the life of a hook."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from simkit import plugins
from simkit.errors import InputError
from simkit.kernels.compressors._group import Group, LocalGroup, completed

PACKAGE = "simkit.kernels.compressors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a method may be told.

    rank          columns of the factors of Power-SGD and ACP-SGD
    density       share of the elements that Top-k keeps
    warmup_steps  steps at the start that exchange plain gradients
    seed          of the first factors; the same on every rank
    selection     of Top-k: ``sampled`` (threshold from a sample) or ``exact`` (torch.topk); both keep the same elements
    error_feedback  whether the compression error is kept and added to the next gradient, where the method has one
    momentum      of Sign-SGD: the sign is taken of m <- momentum m + (1 - momentum) g, each rank its own (Signum)
    min_rate      Power-SGD factors a matrix only where rows·cols > (rows + cols)·rank·min_rate
    Raises InputError for a value out of its range.
    """

    rank: int = 4
    density: float = 0.01
    warmup_steps: int = 0
    seed: int = 0
    selection: str = "sampled"
    error_feedback: bool = True
    momentum: float = 0.0
    min_rate: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InputError("is below 1", key="rank", value=self.rank)
        if not 0.0 < self.density <= 1.0:
            raise InputError("is not in (0, 1]", key="density", value=self.density)
        if self.warmup_steps < 0:
            raise InputError("is below 0", key="warmup_steps", value=self.warmup_steps)
        if not 0.0 <= self.momentum < 1.0:
            raise InputError("is not in [0, 1)", key="momentum", value=self.momentum)
        if self.selection not in ("sampled", "exact"):
            raise InputError("is neither 'sampled' nor 'exact'", key="selection", value=self.selection)


class GradBucket(Protocol):
    """The part of torch.distributed.GradBucket that is used; the optimizer wrapper brings its own."""

    def index(self) -> int: ...
    def is_last(self) -> bool: ...
    def buffer(self) -> torch.Tensor: ...
    def gradients(self) -> list[torch.Tensor]: ...
    def parameters(self) -> list[torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together. views: each as a flat slice of `buffer`; shapes: those of the parameters."""

    buffer: torch.Tensor
    params: tuple[torch.Tensor, ...]
    views: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    last: bool

    @classmethod
    def of(cls, bucket: GradBucket) -> Bucket:
        """Slices come from the buffer: they are contiguous even where a gradient has another memory format."""
        buffer, params = bucket.buffer(), tuple(bucket.parameters())
        begin = buffer.storage_offset()
        offsets = tuple(g.storage_offset() - begin for g in bucket.gradients())
        views = tuple(buffer[o : o + p.numel()] for o, p in zip(offsets, params, strict=True))
        return cls(buffer, params, views, offsets, bucket.is_last())


class State(ABC):
    """State of one method over one process group; what a hook is registered with.

    wire_bytes   bytes that this rank handed to collectives in the last step: the payload, whatever the algorithm
    messages     collectives of the last step
    seconds      wall seconds this rank spent compressing and decompressing in the last step (host; a GPU runs behind)
    cpu_seconds  the same in CPU time of the threads concerned, which leaves out preemption
    step         steps begun
    """

    waits = False
    """Whether taking in the last bucket waits for messages of other ranks."""

    def __init__(self, process_group: Any, settings: Settings) -> None:
        self.settings = settings
        self.group = process_group if isinstance(process_group, LocalGroup) else Group(process_group)
        self.step = 0
        self.wire_bytes = 0
        self.messages = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self._lock = threading.Lock()

    # --- what a method brings ----------------------------------------------------------------------------------------

    @abstractmethod
    def exchange(self, bucket: Bucket) -> Any:
        """Start the exchange; the future answers with bucket.buffer, holding the mean (or the vote) of all ranks."""

    # --- what they share ---------------------------------------------------------------------------------------------

    def __call__(self, bucket: GradBucket) -> Any:
        """One bucket of one step, in the order in which they become ready."""
        if bucket.index() == 0:
            self.step += 1
            self.wire_bytes, self.messages, self.seconds, self.cpu_seconds = 0, 0, 0.0, 0.0
        inner = Bucket.of(bucket)
        if self.step <= self.settings.warmup_steps or not inner.params:
            return self.plain(inner)
        return self.exchange(inner)

    def plain(self, bucket: Bucket) -> Any:
        """The mean of uncompressed gradients."""
        buffer = bucket.buffer
        with self.timed():
            buffer.div_(self.group.size)
        return self.reduce(buffer).then(lambda _: buffer)

    def reduce(self, flat: torch.Tensor) -> Any:
        """All-reduce (sum) in place, counted; no message for no bytes."""
        if not flat.numel():
            return completed([flat], flat.device)
        self.count(flat)
        return self.group.all_reduce(flat)

    def gather(self, flat: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """All-gather, counted by what this rank contributes."""
        self.count(flat)
        return self.group.all_gather(flat)

    def count(self, flat: torch.Tensor) -> None:
        """Add a message to the counts of the step."""
        self.wire_bytes += flat.numel() * flat.element_size()
        self.messages += 1

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds what runs inside to `seconds`. Callbacks of collectives run in threads of the backend."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
            with self._lock:
                self.seconds += wall
                self.cpu_seconds += cpu


def methods() -> tuple[str, ...]:
    """The keys of the methods."""
    return plugins.names(PACKAGE)


def make_state(method: str, process_group: Any = None, **settings: Any) -> State:
    """The state of a method. Raises InputError for an unknown method or a setting out of its range."""
    made: State = plugins.get(PACKAGE, method).Method(process_group, Settings(**settings))
    return made


def make_hook(
    method: str,
    process_group: Any = None,
    *,
    rank: int = 4,
    density: float = 0.01,
    warmup_steps: int = 0,
    seed: int = 0,
    **more: Any,
) -> tuple[State, Callable[[Any, Any], Any]]:
    """(state, hook) for ``ddp.register_comm_hook(state, hook)``.

    method: one of `methods()`. process_group: that of the DDP module, default the world. The other arguments are those
    of `Settings`, and must be the same on every rank. Gradients of 16 bits are compressed, and travel, in fp32.
    Raises InputError for an unknown method or a setting out of its range.
    """
    state = make_state(
        method, process_group, rank=rank, density=density, warmup_steps=warmup_steps, seed=seed, **more
    )
    return state, _hook


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations and takes no others than its own
    return state(bucket)


def flat_sizes(numels: Sequence[int]) -> list[int]:
    """Where each part of a message begins, and where the last one ends."""
    out = [0]
    for n in numels:
        out.append(out[-1] + n)
    return out
