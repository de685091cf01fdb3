"""The event simulation equals the closed forms where there is no contention, and is right where there is."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit import plugins
from simkit.collectives._common import bound_bytes
from simkit.des.network import Collective, fair_rates, flows, replay, run, simulate, star, tiers
from simkit.errors import InputError
from simkit.network import collective
from simkit.spec.hardware import Cluster, Device, Group, Link

PACKAGE = "simkit.collectives"
FLAT = [
    (name, op)
    for name in plugins.names(PACKAGE)
    if name != "hierarchical"
    for op in sorted(plugins.get(PACKAGE, name).OPS)
]
TWO_TIER = sorted(plugins.get(PACKAGE, "hierarchical").OPS)
alphas = st.floats(0, 1e-2)
rates = st.floats(1e6, 1e12)
sizes = st.floats(1, 1e9)


@settings(max_examples=12, deadline=None)
@given(ranks=st.integers(1, 20), nbytes=sizes, alpha_s=alphas, Bps=rates)
@pytest.mark.parametrize(("name", "op"), FLAT)
def test_closed_form_equals_simulation(name, op, ranks, nbytes, alpha_s, Bps):
    closed = plugins.get(PACKAGE, name).seconds(op, ranks=ranks, nbytes=nbytes, alpha_s=alpha_s, Bps=Bps)
    events = simulate(op, algorithm=name, nbytes=nbytes, topology=star(ranks, Bps=Bps, alpha_s=alpha_s))
    assert events == pytest.approx(closed, rel=1e-9, abs=1e-15)
    assert events >= bound_bytes(op, ranks=ranks, nbytes=nbytes) / Bps * (1 - 1e-9)


@settings(max_examples=12, deadline=None)
@given(nodes=st.integers(1, 5), per_node=st.integers(1, 6), nbytes=sizes, alpha_s=alphas, Bps=rates, inner_Bps=rates)
@pytest.mark.parametrize("op", TWO_TIER)
def test_hierarchical_equals_simulation(op, nodes, per_node, nbytes, alpha_s, Bps, inner_Bps):
    inner = {"inner_alpha_s": alpha_s / 7, "inner_Bps": inner_Bps}
    closed = plugins.get(PACKAGE, "hierarchical").seconds(
        op, ranks=nodes * per_node, nbytes=nbytes, alpha_s=alpha_s, Bps=Bps, inner_ranks=per_node, **inner
    )
    topology = tiers(nodes=nodes, per_node=per_node, alpha_s=alpha_s, rank_Bps=Bps, **inner)
    events = simulate(op, algorithm="hierarchical", nbytes=nbytes, topology=topology, inner_ranks=per_node)
    assert events == pytest.approx(closed, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("ranks", "seconds"), [(8, 0.140700), (64, 0.163800)])
def test_ring_on_a_ten_gigabit_star(ranks, seconds):
    # 2(n-1)(50 us + 1e8/n/1.25e9), by hand.
    topology = star(ranks, Bps=1.25e9, alpha_s=50e-6)
    assert simulate("all_reduce", algorithm="ring", nbytes=1e8, topology=topology) == pytest.approx(seconds, rel=1e-3)


def test_a_late_rank_delays_everybody_it_feeds():
    rounds = list(plugins.get(PACKAGE, "ring").rounds("all_gather", ranks=4, nbytes=4.0))
    end = run(rounds, star(4, Bps=1.0, alpha_s=0.0), enter_s=np.array([0.0, 0.0, 0.0, 10.0]))
    # The last block to arrive left rank 3 at 10 s and needs three hops of one second; nobody finishes before that.
    assert end.max() == pytest.approx(13.0)


def test_one_slow_port_sets_the_pace_of_a_ring():
    even = simulate("all_reduce", algorithm="ring", nbytes=8.0, topology=star(8, Bps=1.0, alpha_s=0.0))
    slow = simulate("all_reduce", algorithm="ring", nbytes=8.0, topology=star(8, Bps=[1.0] * 7 + [0.25], alpha_s=0.0))
    assert slow == pytest.approx(4 * even)


def test_max_min_shares_by_hand():
    # Two flows leave port 0 (capacity 10), one of them ends in port 1 (capacity 2): it gets 2, the other 8.
    shares = fair_rates(np.array([[0, 1], [0, 2]]), np.array([10.0, 2.0, 100.0]))
    assert shares == pytest.approx([2.0, 8.0])
    # Bertsekas and Gallager: three flows on a line of two unit links, one crossing both: a half each.
    shares = fair_rates(np.array([[0, 1], [0, 2], [1, 2]]), np.array([1.0, 1.0, np.inf]))
    assert shares == pytest.approx([0.5, 0.5, 0.5])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_max_min_never_overfills_and_leaves_no_flow_without_a_full_port(data):
    ports = data.draw(st.integers(2, 6))
    capacity = np.array(data.draw(st.lists(st.floats(0.1, 100), min_size=ports, max_size=ports)))
    pair = st.tuples(st.integers(0, ports - 1), st.integers(0, ports - 1)).filter(lambda p: p[0] != p[1])
    routes = np.array(data.draw(st.lists(pair, min_size=1, max_size=12)))
    shares = fair_rates(routes, capacity)
    load = np.zeros(ports)
    for route, share in zip(routes, shares, strict=True):
        load[route] += share
    assert np.all(load <= capacity * (1 + 1e-9))
    full = load >= capacity * (1 - 1e-9)
    assert np.all(full[routes].any(axis=1))


def test_two_transfers_share_a_nic_and_speed_up_when_one_ends():
    # 10 B and 30 B from t=0 through one port of 10 B/s: both at 5 until t=2, then the long one alone: 2 + 20/10 = 4.
    routes = np.array([[0, 1], [0, 2]])
    end = flows(start_s=np.zeros(2), nbytes=np.array([10.0, 30.0]), routes=routes, capacities=np.array([10.0, 99, 99]))
    assert end == pytest.approx([2.0, 4.0])
    # The second starts at 1 s: 10 B alone reach 10 at 1 s exactly, so they never meet.
    end = flows(start_s=np.array([0.0, 1.0]), nbytes=np.array([10.0, 30.0]), routes=routes, capacities=np.full(3, 10.0))
    assert end == pytest.approx([1.0, 4.0])


def test_flat_ring_and_hierarchy_through_one_nic():
    # 2 nodes x 8 GPUs, 12.5 GB/s a node, 1e9 B. The ring crosses the NIC once each way: 2*15/16*1e9/12.5e9 = 0.15 s.
    # By rails all eight ranks share the NIC: S through it once, 0.08 s, plus 2*7/8*1e9/300e9 = 5.83 ms inside.
    free = {"alpha_s": 0.0, "inner_alpha_s": 0.0, "inner_Bps": 300e9}
    node = tiers(nodes=2, per_node=8, node_Bps=12.5e9, **free)
    assert simulate("all_reduce", algorithm="ring", nbytes=1e9, topology=node) == pytest.approx(0.150, rel=1e-6)
    rails = simulate("all_reduce", algorithm="hierarchical", nbytes=1e9, topology=node, inner_ranks=8)
    assert rails == pytest.approx(0.080 + 1.75e9 / 300e9, rel=1e-6)


def linked(nodes, per_node, *, alpha_s, Bps):
    """A cluster whose nodes are joined by a plain link, and free inside, with nothing fitted and nothing assumed."""
    facts = {"peak_flops": {}, "memory_bytes": 1.0, "memory_nominal_bytes": 1.0, "memory_Bps": 1.0, "intra": ""}
    card = Device(name="x", title="", vendor="", p2p=True, pcie_generation=99, gpus_per_node=per_node, **facts)
    inter = Link(name="line", title="", scope="nic", Bps=Bps, latency_s=alpha_s)
    intra = Link(name="free", title="", scope="gpu", Bps=1e30, latency_s=0.0)
    groups = (Group(nodes=nodes, gpus_per_node=per_node, device=card),)
    return Cluster(groups=groups, intra=intra, inter=inter, nics_per_node=1)


@settings(max_examples=30, deadline=None)
@given(nodes=st.integers(2, 20), nbytes=sizes, alpha_s=alphas, Bps=rates)
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"])
def test_the_price_on_a_star_is_the_faster_of_the_simulated_candidates(op, nodes, nbytes, alpha_s, Bps):
    price = collective(op, nbytes=nbytes, cluster=linked(nodes, 1, alpha_s=alpha_s, Bps=Bps)).seconds
    candidates = ["ring", "double-tree"] if op == "all_reduce" else ["ring"]
    topology = star(nodes, Bps=Bps, alpha_s=alpha_s)
    simulated = min(simulate(op, algorithm=name, nbytes=nbytes, topology=topology) for name in candidates)
    assert simulated == pytest.approx(price, rel=1e-9, abs=1e-15)


@settings(max_examples=15, deadline=None)
@given(nodes=st.integers(2, 6), groups=st.integers(1, 6), nbytes=sizes, alpha_s=alphas, Bps=rates)
def test_rings_of_sibling_groups_share_the_nic_as_priced(nodes, groups, nbytes, alpha_s, Bps):
    shape = linked(nodes, groups, alpha_s=alpha_s, Bps=Bps)
    price = collective("all_gather", nbytes=nbytes, cluster=shape, ranks=nodes, stride=groups).seconds
    local = np.arange(groups)
    together = [
        replace(one, src=(one.src[:, None] * groups + local).ravel(), dst=(one.dst[:, None] * groups + local).ravel())
        for one in plugins.get(PACKAGE, "ring").rounds("all_gather", ranks=nodes, nbytes=nbytes)
    ]
    node = tiers(nodes=nodes, per_node=groups, alpha_s=alpha_s, inner_alpha_s=0.0, inner_Bps=1e30, node_Bps=Bps)
    assert run(together, node).max() == pytest.approx(price, rel=1e-9, abs=1e-15)


def test_replay_waits_for_the_last_rank():
    work = np.array([1.0, 2.0, 3.0])
    out = replay([Collective(duration_s=0.5, work_s=work), Collective(duration_s=0.25, work_s=work)], 3)
    # max(1, 2, 3) + 0.5 = 3.5, then 3.5 + 3 + 0.25.
    assert out.end_s == pytest.approx([3.5, 6.75])
    assert out.waited_s == pytest.approx([4.0, 2.0, 0.0])
    assert out.events == 6


def test_replay_of_groups_and_ready_times():
    steps = [
        Collective(duration_s=1.0, ranks=(0, 1)),
        Collective(duration_s=5.0, ranks=(2, 3)),
        Collective(duration_s=1.0, ready_s=3.0),
    ]
    out = replay(steps, 4)
    assert out.begin_s == pytest.approx([0.0, 0.0, 5.0])
    assert out.finish_s == pytest.approx([6.0] * 4)
    with pytest.raises(InputError, match=r"outside 0\.\.3"):
        replay([Collective(duration_s=1.0, ranks=(4,))], 4)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 9)), min_size=1, max_size=9)
)
def test_replay_equals_the_recurrence(ranks, steps):
    rng = np.random.default_rng(ranks)
    work = [rng.uniform(0, 1 + w, ranks) for _, w, _ in steps]
    out = replay(
        [Collective(duration_s=d, work_s=w, ready_s=r) for (d, _, r), w in zip(steps, work, strict=True)], ranks
    )
    end = 0.0
    for k, ((duration, _, ready), w) in enumerate(zip(steps, work, strict=True)):
        end = max(ready, end + w.max()) + duration
        assert out.end_s[k] == pytest.approx(end, rel=1e-12)


def test_replay_of_a_thousand_ranks_is_fast():
    work = np.random.default_rng(0).random(1024) * 1e-3
    start = time.process_time()
    out = replay([Collective(duration_s=1e-3, work_s=work) for _ in range(97)], 1024)
    assert time.process_time() - start < 2.0
    assert out.events == 1024 * 97
    assert out.finish_s == pytest.approx(97 * (1e-3 + work.max()))
