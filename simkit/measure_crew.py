"""The rank processes of suite ``links``: where they meet, how many there may be, and that none outlives its purpose.

Ranks end with this process: each watches its standard input, which this process holds open, and on Linux the kernel
ends it when its parent is gone (`simkit.measure_ranks`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from simkit.errors import InputError
from simkit.measure import Samples

MOST_RANKS = 64
RANK_BYTES = 320e6
"""Memory of a rank: torch and the buffers of the largest collective, 290 MB measured on a CPU."""
MEMINFO = Path("/proc/meminfo")
ANSWER_S = 180.0
MEET_S, MEET_RANK_S = 30.0, 5.0
"""Seconds in which the ranks must have met: these, and more for each rank that a core has to start."""
RESOLVE_S = 10.0
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


def most_ranks(backend: str) -> tuple[int, str]:
    """(ranks that this machine can start, why not `MOST_RANKS`): what its free memory holds, a GPU each."""
    if backend == "nccl":
        import torch

        if torch.cuda.device_count() < MOST_RANKS:
            return torch.cuda.device_count(), "each needs a GPU of this machine"
    try:
        text = MEMINFO.read_text(encoding="ascii")
    except OSError:
        text = ""
    free = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    fits = int(float(free[1]) * 1024.0 / RANK_BYTES) if free else MOST_RANKS
    if fits < MOST_RANKS:
        return fits, f"each needs {RANK_BYTES / 1e6:.0f} MB of free memory"
    return MOST_RANKS, ""


class Crew:
    """The rank processes: started at the first order, ended with this process, killed when one does not answer.

    Raises InputError: too few or too many ranks, an address that is none or not of this machine, a launch command that
    cannot be read. With `launch` ranks may run elsewhere, so neither memory nor the address is held against this
    machine."""

    def __init__(self, ranks: int, backend: str, *, launch: str | None = None, address: str | None = None) -> None:
        most, why = (MOST_RANKS, "") if launch else most_ranks(backend)
        if ranks < 2:
            raise InputError("are too few to talk", key="--ranks", value=ranks, hint=f"2 to {max(most, 2)}")
        if ranks > most:
            room = (f"2 to {most}" if most >= 2 else f"there is room for {most}") + (f" ({why})" if why else "")
            raise InputError("is out of range", key="--ranks", value=ranks, hint=room)
        self.ranks, self.backend = ranks, backend
        self.address = address or LOOPBACK
        self._prefixes = [_prefix(launch, rank) for rank in range(ranks)]
        self._here = launch is None
        _free_port(self.address, here=self._here)
        self._processes: list[subprocess.Popen[str]] = []
        # Also at the exit of the interpreter, where __del__ is not sure to be called.
        self._end = weakref.finalize(self, _end_all, self._processes)

    def runs(self, order: Mapping[str, Any]) -> Callable[[], Samples]:
        """A case's `run`: gives the order to every rank and waits for the answer of rank 0."""

        def run() -> Samples:
            answer = self.ask(order)
            # Means: the kernel's clock ticks a hundred times a second.
            busy = fmean(answer["cpu_s"]) / max(fmean(answer["samples"]), 1e-9)
            return Samples({"time_s": answer["samples"]}, f"processor busy {busy:.3f} of the time")

        return run

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Raises InputError where a rank cannot be started, ends, or does not answer in time."""
        try:
            if not self._processes:
                self._start()
            for process in self._processes:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(order) + "\n")
                    process.stdin.flush()
            return self._answer(str(order["op"]), ANSWER_S)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        host = f"[{self.address}]" if ":" in self.address else self.address
        meet = f"tcp://{host}:{_free_port(self.address, here=self._here)}"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        for rank, prefix in enumerate(self._prefixes):
            command = [*prefix, sys.executable, "-m", "simkit.measure_ranks", str(rank), str(self.ranks)]
            try:
                process = subprocess.Popen(
                    [*command, meet, self.backend],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(
                    f"cannot be started ({error.strerror})", key="--launch", value=shlex.join(prefix)
                ) from None
            self._processes.append(process)
        self._answer("start", MEET_S + MEET_RANK_S * self.ranks / (os.cpu_count() or 1))

    def _answer(self, what: str, limit_s: float) -> dict[str, Any]:
        """The next line of rank 0. Raises InputError where a rank ends first, or `limit_s` is over."""
        stdout = self._processes[0].stdout
        assert stdout is not None
        end = time.monotonic() + limit_s
        with selectors.DefaultSelector() as watch:
            watch.register(stdout, selectors.EVENT_READ)
            while not watch.select(POLL_S):
                gone = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
                # A moment more for rank 0, which may have answered just before.
                if gone and not watch.select(POLL_S):
                    raise self._lost(f"gave no answer to {what}: rank {gone[0]} ended")
                if time.monotonic() > end:
                    raise self._lost(f"gave no answer to {what} within {limit_s:.0f} s")
            line = stdout.readline()
        if not line:
            raise self._lost(f"gave no answer to {what}: rank 0 ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self, what: str) -> InputError:
        hint = "have they the memory?" if self._here else f"does every rank reach {self.address}, where rank 0 listens?"
        return InputError(what, key="--ranks", value=self.ranks, hint=hint)

    def close(self) -> None:
        """Ends every rank, by force where it does not go; the next order starts them anew."""
        _end_all(self._processes)


def _end_all(processes: list[subprocess.Popen[str]]) -> None:
    """Ends the processes and empties the list, in which they stay until they are gone."""
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            assert process.stdin is not None
            process.stdin.close()
    end = time.monotonic() + 2.0
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    for process in processes:
        if process.poll() is None:
            # The group, because a launch command may have children; it is a session of its own.
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        if process.stdout is not None:
            process.stdout.close()
    processes.clear()


def _prefix(launch: str | None, rank: int) -> list[str]:
    """The words before a rank's command. Raises InputError for braces or quotes that do not close."""
    try:
        return shlex.split(launch.format(rank=rank)) if launch else []
    except (ValueError, LookupError, AttributeError) as error:
        what = f"cannot be read ({str(error).lower()})"
        raise InputError(what, key="--launch", value=launch, hint="as in 'ssh node{rank}'") from None


def _free_port(address: str, *, here: bool) -> int:
    """A port that is free at the address of this machine; one that is free on this machine where rank 0 is elsewhere.

    Raises InputError for an address that is none, or, where rank 0 runs here, not of this machine."""
    family, place = _resolve(address)
    with socket.socket(family if here else socket.AF_INET) as probe:
        try:
            probe.bind((*place[:1], 0, *place[2:]) if here else ("", 0))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            hint = f"an address of this machine, {LOOPBACK} for one; --launch starts ranks on others"
            raise InputError(f"cannot be listened at ({reason})", key="--address", value=address, hint=hint) from None
        return int(probe.getsockname()[1])


def _resolve(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """(family, socket address) of a name or an IP address."""
    wrong = InputError("is no address", key="--address", value=address, hint="an IP address or the name of a host")
    if ":" in address or re.fullmatch(r"[\d.]+", address):
        # A resolver would take these for names, and ask the network for long.
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise wrong from None
    found: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM))

    # On a thread, because the system's resolver knows no limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(RESOLVE_S)
    if not found:
        raise wrong
    return found[0][0], found[0][4]
