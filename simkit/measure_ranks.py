"""One rank of suite ``links``: joins a process group, then runs the collectives it is told to on standard input.

    python -m simkit.measure_ranks RANK WORLD tcp://ADDRESS:PORT BACKEND

A line of input is {"op", "bytes", "repeats"} or {"quit": true}. Rank 0 answers each with a line {"samples": seconds of
one call, the slowest rank's; "cpu_s": processor seconds of a rank per call, threads of the back end and what the kernel
does for the network included}. A rank ends when its standard input does, at any moment, and on Linux with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

WARM_UP = 2
TIMEOUT_S = 120.0
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""
POLL_S = 1.0


def main(rank: int, world: int, address: str, backend: str) -> int:
    """Serves until it is told to quit, its input ends, or a peer is gone."""
    end_with_parent()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    names: list[Any] = [None] * world
    dist.all_gather_object(names, socket.gethostname())
    neighbours = names.count(socket.gethostname())
    _say(rank, {"ready": world})
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("quit"):
            break
        call = _call(torch, dist, order["op"], order["bytes"], rank, world, device)
        _say(rank, _timed(torch, dist, call, order["repeats"], device, neighbours))
    # Threads of gloo may outlive the group and abort the interpreter on its way out: nothing is left to be done.
    sys.stdout.flush()
    os._exit(0)


def end_with_parent() -> None:
    """From now on this process ends with whoever holds its standard input open, killed or not.

    On Linux the kernel sees to it for the parent, even while the interpreter is busy; the watch on the input also works
    through ssh or sudo, whose end of the pipe closes. Where poll(2) is missing, a change of parent is looked for."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # After prctl: a parent that ended before it has closed the pipe, and the watch sees that at once.
    threading.Thread(target=_watch_input, args=(os.getppid(),), daemon=True).start()


def _watch_input(parent: int) -> None:
    if not hasattr(select, "poll"):
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)
    closed = getattr(select, "POLLRDHUP", 0)
    watch = select.poll()
    watch.register(0, closed)
    while not any(event & (select.POLLHUP | select.POLLERR | closed) for _, event in watch.poll()):
        time.sleep(POLL_S)
    os._exit(0)


def _say(rank: int, answer: dict[str, Any]) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _call(torch: Any, dist: Any, op: str, nbytes: int, rank: int, world: int, device: Any) -> Callable[[], object]:
    """The collective on fp32 tensors. nbytes: nccl-tests convention, so an all-gather ends with that many."""
    if op == "all_gather":
        mine = torch.ones(max(1, nbytes // 4 // world), device=device)
        parts = [torch.empty_like(mine) for _ in range(world)]
        return lambda: dist.all_gather(parts, mine)
    x = torch.ones(max(1, nbytes // 4), device=device)
    if op == "all_reduce":
        return lambda: dist.all_reduce(x)
    if op == "broadcast":
        return lambda: dist.broadcast(x, 0)
    if op == "send_recv":
        return lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None
    raise ValueError(f"no such collective: {op}")


def softirq_s() -> float:
    """Seconds that all cores have spent in the kernel's deferred work, most of it of the network; no process pays."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return int(file.readline().split()[7]) / float(os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return 0.0


def _timed(
    torch: Any, dist: Any, call: Callable[[], object], repeats: int, device: Any, neighbours: int
) -> dict[str, Any]:
    """neighbours: ranks on this host, which share its kernel."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds, cpu = [], []
    for attempt in range(WARM_UP + repeats):
        dist.barrier()
        wait()
        start, busy, soft = time.perf_counter(), time.process_time(), softirq_s()
        call()
        wait()
        taken, used = time.perf_counter() - start, time.process_time() - busy + (softirq_s() - soft) / neighbours
        slowest = torch.tensor([taken], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if attempt >= WARM_UP:
            seconds.append(float(slowest))
            cpu.append(used)
    return {"samples": seconds, "cpu_s": cpu}


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
