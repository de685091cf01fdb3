"""The checks of `benchmarks/gpu_check.sh`; see there. Exit code 1 where a result is wrong, 2 where there is no GPU."""

from __future__ import annotations

import argparse
import copy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simkit import measure
from simkit.errors import InputError
from simkit.measure_machine import Machine, machine, versions
from simkit.measure_store import Store, quantiles
from simkit.measure_timing import Timer


@dataclass(slots=True)
class Check:
    """Where the checks run, what they found. rows: for the table; wrong: what is not as it must be."""

    host: Machine
    software: str
    timer: Timer
    dry: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return self.host.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def say(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def holds(self, what: str, good: bool, detail: str = "") -> None:
        """Notes a correctness result."""
        self.say(f"  {'ok   ' if good else 'WRONG'} {what}{f' ({detail})' if detail else ''}")
        if not good:
            self.wrong.append(what)

    def row(self, name: str, metric: str, values: list[float], *, notes: str = "", **fields: Any) -> float:
        """A row of the table; answers with its median."""
        middle, low, high = quantiles(values)
        said = {"id": name, "source": f"gpu_check on {self.host.name}", "where": self.host.title, **fields}
        said |= {"metric": metric, "value": middle, "p10": low, "p90": high, "repeats": len(values)}
        said |= {"date": self.host.date, "software": self.software, "load": self.host.load(), "notes": notes}
        self.rows.append(said)
        return middle

    def time(self, name: str, call: Callable[[], object], *, notes: str = "", **fields: Any) -> float:
        """Seconds of a call, as a row."""
        return self.row(name, "time_s", self.timer.samples(call), notes=notes, **{"device": self.host.name, **fields})


# -- SALR ----------------------------------------------------------------------------------------------------------


def salr(check: Check) -> None:
    """SALR against the dense product of the library and, on a GPU, against 2:4 weights."""
    from simkit.kernels import convert

    shapes = ((512, 512),) if check.dry else ((4096, 4096), (11008, 4096), (4096, 11008))
    batches = (1, 8) if check.dry else (1, 4, 16, 64, 256, 2048)
    for n, k in shapes:
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(k, n, bias=False)).to(check.device, check.dtype)
        pruned = convert(copy.deepcopy(dense), method="salr", sparsity=0.5, rank=16).to(check.device)
        structured = _two_of_four(check, dense[0].weight.detach())
        for m in batches:
            _salr_at(check, dense, pruned, structured, (m, n, k))


def _salr_at(check: Check, dense: nn.Module, pruned: nn.Module, structured: Any, shape: tuple[int, int, int]) -> None:
    """One shape: m rows of input, n outputs, k inputs."""
    m, n, k = shape
    x = torch.randn(m, k, device=check.device, dtype=check.dtype)
    fields = {"op": "gemm", "dtype": _name(check.dtype), "batch": 1, "m": m, "n": n, "k": k}
    name = f"{m}x{n}x{k}"
    with torch.inference_mode():
        _salr_right(check, pruned, x, f"salr {name}")
        plain = check.time(f"salr/dense/{name}", lambda: dense(x), **fields)
        ours = check.time(f"salr/salr/{name}", lambda: pruned(x), **fields, sparsity=0.5, engine="salr")
        line = f"  {name}: dense {plain * 1e6:.1f} us, SALR {ours * 1e6:.1f} us, {plain / ours:.2f}x"
        if structured is not None:
            call = check.time
            half = call(f"salr/2:4/{name}", lambda: nn.functional.linear(x, structured), **fields, sparsity="2:4")
            line += f"; 2:4 {half * 1e6:.1f} us, {plain / half:.2f}x"
    check.say(line)


def _salr_right(check: Check, pruned: nn.Module, x: torch.Tensor, what: str) -> None:
    """The fast path against the dense matrix that the layer says it stands for."""
    layer = pruned[0] if isinstance(pruned, nn.Sequential) else pruned
    merged = layer.merge()
    expected = nn.functional.linear(x.float(), merged.weight.to(x.device).float())
    error = float((pruned(x).float() - expected).norm() / expected.norm())
    check.holds(what, error < (1e-5 if check.dtype == torch.float32 else 2e-2), f"relative error {error:.1e}")


def _two_of_four(check: Check, weight: torch.Tensor) -> Any:
    """The weight with two of four kept, in the library's format; None where it has none for this device."""
    if check.device != "cuda":
        return None
    try:
        groups = weight.view(-1, 4)
        kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2, dim=1).indices, 1.0)
        return torch.sparse.to_sparse_semi_structured((groups * kept).view_as(weight))
    except (RuntimeError, NotImplementedError) as error:
        check.say(f"  no 2:4 on this device: {error}")
        return None


# -- adapters ------------------------------------------------------------------------------------------------------


def adapters(check: Check) -> None:
    """A step of LoRA and of LoRA-FA on the same stack of linear layers: time, and the peak of allocated memory."""
    from simkit.kernels import convert

    width, layers, tokens = (64, 2, 128) if check.dry else (4096, 8, 4096)
    found: dict[str, tuple[float, float]] = {}
    for method in ("lora", "lora-fa"):
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width, bias=False), nn.GELU())]
        model = convert(nn.Sequential(*parts), method=method, rank=16).to(check.device, check.dtype)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-4)
        x = torch.randn(tokens, width, device=check.device, dtype=check.dtype)

        def step(model: nn.Module = model, optimizer: Any = optimizer, x: torch.Tensor = x) -> None:
            model(x).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        notes = f"training step of {layers} layers of width {width}, {tokens} tokens, rank 16"
        seconds = check.time(f"adapters/{method}/step", step, op=f"step_{method}", notes=notes)
        found[method] = (seconds, _peak_bytes(check, model, step, x))
    (lora_s, lora_b), (fa_s, fa_b) = found["lora"], found["lora-fa"]
    check.say(f"  step: LoRA {lora_s * 1e3:.2f} ms, LoRA-FA {fa_s * 1e3:.2f} ms, {lora_s / fa_s:.2f}x")
    check.say(f"  memory: LoRA {lora_b / 2**20:.1f} MiB, LoRA-FA {fa_b / 2**20:.1f} MiB, {lora_b / fa_b:.2f}x")
    check.holds("LoRA-FA keeps less than LoRA", fa_b < lora_b)


def _peak_bytes(check: Check, model: nn.Module, step: Callable[[], None], x: torch.Tensor) -> float:
    """Peak of allocated memory of a step; on a CPU the bytes saved for the backward pass."""
    if check.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated())
    held: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        held[t.untyped_storage().data_ptr()] = t
        return t

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).float().pow(2).mean()
        return float(sum(t.untyped_storage().nbytes() for at, t in held.items() if at not in own))


# -- compressors ---------------------------------------------------------------------------------------------------


class Bucket:
    """Gradients as DDP hands them to a hook."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        self._parameters = [nn.Parameter(torch.zeros(s, device=device)) for s in shapes]
        self._buffer = torch.randn(sum(p.numel() for p in self._parameters), device=device)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        at, found = 0, []
        for p in self._parameters:
            found.append(self._buffer[at : at + p.numel()].view(p.shape))
            at += p.numel()
        return found


def compressors(check: Check) -> None:
    """Every method on one rank: what compression and decompression cost, and that what comes back is finite."""
    from simkit.kernels.compressors import make_hook, methods

    width, layers = (64, 2) if check.dry else (2048, 6)
    shapes: list[tuple[int, ...]] = [s for _ in range(layers) for s in ((width, width), (4 * width, width), (width,))]
    for method in methods():
        bucket = Bucket(shapes, check.device)
        state, hook = make_hook(method, rank=4, density=0.01)

        def run(state: Any = state, hook: Any = hook, bucket: Bucket = bucket) -> Any:
            return hook(state, bucket).wait()

        run()
        check.holds(f"{method} answers with finite gradients", bool(torch.isfinite(bucket.buffer()).all()))
        notes = "one rank, compression and back"
        seconds = check.time(f"compressors/{method}", run, op=f"compress_{method}", notes=notes)
        elements = bucket.buffer().numel()
        check.say(f"  {method}: {seconds * 1e3:.3f} ms for {elements / 1e6:.2f} M elements, {state.wire_bytes} bytes")


# -- the rest ------------------------------------------------------------------------------------------------------


def calibration(check: Check, out: Path) -> list[dict[str, str]]:
    """`simkit measure operators --quick`: products, attention, streams; answers with its rows."""
    options = measure.Options(out=out, device=check.device, quick=True, threads=check.host.threads)
    done = measure.measure("operators", options, progress=lambda what, n, of: None)
    check.say(f"  measured {done.measured}, kept {done.kept}, skipped {len(done.skipped)}")
    return Store(done.files[0]).rows


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _steps(check: Check) -> Iterator[tuple[str, Callable[[Check], None]]]:
    yield "SALR against dense and 2:4", salr
    yield "LoRA-FA against LoRA", adapters
    yield "gradient compressors", compressors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="every step on the CPU with small shapes")
    parser.add_argument("--out", default="measured", help="folder for the result (default: measured)")
    args = parser.parse_args()
    begin, out = time.monotonic(), Path(args.out)
    options = measure.Options(out=out, device="cpu" if args.dry_run else "cuda", threads=1 if args.dry_run else 0)
    try:
        host = machine(options)
    except InputError as error:
        sys.stderr.write(f"gpu_check: {error}\n")
        return 2
    timer = Timer(torch, host.device, quick=True)
    check = Check(host, versions(host.device), timer, args.dry_run)
    check.say(f"{host.title}; {check.software}{' - a dry run, no figure is of a GPU' if args.dry_run else ''}")
    for title, step in _steps(check):
        check.say(title)
        try:
            step(check)
        except (ImportError, InputError) as error:
            check.say(f"  not there: {error}")
        except Exception:
            check.say(traceback.format_exc(limit=3))
            check.wrong.append(f"{title} failed")
    check.say("calibration rows")
    rows = calibration(check, out)
    table = Store(out / f"gpu_check_{host.name}.csv")
    table.rows.clear()
    table.add([*rows, *check.rows])
    check.say(f"wrote {table.path}: {len(table)} rows, {time.monotonic() - begin:.0f} s")
    for what in check.wrong:
        check.say(f"WRONG: {what}")
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
