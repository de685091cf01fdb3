"""Do compressed gradients train as well as plain ones in the same steps? A small CNN and a small transformer.

    python benchmarks/compressor_convergence.py --out benchmarks/compressor_convergence.json

Ranks live in one process (`LocalGroup`): the same operators as DDP hooks, several buckets, real messages. The
CNN tells ten drawn patterns apart, shifted and under noise; the transformer reads modules of Python's own library, by
character. All methods see the same batches, initial values and number of steps; a run ends with the loss on data that
no rank trained on. Learning rates are those of `tasks`: one
for S-SGD, which Top-k, Power-SGD and ACP-SGD take over as it is, and one for Sign-SGD, whose step has another meaning.
The noise is the standard deviation of S-SGD over seeds. Needs the extra `kernels`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simkit.kernels.compressors import LocalGroup, exchange, fuse, make_hook

METHODS = ("s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd")
BUCKET_MB = 0.02
WARMUP_SHARE = 0.05
"""Share of the steps that Top-k, Power-SGD and ACP-SGD send uncompressed, as their authors advise."""
CONTEXT = 32


class Patterns:
    """Ten patterns of 16 x 16, moved by up to 3 pixels around the edge, under 1.5 times as much fresh noise;
    a tenth of the labels is drawn anew."""

    classes, side, count = 10, 16, 8192

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        coarse = torch.randn(self.classes, 1, 6, 6, generator=generator)
        smooth = nn.functional.interpolate(coarse, size=self.side, mode="bicubic")
        patterns = (smooth / smooth.std(dim=(1, 2, 3), keepdim=True)).squeeze(1)
        self.y = torch.randint(self.classes, (self.count,), generator=generator)
        shifts = torch.randint(-3, 4, (self.count, 2), generator=generator).tolist()
        moved = [torch.roll(patterns[c], s, (0, 1)) for c, s in zip(self.y.tolist(), shifts, strict=True)]
        self.x = torch.stack(moved).unsqueeze(1)
        wrong = torch.rand(self.count, generator=generator) < 0.1
        self.y[wrong] = torch.randint(self.classes, (int(wrong.sum()),), generator=generator)

    def batch(self, size: int, generator: torch.Generator, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.count // 2
        at = torch.randint(half, (size,), generator=generator) + half * held_out
        x = self.x[at]
        return x + 1.5 * torch.randn(x.shape, generator=generator), self.y[at]


class Source:
    """Characters of Python's own library: the first 90 % to train on, the rest held out."""

    def __init__(self) -> None:
        files = [Path(os.__file__).with_name(f"{n}.py") for n in ("argparse", "ast", "inspect", "typing")]
        text = "".join(f.read_text(encoding="utf-8") for f in files)
        self.chars = sorted(set(text))
        place = {c: i for i, c in enumerate(self.chars)}
        codes = torch.tensor([place[c] for c in text])
        cut = int(0.9 * len(codes))
        self.parts = codes[:cut], codes[cut:]

    def batch(self, size: int, generator: torch.Generator, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        codes = self.parts[held_out]
        starts = torch.randint(len(codes) - CONTEXT - 1, (size,), generator=generator).tolist()
        rows = torch.stack([codes[s : s + CONTEXT + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]


def cnn() -> nn.Module:
    """Three convolutions with group norm: 15 thousand parameters."""
    layers: list[nn.Module] = []
    for into, out in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


class Transformer(nn.Module):
    """Two causal pre-norm blocks of width 64."""

    def __init__(self, vocab: int, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(CONTEXT, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.embed(x) + self.place, mask=self.mask, is_causal=True)
        return self.head(self.norm(h)).flatten(0, 1)


@dataclass(frozen=True)
class Task:
    """A model with its data. lr: of SGD, sign_lr: of Sign-SGD; both with momentum 0.9."""

    net: Callable[[], nn.Module]
    batch: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    held_out: dict[str, Any]
    size: int
    held_out_size: int
    steps: int
    lr: float
    sign_lr: float
    density: float
    rank: int = 4


def tasks() -> dict[str, Task]:
    """By name."""
    source = Source()
    return {
        "cnn": Task(cnn, Patterns().batch, {"held_out": True}, 16, 4096, 600, 0.05, 0.003, 0.05),
        "transformer": Task(
            lambda: Transformer(len(source.chars)), source.batch, {"held_out": True}, 8, 256, 400, 0.3, 0.003, 0.05
        ),
    }


class Ranks:
    """`size` ranks inside this process, which hold one model in common as their replicas would be equal."""

    def __init__(self, params: list[torch.Tensor], method: str, size: int, **settings: Any) -> None:
        groups = LocalGroup.ranks(size)
        self.states = [make_hook(method, group, **settings)[0] for group in groups]
        self.buckets = [fuse(params, BUCKET_MB * 2**20) for _ in range(size)]

    def load(self, rank: int) -> None:
        """What stands in ``.grad`` is this rank's."""
        for bucket in self.buckets[rank]:
            bucket.load()

    def exchange(self) -> None:
        """All ranks exchange; ``.grad`` then is what the first one ends with, as it would be for all."""
        exchange(self.states, self.buckets)
        for bucket in self.buckets[0]:
            bucket.store()


def run(task: Task, method: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train; the loss on held-out data, wire bytes and seconds."""
    steps, size = arguments.steps or task.steps, arguments.ranks
    torch.manual_seed(seed)
    net = task.net()
    params = list(net.parameters())
    sign = method == "sign-sgd"
    warmup = 0 if sign or method == "s-sgd" else int(WARMUP_SHARE * steps)
    settings = {"rank": task.rank, "density": task.density, "momentum": 0.9 if sign else 0.0}
    ranks = Ranks(params, method, size, warmup_steps=warmup, seed=seed, **settings)
    optimizer = torch.optim.SGD(params, lr=task.sign_lr if sign else task.lr, momentum=0.0 if sign else 0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / steps)))
    generators = [torch.Generator().manual_seed(1000 * seed + r) for r in range(size)]
    begin, curve, wire = time.perf_counter(), [], 0
    for step in range(steps):
        total = 0.0
        for r in range(size):
            x, y = task.batch(task.size, generators[r])
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y.flatten())
            loss.backward()
            total += loss.item() / size
            ranks.load(r)
        ranks.exchange()
        optimizer.step()
        schedule.step()
        wire += ranks.states[0].wire_bytes
        if step % max(1, steps // 20) == 0:
            curve.append(round(total, 4))
    net.eval()
    with torch.no_grad():
        x, y = task.batch(task.held_out_size, torch.Generator().manual_seed(99), **task.held_out)
        logits = net(x)
        loss = nn.functional.cross_entropy(logits, y.flatten()).item()
        accuracy = (logits.argmax(-1) == y.flatten()).float().mean().item()
    return {
        "loss": loss, "accuracy": accuracy, "curve": curve, "steps": steps, "messages": ranks.states[0].messages,
        "wire_bytes_a_step": wire / steps, "plain_bytes_a_step": 4 * sum(p.numel() for p in params),
        "seconds": round(time.perf_counter() - begin, 2),
    }  # fmt: skip


def summary(found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Mean held-out loss of each method beside that of S-SGD, in units of its standard deviation over seeds."""
    out: dict[str, Any] = {"ranks": arguments.ranks, "models": {}}
    for name, by_method in found.items():
        plain = [r["loss"] for r in by_method.get("s-sgd", [])]
        noise = statistics.stdev(plain) if len(plain) > 1 else float("nan")
        rows = {}
        for method, runs in by_method.items():
            losses = [r["loss"] for r in runs]
            mean = statistics.mean(losses)
            rows[method] = {
                "loss": round(mean, 4), "losses": [round(v, 4) for v in losses],
                "accuracy": round(statistics.mean(r["accuracy"] for r in runs), 4),
                "worse_by_sigmas": round((mean - statistics.mean(plain)) / noise, 2) if len(plain) > 1 else None,
                "bytes_saved": round(runs[0]["plain_bytes_a_step"] / runs[0]["wire_bytes_a_step"], 1),
                "curve": runs[0]["curve"],
            }
        out["models"][name] = {"steps": runs[0]["steps"], "noise": round(noise, 4), "methods": rows}
    return out


def main() -> None:
    """Start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="cnn,transformer")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of those of the tasks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    chosen = {n: t for n, t in tasks().items() if n in arguments.models.split(",")}
    for seed, (name, task) in itertools.product(range(arguments.seeds), chosen.items()):
        for method in arguments.methods.split(","):
            result = run(task, method, seed, arguments)
            found.setdefault(name, {}).setdefault(method, []).append(result)
            shown = {k: v for k, v in result.items() if k != "curve"}
            print(name, method, seed, shown, file=sys.stderr, flush=True)
    result = summary(found, arguments)
    for name, model in result["models"].items():
        print(f"{name}: {arguments.ranks} ranks, {model['steps']} steps, noise of S-SGD {model['noise']:.4f}")
        for method, row in model["methods"].items():
            print(
                f"  {method:10} loss {row['loss']:.4f}  accuracy {row['accuracy']:.3f}  "
                f"worse by {row['worse_by_sigmas']} sigma  {row['bytes_saved']} x fewer bytes"
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
