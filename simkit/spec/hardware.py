"""What a device, a link and a cluster are: facts from datasheets, and beside them, apart, what was fitted.

All numbers are SI floats. Values are compared by identity: a profile is loaded once and shared. `sources` names, for
every fact, a key of ``hwprofiles/sources.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

EMPTY: Mapping[str, float] = MappingProxyType({})
IDLE_SHARE = 0.1
"""Idle over board power where a profile gives no idle figure: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """One fitted piece of a profile: its constants, and where they come from.

    dataset: names of the tables it was fitted on; rows: how many; valid: {variable: (low, high)}, the range of the
    data; mape: mean absolute relative residual; method: one line. ``evidence`` is ``"fitted"`` (operator tables),
    ``"end-to-end"`` (declared exceptions: no operator table exists) or ``"assumed"`` (a prior).
    """

    name: str
    values: Mapping[str, float]
    dataset: tuple[str, ...] = ()
    rows: int = 0
    valid: Mapping[str, tuple[float, float]] = field(default_factory=lambda: MappingProxyType({}))
    mape: float | None = None
    evidence: str = "fitted"
    note: str = ""

    def __getitem__(self, key: str) -> float:
        return self.values[key]

    def get(self, key: str, default: float) -> float:
        return self.values.get(key, default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """An accelerator (or a CPU) as its datasheet describes it.

    peak_flops: dense FLOP/s per dtype with fp32 accumulation; peak_flops_fp16_accumulate: the faster figure of
    consumer cards, used only on request. memory_bytes: as the driver reports it. memory_Bps: peak, datasheet.
    p2p: whether GPUs of one host may copy to each other without going through host memory over PCIe.
    """

    name: str
    title: str
    vendor: str
    kind: str = "gpu"
    architecture: str = ""
    form_factor: str = ""
    year: int = 0
    peak_flops: Mapping[str, float]
    peak_flops_fp16_accumulate: float | None = None
    memory_bytes: float
    memory_nominal_bytes: float
    memory_Bps: float
    l2_bytes: float | None = None
    sm_count: int | None = None
    boost_hz: float | None = None
    base_hz: float | None = None
    power_w: float | None = None
    idle_power_w: float | None = None
    launch_price_usd: float | None = None
    rental_usd_per_hour: float | None = None
    rental_date: str = ""
    p2p: bool
    pcie_generation: int
    pcie_lanes: int = 16
    gpus_per_node: int
    intra: str
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    calibration: Mapping[str, Fit] = field(default_factory=lambda: MappingProxyType({}))
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """A link between two ranks, or between two nodes.

    Bps: line rate per direction and per GPU (scope "gpu") or per NIC (scope "nic" and "wan").
    latency_s: one message, one hop, as the datasheet or a published measurement gives it.
    up_Bps: the sender's direction where it differs (WAN); None = symmetric. duplex: both directions at once.
    usable: share of the line rate that collectives reach where nothing was measured; None = that of the transport.
    """

    name: str
    title: str
    scope: str
    Bps: float
    latency_s: float
    up_Bps: float | None = None
    usable: float | None = None
    duplex: bool = True
    switched: bool = True
    p2p: bool = True
    transport: str = ""
    max_ranks: int | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    calibration: Mapping[str, Fit] = field(default_factory=lambda: MappingProxyType({}))
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Nodes of one kind: `nodes` machines with `gpus_per_node` GPUs of `device` each."""

    nodes: int
    gpus_per_node: int
    device: Device

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cluster:
    """Groups of nodes joined by `intra` inside a node and `inter` between nodes.

    nics_per_node: how many NICs of `inter` a node has; p2p: False = traffic inside a node is staged through host
    memory. The link used by a set of ranks follows from where the ranks sit, never from how many they are.
    """

    groups: tuple[Group, ...]
    intra: Link | None
    inter: Link | None
    nics_per_node: int = 1
    p2p: bool = True

    @property
    def gpus(self) -> int:
        return sum(g.gpus for g in self.groups)

    @property
    def nodes(self) -> int:
        return sum(g.nodes for g in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(g.device for g in self.groups)

    @property
    def spec(self) -> str:
        return "+".join(f"{g.nodes}x{g.gpus_per_node}x{g.device.name}" for g in self.groups)
