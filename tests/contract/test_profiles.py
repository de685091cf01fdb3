"""Every shipped profile obeys the rules: it loads, each number has a source, and the numbers fit each other.

The arithmetic below does not come from simkit: FLOP per clock and SM are those of NVIDIA's architecture whitepapers,
bus widths and data rates those of the memory on the board.
"""

from __future__ import annotations

import csv
import os
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from simkit.spec import load
from simkit.spec import profiles as store
from simkit.spec.hardware import Device

DEVICES, LINKS, MACHINES = load.device_names(), load.link_names(), load.machine_names()
SOURCES = tomllib.loads((store.shipped() / "sources.toml").read_text(encoding="utf-8"))
NOT_FACTS = {
    "title", "vendor", "kind", "architecture", "form_factor", "rental_date", "intra", "aliases", "peak", "sources",
}


def raw(kind: str, name: str) -> dict[str, object]:
    path = store.find(kind, name)
    assert path is not None
    table = tomllib.loads(path.read_text(encoding="utf-8"))[kind]
    assert isinstance(table, dict)
    return table


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_loads_and_names_a_source_for_every_fact(name: str) -> None:
    device = load.device(name)
    table = raw("device", name)
    peak = table["peak"]
    assert isinstance(peak, dict)
    facts = {key for key in table if key not in NOT_FACTS} | {f"peak.{dtype}" for dtype in peak}
    assert set(device.sources) == facts
    assert set(device.sources.values()) <= set(SOURCES)
    assert load.link(device.intra).scope == "gpu"
    assert (device.rental_usd_per_hour is None) == (not device.rental_date)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_loads_and_names_a_source_for_every_fact(name: str) -> None:
    link = load.link(name)
    assert set(link.sources) == set(raw("link", name)) - {"title", "scope", "transport", "aliases", "sources"}
    assert set(link.sources.values()) <= set(SOURCES)
    assert 1e5 < link.Bps < 1e12
    assert 1e-7 <= link.latency_s <= 0.1


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_loads_and_its_parts_exist(name: str) -> None:
    machine = load.machine(name)
    assert set(machine.sources) == set(raw("machine", name)) - {"title", "device", "aliases", "sources"}
    assert set(machine.sources.values()) <= set(SOURCES)
    assert load.device(machine.device).name == machine.device
    assert load.link(machine.intra, key="intra").name == machine.intra
    assert load.link(machine.inter).name == machine.inter
    if machine.gpus_per_nic is not None:
        assert machine.gpus_per_nic * machine.nics_per_node == machine.gpus_per_node


@pytest.mark.parametrize("key", sorted(SOURCES))
def test_a_source_says_where_it_is_or_how_it_was_derived(key: str) -> None:
    entry = SOURCES[key]
    assert {"title", "publisher", "date"} <= set(entry) <= {"title", "publisher", "date", "url", "page", "note"}
    assert entry.get("url", "").startswith("https://") or entry["publisher"] == "simkit"
    assert dict(load.source(key)) == entry


def test_every_source_is_used() -> None:
    used = {s for n in DEVICES for s in load.device(n).sources.values()}
    used |= {s for n in LINKS for s in load.link(n).sources.values()}
    used |= {s for n in MACHINES for s in load.machine(n).sources.values()}
    other = "".join(p.read_text(encoding="utf-8") for p in store.shipped().glob("*.toml") if p.name != "sources.toml")
    assert {key for key in SOURCES if key not in used and f'"{key}"' not in other} == set()


@pytest.mark.parametrize("kind", store.KINDS)
def test_no_two_profiles_answer_to_one_name(kind: str) -> None:
    owners: dict[str, set[str]] = {}
    for name in store.names(kind):
        for alias in (name, *raw(kind, name)["aliases"]):  # type: ignore[misc]
            owners.setdefault(store.fold(alias), set()).add(name)
    assert {alias: found for alias, found in owners.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", DEVICES)
def test_every_alias_of_a_device_resolves_to_it(name: str) -> None:
    for alias in load.device(name).aliases:
        assert load.device(alias).name == name


@pytest.mark.parametrize("name", DEVICES)
def test_the_numbers_of_a_device_are_plausible(name: str) -> None:
    d = load.device(name)
    assert 0.95 < d.memory_bytes / d.memory_nominal_bytes < 1.10  # a "GB" of memory is sold as anything up to a GiB
    assert 2010 < d.year < 2027
    assert d.power_w is not None
    assert d.idle_power_w is not None
    assert 0.02 < d.idle_power_w / d.power_w < 0.4
    for dtype, flops in d.peak_flops.items():
        assert 1 < flops / d.memory_Bps < 1500, dtype  # FLOP per byte at the ridge
    if "fp16" in d.peak_flops and "fp8" in d.peak_flops:
        assert d.peak_flops["fp8"] / d.peak_flops["fp16"] == pytest.approx(2, rel=0.02)
    if d.vendor == "nvidia" and "tf32" in d.peak_flops:
        assert d.peak_flops["fp16"] / d.peak_flops["tf32"] == pytest.approx(2, rel=0.02)
        assert d.peak_flops["bf16"] == d.peak_flops["fp16"]
    if d.base_hz and d.boost_hz:
        assert d.base_hz < d.boost_hz


def flop_per_clock(d: Device) -> float | None:
    """Dense fp16 FLOP per clock and SM with fp32 accumulation, None where there are no tensor cores."""
    geforce = d.name.startswith(("rtx20", "rtx30", "rtx40", "rtx50")) and not d.name.endswith("ada")
    if d.architecture == "volta":
        return 8 * 64 * 2  # 8 tensor cores of 64 multiply-adds
    if d.architecture == "turing":
        return None if d.name.startswith("gtx") else (512 if geforce else 1024)
    if d.name.startswith(("a100", "a800", "a30")):
        return 4 * 256 * 2
    if d.architecture in ("ampere", "ada") or d.name.startswith(("rtx5", "rtx-pro", "gb10")):
        return 512 if geforce or d.name in ("a10g", "l40") else 1024
    return {"hopper": 4 * 512 * 2, "blackwell": 8192, "cdna": 1024, "cdna2": 1024, "cdna3": 2048, "cdna4": 4096}.get(
        d.architecture
    )


@pytest.mark.parametrize("name", DEVICES)
def test_the_fp16_peak_is_sms_times_clock(name: str) -> None:
    d = load.device(name)
    per_clock = flop_per_clock(d)
    if per_clock is None:
        assert "fp16" not in d.peak_flops  # fp16 inputs with fp32 accumulation run at the fp32 rate there
        return
    assert d.sm_count is not None
    assert d.boost_hz is not None
    assert d.peak_flops["fp16"] == pytest.approx(d.sm_count * d.boost_hz * per_clock, rel=0.03)
    if d.peak_flops_fp16_accumulate is not None:
        assert d.peak_flops_fp16_accumulate == pytest.approx(2 * d.peak_flops["fp16"], rel=0.01)


NVIDIA = [n for n in DEVICES if load.device(n).vendor == "nvidia"]


# The profile of a Hopper part gives the clock of its tensor cores, and fp32 runs at another.
@pytest.mark.parametrize("name", [n for n in NVIDIA if load.device(n).architecture != "hopper"])
def test_the_fp32_peak_is_cores_times_clock(name: str) -> None:
    d = load.device(name)
    assert d.sm_count is not None
    assert d.boost_hz is not None
    cores = {"kepler": 192, "volta": 64, "turing": 64}.get(d.architecture, 128)
    if d.name.startswith(("p100", "a100", "a800", "a30")):
        cores = 64
    tolerance = 0.08 if d.name in ("b200-sxm-180gb", "b300-sxm", "gb200") else 0.03  # printed to one figure only
    assert d.peak_flops["fp32"] == pytest.approx(d.sm_count * cores * 2 * d.boost_hz, rel=tolerance)


# stem -> (bus width in bit, data rate in Gb/s per pin) of the memory on the board
BUS = {
    "gtx1080": (256, 10), "gtx1080ti": (352, 11.01), "titan-xp": (384, 11.4), "gtx1660super": (192, 14),
    "gtx1660ti": (192, 12), "rtx2060": (192, 14), "rtx2070": (256, 14), "rtx2080": (256, 14),
    "rtx2080super": (256, 15.5), "rtx2080ti": (352, 14), "titan-rtx": (384, 14), "rtx3060-12gb": (192, 15),
    "rtx3060ti": (256, 14), "rtx3070": (256, 14), "rtx3070ti": (256, 19), "rtx3080": (320, 19),
    "rtx3080-12gb": (384, 19), "rtx3080ti": (384, 19), "rtx3090": (384, 19.5), "rtx3090ti": (384, 21),
    "rtx4060": (128, 17), "rtx4070": (192, 21), "rtx4070ti": (192, 21), "rtx4070tisuper": (256, 21),
    "rtx4080": (256, 22.4), "rtx4080super": (256, 23), "rtx4090": (384, 21), "rtx5060ti-16gb": (128, 28),
    "rtx5070": (192, 28), "rtx5080": (256, 30), "rtx5090": (512, 28), "t4": (256, 10), "a10": (384, 12.5),
    "a40": (384, 14.5), "a4000": (256, 14), "a5000": (384, 16), "a6000": (384, 16), "l4": (192, 12.5),
    "l40s": (384, 18), "rtx6000ada": (384, 20), "rtx5000ada": (256, 18), "rtx4000ada": (160, 18),
    "rtx2000ada": (128, 14), "rtx-pro-6000-blackwell": (512, 28), "p4": (256, 6), "p100-pcie-16gb": (4096, 1.43),
    "k80": (384, 5.012), "titan-v": (3072, 1.7), "v100-sxm2-32gb": (4096, 1.752), "v100-sxm3-32gb": (4096, 1.916),
    "a100-sxm4-40gb": (5120, 2.43), "a100-sxm4-80gb": (5120, 3.186), "a30": (3072, 2.43),
    "h100-sxm5-80gb": (5120, 5.23), "h100-pcie-80gb": (5120, 3.186), "h200-sxm-141gb": (6144, 6.25),
    "b200-sxm-180gb": (7680, 7.992), "mi100": (4096, 2.4), "mi210": (4096, 3.2), "mi300x": (8192, 5.2),
    "gb10": (256, 8.533), "raspberrypi4b-8gb": (32, 3.2), "raspberrypi5-8gb": (32, 4.267),
}


@pytest.mark.parametrize("name", sorted(BUS))
def test_the_memory_bandwidth_is_width_times_rate(name: str) -> None:
    bits, gbps = BUS[name]
    assert load.device(name).memory_Bps == pytest.approx(bits * gbps * 1e9 / 8, rel=0.01)


@pytest.mark.parametrize("name", NVIDIA)
def test_geforce_from_turing_on_refuses_peer_to_peer_over_pcie(name: str) -> None:
    d = load.device(name)
    cut = ("rtx20", "rtx30", "rtx40", "rtx50", "gtx16", "titan-rtx")
    geforce = d.name.startswith(cut) and not d.name.endswith("ada")
    assert d.p2p == (not geforce and d.name != "gb10")


@pytest.mark.data
def test_every_name_of_the_measured_tables_resolves() -> None:
    folder = os.environ.get("SIMKIT_DATA", "")
    table = Path(folder) / "devices.csv"
    if not folder or not table.is_file():
        pytest.skip("SIMKIT_DATA names no folder with devices.csv")
    seen: Counter[str] = Counter()
    for row in csv.DictReader(table.open(encoding="utf-8")):
        for alias in (row["canonical"], *(a.strip() for a in row["aliases"].split(";") if a.strip())):
            assert load.device(alias).name == row["canonical"], alias
            seen[row["canonical"]] += 1
    assert seen
