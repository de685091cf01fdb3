"""Suite ``device``: what the profile of a machine needs: streaming rate, matrix products, the cost of a launch.

Rows: ``memory`` (copy, scale and sum of buffers that no cache holds; a tiny one for the launch) and square ``gemm``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simkit.measure import Case, Options, Samples, Skipped
from simkit.measure_machine import Machine, torch_or_complain
from simkit.measure_timing import Timer

TABLE = "kernel"
TAKES: tuple[str, ...] = ()
STREAM_BYTES = 256e6
"""Bytes a streaming kernel moves: what `simkit calibrate` takes as too large for a cache."""
TINY = 64
SQUARES, QUICK_SQUARES = (256, 512, 1024, 2048), (256, 512, 1024)
CUDA_SQUARES, QUICK_CUDA_SQUARES = (1024, 2048, 4096, 8192), (1024, 2048, 4096)


def dtypes(host: Machine) -> tuple[str, ...]:
    """The arithmetic that is measured: fp32 on a CPU; bf16, fp16 and fp32 on a GPU."""
    return ("fp32",) if host.device == "cpu" else ("bf16", "fp16", "fp32")


def of_dtype(torch: Any, name: str) -> Any:
    """The torch dtype of a name of the vocabulary."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def cases(host: Machine, options: Options) -> list[Case]:
    """The benchmarks of a device."""
    torch = torch_or_complain()
    timer = Timer(torch, host.device, quick=options.quick, cpu_time=host.device == "cpu" and host.threads == 1)
    sizes = {
        ("cpu", False): SQUARES,
        ("cpu", True): QUICK_SQUARES,
        ("cuda", False): CUDA_SQUARES,
        ("cuda", True): QUICK_CUDA_SQUARES,
    }[host.device, options.quick]
    products = [(dtype, 1, n, n, n) for dtype in dtypes(host) for n in sizes]
    return [*_streams(torch, timer, host), tiny(torch, timer, host), *gemms(torch, timer, host, products)]


def _streams(torch: Any, timer: Timer, host: Machine) -> list[Case]:
    """copy moves 2 bytes per byte of a buffer, scale (in place) 2, add 3."""

    def buffers(count: int, passes: int) -> list[Any]:
        n = int(STREAM_BYTES / passes / 4)
        return [torch.ones(n, device=host.device) for _ in range(count)]

    def copy() -> Callable[[], object]:
        source, target = buffers(2, 2)
        return lambda: target.copy_(source)

    def scale() -> Callable[[], object]:
        (x,) = buffers(1, 2)
        return lambda: x.mul_(1.0)

    def add() -> Callable[[], object]:
        x, y, out = buffers(3, 3)
        return lambda: torch.add(x, y, out=out)

    return [
        memory_case(timer, host, f"memory/{name}", STREAM_BYTES, make)
        for name, make in (("copy", copy), ("scale", scale), ("add", add))
    ]


def tiny(torch: Any, timer: Timer, host: Machine) -> Case:
    """An operator of 64 elements: nothing but its launch."""

    def make() -> Callable[[], object]:
        x = torch.ones(TINY, device=host.device)
        return lambda: x.mul_(1.0)

    return memory_case(timer, host, "memory/launch", TINY * 8.0, make, notes="launch")


def memory_case(
    timer: Timer,
    host: Machine,
    name: str,
    nbytes: float,
    make: Callable[[], Callable[[], object]],
    notes: str = "",
    engine: str = "",
) -> Case:
    """A streaming operator in fp32; buffers are made when it is its turn and freed after it."""
    fields = {"device": host.name, "op": "memory", "dtype": "fp32", "bytes": int(nbytes), "engine": engine}
    return Case(id=name, fields=fields, run=lambda: timed(timer, make), notes=notes)


def timed(timer: Timer, make: Callable[[], Callable[[], object]]) -> Samples:
    """Seconds of the call that `make` returns. Raises Skipped where the device has not the memory for it."""
    try:
        return Samples({"time_s": timer.samples(make())})
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise Skipped("not enough memory") from None


def gemms(torch: Any, timer: Timer, host: Machine, shapes: Iterable[tuple[str, int, int, int, int]]) -> list[Case]:
    """out[m,n] = in[m,k] w[n,k]^T, `batch` copies, as a linear layer multiplies. shapes: (dtype, batch, m, n, k)."""
    return [_gemm(torch, timer, host, *shape) for shape in dict.fromkeys(shapes)]


def _gemm(torch: Any, timer: Timer, host: Machine, dtype: str, batch: int, m: int, n: int, k: int) -> Case:
    def make() -> Callable[[], object]:
        kind, lead = of_dtype(torch, dtype), (batch,) if batch > 1 else ()
        x = torch.randn((*lead, m, k), device=host.device).to(kind)
        w = torch.randn((*lead, n, k), device=host.device).to(kind)
        out = torch.empty((*lead, m, n), device=host.device, dtype=kind)
        return lambda: torch.matmul(x, w.mT, out=out)

    fields = {"device": host.name, "op": "gemm", "dtype": dtype, "batch": batch, "m": m, "n": n, "k": k}
    name = f"gemm/{dtype}/{f'{batch}x' if batch > 1 else ''}{m}x{n}x{k}"
    return Case(id=name, fields=fields, run=lambda: timed(timer, make))
