"""Devices and links by name: values that users get wrong, names they write, and mistakes in their own files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simkit.errors import InputError
from simkit.spec import load
from simkit.spec.add import add_device
from simkit.spec.profiles import MARKER, fold

MINIMAL = """[device]
title = "My GPU"
memory = "24 GiB"
memory_bandwidth = "1008 GB/s"

[device.peak]
fp16 = "165.2 TFLOP/s"
"""


def write(folder: Path, text: str, name: str = "mine", kind: str = "devices") -> Path:
    path = folder / kind / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    load.forget()
    return path


# ---------------------------------------------------------------- values: cases BR-57, BR-58, BR-71, datasheets


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("RTX 3080", 59.5), ("RTX 3090", 71.0), ("RTX 4090", 165.2), ("RTX 5090", 209.5), ("A6000", 154.8),
        ("2080 Ti", 53.8), ("H100", 989.0), ("H100 PCIe", 756.0), ("A100", 312.0), ("V100", 125.0), ("T4", 65.0),
        ("L4", 121.0), ("L40", 181.0), ("L40S", 362.0), ("A10G", 70.0), ("A30", 165.0), ("MI300X", 1307.4),
        ("B200", 2250.0),
    ],
)
def test_peaks_are_dense_with_fp32_accumulation(name: str, tflops: float) -> None:
    assert load.device(name).peak_flops["fp16"] / 1e12 == pytest.approx(tflops, rel=0.005)


def test_the_fp16_accumulate_rate_of_consumer_cards_is_kept_apart() -> None:
    assert load.device("rtx3080").peak_flops_fp16_accumulate == pytest.approx(119e12, rel=0.005)
    assert load.device("rtx2080ti").peak_flops_fp16_accumulate == pytest.approx(107.6e12, rel=0.005)
    assert load.device("a6000").peak_flops_fp16_accumulate is None


def test_int8_is_the_dense_rate() -> None:
    assert load.device("rtx3080").peak_flops["int8"] / 1e12 == pytest.approx(238, rel=0.005)  # GA102 whitepaper
    assert load.device("rtx4090").peak_flops["int8"] / 1e12 == pytest.approx(660.6, rel=0.005)  # Ada whitepaper
    assert load.device("rtx4090").peak_flops["fp8"] / 1e12 == pytest.approx(330.3, rel=0.005)
    assert load.device("a100").peak_flops["int8"] / 1e12 == pytest.approx(624)


def test_memory_rates_are_decimal_gigabytes() -> None:
    assert load.device("a100-pcie-40gb").memory_Bps == 1555e9
    assert load.device("rtx3080").memory_Bps == 760e9


def test_memory_is_what_the_driver_reports() -> None:
    assert load.device("rtx4090").memory_bytes == 24564 * 2**20
    assert load.device("a100-40gb").memory_bytes == 40536 * 2**20
    assert load.device("h200").memory_bytes == 143771 * 2**20


def test_turing_has_neither_bf16_nor_tf32() -> None:
    assert not {"bf16", "tf32", "fp8"} & set(load.device("rtx2080ti").peak_flops)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    # One direction: NVLink is sold by the sum of both (300, 600, 900, 1800 GB/s).
    [("nvlink2", 150), ("nvlink3", 300), ("nvlink4", 450), ("nvlink5", 900), ("nvlink3-bridge", 56.25),
     ("nvlink2-bridge", 50), ("10gbe", 1.25), ("100gbe", 12.5), ("ib-hdr", 25), ("ib-ndr", 50), ("pcie4x16", 31.508),
     ("pcie3x8", 7.877), ("pcie5x4", 15.754), ("omnipath-100", 12.5), ("ib-fdr", 6.82), ("xgmi", 448)],
)
def test_rates_of_links_are_one_direction_in_bytes(name: str, gigabytes: float) -> None:
    assert load.link(name).Bps / 1e9 == pytest.approx(gigabytes, rel=2e-3)


def test_a_home_line_sends_slower_than_it_receives() -> None:
    for name in ("wan-20mbps", "wan-100mbps", "wan-1gbps"):
        line = load.link(name)
        assert line.scope == "wan"
        assert line.up_Bps is not None
        assert line.up_Bps < line.Bps


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("written", "stem"),
    [
        ("RTX 3080", "rtx3080"), ("3080", "rtx3080"), ("geforce_rtx_3080", "rtx3080"), ("a100-80gb", "a100-sxm4-80gb"),
        ("A100", "a100-sxm4-80gb"), ("H100", "h100-sxm5-80gb"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla T4", "t4"), ("nvidia geforce rtx 2080 ti", "rtx2080ti"), ("H100-PCIe", "h100-pcie-80gb"),
        ("  rtx4090 ", "rtx4090"), ("AMD_Instinct_MI210", "mi210"), ("cpu", "x86-cpu"),
    ],
)
def test_names_ignore_case_spaces_dashes_and_brands(written: str, stem: str) -> None:
    assert load.device(written).name == stem


def test_the_dot_of_a_rate_is_part_of_the_name() -> None:
    assert fold("2.5GbE") != fold("25GbE")
    assert load.link("2.5gbe").Bps == 2.5e9 / 8
    assert load.link("25gbe").Bps == 25e9 / 8


@pytest.mark.parametrize(
    ("written", "near"), [("rtx3800", "rtx3080"), ("h10o", "H100"), ("a100-sxm4-80g", "a100-sxm4-80gb")]
)
def test_an_unknown_device_names_the_nearest(written: str, near: str) -> None:
    with pytest.raises(InputError, match="is no known device; did you mean") as error:
        load.device(written)
    assert near in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "bad", ["", "   ", "\0", "../../etc/passwd", "é", "no such.toml", ".", pytest.param("x" * 10_000, id="long")]
)
def test_a_name_that_is_none_is_one_line(bad: str) -> None:
    for call in (load.device, load.machine, load.link):
        with pytest.raises(InputError) as error:
            call(bad)
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------- RATE@LATENCY


def test_a_described_link() -> None:
    link = load.link("25Gb/s@30us")
    assert (link.Bps, link.latency_s, link.scope) == (25e9 / 8, pytest.approx(30e-6), "nic")
    assert not link.calibration
    assert load.link("100Mb/s@20ms").latency_s == pytest.approx(0.02)
    assert load.link("3.2 GB/s @ 0us").Bps == 3.2e9  # capital B: bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("25Gb/s", "write it as '25Gb/s@30us'"), ("25@30us", "lacks a unit"), ("25Gb/s@30", "lacks a unit"),
        ("-1Gb/s@1us", "not greater than zero"), ("0Gb/s@1us", "not greater than zero"), ("1Gb/s@-1us", "negative"),
        ("nanGb/s@1us", "is not a quantity"), ("25gb/s@30us", "unknown unit"), ("25GB@30us", "not of Bps"),
        ("1Gb/s@1us@2us", "is not a quantity"), ("@", "lacks a unit"), ("10gbee", "did you mean"),
    ],
)
def test_a_link_described_wrongly_names_its_field(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        load.link(text, key="intra")
    assert "intra" in str(error.value)
    assert said in str(error.value)


# ---------------------------------------------------------------- a user's own files


def test_a_minimal_profile_takes_stated_defaults(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    mine = load.device("mine", profiles=[tmp_path])
    assert mine.peak_flops == {"fp16": 165.2e12}
    assert mine.memory_nominal_bytes == mine.memory_bytes == 24 * 2**30
    assert (mine.p2p, mine.gpus_per_node, mine.intra) == (False, 1, "pcie4x16")
    assert {key for key, origin in mine.sources.items() if origin == load.DEFAULT} >= {"p2p", "gpus_per_node", "intra"}
    assert "mine" in load.device_names([tmp_path])
    assert "mine" not in load.device_names()


def test_the_users_folder_wins_and_may_hold_files_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rtx3080.toml").write_text(MINIMAL.replace("165.2", "60"), encoding="utf-8")
    load.forget()
    assert load.device("3080").peak_flops["fp16"] == pytest.approx(59.5e12)
    assert load.device("RTX3080", profiles=[tmp_path]).peak_flops["fp16"] == 60e12
    monkeypatch.setenv("SIMKIT_PROFILES", str(tmp_path))
    assert load.device("rtx3080").peak_flops["fp16"] == 60e12
    monkeypatch.setenv("SIMKIT_PROFILES", str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"SIMKIT_PROFILES = .* is no folder"):
        load.device("rtx3080")


def test_a_users_link_and_source_files(tmp_path: Path) -> None:
    text = '[link]\ntitle = "Lab"\nscope = "nic"\nrate = "56 Gb/s"\nlatency = "3us"\naliases = ["lab fabric"]\n'
    write(tmp_path, text, name="lab", kind="links")
    entry = '[own]\ntitle = "My bench"\npublisher = "me"\ndate = "2026"\n'
    (tmp_path / "sources.toml").write_text(entry, encoding="utf-8")
    assert load.link("Lab-Fabric", profiles=[tmp_path]).Bps == 7e9
    assert load.source("own", profiles=[tmp_path])["title"] == "My bench"
    with pytest.raises(InputError, match="is no known source"):
        load.source("own")


CALIBRATED = MINIMAL + f"""
{MARKER}
[calibration.gemm]
values = {{ ceiling = 0.87, floor_us = 3 }}
dataset = ["a", "b"]
rows = 12
mape = 0.031
evidence = "fitted"
note = "by hand"

[calibration.gemm.valid]
flops = [1e6, 1e12]
"""


def test_fits_stand_apart_from_facts(tmp_path: Path) -> None:
    write(tmp_path, CALIBRATED)
    fit = load.device("mine", profiles=[tmp_path]).calibration["gemm"]
    assert (fit["ceiling"], fit.rows, fit.mape, fit.dataset) == (0.87, 12, 0.031, ("a", "b"))
    assert fit.valid["flops"] == (1e6, 1e12)
    assert not load.device("mine", profiles=[tmp_path], calibration=False).calibration


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('memory = "24 GiB"', 'memroy = "24 GiB"', "device.memory is missing"),
        ('title = "My GPU"', 'title = "My GPU"\nbost_clock = "2 GHz"', "did you mean 'boost_clock'"),
        ('"1008 GB/s"', "1008", "has no unit; write it as '3.35 TB/s'"),
        ('"1008 GB/s"', '"1008"', "has no unit"),
        ('"1008 GB/s"', '"1008 GB"', "not of Bps"),
        ('"1008 GB/s"', '"1008 furlong"', "unknown unit"),
        ('"1008 GB/s"', '"0 GB/s"', "must be greater than zero"),
        ('"1008 GB/s"', '"-5 GB/s"', "must be greater than zero"),
        ('"1008 GB/s"', '"nan GB/s"', "is not a quantity"),
        ('"1008 GB/s"', "nan", "has no unit"),
        ('"1008 GB/s"', '"1e400 GB/s"', "is not finite"),
        ('"1008 GB/s"', '"1008 B/s"', "implausible"),
        ('"1008 GB/s"', "true", "wrong type"),
        ('title = "My GPU"', "title = 3", "wrong type"),
        ('title = "My GPU"', 'title = ""', "is empty"),
        ('title = "My GPU"', 'title = "x"\np2p = "no"', "give true or false"),
        ('title = "My GPU"', 'title = "x"\ngpus_per_node = 0', "out of range"),
        ('title = "My GPU"', 'title = "x"\ngpus_per_node = 1.5', "wrong type"),
        ('title = "My GPU"', 'title = "x"\naliases = "y"', "a list of texts"),
        ('title = "My GPU"', 'title = "x"\naliases = [1]', "is no text"),
        ('title = "My GPU"', 'title = "x"\nkind = "gpuu"', "did you mean 'gpu'"),
        ('fp16 = "165.2 TFLOP/s"', 'fp17 = "165.2 TFLOP/s"', "fp16"),
        ('fp16 = "165.2 TFLOP/s"', "", "names no dtype"),
        ("[device.peak]", "[device.peek]", "device.peak is missing"),
        ("[device]", "[devise]", "holds [device] and [calibration]"),
        ('title = "My GPU"', 'title = "My GPU', "at line 2"),
        ("ceiling = 0.87", 'ceiling = "a"', "calibration.gemm.values.ceiling"),
        ("ceiling = 0.87", "ceiling = inf", "is not finite"),
        ("flops = [1e6, 1e12]", "flops = [1e12, 1e6]", "write it as [low, high]"),
        ("rows = 12", "rwos = 12", "did you mean 'rows'"),
        ('evidence = "fitted"', 'evidence = "guessed"', "evidence"),
    ],
)
def test_a_fault_in_a_profile_is_one_line_that_names_it(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in CALIBRATED
    path = write(tmp_path, CALIBRATED.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        load.device("mine", profiles=[tmp_path])
    line = str(error.value)
    assert line.startswith(str(path))
    assert said in line
    assert "\n" not in line


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "devices" / "mine.toml").mkdir(parents=True)
    load.forget()
    with pytest.raises(InputError, match="is a folder, not a file"):
        load.device("mine", profiles=[tmp_path])
    write(tmp_path, "", name="empty")
    with pytest.raises(InputError, match=r"\[device\] is missing"):
        load.device("empty", profiles=[tmp_path])
    (tmp_path / "devices" / "binary.toml").write_bytes(b"\xff\xfe\x00")
    load.forget()
    with pytest.raises(InputError, match="is not UTF-8"):
        load.device("binary", profiles=[tmp_path])
    with pytest.raises(InputError, match="does not exist"):
        load.device(str(tmp_path / "absent.toml"))


# ---------------------------------------------------------------- simkit devices add


def test_an_added_device_loads(tmp_path: Path) -> None:
    path = add_device("my-gpu-24gb", memory="24 GiB", bandwidth="1008 GB/s", peak={"fp16": "165 TFLOP/s"},
                      directory=tmp_path, title='Mine "of" C:\\new', power="450 W", p2p=True, aliases=["mg24"])
    mine = load.device("MG24", profiles=[tmp_path])
    assert Path(mine.file) == path
    assert (mine.title, mine.power_w, mine.p2p) == ('Mine "of" C:\\new', 450.0, True)
    with pytest.raises(InputError, match="exists already"):
        add_device("my-gpu-24gb", memory="24 GiB", bandwidth="1 TB/s", peak={"fp16": "1 TFLOP/s"}, directory=tmp_path)
    peak = {"fp16": "1 TFLOP/s"}
    add_device("my-gpu-24gb", memory="24 GiB", bandwidth="1 TB/s", peak=peak, directory=tmp_path, force=True)
    assert load.device("my-gpu-24gb", profiles=[tmp_path]).memory_Bps == 1e12


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": "24"}, "has no unit"), ({"bandwidth": "fast"}, "is not a quantity"),
        ({"peak": {}}, "names no dtype"),
        ({"peak": {"fp99": "1 TFLOP/s"}}, "is no known key"), ({"name": "../evil"}, "is no profile name"),
        ({"name": "x.toml"}, "is no profile name"), ({"colour": "red"}, "is no known key"),
        ({"power": "450"}, "has no unit"),
    ],
)
def test_a_bad_device_is_not_written(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"name": "mine", "memory": "24 GiB", "bandwidth": "1 TB/s"}
    given |= {"peak": {"fp16": "1 TFLOP/s"}} | changed
    with pytest.raises(InputError) as error:
        add_device(str(given.pop("name")), directory=tmp_path, **given)  # type: ignore[arg-type]
    assert said in str(error.value)
    assert ".new-" not in str(error.value)
    assert [p for p in tmp_path.rglob("*") if p.is_file() or p.name.startswith(".new-")] == []


def test_a_folder_that_cannot_hold_profiles(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be written"):
        add_device("mine", memory="1 GiB", bandwidth="1 TB/s", peak={"fp16": "1 TFLOP/s"}, directory=tmp_path / "file")


# ---------------------------------------------------------------- budget


def test_loading_a_device_by_alias_is_quick_and_light() -> None:
    code = (
        "import sys, time\nfrom simkit.spec import load\n"
        "t = time.perf_counter()\nload.device('NVIDIA A100-SXM4-80GB')\nprint(time.perf_counter() - t)\n"
        "print(sorted({'numpy', 'pydantic', 'simpy', 'pandas', 'yaml'} & set(sys.modules)))"
    )
    env = {k: v for k, v in os.environ.items() if k != "SIMKIT_PROFILES"}
    best, heavy = 1.0, "[]"
    for _ in range(3):  # the best of three: other work may hold the processor
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        seconds, heavy = done.stdout.splitlines()
        best = min(best, float(seconds))
    assert heavy == "[]"
    assert best < 0.05
