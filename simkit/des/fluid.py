"""Max-min fair sharing of access links by flows that come and go, computed where something changed and nowhere else.

A flow moves at its max-min fair share of the ports it crosses (its sender's upload, its receiver's download, relays or
a server between them). When a flow starts, ends or a port changes, only flows joined to it by shared ports can change
their rate: they are shared out anew by progressive filling, the others keep rate and finish time. Source: D.
Bertsekas, R. Gallager, "Data Networks" (1992), section 6.5.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

from simkit.des.clock import Clock, Token

Port = Hashable
_SAME = 1e-12
_LARGE = 48
"""From this many flows on, arrays are faster than loops."""


class Flow:
    """Bytes on their way. left_bytes is right as of `updated_s`."""

    __slots__ = ("done", "left_bytes", "rate_Bps", "route", "token", "updated_s")

    def __init__(self, route: tuple[Port, ...], nbytes: float, done: Callable[[Flow], None], now_s: float) -> None:
        self.route = route
        self.left_bytes = nbytes
        self.done = done
        self.rate_Bps = 0.0
        self.updated_s = now_s
        self.token: Token | None = None


class Fluid:
    """Flows over ports; `done` of a flow is called when its last byte has arrived."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.capacity: dict[Port, float] = {}
        self.crossing: dict[Port, dict[Flow, None]] = {}

    def port(self, port: Port, Bps: float) -> None:
        """Opens a port, or changes its rate."""
        changed = port in self.capacity and self.capacity[port] != Bps
        self.capacity[port] = Bps
        if changed and self.crossing.get(port):
            self._share([port])

    def close(self, port: Port) -> None:
        """Forgets a port that no flow crosses any more."""
        if not self.crossing.get(port):
            self.capacity.pop(port, None)
            self.crossing.pop(port, None)

    def add(self, route: Iterable[Port], nbytes: float, done: Callable[[Flow], None]) -> Flow:
        """Starts a flow of `nbytes`; without bytes it is done at once, by an event of its own."""
        flow = Flow(tuple(route), max(nbytes, 0.0), done, self.clock.now)
        if flow.left_bytes <= 0.0:
            flow.token = self.clock.after(0.0, self._finish, flow)
            return flow
        for port in flow.route:
            self.crossing.setdefault(port, {})[flow] = None
        self._share(flow.route)
        return flow

    def stop(self, flow: Flow) -> float:
        """Takes a flow out; the bytes it still had to move."""
        self._settle(flow)
        Clock.cancel(flow.token)
        self._leave(flow)
        return flow.left_bytes

    def _leave(self, flow: Flow) -> None:
        found = False
        for port in flow.route:
            found = self.crossing.get(port, {}).pop(flow, 0) is None or found
        if found:
            self._share(flow.route)

    def _finish(self, flow: Flow) -> None:
        flow.left_bytes, flow.updated_s = 0.0, self.clock.now
        self._leave(flow)
        flow.done(flow)

    def _settle(self, flow: Flow) -> None:
        now = self.clock.now
        if now > flow.updated_s:
            flow.left_bytes = max(flow.left_bytes - flow.rate_Bps * (now - flow.updated_s), 0.0)
        flow.updated_s = now

    def _share(self, ports: Iterable[Port]) -> None:
        """Shares out anew what is joined to `ports`, and moves the finish of each flow whose rate changed."""
        flows = self._joined(ports)
        if not flows:
            return
        rates = self._large(flows) if len(flows) >= _LARGE else self._small(flows)
        for flow, rate in zip(flows, rates, strict=True):
            if abs(rate - flow.rate_Bps) <= _SAME * rate and flow.token is not None:
                continue
            self._settle(flow)
            flow.rate_Bps = rate
            Clock.cancel(flow.token)
            flow.token = self.clock.after(flow.left_bytes / rate if rate else math.inf, self._finish, flow)

    def _joined(self, ports: Iterable[Port]) -> list[Flow]:
        seen_ports = set(ports)
        stack = list(dict.fromkeys(ports))
        flows: dict[Flow, None] = {}
        while stack:
            for flow in self.crossing.get(stack.pop(), ()):
                if flow in flows:
                    continue
                flows[flow] = None
                for port in flow.route:
                    if port not in seen_ports:
                        seen_ports.add(port)
                        stack.append(port)
        return list(flows)

    def _small(self, flows: list[Flow]) -> list[float]:
        """Progressive filling: the port with the least share per flow fixes its flows, and so on."""
        left = {port: self.capacity[port] for flow in flows for port in flow.route}
        load = dict.fromkeys(left, 0)
        for flow in flows:
            for port in flow.route:
                load[port] += 1
        rate: dict[Flow, float] = {}
        while len(rate) < len(flows):
            tightest, share = min(
                ((port, left[port] / count) for port, count in load.items() if count), key=lambda found: found[1]
            )
            if share == math.inf:
                return [rate.get(flow, math.inf) for flow in flows]
            for flow in self.crossing[tightest]:
                if flow in rate:
                    continue
                rate[flow] = share
                for port in flow.route:
                    left[port] = max(left[port] - share, 0.0)
                    load[port] -= 1
        return [rate[flow] for flow in flows]

    def _large(self, flows: list[Flow]) -> list[float]:
        import numpy as np

        from simkit.des.network import fair_rates

        index: dict[Port, int] = {}
        width = max(len(flow.route) for flow in flows)
        routes = [[index.setdefault(port, len(index)) for port in flow.route] for flow in flows]
        free = len(index)
        padded = np.array([route + [free] * (width - len(route)) for route in routes], dtype=np.int64)
        capacities = np.array([*(self.capacity[port] for port in index), math.inf])
        found: list[float] = fair_rates(padded, capacities).tolist()
        return found
