"""A small language model, trained here in minutes, then fine-tuned by LoRA, LoRA-FA and SALR side by side.

    python benchmarks/finetune_small.py --out benchmarks/finetune_small.json

A causal transformer of characters learns modules of Python's own library, then each method tunes it on Python's
reference manual (`pydoc_data.topics`). All start from the same base, see the same batches, and take turns step by step
in one process, so that whatever else the machine does falls on all of them. Reported for each: held-out loss over the
steps; CPU seconds a step (forward, backward, optimizer; medians); bytes that autograd keeps for the backward pass,
counted on a run, beside the formula of `simkit.kernels.lora.saved_bytes`; bytes of weights, gradients, states.
Needs the extra `kernels`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from simkit.kernels import convert
from simkit.kernels.conversion import methods as known_methods
from simkit.kernels.lora import AdaptedInput, SavedBytes, saved_bytes
from simkit.kernels.lora_fa import LoRAFAAdamW

WIDTH, FFN, LAYERS, HEADS, CONTEXT, BATCH = 128, 512, 3, 4, 64, 8
MODULES = ("argparse", "ast", "inspect", "typing", "pathlib", "subprocess", "threading", "tarfile")
INPUTS = (AdaptedInput(WIDTH, 3), AdaptedInput(WIDTH, 1, kept=True), AdaptedInput(WIDTH), AdaptedInput(FFN))
"""What the adapted layers of a block read: q, k and v one tensor; o the output of attention, which attention keeps; up;
down."""


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, h = x.shape
        y = self.n1(x)
        q, k, v = (p(y).view(b, t, HEADS, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, h))
        return x + self.down(functional.gelu(self.up(self.n2(x))))


class Language(nn.Module):
    """Characters in, logits of the next one out."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, WIDTH), nn.Parameter(torch.randn(CONTEXT, WIDTH) / 50)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocab)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.blocks(self.embed(x) + self.place)))


class Texts:
    """Two texts as codes of one alphabet, each with its last tenth held out."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        code = "".join(Path(os.__file__).with_name(f"{n}.py").read_text(encoding="utf-8") for n in MODULES)
        manual = "\n".join(topics[k] for k in sorted(topics))
        chars = sorted(set(code) | set(manual))
        place = {c: i for i, c in enumerate(chars)}
        self.vocab = len(chars)
        self.codes = {n: torch.tensor([place[c] for c in t]) for n, t in (("code", code), ("manual", manual))}

    def batch(
        self, name: str, generator: torch.Generator, size: int = BATCH, held_out: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes = self.codes[name]
        cut = int(0.9 * len(codes))
        low, high = (cut, len(codes)) if held_out else (0, cut)
        starts = torch.randint(low, high - CONTEXT - 1, (size,), generator=generator).tolist()
        rows = torch.stack([codes[s : s + CONTEXT + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, nats a character."""
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out(model: nn.Module, texts: Texts, name: str) -> float:
    """Loss on the same 128 excerpts each time."""
    x, y = texts.batch(name, torch.Generator().manual_seed(99), 128, held_out=True)
    return round(loss_of(model, x, y).item(), 4)


def pretrain(texts: Texts, steps: int) -> nn.Module:
    """The base model."""
    torch.manual_seed(0)
    model = Language(texts.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss = loss_of(model, *texts.batch("code", generator))
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"base, step {step}: {loss.item():.3f}", file=sys.stderr, flush=True)
    return model


@dataclass
class Tuned:
    """A model under one method, with what is measured on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    saved: int
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def tuned(base: nn.Module, method: str, rank: int, lr: float, x: torch.Tensor) -> Tuned:
    """The base under a method, and the bytes that one forward pass makes autograd keep."""
    torch.manual_seed(7)
    model = convert(base, method, rank=rank, alpha=2.0 * rank).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=lr, eps=1e-6)
    optimizer = LoRAFAAdamW(model, lr=lr) if method == "lora-fa" else adamw
    with SavedBytes(model) as saved:
        y = model(x)
    del y
    return Tuned(model, optimizer, saved.nbytes)


def one_step(run: Tuned, x: torch.Tensor, y: torch.Tensor) -> None:
    """Forward, backward, update, with the CPU seconds of this thread."""
    begin = time.thread_time()
    run.optimizer.zero_grad()
    loss = loss_of(run.model, x, y)
    loss.backward()
    run.optimizer.step()
    run.cpu_s.append(time.thread_time() - begin)
    run.losses.append(loss.item())


def nbytes(tensors: Any) -> int:
    """Bytes of the distinct storages of tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def flops_a_step(base: nn.Module, method: str, rank: int) -> float:
    """Products of a step: W x and W^T g of every linear layer, those of attention, and what the adapters add.

    A LoRA pair costs A x, B z, their two transposes and the gradients of A and B, 2 r d each; LoRA-FA has no gradient
    of A. SALR has two pairs, of which the residual one trains too.
    """
    tokens = BATCH * CONTEXT
    linears = [m for m in base.modules() if isinstance(m, nn.Linear)]
    dense = sum(4.0 * m.in_features * m.out_features for m in linears)
    attention = LAYERS * 3 * 4.0 * CONTEXT * WIDTH
    pairs = {"lora": 1, "lora-fa": 1, "salr": 2}[method]
    sides = [(m.in_features, m.out_features) for m in linears if m is not base.lm_head]
    adapters = pairs * sum(2.0 * rank * ((2 if method == "lora-fa" else 3) * i + 3 * o) for i, o in sides)
    return tokens * (dense + attention + adapters)


def weights_formula(base: nn.Module, method: str, rank: int) -> int:
    """Bytes of weights in fp32: the base and A, B; SALR holds half of a matrix as values, a bit for every place, and a
    second pair."""
    adapted = [m for m in base.modules() if isinstance(m, nn.Linear) and m is not base.lm_head]
    pair = sum(4 * rank * (m.in_features + m.out_features) for m in adapted)
    dense = nbytes([*base.parameters(), *base.buffers()])
    if method != "salr":
        return dense + pair
    saved = sum(m.weight.numel() * 4 - (m.weight.numel() * 2 + m.weight.numel() // 8) for m in adapted)
    return dense + 2 * pair - saved


def report(run: Tuned, base: nn.Module, method: str, rank: int) -> dict[str, Any]:
    """What was measured, beside what formulas say."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    states = [t for s in run.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.ndim]
    return {
        "held_out": run.held_out,
        "cpu_ms_a_step": round(1e3 * statistics.median(run.cpu_s), 2),
        "mflops_a_step_by_formula": round(flops_a_step(base, method, rank) / 1e6, 1),
        "trained_parameters": sum(p.numel() for p in trained),
        "weights_bytes": nbytes([*run.model.parameters(), *run.model.buffers()]),
        "weights_bytes_by_formula": weights_formula(base, method, rank),
        "gradients_bytes": nbytes([p.grad for p in trained if p.grad is not None]),
        "states_bytes": nbytes(states),
        "saved_bytes": run.saved,
    }


def ratios(runs: dict[str, Tuned], methods: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Seconds of each method over those of LoRA: medians of the ratios of the steps on one batch, and by FLOP."""
    out = {}
    for name, run in runs.items():
        paired = [a / b for a, b in zip(run.cpu_s, runs["lora"].cpu_s, strict=True)]
        flops = methods[name]["mflops_a_step_by_formula"] / methods["lora"]["mflops_a_step_by_formula"]
        out[name] = {"cpu_time": round(statistics.median(paired), 3), "flops_by_formula": round(flops, 3)}
    return out


def main() -> None:
    """Train the base, tune it by every method in turn, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = Texts()
    base = pretrain(texts, arguments.base_steps)
    first = texts.batch("manual", torch.Generator().manual_seed(5))
    names = [m for m in ("lora", "lora-fa", "salr") if m in known_methods()]
    runs = {m: tuned(base, m, arguments.rank, arguments.lr, first[0]) for m in names}
    generator = torch.Generator().manual_seed(2)
    for step in range(arguments.steps):
        batch = texts.batch("manual", generator)
        for i in range(len(names)):
            one_step(runs[names[(step + i) % len(names)]], *batch)
        if step % 20 == 0 or step == arguments.steps - 1:
            for name, run in runs.items():
                run.held_out.append(held_out(run.model, texts, "manual"))
                print(f"step {step} {name}: {run.held_out[-1]}", file=sys.stderr, flush=True)
    result = {
        "base": {"parameters": sum(p.numel() for p in base.parameters()), "weights_bytes": nbytes(base.parameters()),
                 "held_out_code": held_out(base, texts, "code"), "held_out_manual": held_out(base, texts, "manual")},
        "steps": arguments.steps, "rank": arguments.rank, "tokens_a_step": BATCH * CONTEXT,
    }  # fmt: skip
    result["methods"] = {m: report(run, base, m, arguments.rank) for m, run in runs.items()}
    result["over_lora"] = ratios(runs, result["methods"])
    kept = {m: saved_bytes(m, INPUTS, tokens=BATCH * CONTEXT, rank=arguments.rank) for m in ("lora", "lora-fa")}
    result["saved_bytes_of_lora_over_lora_fa"] = {
        "measured": runs["lora"].saved - runs["lora-fa"].saved,
        "by_formula": LAYERS * (kept["lora"] - kept["lora-fa"]),
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
