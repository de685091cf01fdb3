"""The state of a stage on its way to the peer that takes it over: over real links, from peers or from the checkpoint.

A transfer waits for one round trip, then moves as fluid flows through the sender's upload, relays of firewalled peers,
and the receiver's download. While a peer sends state, its activations get their fair share of its upload, 1/(1 + k)
beside k transfers. When a sender leaves, what is missing comes from another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simkit import plugins
from simkit.des.clock import Clock, Token
from simkit.des.fluid import Flow, Fluid, Port
from simkit.des.swarm_config import SwarmConfig
from simkit.des.swarm_parts import Node

if TYPE_CHECKING:
    from simkit.des.swarm import Swarm


class Load:
    """One takeover: `node` fetches the state of a stage."""

    __slots__ = ("began_s", "flows", "fresh", "missing_bytes", "node", "stage", "token", "unit")

    def __init__(self, node: Node, unit: Any, stage: int, began_s: float) -> None:
        self.node, self.unit, self.stage, self.began_s = node, unit, stage, began_s
        self.flows: dict[Flow, Node | int] = {}
        self.missing_bytes = 0.0
        self.token: Token | None = None
        self.fresh = True


class Book:
    """Nodes that hold each stage, for choosing some of them at random in constant time."""

    def __init__(self, stages: int) -> None:
        self.at: list[list[Node]] = [[] for _ in range(stages)]
        self.index: dict[Node, int] = {}

    def add(self, node: Node, stage: int) -> None:
        self.index[node] = len(self.at[stage])
        self.at[stage].append(node)

    def remove(self, node: Node, stage: int) -> None:
        held, i = self.at[stage], self.index.pop(node)
        last = held.pop()
        if last is not node:
            held[i] = last
            self.index[last] = i


class View:
    """What a replacement policy may look at."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def replicas(self, stage: int, *, unit: Any, draw: float, count: int) -> list[Node]:
        """Up to `count` peers that hold the stage, from a random one on."""
        held = self.book.at[stage]
        if not held:
            return []
        first = int(draw * len(held))
        return [held[(first + i) % len(held)] for i in range(min(count, len(held)))]

    def neighbours(self, unit: Any, stage: int) -> list[Node]:
        """The peers that hold the stages before and after this one in the same unit."""
        found: list[Node] = unit.beside(stage)
        return found

    @staticmethod
    def burden(node: Node) -> tuple[float, ...]:
        """What makes a peer a poor source: seconds a byte at its share of the upload."""
        return ((1.0 + node.uploads) / node.peer.up_Bps, node.key)


class Transfers:
    """All takeovers under way. `done(load)` is called at the end of each."""

    def __init__(self, swarm: Swarm, cfg: SwarmConfig, clock: Clock, book: Book,
                 done: Callable[[Load], None]) -> None:
        self.swarm, self.cfg, self.clock, self.book, self.done = swarm, cfg, clock, book, done
        self.view = View(book)
        self.policy = plugins.get("simkit.policies.replacement", cfg.replacement)
        self.fluid = Fluid(clock)
        self.servers = [0] * cfg.checkpoint_servers
        for i in range(cfg.checkpoint_servers):
            self.fluid.port(("server", i), cfg.checkpoint_Bps)
        for i in range(cfg.relays):
            self.fluid.port(("relay", i), cfg.relay_Bps)
        self.moved_bytes = 0.0
        self.from_peers = self.from_checkpoint = self.switched = 0

    def begin(self, node: Node, unit: Any, stage: int, holder: Node | None = None) -> None:
        """`node` starts to fetch; from `holder` where it is still there (a handover)."""
        load = node.load = Load(node, unit, stage, self.clock.now)
        total = float(self.cfg.stages.state_bytes[stage])
        sources = [holder] if holder is not None else self.policy.sources(self.view, unit, stage, node.draw)
        if total <= 0.0:
            load.token = self.clock.after(0.0, self._finish, load)
            return
        lag = 2.0 * max((self.swarm.latency(source.peer, node.peer) for source in sources), default=node.peer.latency_s)
        load.missing_bytes = total
        load.token = self.clock.after(lag, self._fetch, load, holder)

    def _fetch(self, load: Load, holder: Node | None) -> None:
        load.token = None
        nbytes, load.missing_bytes = load.missing_bytes, 0.0
        if holder is not None and holder.state == "working" and holder.stage == load.stage:
            sources = [holder]
        else:
            sources = self.policy.sources(self.view, load.unit, load.stage, load.node.draw)
        if sources:
            self.from_peers += load.fresh
            for source in sources:
                self._flow(load, nbytes / len(sources), source)
        else:
            # A state that was begun from a peer and goes on from a checkpoint would be of two versions: start over.
            self.from_checkpoint += 1
            for flow, origin in list(load.flows.items()):
                self._drop(load, flow, origin)
            total = float(self.cfg.stages.state_bytes[load.stage])
            least = min(range(len(self.servers)), key=lambda i: (self.servers[i], i))
            self._flow(load, total, least)
        load.fresh = False

    def _flow(self, load: Load, nbytes: float, source: Node | int) -> None:
        node, fluid = load.node, self.fluid
        down: Port = ("down", node.key)
        fluid.port(down, node.peer.down_Bps)
        route: list[Port] = []
        if isinstance(source, Node):
            up: Port = ("up", source.key)
            fluid.port(up, source.peer.up_Bps)
            route.append(up)
            route += [("relay", n.key % self.cfg.relays) for n in (source, node) if n.peer.relay]
            source.serving[load] = None
            source.uploads += 1
            self.swarm.wiring.refresh(source)
        else:
            self.servers[source] += 1
            route.append(("server", source))
            route += [("relay", node.key % self.cfg.relays)] if node.peer.relay else []
        route.append(down)
        self.moved_bytes += nbytes
        flow = fluid.add(dict.fromkeys(route), nbytes, lambda flow: self._arrived(load, flow))
        load.flows[flow] = source

    def _drop(self, load: Load, flow: Flow, source: Node | int) -> float:
        """Takes a flow out of the books; its bytes that are still missing."""
        left = self.fluid.stop(flow)
        self.moved_bytes -= left
        self._release(load, flow, source)
        return left

    def _release(self, load: Load, flow: Flow, source: Node | int) -> None:
        del load.flows[flow]
        if isinstance(source, Node):
            source.uploads -= 1
            if not any(origin is source for origin in load.flows.values()):
                source.serving.pop(load, None)
            if not source.uploads:
                self.fluid.close(("up", source.key))
            self.swarm.wiring.refresh(source)
        else:
            self.servers[source] -= 1

    def _arrived(self, load: Load, flow: Flow) -> None:
        self._release(load, flow, load.flows[flow])
        if not load.flows and load.token is None:
            self._finish(load)

    def _finish(self, load: Load) -> None:
        load.token = None
        load.node.load = None
        self.fluid.close(("down", load.node.key))
        self.done(load)

    def abandon(self, node: Node) -> None:
        """The receiver is gone, or wanted elsewhere."""
        load = node.load
        if load is None:
            return
        node.load = None
        Clock.cancel(load.token)
        for flow, source in list(load.flows.items()):
            self._drop(load, flow, source)
        self.fluid.close(("down", node.key))

    def orphan(self, source: Node) -> None:
        """A sender is gone: its receivers ask somebody else for what is missing, after they have noticed."""
        for load in list(source.serving):
            left = sum(self._drop(load, flow, origin) for flow, origin in list(load.flows.items()) if origin is source)
            if left > 0.0:
                self.switched += 1
                load.missing_bytes += left
                Clock.cancel(load.token)
                wait = 2.0 * load.node.peer.latency_s + self.cfg.heartbeat_s
                load.token = self.clock.after(wait, self._fetch, load, None)
            elif not load.flows and load.token is None:
                load.token = self.clock.after(0.0, self._finish, load)

    def relay_share_Bps(self) -> float:
        """What a firewalled peer gets of the relays for its activations, when all of them talk."""
        behind = sum(peer.relay for peer in self.cfg.peers) * self.cfg.online / len(self.cfg.peers)
        return self.cfg.relays * self.cfg.relay_Bps / behind if behind else math.inf
