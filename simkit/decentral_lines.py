"""Access lines of peers: how long a message takes, and how long many peers take to average a vector.

    message      bytes / min(up of the sender, down of the receiver), then latency of both to the backbone
    ring         2(n-1)/n · S / slowest line + 2(n-1) · latency                        everybody holds 1/n
    butterfly    every peer i averages a share f_i of the vector: it uploads and downloads S (1 + (n-2) f_i) in all;
                 f minimises the time of the slowest:  f_i = (T r_i / S - 1) / (n-2),  sum f = 1;  2 · latency

r_i: the slower direction of line i. A firewalled peer cannot be asked for a share: f_i = 0 (it still uploads its own
vector and downloads the mean). `PAYLOAD`: what TCP over Ethernet leaves of a line rate. Beside the wire the vector
passes the host: `HOST_S`, seconds an element that is sent.
Sources: P. Patarasuk, X. Yuan (JPDC 2009) for the ring; M. Ryabinin et al., Moshpit SGD (arXiv 2103.03239) and
hivemind's `averaging/load_balancing.py` for shares by bandwidth and peers in client mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.spec.peers import Peer

Array = NDArray[np.float64]

PAYLOAD = 1448.0 / 1514.0
"""TCP payload of a full Ethernet frame with its headers; a measured all-reduce between namespaces joined by shaped
links reached 0.95 to 0.96 of the line rate."""
HOST_S: Mapping[str, float] = MappingProxyType(
    {"fp32": 3.12 / 1.5e9, "fp16": 3.12 / 1.5e9, "bf16": 3.12 / 1.5e9, "int8": 8.99 / 1.5e9}
)
"""Seconds of the host for each element that a peer sends in an all-reduce. From a public report of an open int8 ring:
10^9 elements among 4 processes (1.5 · 10^9 sent each) over the loopback of one machine take 3.12 s in fp32 with gloo
and 8.99 s with quantisation; 16-bit formats are taken to cost what fp32 costs. The processes shared the machine, so it
is an upper estimate."""
ELEMENT_BYTES: Mapping[str, float] = MappingProxyType({"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0})
RELAY_SHARE = 0.5
"""A message between two peers one of which is firewalled passes a relay, which receives and sends it again: half of
the rate, and the relay's way is counted as one more latency. Assumed."""


def rate_Bps(sender: Peer, receiver: Peer) -> float:
    """Payload byte/s of a message alone on both lines."""
    rate = min(sender.up_Bps, receiver.down_Bps) * PAYLOAD
    return rate * RELAY_SHARE if sender.relay or receiver.relay else rate


def latency_s(sender: Peer, receiver: Peer) -> float:
    """One way, over the backbone."""
    way = sender.latency_s + receiver.latency_s
    return 2.0 * way if sender.relay or receiver.relay else way


def lines(peers: Sequence[Peer]) -> tuple[Array, Array, NDArray[np.bool_]]:
    """(slower direction of each line, payload byte/s; latency to the backbone; firewalled)."""
    rate = np.array([min(p.up_Bps, p.down_Bps) * PAYLOAD for p in peers])
    return rate, np.array([p.latency_s for p in peers]), np.array([p.relay for p in peers], dtype=bool)


def shares(rate: Array, relay: NDArray[np.bool_]) -> tuple[float, Array]:
    """(seconds a byte of the vector, share of each peer) of the best butterfly.

    Peers that are all firewalled cannot average among themselves: a relay does it, at half of the slowest line.
    """
    n = len(rate)
    if n < 2:
        return 0.0, np.ones(n)
    if relay.all():
        return 1.0 / (float(rate.min()) * RELAY_SHARE), np.zeros(n)
    if not relay.any() and float(rate.max()) == float(rate.min()):
        return 2.0 * (n - 1.0) / n / float(rate.min()), np.full(n, 1.0 / n)
    if n == 2:
        return 1.0 / float(rate.min()), np.where(relay, 0.0, 1.0 / float((~relay).sum()))

    def taken(per_byte_s: float) -> Array:
        return np.where(relay, 0.0, np.clip((per_byte_s * rate - 1.0) / (n - 2.0), 0.0, 1.0))

    low = 1.0 / float(rate.min())
    if taken(low).sum() >= 1.0:
        found = taken(low)
        return low, found / found.sum()
    high = low
    while taken(high).sum() < 1.0:
        high *= 2.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if taken(middle).sum() < 1.0 else (low, middle)
    found = taken(high)
    return high, found / found.sum()


def line_of(op: str, rate: Array, latency: Array, relay: NDArray[np.bool_], algorithm: str = "butterfly"
            ) -> tuple[float, float]:
    """(seconds a byte, seconds whatever the size) of an all-reduce, or of an all-gather of so many bytes a peer.

    algorithm: ``butterfly`` or ``ring``; nothing for one peer. rate, latency, relay: as of `lines`.
    """
    n = len(rate)
    if n < 2:
        return 0.0, 0.0
    hop = 2.0 * float(latency.max())
    if op == "all_gather":
        return (n - 1.0) / float(rate.min()), hop * (n - 1.0 if algorithm == "ring" else 1.0)
    if algorithm == "ring":
        slow = float((rate * np.where(relay, RELAY_SHARE, 1.0)).min())
        return 2.0 * (n - 1.0) / n / slow, 2.0 * (n - 1.0) * hop
    return shares(rate, relay)[0], 2.0 * hop


def wire_s(op: str, nbytes: Any, peers: Sequence[Peer], algorithm: str = "butterfly") -> Any:
    """Seconds of an all-reduce or all-gather of `nbytes` (all_gather: of each peer) on the wire alone."""
    each, fixed = line_of(op, *lines(peers), algorithm)
    return nbytes * each + fixed


def all_reduce_s(elements: float, peers: Sequence[Peer], *, dtype: str = "fp32", algorithm: str = "butterfly") -> float:
    """Seconds in which `peers` average a vector: wire and host, one after the other."""
    if len(peers) < 2:
        return 0.0
    n = float(len(peers))
    host = elements * 2.0 * (n - 1.0) / n * HOST_S[dtype]
    return float(wire_s("all_reduce", elements * ELEMENT_BYTES[dtype], peers, algorithm)) + host
