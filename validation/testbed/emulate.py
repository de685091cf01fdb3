"""One rank of an emulated run: it sleeps instead of computing and issues the real collectives of a method.

    python emulate.py RANK WORLD tcp://ADDRESS:PORT CASES.json ITERATIONS

A case is {"name", "method", "forward_s", "layers": [{"backward_s", "shape"}, …] in the order of back-propagation,
"bucket_bytes" (0: a message per tensor, null: one for all), "rank", "density"}. Rank 0 prints one JSON line a case.

The buckets and the bytes of the methods are worked out here, by the formulas of their papers, not by simkit:
S-SGD 4 n·m; Sign 4 ceil(n·m/32); Top-k 8 ceil(density·n·m); Power-SGD 4 n·r, then 4 m·r, which depends on it and for
which back-propagation waits; ACP-SGD 4 n·r and 4 m·r in turns.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from datetime import timedelta
from typing import Any

FIRST_BUCKET_BYTES = 2**20
WARM_UP = 2


def buckets(sizes: list[int], cap: float | None) -> list[list[int]]:
    """PyTorch DDP's: a bucket closes with the tensor that brings it to its cap, the first one at 1 MiB."""
    if cap is None:
        return [list(range(len(sizes)))]
    found: list[list[int]] = [[]]
    for index in range(len(sizes)):
        found[-1].append(index)
        limit = min(FIRST_BUCKET_BYTES, cap) if len(found) == 1 else cap
        if sum(sizes[i] for i in found[-1]) >= limit:
            found.append([])
    return [b for b in found if b]


def message_bytes(case: dict[str, Any], shape: list[int], step: int) -> list[int]:
    """Bytes of one tensor on the wire, phase by phase."""
    n, m = shape[0], math.prod(shape[1:])
    method, r = case["method"], min(case.get("rank", 4), n, m)
    if method == "sign-sgd":
        return [4 * math.ceil(n * m / 32)]
    if method == "topk-sgd":
        return [8 * max(1, math.ceil(case["density"] * n * m))]
    if method == "power-sgd":
        return [4 * n * r, 4 * m * r]
    if method == "acp-sgd":
        return [4 * (n if step % 2 == 0 else m) * r]
    return [4 * n * m]


class Emulated:
    """Runs the iterations of one case."""

    def __init__(self, torch: Any, dist: Any, case: dict[str, Any], world: int) -> None:
        self.dist, self.case = dist, case
        self.layers = case["layers"]
        sizes = [4 * math.prod(layer["shape"]) for layer in self.layers]
        self.closes = {b[-1]: b for b in buckets(sizes, case["bucket_bytes"])}
        self.gathers = case["method"] in ("sign-sgd", "topk-sgd")
        self.blocks = case["method"] == "power-sgd"
        largest = sum(sizes) // 4 + 1
        self.data = torch.zeros(largest)
        self.parts = [torch.zeros(largest) for _ in range(world)] if self.gathers else []

    def send(self, nbytes: int) -> Any:
        n = max(1, nbytes // 4)
        if self.gathers:
            return self.dist.all_gather([p[:n] for p in self.parts], self.data[:n], async_op=True)
        # A tensor of its own: messages in flight must not share memory.
        return self.dist.all_reduce(self.data[:n].clone(), async_op=True)

    def iteration(self, step: int) -> float:
        """Seconds from the begin of the forward pass to the end of the last message."""
        self.dist.barrier()
        begin = time.perf_counter()
        due = begin + self.case["forward_s"]
        work = []
        for index, layer in enumerate(self.layers):
            due += layer["backward_s"]
            time.sleep(max(0.0, due - time.perf_counter()))
            if index not in self.closes:
                continue
            phases = zip(
                *(message_bytes(self.case, self.layers[i]["shape"], step) for i in self.closes[index]), strict=True
            )
            for sizes in phases:
                handle = self.send(sum(sizes))
                if self.blocks:
                    handle.wait()
                    due = max(due, time.perf_counter())
                else:
                    work.append(handle)
        for handle in work:
            handle.wait()
        time.sleep(max(0.0, due - time.perf_counter()))
        return time.perf_counter() - begin


def main(rank: int, world: int, address: str, file: str, iterations: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    with open(file, encoding="utf-8") as stream:
        cases = json.load(stream)
    for case in cases:
        run = Emulated(torch, dist, case, world)
        seconds = []
        for step in range(WARM_UP + iterations):
            taken = torch.tensor([run.iteration(step)], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            seconds.append(float(taken))
        if rank == 0:
            load = os.getloadavg()[0]
            line = {"name": case["name"], "seconds": [round(s, 6) for s in seconds[WARM_UP:]], "load": round(load, 2)}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
