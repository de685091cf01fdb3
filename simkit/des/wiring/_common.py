"""What a wiring answers to the swarm: peers that come free, are lost, have their state, or changed their speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from simkit.des.swarm_parts import Node, Unit

if TYPE_CHECKING:
    from simkit.des.swarm import Swarm


class Wiring(ABC):
    """units: what runs or stands still as a whole. The methods are called by `simkit.des.swarm.Swarm`."""

    units: list[Any]

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.cfg = swarm.cfg
        self.cost = swarm.cfg.stages
        self.stages = swarm.cfg.stages.stages
        self.reference_s: list[float] = [float(x) for x in self.cost.compute_s * self.cost.flops]
        self.memory: list[float] = [float(x) for x in self.cost.memory_bytes]
        self.duty = 1.0
        # What is written in the background takes its share of the line.
        self.state: list[float] = [float(x) for x in self.cost.state_bytes]

    def seconds(self, node: Node, stage: int) -> float:
        """Forward and backward of one micro-batch of a stage on a peer as it is now."""
        return self.reference_s[stage] / node.peer.flops * node.slow

    def up_Bps(self, node: Node, stage: int) -> float:
        """What a peer's activations get of its upload: its share beside transfers, less the checkpoints it writes."""
        rate = node.peer.up_Bps
        if node.peer.relay:
            rate = min(rate, self.swarm.relay_Bps)
        if self.cfg.checkpoint_s == 0.0:
            written = self.state[stage] / (rate * self.cfg.checkpoint_interval_s) / self.cfg.pipelines
            rate *= max(1.0 - written, 0.01)
        return rate / (1.0 + node.uploads)

    def down_Bps(self, node: Node) -> float:
        return min(node.peer.down_Bps, self.swarm.relay_Bps) if node.peer.relay else node.peer.down_Bps

    def fits(self, node: Node, stage: int) -> bool:
        return self.memory[stage] <= node.peer.memory_bytes

    @abstractmethod
    def start(self, nodes: list[Node]) -> None:
        """Places the peers of the start, whose state is there already."""

    @abstractmethod
    def offer(self, node: Node) -> None:
        """A peer is free."""

    @abstractmethod
    def lost(self, node: Node, *, announced: bool) -> None:
        """A working or loading peer is gone."""

    @abstractmethod
    def loaded(self, node: Node, unit: Unit, stage: int) -> None:
        """A peer has the state of its stage."""

    def leaving(self, node: Node) -> None:  # noqa: B027 - a wiring need not prepare for it
        """A working peer will leave soon."""

    def slowed(self, node: Node) -> None:
        """A working peer has become slower, or itself again."""
        self.refresh(node)

    @abstractmethod
    def refresh(self, node: Node) -> None:
        """The speed or the upload of a working peer has changed."""

    @abstractmethod
    def alive(self, stage: int) -> bool:
        """Whether somebody can still give the state of a stage."""

    def settle(self) -> None:
        """Brings every unit, and the busy seconds of its peers, up to now."""
        now = self.swarm.clock.now
        for unit in self.units:
            unit.advance(now)

    @abstractmethod
    def pool_size(self) -> int:
        """Spare peers."""

    @abstractmethod
    def finish(self) -> None:
        """Settles the busy seconds of whoever works at the end."""
