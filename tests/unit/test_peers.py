"""Are peers what a cluster text or a CSV says, and is a bad file told apart with file, line, column and way out?"""

from __future__ import annotations

from pathlib import Path

import pytest

from simkit.errors import InputError
from simkit.spec.peers import peers_from_cluster, read_peers


def test_a_cluster_gives_every_gpu_its_line() -> None:
    peers = peers_from_cluster("3x3080+2x4090", inter="wan-100mbps")
    assert len({p.name for p in peers}) == 5
    assert [p.device for p in peers] == ["rtx3080"] * 3 + ["rtx4090"] * 2
    # Cable class: 100 Mb/s down, 20 Mb/s up, 20 ms one way between two homes.
    assert {(p.down_Bps, p.up_Bps, p.latency_s) for p in peers} == {(12.5e6, 2.5e6, 0.010)}
    assert peers[0].memory_bytes == 10240 * 2**20
    assert peers[0].power_w == 320.0
    assert peers[0].flops == 59.5e12  # the dense peak, unless a rate is given
    assert peers_from_cluster("1x3080", rate=lambda device: 1e12)[0].flops == 1e12


def test_gpus_of_a_node_share_its_line() -> None:
    peers = peers_from_cluster("2x4x2080ti", inter="10Gb/s@50us")
    assert len(peers) == 8
    assert peers[0].up_Bps == pytest.approx(1.25e9 / 4)


def test_a_csv_takes_units_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text(
        "name,device,up_Bps,down_Bps,latency_s,region,relay,count,flops\n"
        "home,3080,20 Mb/s,100 Mb/s,15ms,eu,true,2,\n"
        "lab,RTX 4090,125e6,125e6,0.001,us,,,100 TFLOP/s\n"
    )
    peers = read_peers(file)
    assert [p.name for p in peers] == ["home-0", "home-1", "lab"]
    assert peers[0].up_Bps == 2.5e6
    assert peers[0].relay
    assert peers[0].latency_s == 0.015
    assert peers[2].flops == 100e12
    assert peers[2].up_Bps == 125e6
    assert not peers[2].relay


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device,up_Bps\n3080,1\n", "down_Bps"),
        ("device,up_Bps,down_Bps,speed\n", "speed"),
        ("device,up_Bps,down_Bps\nrtx3o80,1,1\n", "p.csv:2: device"),
        ("device,up_Bps,down_Bps\n3080,-1,1\n", "not positive"),
        ("device,up_Bps,down_Bps\n3080,1 GiB,1\n", "p.csv:2: up_Bps"),
        ("device,up_Bps,down_Bps\n3080,,1\n", "is empty"),
        ("name,device,up_Bps,down_Bps\na,3080,1,1\na,3080,1,1\n", "stands twice"),
        ("device,up_Bps,down_Bps,count\n3080,1,1,0\n", "is no count"),
        ("device,up_Bps,down_Bps,relay\n3080,1,1,perhaps\n", "relay"),
        ("device,up_Bps,down_Bps\n3080,1\n", "2 cells for 3"),
        ("device,up_Bps,down_Bps\n", "holds no peer"),
        ("", "is missing"),
    ],
)
def test_a_bad_csv_names_the_way_out(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "p.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=said):
        read_peers(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_peers(tmp_path / "none.csv")
