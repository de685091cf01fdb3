"""N hosts behind one switch: network namespaces, veth pairs into a bridge, both directions of every link shaped by tbf.

    host i: namespace PREFIXi, 10.78.0.(i+1), device eth0         switch: namespace PREFIXsw

Needs root, iproute2 and the token bucket filter of the kernel. TCP runs CUBIC, chosen per route, because the default
may be another (BBR paces by its own estimate) and the sysctl may be read-only. The bucket is small: whatever fits into
it passes unshaped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = os.environ.get("TESTBED_PREFIX", "skt")
SUBNET = "10.78.0"
BURST = {100: "32kb", 300: "128kb", 1000: "128kb"}
"""Bucket by rate in Mb/s: at least what the kernel sends between two looks at the clock."""
LIMIT = os.environ.get("TESTBED_LIMIT", "16mb")
NICE = int(os.environ.get("TESTBED_NICE", "-15"))


def launch(*, realtime: bool = False) -> str:
    """What starts rank {rank} on its host: before the other jobs of the machine, which a rank would wait for. realtime:
    before all of them, at any moment, for ranks that compute next to nothing."""
    inside = f'ip netns exec {PREFIX}{{rank}} "$@"'
    if realtime and NICE < 0:
        return f"sh -c 'exec chrt -r 1 {inside}' --"
    prefer = f"echo {NICE} > /proc/self/autogroup 2> /dev/null"
    return f"sh -c '{prefer}; exec nice -n {NICE} {inside}' --"


def address() -> str:
    """Of rank 0."""
    return f"{SUBNET}.1"


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, timeout=20, capture_output=not check)


def up(hosts: int, mbps: int) -> None:
    """Builds the network. Raises CalledProcessError where the kernel or the rights do not allow it."""
    _run(f"ip netns add {PREFIX}sw")
    _run(f"ip -n {PREFIX}sw link add br0 type bridge")
    _run(f"ip -n {PREFIX}sw link set br0 up")
    shape = f"root tbf rate {mbps}mbit burst {BURST[mbps]} limit {LIMIT}"
    for i in range(hosts):
        host = f"{PREFIX}{i}"
        _run(f"ip netns add {host}")
        _run(f"ip link add eth0 netns {host} type veth peer name p{i} netns {PREFIX}sw")
        _run(f"ip -n {host} addr add {SUBNET}.{i + 1}/24 dev eth0")
        _run(f"ip -n {host} link set eth0 up")
        _run(f"ip -n {host} link set lo up")
        _run(f"ip -n {host} route change {SUBNET}.0/24 dev eth0 congctl cubic")
        _run(f"ip -n {PREFIX}sw link set p{i} master br0")
        _run(f"ip -n {PREFIX}sw link set p{i} up")
        _run(f"tc -n {host} qdisc add dev eth0 {shape}")
        _run(f"tc -n {PREFIX}sw qdisc add dev p{i} {shape}")


def down(hosts: int) -> None:
    """Takes away whatever is there; the devices go with their namespaces."""
    for name in (*(f"{PREFIX}{i}" for i in range(hosts)), f"{PREFIX}sw"):
        _run(f"ip netns del {name}", check=False)


def softirq_threads() -> list[int]:
    """The kernel's threads that finish the work of the network when there is much of it, one a core."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text(encoding="utf-8").startswith("ksoftirqd/"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@contextmanager
def preferred(threads: list[int]) -> Iterator[None]:
    """These threads at the priority of the ranks, afterwards at 0, theirs: the wire must not wait for other jobs."""
    _prioritise(threads, NICE)
    try:
        yield
    finally:
        _prioritise(threads, 0)


def _prioritise(threads: list[int], priority: int) -> None:
    for pid in threads:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, priority)


@contextmanager
def network(hosts: int, mbps: int) -> Iterator[None]:
    """The network for the length of a block, gone afterwards whatever happens."""
    down(hosts)
    try:
        up(hosts, mbps)
        with preferred(softirq_threads()):
            yield
    finally:
        down(hosts)
