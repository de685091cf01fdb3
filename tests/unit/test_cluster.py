"""Cluster texts: how GPUs are grouped, which links are assumed, and that nothing but an InputError comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.errors import InputError
from simkit.spec import load
from simkit.spec.cluster import MAX_GPUS, cluster
from simkit.spec.hardware import Cluster


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("1x8xh100", "1x8xh100-sxm5-80gb"),
        ("8x4x2080ti", "8x4xrtx2080ti"),
        ("50x3080", "50x1xrtx3080"),
        ("32xA100", "4x8xa100-sxm4-80gb"),
        ("3xA100", "1x3xa100-sxm4-80gb"),
        ("8xh100", "1x8xh100-sxm5-80gb"),
        ("4xH100-PCIe", "1x4xh100-pcie-80gb"),
        ("h100", "1x1xh100-sxm5-80gb"),
        ("rtx4090", "1x1xrtx4090"),
        ("2xrtx4090", "2x1xrtx4090"),
        ("1 x 2 x RTX 4090", "1x2xrtx4090"),
        ("2X4XA40", "2x4xa40"),
        ("2xx86-cpu", "2x1xx86-cpu"),
        ("4xdgx-a100", "4x8xa100-sxm4-80gb"),
        ("dgx-2", "1x16xv100-sxm3-32gb"),
        ("2xp4d.24xlarge", "2x8xa100-sxm4-40gb"),
        ("30x3080+20x4090", "30x1xrtx3080+20x1xrtx4090"),
        ("1x8xh100 + 2x4x3090", "1x8xh100-sxm5-80gb+2x4xrtx3090"),
        ("1000000x3080", "1000000x1xrtx3080"),
    ],
)
def test_grouping(text: str, spec: str) -> None:
    built, _ = cluster(text)
    assert built.spec == spec
    assert cluster(spec)[0].spec == spec  # what is printed can be read again


def test_gpus_per_node_regroups() -> None:
    assert cluster("8x2080ti", gpus_per_node=4)[0].spec == "2x4xrtx2080ti"
    assert cluster("12xH100", gpus_per_node=4)[0].spec == "3x4xh100-sxm5-80gb"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12xH100", "write all three, such as 2x6xh100-sxm5-80gb"),
        ("0xh100", "zero"), ("1x0xh100", "zero"), ("1x2x3xh100", "more than two counts"),
        ("", "names no device"), ("8x", "names no device"), ("+", "empty part"), ("h100+", "empty part"),
        ("-1xh100", "is no known device"), ("1.5xh100", "is no known device"), ("8xh1000", "did you mean"),
        ("1000001x3080", "1 to 1000000"), pytest.param("9" * 5000 + "xh100", "too large", id="long"),
        ("600000x3080+600000x4090", "1200000 GPUs"),
        ("2x4xdgx-a100", "write 2xdgx-a100"), ("4xdgx-a10", "did you mean"),
    ],
)
def test_a_malformed_text_is_one_line_with_a_way_out(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        cluster(text)
    assert said in str(error.value)
    assert "cluster" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8*h100", "8xh100"),
        ("8 h100", "8xh100"),
        ("H100x8", "8xH100"),
        ("3090x2", "2x3090"),
        ("2x8h100", "2x8xh100"),
        ("30x3080+20 4090", "20x4090"),
    ],
)
def test_near_misses_are_put_right(text: str, meant: str) -> None:
    with pytest.raises(InputError, match=f"did you mean {meant}[?]"):
        cluster(text)



@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8", 2000])
def test_counts_are_whole_numbers(bad: object) -> None:
    for key in ("gpus_per_node", "nics_per_node"):
        with pytest.raises(InputError, match=key):
            cluster("8x3080", **{key: bad})  # type: ignore[arg-type]


def test_contradictions_are_refused() -> None:
    with pytest.raises(InputError, match="gpus_per_node = 2 contradicts 3"):
        cluster("2x3x3080", gpus_per_node=2)
    with pytest.raises(InputError, match="another number of GPUs than the 8"):
        cluster("2xdgx-a100", gpus_per_node=4)
    with pytest.raises(InputError, match="inter = 'nothing'"):
        cluster("1x8xh100", inter="nothing")


@pytest.mark.parametrize(
    ("text", "intra", "inter", "nics"),
    [
        ("2x8xh100", "nvlink4", "ib-ndr", 8), ("2x8xa100", "nvlink3", "ib-hdr", 8),
        ("2x8xv100", "nvlink2", "ib-edr", 4),
        ("2x8xa40", "pcie4x16", "100gbe-rdma", 1), ("2x8xb200", "nvlink5", "ib-ndr", 8), ("2x3080", None, "1gbe", 1),
        ("2xgb10", None, "200gbe-rdma", 1),
        ("2x8xmi300x", "xgmi", "400gbe-rdma", 8), ("2xp5.48xlarge", "nvlink4", "efa", 32),
        ("2xhkbu-2080ti", "pcie3x16", "10gbe", 1), ("1x8xh100", "nvlink4", None, 1), ("h100", None, None, 1),
    ],
)
def test_the_links_that_such_nodes_usually_have(text: str, intra: str | None, inter: str | None, nics: int) -> None:
    built, notes = cluster(text)
    assert (built.intra and built.intra.name, built.inter and built.inter.name) == (intra, inter)
    assert built.nics_per_node == nics
    if "x8x" in text and inter:  # a machine states its links; what a bare device leaves open is said
        assert any(note.startswith(f"inter = {inter}, nics_per_node = {nics}") for note in notes)
        assert any(note.startswith(f"intra = {intra}") for note in notes)


def test_links_that_were_given_are_no_assumptions() -> None:
    built, notes = cluster("8x4x2080ti", intra="pcie3x16", inter="10gbe", nics_per_node=1, p2p=False)
    assert (built.intra and built.intra.name, built.inter and built.inter.name) == ("pcie3x16", "10gbe")
    assert notes == ()


def test_nics_of_a_link_given_without_their_number() -> None:
    assert cluster("2x8xh100", inter="400gbe-rdma")[0].nics_per_node == 8
    built, notes = cluster("2x8xh100", inter="100gbe")
    assert built.nics_per_node == 1
    assert "nics_per_node = 1" in notes
    assert cluster("2x4xgb200", inter="nvlink5")[0].nics_per_node == 4


def test_a_described_network() -> None:
    built, _ = cluster("3x1xa100", inter="100Mb/s@50ms")
    assert built.inter is not None
    assert (built.inter.Bps, built.inter.latency_s) == (12.5e6, pytest.approx(0.05))


@pytest.mark.parametrize(
    ("text", "intra", "p2p"),
    # Cases BR-78: GeForce cards bounce through the host unless NVLink joins them.
    [("1x4x4090", None, False), ("1x8x2080ti", None, False), ("1x2x3090", "nvlink3-bridge", True),
     ("1x8xa40", None, True), ("1x8xh100", None, True), ("1x4x1080ti", None, True), ("1x4xa6000", None, True)],
)
def test_p2p_follows_from_the_device_and_the_link(text: str, intra: str | None, p2p: bool) -> None:
    built, notes = cluster(text, intra=intra)
    assert built.p2p is p2p
    assert any(note.startswith("p2p = false") for note in notes) is (not p2p)
    assert cluster(text, intra=intra, p2p=not p2p)[0].p2p is (not p2p)


def test_a_mixed_cluster_takes_the_slowest_link_and_says_so() -> None:
    built, notes = cluster("2x8xh100+2x8xa40")
    assert built.intra is not None
    assert built.inter is not None
    assert (built.intra.name, built.inter.name, built.nics_per_node) == ("pcie4x16", "100gbe-rdma", 1)
    assert sum("the slowest of a mixed cluster" in note for note in notes) == 2


def test_a_bridge_reaches_only_its_cards() -> None:
    pair, _ = cluster("2xh100-nvl")
    assert pair.intra is not None
    assert pair.intra.name == "nvlink4-bridge"
    eight, notes = cluster("8xh100-nvl")
    assert eight.intra is not None
    assert eight.intra.name == "pcie5x16"
    assert any("joins 2 GPUs" in note for note in notes)
    assert any("joins 2 GPUs only" in note for note in cluster("1x4x3090", intra="nvlink3-bridge")[1])


def test_two_nodes_on_ten_gigabit_move_bytes_not_bits() -> None:
    # Case BR-72: 1,310,720,000 bytes over 10 Gb/s take at best 1.0486 s.
    built, _ = cluster("2x1x3080", inter="10gbe")
    assert built.inter is not None
    assert 1_310_720_000 / built.inter.Bps == pytest.approx(1.0486, rel=1e-4)


def test_a_users_device_says_what_it_left_out(tmp_path: Path) -> None:
    facts = 'title = "Mine"\nmemory = "24 GiB"\nmemory_bandwidth = "1 TB/s"\n'
    text = f'[device]\n{facts}[device.peak]\nfp16 = "1 TFLOP/s"\n'
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    load.forget()
    built, notes = cluster("2x2xmine", profiles=[tmp_path])
    assert built.spec == "2x2xmine"
    assert any(note.startswith("device mine: ") and "gpus_per_node = 1" in note for note in notes)


def test_calibration_can_be_left_out() -> None:
    built, _ = cluster("2x8xa100", calibration=False)
    assert not built.devices[0].calibration
    assert built.intra is not None
    assert not built.intra.calibration


NAMES = st.sampled_from(["h100", "3080", "rtx4090", "dgx-a100", "x86-cpu", "x", "a100-sxm4-80gb", "nvidia", "efa", "?"])
PARTS = st.builds(
    lambda counts, name, gap: gap.join([*(str(c) for c in counts), name]),
    st.lists(st.integers(-2, 2_000_000), max_size=3), NAMES, st.sampled_from(["x", "X", " x ", "×", "*"]),
)
JOINED = st.lists(PARTS, min_size=1, max_size=3).map("+".join)
TEXTS = st.one_of(st.text(max_size=40), JOINED, st.from_regex(r"[0-9x+ ]{0,12}[a-z0-9-]*"))
LINKS = st.sampled_from([None, "10gbe", "1Gb/s@1ms", "z"])


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, each=st.one_of(st.none(), st.integers(-1, 20)), inter=LINKS)
def test_any_text_is_a_cluster_or_one_line(text: str, each: int | None, inter: str | None) -> None:
    try:
        built, notes = cluster(text, gpus_per_node=each, inter=inter)
    except InputError as error:
        if "\n" in str(error):
            pytest.fail(f"more than one line: {error}")
        return
    assert isinstance(built, Cluster)
    assert 1 <= built.gpus <= MAX_GPUS
    assert (built.inter is not None) >= (built.nodes > 1)
    assert (built.intra is not None) >= any(g.gpus_per_node > 1 for g in built.groups)
    assert all("\n" not in note for note in notes)
    assert cluster(built.spec)[0].spec == built.spec
