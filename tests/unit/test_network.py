"""Placement decides the links, the links decide the seconds."""

import math
from dataclasses import replace

import numpy as np
import pytest

from simkit.calibrate_links import MARKER, fit_links, fit_toml, write_link_fits
from simkit.collectives._law import names
from simkit.errors import InputError
from simkit.network import collective, place, predict_row, seconds_fn
from simkit.spec.hardware import Cluster, Device, Fit, Group, Link

NVLINK = Link(name="nvlink4", title="", scope="gpu", Bps=450e9, latency_s=0.6e-6, transport="nvlink")
PCIE3 = Link(name="pcie3x16", title="", scope="gpu", Bps=15.75e9, latency_s=1e-6, transport="pcie")
TEN_GBE = Link(name="10Gb/s@50us", title="", scope="nic", Bps=1.25e9, latency_s=50e-6)
HUNDRED = Link(name="100Gb/s@5us", title="", scope="nic", Bps=12.5e9, latency_s=5e-6)


def device(name="gpu", *, p2p=True, generation=5):
    facts = {"peak_flops": {}, "memory_bytes": 1.0, "memory_nominal_bytes": 1.0, "memory_Bps": 1.0, "intra": ""}
    return Device(
        name=name, title=name, vendor="", p2p=p2p, pcie_generation=generation, gpus_per_node=8, **facts
    )


def cluster(nodes, gpus, *, intra=NVLINK, inter=TEN_GBE, nics=1, p2p=True, kind=None):
    groups = (Group(nodes=nodes, gpus_per_node=gpus, device=kind or device()),)
    return Cluster(groups=groups, intra=intra, inter=inter, nics_per_node=nics, p2p=p2p)


def fitted(link, **values):
    fit = Fit(name="all_reduce", values=values, rows=9, mape=0.05, valid={"bytes": (1e3, 1e9), "ranks": (2, 8)})
    return replace(link, calibration={"all_reduce": fit})


def test_ten_gigabit_between_two_machines_is_bits():
    # 1310720000 B over 10 Gb/s: 1.048576 s at best; at two ranks bus and algorithm bandwidth are the same.
    cost = collective("all_reduce", nbytes=1310720000, cluster=cluster(2, 1), algorithm="ring")
    assert cost.seconds == pytest.approx(1.048576 + 2 * 50e-6)
    assert cost.Bps == pytest.approx(1.25e9)
    assert cost.tier == "inter"
    assert cost.bound == "bandwidth of 10Gb/s@50us"


def test_eight_ranks_of_one_node_use_the_node_link():
    big = cluster(4, 8)
    inside = collective("all_reduce", nbytes=1e9, cluster=big, ranks=8)
    assert inside.tier == "intra"
    assert inside.seconds == collective("all_reduce", nbytes=1e9, cluster=cluster(1, 8, inter=None)).seconds
    spread = collective("all_reduce", nbytes=1e9, cluster=big, ranks=[0, 8, 16, 24])
    assert spread.tier == "inter"
    assert spread.seconds > 50 * inside.seconds


def test_placement_by_size_stride_and_list():
    big = cluster(4, 8)
    for where in (place(big), place(big, list(range(32)))):
        assert (where.ranks, where.nodes, where.per_node) == (32, 4, 8)
    dp = place(big, 4, stride=8)
    assert (dp.ranks, dp.nodes, dp.per_node, dp.sharing) == (4, 4, 1, 8)
    assert (place(big, 16, stride=2).nodes, place(big, 16, stride=2).per_node) == (4, 4)
    sizes = place(big, np.array([1, 8, 16]))
    assert sizes.nodes.tolist() == [1, 1, 2]
    assert place(big, [3, 4, 9]).nodes == 2


def test_placement_on_nodes_of_different_size():
    two = Group(nodes=2, gpus_per_node=2, device=device("small"))
    mixed = Cluster(groups=(two, Group(nodes=1, gpus_per_node=4, device=device("large"))), intra=NVLINK, inter=TEN_GBE)
    where = place(mixed)
    assert (where.ranks, where.nodes, where.per_node) == (8, 3, 4)
    assert [d.name for d in where.devices] == ["small", "large"]
    assert [d.name for d in place(mixed, [4, 5]).devices] == ["large"]


@pytest.mark.parametrize(("ranks", "stride"), [(0, 1), (33, 1), (5, 8), ([32], 1), ([], 1)])
def test_ranks_the_cluster_lacks(ranks, stride):
    with pytest.raises(InputError, match="ranks = "):
        place(cluster(4, 8), ranks, stride=stride)


def test_one_rank_is_free_and_needs_no_link():
    alone = cluster(1, 1, intra=None, inter=None)
    for op in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
        assert collective(op, nbytes=1e9, cluster=alone).seconds == 0
    with pytest.raises(InputError, match="inter is needed"):
        collective("all_reduce", nbytes=1e9, cluster=cluster(2, 1, inter=None))
    with pytest.raises(InputError, match="intra is needed"):
        collective("all_reduce", nbytes=1e9, cluster=cluster(1, 2, intra=None))


def test_bus_bandwidth_above_the_nic_only_without_the_ring():
    # 2 x 8 GPUs, 100 Gb/s a node, 1 GB: a ring sends 1.875 GB through the NIC, 150 ms; tree and rails 1 GB, 80 ms.
    pair = cluster(2, 8, inter=HUNDRED)
    cost = {a: collective("all_reduce", nbytes=1e9, cluster=pair, algorithm=a) for a in ("ring", "hierarchical", None)}
    assert cost["ring"].seconds == pytest.approx(0.150, rel=0.01)
    assert cost["ring"].Bps <= 12.5e9 * (1 + 1e-12)
    assert cost["hierarchical"].seconds == pytest.approx(0.080 + 1.75e9 / (0.8 * 450e9), rel=0.01)
    assert cost[None].algorithm == "double-tree"
    assert 1.875e9 / cost[None].seconds > 1.8 * 12.5e9


def test_groups_that_communicate_together_share_the_nics():
    big = cluster(4, 8, inter=HUNDRED, nics=8)
    alone = collective("all_gather", nbytes=1e9, cluster=big, ranks=[0, 8, 16, 24])
    together = collective("all_gather", nbytes=1e9, cluster=big, ranks=4, stride=8)
    # One GPU drives one of eight NICs; eight groups on eight NICs take one each as well.
    assert together.seconds == pytest.approx(alone.seconds)
    one_nic = collective("all_gather", nbytes=1e9, cluster=cluster(4, 8, inter=HUNDRED), ranks=4, stride=8)
    assert one_nic.Bps == pytest.approx(12.5e9 / 8)


def test_nics_add_up_for_a_group_that_fills_the_node():
    seconds = [collective("all_reduce", nbytes=1e10, cluster=cluster(4, 8, nics=k)).seconds for k in (1, 2, 4)]
    assert seconds[0] / seconds[1] == pytest.approx(2, rel=0.01)
    assert seconds[0] / seconds[2] == pytest.approx(4, rel=0.01)


def test_host_memory_halves_pcie_and_caps_a_fast_nic():
    hosts = {"intra": PCIE3, "kind": device(p2p=False, generation=3)}
    peer = collective("all_reduce", nbytes=1e9, cluster=cluster(1, 4, p2p=True, **hosts), algorithm="ring")
    staged = collective("all_reduce", nbytes=1e9, cluster=cluster(1, 4, p2p=False, **hosts), algorithm="ring")
    assert staged.Bps <= 15.75e9 / 2
    assert staged.Bps < peer.Bps
    # Hosts of this kind are known to move 4.76 GB/s, less than their 100 Gb/s NIC.
    across = collective("all_reduce", nbytes=1e9, cluster=cluster(4, 4, inter=HUNDRED, p2p=False, **hosts))
    assert across.Bps == pytest.approx(4.76e9, rel=0.02)
    with_p2p = collective("all_reduce", nbytes=1e9, cluster=cluster(4, 4, inter=HUNDRED, p2p=True, **hosts))
    assert with_p2p.seconds < across.seconds


def test_slower_direction_of_a_home_line_counts():
    adsl = Link(name="adsl", title="", scope="wan", Bps=12.5e6, up_Bps=2.5e6, latency_s=20e-3)
    cost = collective("all_reduce", nbytes=1e8, cluster=cluster(50, 1, inter=adsl), algorithm="ring")
    # 2*49/50*1e8/2.5e6 + 98 * 20 ms
    assert cost.seconds == pytest.approx(78.4 + 1.96)


def test_small_messages_take_a_tree_between_many_nodes_and_large_ones_a_ring():
    many = cluster(64, 1)
    small = collective("all_reduce", nbytes=1e3, cluster=many)
    assert small.algorithm == "double-tree"
    # 2*6*50 us + 2000/1.25e9
    assert small.seconds == pytest.approx(12 * 50e-6 + 2e3 / 1.25e9)
    assert small.bound == "latency"
    assert collective("all_reduce", nbytes=1e10, cluster=many).algorithm == "ring"


def test_fitted_law_by_hand():
    link = fitted(NVLINK, a_s=1e-5, a1_s=1e-6, c=1e-8, **{"Bps@2": 100e9, "Bps@8": 400e9})
    cost = collective("all_reduce", nbytes=1e8, cluster=cluster(1, 8, intra=link, inter=None))
    wire = 1.75e8
    assert cost.seconds == pytest.approx(1e-5 + 7e-6 + 1e-8 * math.sqrt(wire) + wire / 400e9)
    assert cost.kind == "fitted"
    assert not cost.warnings
    # Half way between 2 and 8 on a log scale lies 4: sqrt(100 * 400) = 200 GB/s.
    four = collective("all_reduce", nbytes=1e8, cluster=cluster(1, 4, intra=link, inter=None))
    assert four.Bps == pytest.approx(200e9)
    outside = collective("all_reduce", nbytes=1e10, cluster=cluster(1, 8, intra=link, inter=None))
    assert "bytes outside the fitted 1000 B to 953.7 MiB" in outside.warnings[0]


def test_an_eager_call_takes_at_least_its_launch():
    link = fitted(NVLINK, a_s=1e-5, a1_s=0.0, c=0.0, Bps=400e9, floor_s=4e-5)
    one = cluster(1, 8, intra=link, inter=None)
    assert collective("all_reduce", nbytes=8, cluster=one, eager=True).seconds == pytest.approx(4e-5)
    assert collective("all_reduce", nbytes=8, cluster=one).seconds == pytest.approx(1e-5, rel=1e-3)


def test_order_of_calibration_tables():
    assert names("all_gather", "h100") == ["all_gather@h100", "all_gather", "all_reduce@h100", "all_reduce"]
    staged = names("all_reduce", "4090", staged=True, engine="vllm")
    assert staged == ["all_reduce@4090/vllm", "all_reduce@4090+staged", "all_reduce+staged", "all_reduce@4090"]


def test_seconds_fn_equals_collective_on_arrays():
    sizes = np.geomspace(1e3, 1e9, 50)
    for shape in (cluster(1, 8), cluster(4, 8), cluster(16, 1)):
        for op in ("all_reduce", "reduce_scatter", "all_to_all"):
            fast = seconds_fn(op, cluster=shape)
            assert fast(sizes) == pytest.approx(collective(op, nbytes=sizes, cluster=shape).seconds)
            assert fast(sizes)[7] == pytest.approx(float(fast(float(sizes[7]))))


def test_arrays_of_group_sizes_equal_scalars():
    shape = cluster(8, 4, inter=HUNDRED, nics=2)
    sizes = np.array([1, 2, 4, 8, 32])
    for op in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
        together = collective(op, nbytes=1e8, cluster=shape, ranks=sizes, algorithm="ring").seconds
        alone = [collective(op, nbytes=1e8, cluster=shape, ranks=int(n), algorithm="ring").seconds for n in sizes]
        assert together == pytest.approx(alone)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_no_algorithm_beats_the_nics(op):
    shape = cluster(4, 8, inter=HUNDRED, nics=2)
    for algorithm in ("ring", "hierarchical", "halving_doubling", "direct", None):
        seconds = collective(op, nbytes=1e9, cluster=shape, algorithm=algorithm).seconds
        # What a node must send whatever happens inside it: 2(N-1)/N S for all_reduce, (N-1)/N S for the rest, and
        # eight ranks' worth of that for all_to_all.
        must = {"all_reduce": 1.5e9, "all_to_all": 6e9}.get(op, 0.75e9)
        assert seconds >= must / 25e9


def test_unknown_names_are_one_line_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'all_reduce'"):
        collective("allreduce", nbytes=1, cluster=cluster(2, 1))
    with pytest.raises(InputError, match="did you mean 'double-tree'"):
        collective("all_reduce", nbytes=1, cluster=cluster(2, 1), algorithm="dbl_tree")


def test_rows_give_seconds_or_bus_bandwidth():
    row = {"op": "all_reduce", "bytes": "1310720000", "ranks": "2", "metric": "busbw", "notes": ""}
    value, metric = predict_row(row, cluster(2, 1))
    assert metric == "busbw"
    assert 1.2e9 < value <= 1.25e9
    assert predict_row({**row, "metric": "time_s"}, cluster(2, 1))[0] >= 1.0486
    with pytest.raises(InputError, match="metric = 'mfu'"):
        predict_row({**row, "metric": "mfu"}, cluster(2, 1))


def rows_of_a_known_law(a_s, a1_s, c, Bps):
    rows = []
    for ranks in (2, 4, 8):
        for size in np.geomspace(1e3, 1e9, 13):
            wire = 2 * (ranks - 1) / ranks * size
            seconds = a_s + a1_s * (ranks - 1) + c * math.sqrt(wire) + wire / Bps
            rows.append(
                {"op": "all_reduce", "bytes": str(size), "ranks": str(ranks), "device": "gpu", "metric": "time_s",
                 "intra": "nvlink4", "value": str(seconds), "source": "made@1"}
            )  # fmt: skip
    return rows


def test_fit_recovers_the_law_that_made_the_rows(tmp_path):
    pytest.importorskip("scipy")
    fits = fit_links({"made.csv": rows_of_a_known_law(8e-6, 1e-6, 2e-8, 300e9)}, link=lambda _: NVLINK, device=device)
    fit = fits["nvlink4"]["all_reduce@gpu"]
    assert fit.values == pytest.approx({"a_s": 8e-6, "a1_s": 1e-6, "c": 2e-8, "Bps": 300e9}, rel=1e-3)
    assert (fit.rows, fit.dataset) == (39, ("made.csv",))
    assert fit.mape < 1e-3

    profile = tmp_path / "links" / "nvlink4.toml"
    profile.parent.mkdir()
    profile.write_text('[link]\ntitle = "x"\n')
    write_link_fits(fits, tmp_path)
    first = profile.read_text()
    write_link_fits(fits, tmp_path)
    assert profile.read_text() == first
    assert first.startswith('[link]\ntitle = "x"\n')
    assert first.count(MARKER) == 1
    assert [p.name for p in profile.parent.iterdir()] == ["nvlink4.toml"]
    with pytest.raises(InputError, match="has no profile"):
        write_link_fits({"nowhere": fits["nvlink4"]}, tmp_path)


def test_written_fits_read_back_as_toml():
    import tomllib

    fit = Fit(name="x", values={"Bps@2": 1.23456789e11}, rows=3, mape=0.0123456, valid={"bytes": (8, 8589934592)})
    table = tomllib.loads(fit_toml({"all_reduce@gpu+staged": fit}))["calibration"]["all_reduce@gpu+staged"]
    assert table["values"]["Bps@2"] == pytest.approx(1.23456789e11, rel=1e-4)
    assert table["valid"]["bytes"] == [8, 8589934592]


def test_a_bridge_joins_only_its_pair():
    bridge = replace(NVLINK, name="bridge", Bps=56.25e9, max_ranks=2)
    card = device(p2p=False, generation=4)
    pair = collective("all_reduce", nbytes=1e9, cluster=cluster(1, 2, intra=bridge, kind=card))
    assert pair.Bps == pytest.approx(0.8 * 56.25e9)
    # Four cards: the ring also crosses PCIe 4 x16 through host memory, at most half of 31.5 GB/s.
    four = collective("all_reduce", nbytes=1e9, cluster=cluster(1, 4, intra=bridge, kind=card), algorithm="ring")
    assert four.Bps <= 31.504e9 / 2
    assert four.bound == "bandwidth of PCIe 4 x16 (more than the 2 ranks of bridge)"


def test_two_pcie_nodes_exchange_as_a_ring():
    # 4 RTX 2080 Ti a node on 10 GbE, BERT-large, one merged all-reduce after the backward pass: 2.047 s on 2 nodes and
    # 2.273 s on 8 (HKBU-HPML/ddl-benchmarks, BSP-A2A: step minus the step of one GPU); 1344929032 bytes of gradients.
    tcp = Link(name="10gbe", title="", scope="nic", Bps=1.25e9, latency_s=30e-6, transport="tcp")
    for nodes, measured in ((2, 2.047), (8, 2.273)):
        shape = cluster(nodes, 4, intra=PCIE3, inter=tcp, p2p=False, kind=device(p2p=False, generation=3))
        assert collective("all_reduce", nbytes=1344929032, cluster=shape).seconds == pytest.approx(measured, rel=0.05)
