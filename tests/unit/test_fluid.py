"""Max-min sharing: worked by hand, against progressive filling from scratch, and against M/G/1 processor sharing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.des import fluid as module
from simkit.des.clock import Clock
from simkit.des.fluid import Flow, Fluid
from simkit.des.network import fair_rates


def network(**ports: float) -> tuple[Clock, Fluid]:
    clock = Clock()
    found = Fluid(clock)
    for name, rate in ports.items():
        found.port(name, rate)
    return clock, found


def test_the_textbook_line() -> None:
    # Bertsekas and Gallager, section 6.5.2: one flow over both links, one on each; links of 1 and 2.
    # The long flow and the first share link a: 1/2 each; the second gets the rest of link b: 3/2.
    clock, found = network(a=1.0, b=2.0)
    flows = [found.add(route, 100.0, lambda f: None) for route in (("a", "b"), ("a",), ("b",))]
    assert [f.rate_Bps for f in flows] == [0.5, 0.5, 1.5]
    clock.run(10.0)
    assert found.stop(flows[1]) == pytest.approx(95.0)
    assert [flows[0].rate_Bps, flows[2].rate_Bps] == [1.0, 1.0]


def test_finish_times_follow_the_shares() -> None:
    # 30 and 60 bytes on a port of 10 B/s: 5 each until 6 s, then the second has 30 left at 10 B/s: 9 s.
    clock, found = network(up=10.0)
    ends: list[float] = []
    for size in (30.0, 60.0):
        found.add(("up",), size, lambda f: ends.append(clock.now))
    clock.run(100.0)
    assert ends == pytest.approx([6.0, 9.0])


def test_a_port_may_change_and_nothing_takes_no_time() -> None:
    clock, found = network(up=10.0, free=math.inf)
    ends: list[float] = []
    found.add(("up",), 100.0, lambda f: ends.append(clock.now))
    found.add(("up",), 0.0, lambda f: ends.append(clock.now))
    found.add(("free",), 5.0, lambda f: ends.append(clock.now))
    clock.run(5.0)
    assert ends == [0.0, 0.0]
    found.port("up", 25.0)
    clock.run(50.0)
    assert ends[2] == pytest.approx(7.0)


@pytest.mark.parametrize(("n", "seconds"), [(10, 2.0), (20, 2.0), (40, 4.0), (400, 40.0)])
def test_equal_receivers_of_one_server_reach_the_fluid_limit(n: int, seconds: float) -> None:
    # n downloads of 100 bytes from a server of 1000 B/s, each line 50 B/s: below 20 of them the lines bind.
    clock, found = network(server=1000.0)
    ends: list[float] = []
    for i in range(n):
        found.port(("down", i), 50.0)
        found.add(("server", ("down", i)), 100.0, lambda f: ends.append(clock.now))
    clock.run(1e4)
    assert ends == pytest.approx([seconds] * n)


routes = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple), min_size=1, max_size=14
)


@settings(max_examples=200, deadline=None)
@given(routes=routes, capacity=st.lists(st.floats(0.5, 50.0), min_size=6, max_size=6),
       out=st.sets(st.integers(0, 13)), large=st.integers(1, 100))
def test_shares_are_those_of_filling_from_scratch(
    routes: list[tuple[int, ...]], capacity: list[float], out: set[int], large: int
) -> None:
    # Flows come one by one and some go again: after each change the incremental shares are those from scratch.
    before, module._LARGE = module._LARGE, large
    try:
        clock, found = Clock(), None
        found = Fluid(clock)
        for port, rate in enumerate(capacity):
            found.port(port, rate)
        flows: list[tuple[tuple[int, ...], Flow]] = []
        for route in routes:
            flows.append((route, found.add(route, 1e9, lambda f: None)))
        for i in sorted(out & set(range(len(flows))), reverse=True):
            found.stop(flows.pop(i)[1])
        if flows:
            padded = np.array([list(r) + [6] * (3 - len(r)) for r, _ in flows])
            wanted = fair_rates(padded, np.array([*capacity, math.inf]))
            np.testing.assert_allclose([f.rate_Bps for _, f in flows], wanted, rtol=1e-9)
    finally:
        module._LARGE = before


@pytest.mark.parametrize("law", ["exponential", "deterministic", "pareto"])
def test_one_port_is_processor_sharing(law: str) -> None:
    # M/G/1-PS: the mean response is E[S]/(1 - rho) whatever the law of sizes (Kleinrock II, section 4.4).
    rng = np.random.default_rng(5)
    load, count, runs = 0.5, 2500, 12
    means = []
    for _ in range(runs):
        sizes = {"exponential": rng.exponential(1.0, count), "deterministic": np.ones(count),
                 "pareto": (rng.pareto(2.5, count) + 1.0) * 0.6}[law]
        clock, found = network(up=1.0)
        spent: list[float] = []

        def start(size: float, clock: Clock = clock, found: Fluid = found, spent: list[float] = spent) -> None:
            begin = clock.now
            found.add(("up",), size, lambda f: spent.append(clock.now - begin))

        for time, size in zip(np.cumsum(rng.exponential(1.0 / load, count)), sizes, strict=True):
            clock.at(float(time), start, float(size))
        clock.run(1e9)
        means.append(float(np.mean(spent[200:])) / float(sizes.mean()) * (1.0 - load))
    error = np.std(means, ddof=1) / math.sqrt(runs)
    assert abs(np.mean(means) - 1.0) < max(3.106 * error, 1e-3)  # Student's t with 11 degrees, 99 %
    assert error < 0.1
