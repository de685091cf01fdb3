"""What must hold in any swarm, whatever comes and goes: after every change, in a thousand drawn histories."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simkit.churn._common import churn
from simkit.des.swarm import Swarm, SwarmConfig, simulate
from simkit.spec.peers import Peer
from simkit.spec.stage import StageCost

HOUR_S = 3600.0
HISTORIES = 1000 if os.environ.get("SIMKIT_SLOW") == "1" else 200
LAWS = ("none", "exponential:20min", "weibull:30min,shape=0.5", "pareto:30min,alpha=1.4",
        "day-night:30min,amplitude=1", "correlated:40min,every=1h,share=0.6,duration=10min")  # fmt: skip


@st.composite
def swarms(draw: st.DrawFn) -> SwarmConfig:
    stages, pipelines = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = rng.uniform(1e6, 3e9, stages) * draw(st.sampled_from([0.0, 1.0]))
    memory = rng.choice([2e9, 6e9], stages)
    cost = StageCost(
        forward_s=rng.uniform(0.01, 1.0, stages), backward_s=rng.uniform(0.0, 2.0, stages),
        activation_bytes=np.append(rng.uniform(0.0, 1e7, stages - 1), 0.0),
        gradient_bytes=np.append(0.0, rng.uniform(0.0, 1e7, stages - 1)), state_bytes=sizes, memory_bytes=memory,
        exchange_bytes=np.zeros(stages), flops=np.ones(stages),
    )  # fmt: skip
    count = max(1, stages * pipelines + draw(st.integers(-3, 4)))
    peers = tuple(
        Peer(name=f"p{i}", device="x", flops=float(rng.uniform(0.5, 2.0)),
             memory_bytes=float(rng.choice([4e9, 8e9], p=[0.3, 0.7])), up_Bps=float(rng.uniform(1e6, 3e7)),
             down_Bps=float(rng.uniform(1e6, 3e8)), latency_s=float(rng.uniform(0.0, 0.05)),
             region=str(rng.choice(["", "north", "south"])), relay=bool(rng.random() < 0.2))
        for i in range(count)
    )  # fmt: skip
    return SwarmConfig(
        stages=cost, peers=peers, pipelines=pipelines, churn=churn(draw(st.sampled_from(LAWS))),
        horizon_s=draw(st.sampled_from([900.0, 2 * HOUR_S])), micro_batches=draw(st.integers(1, 20)),
        steps_per_round=draw(st.integers(1, 3)), exchange_s=draw(st.sampled_from([0.0, 7.0])),
        wiring=draw(st.sampled_from(["fixed", "fixed", "stochastic"])),
        schedule=draw(st.sampled_from(["endless", "1f1b"])),
        backup_pool=draw(st.integers(0, 5)), arrivals=draw(st.sampled_from(["open", "recruit"])),
        recruit_s=draw(st.sampled_from([30.0, 900.0])), graceful=draw(st.sampled_from([0.0, 0.5, 1.0])),
        joins=draw(st.sampled_from([(), ((600.0, 8),)])), heartbeat_s=draw(st.sampled_from([1.0, 30.0])),
        broker_law=draw(st.sampled_from(["deterministic", "exponential"])), broker_s=draw(st.sampled_from([0.0, 2.0])),
        checkpoint_interval_s=draw(st.sampled_from([120.0, 1800.0])), checkpoint_s=draw(st.sampled_from([0.0, 20.0])),
        checkpoint_servers=draw(st.integers(1, 2)), slow_every_s=draw(st.sampled_from([math.inf, 900.0])),
        placement=draw(st.sampled_from(["fastest", "longest", "uniform", "cheapest", "best-link"])),
        replacement=draw(st.sampled_from(["replica", "checkpoint", "neighbour", "striped"])),
        pool=draw(st.sampled_from(["fixed", "share", "poisson"])),
        deadline=draw(st.sampled_from(["none", "fixed", "adaptive"])), patience_s=draw(st.sampled_from([30.0, 300.0])),
        latency_s={("north", "south"): 0.08}, bins=7, seed=draw(st.integers(0, 2**31)), record=True,
    )  # fmt: skip


class Auditor:
    """Looks at a swarm after each change, with its own books."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done: dict[int, int] = {}
        self.looks = 0

    def __call__(self, swarm: Swarm) -> None:
        self.looks += 1
        assert swarm.clock.now >= self.now_s, "the clock goes back"
        self.now_s = swarm.clock.now
        self.places(swarm)
        self.work(swarm)
        self.transfers(swarm)

    def places(self, swarm: Swarm) -> None:
        """Every working peer holds one place that fits it and knows of it; every stage without a holder is known."""
        memory = swarm.cfg.stages.memory_bytes
        working = {n: n.stage for n in swarm.population.nodes.values() if n.state == "working"}
        held = [(n, s) for s, nodes in enumerate(swarm.book.at) for n in nodes]
        assert dict(held) == working, "a place without its peer, or a peer without its place"
        assert len(held) == len(working), "a peer with two places"
        for node, stage in held:
            assert memory[stage] <= node.peer.memory_bytes, "more memory than the peer has"
        for stage, nodes in enumerate(swarm.book.at):
            if not nodes:
                # Whatever runs has all of its stages; and nobody can get the state: it is known to be lost.
                assert not any(unit.running for unit in swarm.wiring.units), "runs without a holder"
                assert stage in swarm.dead or swarm.wiring.alive(stage), "a block without a holder goes unnoticed"
        for unit in swarm.wiring.units:
            for stage in range(swarm.cfg.stages.stages) if hasattr(unit, "holder") else ():
                assert (unit.holder[stage] is None) == (stage in unit.hole), "a hole that nobody knows of"
            if unit.running and hasattr(unit, "holder"):
                assert all(unit.holder), "runs with a hole"
                assert not unit.parked

    def work(self, swarm: Swarm) -> None:
        """done = useful + open + lost, never less than before; nothing is lost without a reason."""
        for unit in swarm.wiring.units:
            count = unit.progress.count()
            assert 0 <= count <= unit.progress.per_round
            assert unit.done == unit.useful + count + sum(unit.lost.values())
            assert unit.lost_total == sum(unit.lost.values())
            assert all(reason and n > 0 for reason, n in unit.lost.items())
            assert unit.safe <= unit.useful
            assert unit.useful % unit.progress.per_round == 0, "a round is useful as a whole"
            assert unit.done >= self.done.get(unit.key, 0), "work that was done is gone"
            self.done[unit.key] = unit.done

    def transfers(self, swarm: Swarm) -> None:
        """Nobody sends or gets more than its line, and every sender and receiver is there."""
        fluid = swarm.transfers.fluid
        for port, flows in fluid.crossing.items():
            rate = sum(flow.rate_Bps for flow in flows)
            assert rate <= fluid.capacity[port] * (1.0 + 1e-9)
        for node in swarm.population.nodes.values():
            assert node.uploads == sum(sum(1 for o in load.flows.values() if o is node) for load in node.serving)
            if node.load is not None:
                assert node.state == "loading"
                assert all(o.state in ("working", "spare", "done") for o in node.load.flows.values()
                           if not isinstance(o, int))  # fmt: skip


def check(cfg: SwarmConfig, found: Any) -> None:
    """What must hold of a whole run."""
    assert found.done == found.useful + sum(found.lost.values())
    for name in ("done", "lost"):
        assert np.all(np.diff(found.samples[name]) >= 0.0)
    assert found.samples["t_s"][-1] == pytest.approx(cfg.horizon_s)
    # The seconds of every unit are accounted for, and no work was done in a stretch that is not named as a stall.
    assert sum(found.time_by.values()) == pytest.approx(found.units * cfg.horizon_s)
    assert set(found.time_by) <= {"start", "running", "detect", "starved", "broker", "load", "parked", "checkpoint"}
    edges = [(s.start_s, s.end_s) for s in found.stalls]
    assert all(a < b for a, b in edges)
    assert all(b <= c for (_, b), (c, _) in pairwise(edges))
    still = sum(b - a for a, b in edges)
    assert cfg.horizon_s - still <= found.time_by.get("running", 0.0) + found.time_by.get("checkpoint", 0.0) + 1e-6
    for s in found.stalls:
        assert s.reason in ("start", "detect", "starved", "broker", "load", "parked", "checkpoint")
    assert np.all(found.peers["busy_s"] <= found.peers["working_s"] * (1.0 + 1e-6) + 1e-6)
    assert np.all(found.peers["working_s"] <= found.peers["online_s"] * (1.0 + 1e-9) + 1e-6)


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cfg=swarms())
def test_a_thousand_histories(cfg: SwarmConfig) -> None:
    auditor = Auditor()
    found = simulate(cfg, watch=auditor)
    assert auditor.looks > 0
    check(cfg, found)


@settings(max_examples=25, deadline=None)
@given(cfg=swarms())
def test_the_same_seed_gives_the_same_bytes(cfg: SwarmConfig) -> None:
    a, b = simulate(cfg), simulate(cfg)
    assert repr(a.marks) == repr(b.marks)
    assert {k: v.tobytes() for k, v in a.samples.items()} == {k: v.tobytes() for k, v in b.samples.items()}
    assert (a.done, a.useful, a.lost, a.time_by, a.cost_usd) == (b.done, b.useful, b.lost, b.time_by, b.cost_usd)
