"""Suite ``links``: collectives among ranks, and the profile of the link that joins them.

Ranks are processes of this machine, or of whatever ``--launch`` starts them on ("ssh node{rank}", "ip netns exec
ns{rank}"). gloo runs them on CPUs, NCCL on GPUs. One rank counts as one node, so the rows are of the link between
nodes; gloo's all-reduce is a ring, and is written down and fitted as one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from simkit.errors import InputError
from simkit.measure import Case, Samples
from simkit.measure_machine import Machine
from simkit.spec import profiles
from simkit.units import format_bits, parse

if TYPE_CHECKING:
    from simkit.measure import Options

TABLE = "collective"
SIZES = (4, 4096, 16384, 65536, 262144, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 32_000_000)
QUICK_SIZES = (4, 16384, 65536, 262144, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
GATHER_SIZES = (16384, 65536, 262144, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000)
QUICK_GATHER_SIZES = (16384, 1_000_000, 4_000_000)
REPEATS, QUICK_REPEATS = 10, 5
LONGEST_S = 30.0
"""Seconds a case may take by the link's rate; larger messages are left out."""
ANSWER_S = 180.0
LATENCY_BYTES = 4096.0
DEFAULT_LINK = "loopback"


def cases(host: Machine, options: Options) -> list[Case]:
    """All-reduces and all-gathers of a ladder of sizes among the ranks. Raises InputError for fewer than two ranks."""
    ranks, link = options.ranks or 2, options.link or DEFAULT_LINK
    if ranks < 2:
        raise InputError("are too few to talk", key="--ranks", value=ranks, hint="2 or more")
    crew = Crew(ranks, "nccl" if host.device == "cuda" else "gloo", launch=options.launch, address=options.address)
    rate = parse(options.rate, "Bps", key="--rate") if options.rate else None
    repeats = QUICK_REPEATS if options.quick else REPEATS
    found = []
    quick = {"all_reduce": QUICK_SIZES, "all_gather": QUICK_GATHER_SIZES}
    for op, sizes in (quick if options.quick else {"all_reduce": SIZES, "all_gather": GATHER_SIZES}).items():
        for nbytes in sizes:
            if rate is not None and (repeats + 2) * 2.0 * nbytes / rate > LONGEST_S:
                continue
            fields = {"device": host.name, "op": op, "dtype": "fp32", "bytes": nbytes, "ranks": ranks}
            fields |= {"gpus_per_node": 1, "nics_per_node": 1, "inter": link, "engine": ""}
            if host.device == "cpu":
                fields["algorithm"] = "ring"
            order = {"op": op, "bytes": nbytes, "repeats": repeats}
            found.append(Case(id=f"{link}/{op}/{ranks}/{nbytes}", fields=fields, run=crew.runs(order)))
    return found


class Crew:
    """The rank processes: started at the first order, ended with this process, killed when one does not answer."""

    def __init__(self, ranks: int, backend: str, *, launch: str | None = None, address: str | None = None) -> None:
        self.ranks, self.backend, self.launch = ranks, backend, launch
        self.address = address or "127.0.0.1"
        self._processes: list[subprocess.Popen[str]] = []

    def runs(self, order: Mapping[str, Any]) -> Callable[[], Samples]:
        """A case's `run`: gives the order to every rank and waits for the answer of rank 0."""

        def run() -> Samples:
            answer = self.ask(order)
            # Means: the kernel's clock ticks a hundred times a second.
            busy = fmean(answer["cpu_s"]) / max(fmean(answer["samples"]), 1e-9)
            return Samples({"time_s": answer["samples"]}, f"processor busy {busy:.3f} of the time")

        return run

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Raises InputError where a rank cannot be started or does not answer in time."""
        if not self._processes:
            self._start()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        return self._answer(str(order["op"]))

    def _start(self) -> None:
        port = _free_port()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        for rank in range(self.ranks):
            prefix = shlex.split(self.launch.format(rank=rank)) if self.launch else []
            command = [*prefix, sys.executable, "-m", "simkit.measure_ranks", str(rank), str(self.ranks)]
            command += [f"tcp://{self.address}:{port}", self.backend]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                self.close()
                raise InputError(f"cannot be started ({error.strerror})", key="--launch", value=self.launch) from None
            self._processes.append(process)
        self._answer("start")

    def _answer(self, what: str) -> dict[str, Any]:
        stdout = self._processes[0].stdout
        assert stdout is not None
        try:
            with selectors.DefaultSelector() as watch:
                watch.register(stdout, selectors.EVENT_READ)
                line = stdout.readline() if watch.select(ANSWER_S) else ""
        except BaseException:
            self.close()
            raise
        if not line:
            self.close()
            hint = "are all ranks reachable?"
            raise InputError(f"gave no answer to {what}", key="ranks", value=self.ranks, hint=hint)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends every rank, by force where it does not go."""
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()
        end = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []

    def __del__(self) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# -- the profile ---------------------------------------------------------------------------------------------------


def facts_of_links(tables: Mapping[str, Sequence[Mapping[str, str]]], options: Options) -> dict[Path, str | None]:
    """The facts of every link that the collective tables name, by the file of its profile."""
    rows = [row for table, found in tables.items() if table.startswith(TABLE) for row in found]
    found: dict[Path, str | None] = {}
    for name in sorted({row["inter"] for row in rows if row.get("inter")}):
        path = options.out / "links" / f"{name}.toml"
        found[path] = _facts(path, name, [row for row in rows if row.get("inter") == name], options)
    return found


def _facts(path: Path, name: str, rows: Sequence[Mapping[str, str]], options: Options) -> str:
    """The TOML of the facts. The rate is the one given for the link, else the fastest that was measured."""
    given = options.rate if name == (options.link or DEFAULT_LINK) else None
    kept = profiles.read(path)["link"] if path.exists() and given is None else {}
    source = kept.get("sources", {}).get("rate", "measured")
    if given is not None:
        rate, source = format_bits(parse(given, "Bps", key="--rate")), "user"
    elif source == "user":
        rate = kept["rate"]
    else:
        rate = format_bits(max(_rate(row) for row in rows))
    small = [_step(row) for row in rows if float(row["bytes"]) <= LATENCY_BYTES] or [_step(rows[0])]
    lines = ["[link]", f'title = "{name}, as measured"', 'scope = "nic"', f'rate = "{rate}"']
    lines += [f'latency = "{min(small) * 1e6:.4g}us"', 'transport = "tcp"', "", "[link.sources]"]
    lines += [f'rate = "{source}"', 'latency = "measured"']
    return "\n".join(lines) + "\n"


def _rate(row: Mapping[str, str]) -> float:
    """Bytes a rank sends a second: (n-1)/n of the buffer, twice for an all-reduce."""
    ranks = float(row["ranks"])
    share = (ranks - 1.0) / ranks * (2.0 if row["op"] == "all_reduce" else 1.0)
    return share * float(row["bytes"]) / float(row["value"])


def _step(row: Mapping[str, str]) -> float:
    """Seconds of a step of a ring that moves nothing."""
    return float(row["value"]) / (float(row["ranks"]) - 1.0) / (2.0 if row["op"] == "all_reduce" else 1.0)
