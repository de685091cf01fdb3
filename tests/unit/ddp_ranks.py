"""What test_kernel_compressors starts as processes: ranks of gloo that train by DDP and write down what they saw."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from simkit.kernels.compressors import CompressedOptimizer, make_hook

RANKS = 4
SHAPES = ((24, 3, 3, 3), (24,), (40, 24), (40,), (40, 24), (7, 5), (64, 40), (64,), (), (33,))
"""Registration order: a convolution, equal matrices, one that Power-SGD leaves alone, vectors, a scalar."""
BUCKET_MB = 0.005
EXACT = [
    ("s-sgd", {}),
    ("sign-sgd", {}),
    ("topk-sgd", {"density": 0.05}),
    ("topk-sgd", {"density": 0.05, "error_feedback": False, "selection": "exact"}),
    ("power-sgd", {"rank": 2}),
    ("acp-sgd", {"rank": 2}),
    ("power-sgd", {"rank": 64, "min_rate": 0.0}),
    ("acp-sgd", {"rank": 64}),
    ("acp-sgd", {"rank": 2, "warmup_steps": 2}),
]
STEPS = 6


class Given(nn.Module):
    """A module whose gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in SHAPES])

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.tensors, gradients, strict=True)]).sum()


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    """Those of a rank at a step, with zeros that all ranks share and zeros of one alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    out = [torch.randn(s, generator=generator) for s in SHAPES]
    out[2][5:9] = 0.0
    if rank == 1:
        out[6][0] = 0.0
    return out


def seen(rank: int, method: str, settings: dict[str, Any], wrapped: bool) -> dict[str, Any]:
    """Gradients, bytes and messages of each step, by DDP's hook or by the wrapper of an optimizer."""
    net = Given()
    if wrapped:
        plain = torch.optim.SGD(net.parameters(), lr=0.0)
        optimizer = CompressedOptimizer(plain, method, bucket_mb=BUCKET_MB, **settings)
        state, model = optimizer.state, net
    else:
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
        state, hook = make_hook(method, **settings)
        model.register_comm_hook(state, hook)
    out: dict[str, Any] = {"grads": [], "bytes": [], "messages": [], "seconds": []}
    for step in range(STEPS):
        net.zero_grad()
        model(gradients(rank, step)).backward()
        if wrapped:
            optimizer.exchange()
        out["grads"].append([p.grad.clone() for p in net.tensors])
        out["bytes"].append(state.wire_bytes)
        out["messages"].append(state.messages)
        out["seconds"].append((state.seconds, state.cpu_seconds))
    return out


def last(method: str, steps: int, rank: int) -> dict[str, Any]:
    """`steps` steps of a small net over several buckets, ranks out of step with one another."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(32, 8))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    state, hook = make_hook(method, rank=2, density=0.05, warmup_steps=3)
    model.register_comm_hook(state, hook)
    rate = 0.002 if method == "sign-sgd" else 0.05
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(5)) / 4
    generator, jitter, losses = torch.Generator().manual_seed(rank), random.Random(rank), []
    for _ in range(steps):
        x = torch.randn(16, 32, generator=generator)
        if jitter.random() < 0.05:
            time.sleep(0.004 * jitter.random())
        optimizer.zero_grad()
        loss = (model(x) - torch.tanh(x @ teacher)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    return {"losses": losses, "params": flat, "messages": state.messages}


def main(rank: int, folder: str, steps: int) -> None:
    """One rank: all of EXACT, the wrapper, then `steps` steps of every method."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    out: dict[str, Any] = {"hook": [seen(rank, m, s, wrapped=False) for m, s in EXACT]}
    out["wrapped"] = [seen(rank, m, s, wrapped=True) for m, s in EXACT]
    out["long"] = {m: last(m, steps, rank) for m in ("s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd")}
    torch.save(out, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
