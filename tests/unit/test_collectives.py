"""Closed forms against numbers worked out by hand or printed elsewhere."""

import numpy as np
import pytest

from simkit.collectives import direct, double_tree, halving_doubling, hierarchical, ring, tree
from simkit.errors import InputError


def test_ring_all_reduce_on_ten_gigabit_by_hand():
    # 2*7*(50e-6 + 1e8/8/1.25e9) = 14 * 0.01005; 126 * (50e-6 + 1.5625e6/1.25e9) = 126 * 0.0013
    args = {"nbytes": 1e8, "alpha_s": 50e-6, "Bps": 1.25e9}
    assert ring.seconds("all_reduce", ranks=8, **args) == pytest.approx(0.1407, rel=1e-12)
    assert ring.seconds("all_reduce", ranks=64, **args) == pytest.approx(0.1638, rel=1e-12)


def test_two_ranks_on_ten_gigabit_have_a_factor_of_one():
    # 1310720000 B / 1.25e9 B/s = 1.048576 s; bus bandwidth = algorithm bandwidth at n = 2.
    assert ring.seconds("all_reduce", ranks=2, nbytes=1310720000, alpha_s=0, Bps=1.25e9) == pytest.approx(1.048576)


def test_direct_is_no_faster_than_ring_in_bandwidth():
    # 2*7/8*100e6/50e9 = 3.5 ms for either, on eight ranks of a 50 GB/s switch.
    for algorithm in (ring, direct, halving_doubling):
        assert algorithm.seconds("all_reduce", ranks=8, nbytes=100e6, alpha_s=0, Bps=50e9) == pytest.approx(3.5e-3)


def test_bus_bandwidth_of_a_published_line():
    # nccl-tests, 4 RTX 4090 with P2P: 1 GiB in 62077 us prints algbw 17.30 and busbw 25.95 GB/s.
    size, seconds = 2**30, 62077e-6
    assert size / seconds / 1e9 == pytest.approx(17.30, abs=0.005)
    assert ring.wire_bytes("all_reduce", ranks=4, nbytes=size) / seconds / 1e9 == pytest.approx(25.95, abs=0.005)


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1024, 10)])
def test_logarithmic_steps(ranks, steps):
    assert tree.steps("broadcast", ranks) == steps
    assert halving_doubling.steps("all_gather", ranks) == steps
    assert halving_doubling.steps("all_reduce", ranks) == 2 * steps


@pytest.mark.parametrize(("ranks", "height"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (1023, 9), (1024, 10)])
def test_double_tree_height(ranks, height):
    assert double_tree.steps("all_reduce", ranks) == 2 * height


def test_bruck_all_to_all_sends_a_block_once_per_digit():
    # Digit sums of 0..4 (0, 1, 10, 11, 100) add up to 5; of 0..7 to 12.
    assert halving_doubling.wire_bytes("all_to_all", ranks=5, nbytes=5.0) == pytest.approx(5.0)
    assert halving_doubling.wire_bytes("all_to_all", ranks=8, nbytes=8.0) == pytest.approx(12.0)


def test_hierarchical_beats_the_nic_at_two_nodes():
    # 2 nodes x 8 GPUs, 12.5 GB/s a node: the node sends 2(N-1)/N S = S, so 1 GB takes 80 ms on the NIC;
    # a flat ring through one NIC sends 2*15/16 GB: 150 ms. Free links inside the node.
    args = {"ranks": 16, "nbytes": 1e9, "alpha_s": 0.0}
    rail = hierarchical.seconds("all_reduce", Bps=12.5e9 / 8, inner_ranks=8, **args)
    assert rail == pytest.approx(0.080)
    assert ring.seconds("all_reduce", Bps=12.5e9, **args) == pytest.approx(0.150)


def test_hierarchical_by_hand():
    # g=4, N=3, S=12 B: inside 2*3/4*12/6 = 3, between 2*2/3*(12/4)/2 = 2, latency 2*3*0.1 + 2*2*0.5 = 2.6.
    cost = hierarchical.seconds(
        "all_reduce", ranks=12, nbytes=12.0, alpha_s=0.5, Bps=2.0, inner_ranks=4, inner_alpha_s=0.1, inner_Bps=6.0
    )
    assert cost == pytest.approx(3 + 2 + 2.6)


def test_hierarchical_refuses_unequal_nodes():
    with pytest.raises(InputError, match="inner_ranks = 4 does not divide 10 ranks"):
        list(hierarchical.rounds("all_reduce", ranks=10, nbytes=1.0, inner_ranks=4))


def test_unknown_op_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'all_reduce'"):
        ring.seconds("allreduce", ranks=2, nbytes=1, alpha_s=0, Bps=1)
    with pytest.raises(InputError):
        tree.seconds("all_to_all", ranks=2, nbytes=1, alpha_s=0, Bps=1)


def test_arrays_of_ranks_and_bytes():
    ranks = np.array([1, 2, 8])
    assert ring.seconds("all_reduce", ranks=ranks, nbytes=8e9, alpha_s=1e-3, Bps=1e9) == pytest.approx(
        [0, 8 + 2e-3, 14 + 14e-3]
    )
