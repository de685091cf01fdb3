"""One rank of a real training run: DistributedDataParallel over gloo, with a gradient compressor as its hook.

    python train.py RANK WORLD tcp://ADDRESS:PORT CASES.json PAIRS

A case is {"name", "model", "batch", "method", "bucket_bytes" (null: one bucket), "rank", "density"}. Steps come in
pairs: one of a twin that exchanges nothing, one that exchanges, so that both see the same neighbours on the machine. Of
the twin's step the rank notes the processor seconds, part by part: they become the compute profile of the run. Rank 0
prints one JSON line a case:

    alone_s, step_s     wall seconds of every pair, the slowest rank's
    cpu_s               processor seconds of the twin's step, mean over the ranks
    compress_s          processor seconds of compression of a step, rank 0
    wire_bytes          handed to collectives in a step by rank 0 (the mean over steps)
    profile             the compute profile, with time_share 1
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import mean
from typing import Any

WARM_UP = 4
"""Pairs that are not counted: DDP rebuilds its buckets after the first, ACP-SGD needs one of each kind."""
ONE_BUCKET_MIB = 1 << 20
VOCAB = 512


def batches(torch: Any, model: Any, batch: int, rank: int) -> Callable[[], tuple[Any, ...]]:
    """Data with something to learn: a Markov chain of words, or images with a bright patch per class."""
    generator = torch.Generator().manual_seed(100 + rank)
    (shape,) = (t.shape for t in (model.example_inputs(batch),))
    if len(shape) == 2:
        follow = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))

        def words() -> tuple[Any, ...]:
            x = torch.empty(shape, dtype=torch.long)
            x[:, 0] = torch.randint(VOCAB, (batch,), generator=generator)
            for t in range(1, shape[1]):
                strange = torch.rand(batch, generator=generator) < 0.1
                other = torch.randint(VOCAB, (batch,), generator=generator)
                x[:, t] = torch.where(strange, other, follow[x[:, t - 1]])
            return (x,)

        return words

    def images() -> tuple[Any, ...]:
        labels = torch.randint(10, (batch,), generator=generator)
        x = torch.randn(shape, generator=generator)
        for i, label in enumerate(labels.tolist()):
            x[i, :, 3 * label : 3 * label + 3] += 1.0
        return (x, labels)

    return images


def silent(state, bucket):  # type: ignore[no-untyped-def]
    """The hook of the twin: nothing is exchanged. (DDP reads annotations, and takes none but its own.)"""
    import torch

    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Lossy:
    """A module that returns its loss, so that DDP sees the whole step."""

    def __new__(cls, torch: Any, inner: Any) -> Any:
        class Wrapped(torch.nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, *inputs: Any) -> Any:
                return self.inner.training_loss(*inputs)

        return Wrapped()


class Run:
    """One case on one rank."""

    def __init__(self, torch: Any, dist: Any, case: dict[str, Any], rank: int) -> None:
        self.torch, self.dist, self.case = torch, dist, case
        from simkit.kernels.compressors import make_hook
        from simkit.measure_compute import Watch

        self.twin, _ = self._ddp()
        self.twin.register_comm_hook(None, silent)
        self.trained, self.model = self._ddp()
        settings = {key: case[key] for key in ("rank", "density") if key in case}
        self.state, hook = make_hook(case["method"], **settings)
        self.trained.register_comm_hook(self.state, hook)
        rate = 1e-3 if case["method"] == "sign-sgd" else 0.05
        sgd = torch.optim.SGD
        self.optimizers = [sgd(m.parameters(), lr=rate, momentum=0.9) for m in (self.twin, self.trained)]
        self.feed = batches(torch, self.model, case["batch"], rank)
        self.watch = Watch(self.twin)

    def _ddp(self) -> tuple[Any, Any]:
        self.torch.manual_seed(0)
        module, _, function = self.case["model"].partition(":")
        inner = getattr(importlib.import_module(module), function)()
        bucket = self.case["bucket_bytes"]
        cap = ONE_BUCKET_MIB if bucket is None else bucket / 2**20
        wrapped = self.torch.nn.parallel.DistributedDataParallel(Lossy(self.torch, inner), bucket_cap_mb=cap)
        return wrapped, inner

    def pair(self, *, counted: bool) -> tuple[float, float, float, float]:
        """(wall seconds of the twin's step, its processor seconds, wall seconds of the exchanging step, its loss)."""
        inputs = self.feed()
        self.dist.barrier()
        begin, busy = time.perf_counter(), time.process_time()
        self.watch.step(lambda: self.twin(*inputs), self.optimizers[0], counted=counted)
        alone, cpu = time.perf_counter() - begin, time.process_time() - busy
        self.dist.barrier()
        begin = time.perf_counter()
        loss = self.trained(*inputs)
        loss.backward()
        self.optimizers[1].step()
        self.optimizers[1].zero_grad(set_to_none=False)
        return alone, cpu, time.perf_counter() - begin, float(loss)


def measured(torch: Any, dist: Any, case: dict[str, Any], rank: int, pairs: int) -> dict[str, Any]:
    """Runs a case and sums it up over the ranks."""
    from simkit.measure_compute import profile

    run = Run(torch, dist, case, rank)
    rows, wire, compress, losses = [], [], [], []
    for step in range(WARM_UP + pairs):
        alone, cpu, exchanged, loss = run.pair(counted=step >= WARM_UP)
        slowest = torch.tensor([alone, exchanged], dtype=torch.float64)
        total = torch.tensor([cpu], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        losses.append(loss)
        if step >= WARM_UP:
            rows.append((float(slowest[0]), float(slowest[1]), float(total) / dist.get_world_size()))
            wire.append(run.state.wire_bytes)
            compress.append(run.state.cpu_seconds)
    steps = run.watch.close()
    kind = "images" if run.model.example_inputs(1).dim() == 4 else "tokens"
    data = profile(run.twin, steps, name=case["model"].rpartition(":")[2], device="testbed-rank", batch=case["batch"],
                   kind=kind)  # fmt: skip
    rounded = [[round(v, 6) for v in row] for row in rows]
    return {
        "name": case["name"],
        "alone_s": [r[0] for r in rounded],
        "step_s": [r[1] for r in rounded],
        "cpu_s": [r[2] for r in rounded],
        "compress_s": round(mean(compress), 6),
        "wire_bytes": mean(wire),
        "losses": [round(mean(losses[:3]), 4), round(mean(losses[-3:]), 4)],
        "load": round(os.getloadavg()[0], 2),
        "profile": data,
    }


def main(rank: int, world: int, address: str, file: str, pairs: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    with open(file, encoding="utf-8") as stream:
        cases = json.load(stream)
    for case in cases:
        answer = measured(torch, dist, case, rank, pairs)
        if rank == 0:
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
