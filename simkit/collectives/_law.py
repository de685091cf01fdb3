"""The law of one link for one operation: fitted where a table of measurements exists, else the datasheet and a prior.

Inside a node        t = a + a1 (n-1) + c sqrt(w) + w / B(n)        w = bytes the busiest rank sends
Between nodes        t = steps * alpha + c sqrt(w) + w / B          B per NIC

a is what one call costs however small, a1 what every further rank adds; the square root is the ramp between the latency
and the bandwidth regime (chunks in flight, change of protocol); B(n) is interpolated between the fitted rank counts in
log-log and constant outside them. A `Fit` stores a_s, a1_s, c or c@2..., Bps or Bps@2..., floor_s;
between nodes alpha_s, c, Bps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from simkit.collectives._common import Num
from simkit.spec.hardware import Fit, Link

# The usable fraction of the line rate where no measurement of the link exists, and why we believe it.
PRIOR: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "tcpxo": (0.90, "Google's GPUDirect-TCPXO: 1.6 Tb/s per node advertised, about 0.9 of it in NCCL logs"),
        "tcp": (0.95, "TCP framing: 1448 of 1514 bytes of a frame are payload"),
        "wan": (0.95, "TCP framing: 1448 of 1514 bytes of a frame are payload"),
        "rdma": (0.85, "HDR and RoCE fabrics reach 0.85 of the NICs in published all-reduce logs"),
        "nvlink": (0.80, "A100 and H100 SXM all-reduce: 0.80-0.83 of the line rate"),
        "xgmi": (0.75, "48 of 64 GB/s of a link are usable: AMD ROCm blog on RCCL and xGMI, March 2025"),
        "pcie": (0.50, "RTX PRO 6000 on PCIe 5: 0.62 to 0.38 from 2 to 8 GPUs; 4 RTX 4090 with P2P: 0.4 to 0.8"),
    }
)
# What a call inside a node costs before the first byte moves: NCCL graph/tuning.cc, base latency of the LL ring.
LAUNCH_S = 6.6e-6
# A step of a collective over RDMA is more than the latency of the wire: a proxy thread posts it. NCCL graph/tuning.cc
# has 5 us (LL) to 14 us (Simple) for it; the one RoCE fabric measured here needs 11.6 us.
RDMA_STEP_S = 10e-6
AS_GIVEN = (1.0, "the rate is taken as usable, as given")
# A copy that bounces through host memory crosses the bus twice; the rest is the shared memory channel.
STAGED = (0.5 * 0.6, "two crossings of the bus, and 0.6 of that: PCIe 3 hosts without P2P move 4.76 of 15.75 GB/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Constants of the law for one op. rates: {ranks: Bps}, ramps: {ranks: c}; step_s: one latency step; floor_s: the
    least time of a call which the host launches by itself.

    evidence is one line for the report; valid: {variable: (low, high)} of the fit, empty for a prior.
    """

    link: str = ""
    a_s: float = 0.0
    floor_s: float = 0.0
    step_s: float = 0.0
    ramps: Mapping[float, float] = field(default_factory=lambda: MappingProxyType({1.0: 0.0}))
    rates: Mapping[float, float] = field(default_factory=lambda: MappingProxyType({1.0: math.inf}))
    kind: str = "assumed"
    evidence: str = ""
    valid: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))

    def rate_Bps(self, ranks: Num) -> Num:
        """B(n) in byte/s."""
        return _between(self.rates, ranks)

    def ramp(self, ranks: Num) -> Num:
        """c(n) in s per sqrt(byte)."""
        return _between(self.ramps, ranks)


def _between(table: Mapping[float, float], ranks: Num) -> Num:
    values = list(table.values())
    if len(values) == 1:
        return values[0]
    logs = np.log(np.maximum(values, 1e-300))
    return np.exp(np.interp(np.log(ranks), np.log(list(table)), logs))


def _per_rank_count(fit: Fit, key: str, default: float) -> Mapping[float, float]:
    found = {float(k.partition("@")[2]): v for k, v in fit.values.items() if k.startswith(f"{key}@")}
    return MappingProxyType(dict(sorted(found.items())) or {1.0: fit.get(key, default)})


def latency_factor(op: str) -> int:
    """Latency steps per further rank in a ring: 2 for all_reduce, else 1."""
    return 2 if op == "all_reduce" else 1


def names(op: str, device: str, *, staged: bool = False, engine: str = "") -> list[str]:
    """The calibration tables of a link that may describe this op, best first.

    ``@device`` = measured on that device, ``+staged`` = through host memory, ``/engine`` = an engine's own kernels.
    """
    ops = tuple(dict.fromkeys((op, "all_reduce")))
    found = [f"{op}@{device}/{engine}"] if engine else []
    if staged:
        found += [name for one in ops for name in (f"{one}@{device}+staged", f"{one}+staged")]
        # The device's own table was taken on such a host, whatever the host did; another device's P2P says nothing.
        return found + [f"{one}@{device}" for one in ops]
    return found + [name for one in ops for name in (f"{one}@{device}", one)]


def law(link: Link, op: str, device: str, *, staged: bool = False, engine: str = "") -> Law:
    """The law of that op over that link between GPUs of that device; a prior where nothing was fitted.

    Rate and latency of the link may be arrays over the points of a sweep; such laws are not remembered.
    """
    rate: Num = link.Bps
    found: Law = (_law.__wrapped__ if isinstance(rate, np.ndarray) else _law)(link, op, device, staged, engine)
    return found


@lru_cache(maxsize=4096)
def _law(link: Link, op: str, device: str, staged: bool, engine: str) -> Law:
    for name in names(op, device, staged=staged, engine=engine) if link.calibration else ():
        if name in link.calibration:
            return _fitted(link, op, name)
    share, why = STAGED if staged else PRIOR.get(link.transport, AS_GIVEN)
    if link.usable is not None and not staged:
        share, why = link.usable, "as the profile of the link has it"
    rate = (min(link.Bps, link.up_Bps) if link.up_Bps else link.Bps) * share
    evidence = f"{link.name}: line rate x {share:.2g} ({why}), latency of the profile"
    launch_s = LAUNCH_S if link.scope == "gpu" and link.transport else 0.0
    rates = MappingProxyType({1.0: rate})
    step_s = max(link.latency_s, RDMA_STEP_S) if link.transport == "rdma" else link.latency_s
    return Law(link=link.name, a_s=launch_s, step_s=step_s, rates=rates, evidence=evidence)


def _fitted(link: Link, op: str, name: str) -> Law:
    fit = link.calibration[name]
    fitted_op = name.partition("@")[0].partition("+")[0]
    step_s = fit.get("alpha_s", fit.get("a1_s", 0.0) / latency_factor(fitted_op))
    residual = f", MAPE {fit.mape:.1%}" if fit.mape is not None else ""
    return Law(
        link=link.name,
        a_s=fit.get("a_s", 0.0),
        floor_s=fit.get("floor_s", 0.0),
        step_s=step_s,
        ramps=_per_rank_count(fit, "c", 0.0),
        rates=_per_rank_count(fit, "Bps", link.Bps),
        kind=fit.evidence,
        evidence=f"{link.name} {name}: {fit.evidence} on {fit.rows} rows{residual}",
        valid=fit.valid,
    )


def slowest(laws: list[Law]) -> Law:
    """The law of the slowest device: a collective waits for it."""
    if len(laws) == 1:
        return laws[0]
    return min(laws, key=lambda one: float(np.min(min(one.rates.values()))))
