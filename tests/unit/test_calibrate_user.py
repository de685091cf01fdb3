"""One's own measurements in one's own profile: the constants behind them are found again, and are in force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_measurements import Trace, nccl_log

from simkit import predict
from simkit.calibrate_user import calibrate_user, rows_of, write
from simkit.errors import InputError
from simkit.roofline import Law, attention_seconds, matmul_seconds
from simkit.spec import load

A100 = "a100-sxm4-80gb"
LAW = Law(
    peak_flops=312e12, ceiling=0.8, depth=150.0, sm_count=108.0, memory_Bps=0.75 * 2039e9, attention_ceiling=0.55,
    attention_depth=250.0,
)  # fmt: skip
SHAPES = [(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 12288) for k in (512, 4096, 16384)]


def seconds_of(m: int, n: int, k: int, law: Law = LAW) -> float:
    return float(matmul_seconds(*(np.array([float(x)]) for x in (1, m, n, k)), law)[0])


def trace_of(path: Path, law: Law = LAW) -> Path:
    """A trace of products and fused attention that take what the law says, and of streams at 0.8 of 2,039 GB/s."""
    trace = Trace()
    bf16 = "c10::BFloat16"
    for m, n, k in SHAPES:
        trace.mm(m, n, k, seconds_of(m, n, k, law) + 2e-6)
    for batch, length in ((1, 2048), (1, 4096), (2, 8192), (1, 16384), (8, 1024)):
        sides = (np.array([float(x)]) for x in (batch * 32, length, length, 128 * (1 + 1 / length)))
        seconds = float(attention_seconds(*sides, law)[0])
        trace.call("aten::_flash_attention_forward", [[batch, length, 32, 128]] * 3, [bf16] * 3, "flash_fwd",
                   seconds + 3e-6, concrete=[""] * 7 + ["0.", "True", "False"])  # fmt: skip
    size = 8 * 4096 * 8192
    trace.call("aten::copy_", [[8, 4096, 8192]] * 2, [bf16, bf16], "copy", 4.0 * size / (0.8 * 2039e9))
    for _ in range(30):
        trace.call("aten::mul", [[64], [64]], ["float", "float"], "tiny", 2e-6)
    return trace.write(path)


def test_alpha_and_beta_of_a_link_from_a_log(tmp_path: Path) -> None:
    log = nccl_log(tmp_path / "ar.log", ranks=8, alpha_s=25e-6, Bps=180e9)
    out = calibrate_user([log], device="a100", link="nvlink3")
    fit = out.fits["links"]["nvlink3"][f"all_reduce@{A100}"]
    assert fit["a_s"] == pytest.approx(25e-6, rel=0.02)
    assert fit["Bps"] == pytest.approx(180e9, rel=0.01)
    assert (fit.dataset, fit.rows, fit.valid["bytes"], fit.valid["ranks"]) == (("ar",), 30, (8.0, 2.0**32), (8.0, 8.0))
    assert fit.mape is not None
    assert fit.mape < 0.01


def test_a_new_link_between_nodes(tmp_path: Path) -> None:
    """16 GPUs of two nodes with 8 NICs of 25 GB/s each: the profile gives the times of the log again, within what trees
    over two tiers can follow of one straight line."""
    log = nccl_log(tmp_path / "ar.log", ranks=16, hosts=2, alpha_s=60e-6, Bps=100e9)
    out = calibrate_user([log], link="my-net=200Gb/s@5us", nics_per_node=8)
    folder = tmp_path / "mine"
    write(out, folder)
    found = load.link("my-net", profiles=(str(folder),))
    # Not where the search began, 0.8 of the line rate, at which the links inside a node hide the NICs.
    assert 5e9 < found.calibration["all_reduce"]["Bps"] < 18e9
    from simkit.network import collective
    from simkit.spec.cluster import cluster

    pod, _ = cluster(f"2x8x{A100}", inter="my-net", nics_per_node=8, profiles=(str(folder),))
    for nbytes in (2**28, 2**31):
        expected = 60e-6 + 1.875 * nbytes / 100e9
        assert collective("all_reduce", nbytes=float(nbytes), cluster=pod, ranks=16).seconds == pytest.approx(
            expected, rel=0.12
        )


def test_the_constants_of_a_device_from_a_trace(tmp_path: Path) -> None:
    out = calibrate_user([trace_of(tmp_path / "t.json.gz")], device="a100")
    fits = out.fits["devices"][A100]
    assert fits["gemm.bf16"]["ceiling"] == pytest.approx(0.8, rel=0.01)
    assert fits["gemm.bf16"]["depth"] == pytest.approx(150.0, rel=0.1)
    assert fits["gemm.bf16"].rows == len(SHAPES)
    assert fits["gemm.bf16"].valid["m"] == (512.0, 8192.0)
    assert fits["attention.bf16"]["ceiling"] == pytest.approx(0.55, rel=0.03)
    assert fits["memory"]["fraction"] == pytest.approx(0.8, rel=0.01)
    assert fits["kernel"]["seconds"] == pytest.approx(2e-6)
    assert out.facts["host_kernel_s"] == pytest.approx(10e-6)
    assert all(fit.mape is None or fit.mape < 0.03 for fit in fits.values())


def test_the_profile_is_in_force_and_keeps_what_was_not_measured(tmp_path: Path) -> None:
    slow = trace_of(tmp_path / "t.json", replace(LAW, ceiling=0.4))
    out = calibrate_user([slow], device="a100")
    paths = write(out, tmp_path / "mine")
    assert [p.relative_to(tmp_path).as_posix() for p in paths] == [f"mine/devices/{A100}.toml"]
    mine, shipped = load.device(A100, profiles=(str(tmp_path / "mine"),)), load.device(A100)
    assert mine.peak_flops == shipped.peak_flops
    assert mine.sources == shipped.sources
    assert mine.calibration["gemm.bf16"]["ceiling"] == pytest.approx(0.4, rel=0.01)
    kept = set(shipped.calibration) - set(out.fits["devices"][A100])
    assert kept
    for name in kept:
        assert dict(mine.calibration[name].values) == dict(shipped.calibration[name].values)
    job = {"model": "gpt2-xl", "cluster": "1x8xa100", "micro_batch": 4, "grad_accum": 1, "precision": "bf16"}
    before, after = predict(**job), predict(**job, profiles=(str(tmp_path / "mine"),))
    assert after.iteration_time_s > 1.2 * before.iteration_time_s


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "t.json")
    texts = [calibrate_user([trace], device="a100").profiles for _ in range(2)]
    assert texts[0] == texts[1]
    write(calibrate_user([trace], device="a100"), tmp_path / "mine")
    # Once more on top of itself: nothing is lost and nothing doubled.
    again = calibrate_user([trace], device="a100", folders=(str(tmp_path / "mine"),))
    assert again.profiles == texts[0]


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    lines = [f"{m},{n},{k},bf16,{(seconds_of(m, n, k) + 3e-6) * 1e6!r}" for m, n, k in SHAPES]
    path = tmp_path / "gemms.csv"
    path.write_text("\n".join(["M,N,K,dtype,time_us", *lines]) + "\n", encoding="utf-8")
    row = next(r for r in rows_of(calibrate_user([path], device="a100")) if r["fit"] == "gemm.bf16")
    assert row["values"]["ceiling"] == pytest.approx(0.8, rel=0.01)
    assert row["dataset"] == ["gemms"]


def test_what_is_lacking_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("m,n,k,dtype,time_us,device\n64,64,64,bf16,5,a100\n64,64,64,bf16,5,h100\n", encoding="utf-8")
    with pytest.raises(InputError, match="told too little") as caught:
        calibrate_user([path], device="a100")
    assert "rows of gemm in bf16: 1; 4 are needed" in str(caught.value)
    assert "rows of another device, h100-sxm5-80gb: 1" in str(caught.value)


def test_products_faster_than_the_datasheet_are_doubted(tmp_path: Path) -> None:
    lines = [f"{m},{n},{k},bf16,{2e6 * m * n * k / 700e12!r}" for m, n, k in SHAPES]
    path = tmp_path / "gemms.csv"
    path.write_text("\n".join(["M,N,K,dtype,time_us", *lines]) + "\n", encoding="utf-8")
    assert any("times the peak" in line for line in calibrate_user([path], device="a100").lacking)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "--device or --link"),
        ({"device": "a1000"}, "a1000"),
        ({"link": "100Gb/s@5us"}, "names none"),
        ({"link": "nvlink3=100Gb/s@5us"}, "already"),
        ({"link": "My Net=100Gb/s@5us"}, "no profile name"),
        ({"link": "nvlinq3"}, "nvlink3"),
    ],
)
def test_bad_names(asked: dict[str, str], said: str, tmp_path: Path) -> None:
    log = nccl_log(tmp_path / "ar.log")
    with pytest.raises(InputError, match=said):
        calibrate_user([log], **asked)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    out = calibrate_user([nccl_log(tmp_path / "ar.log")], device="a100", link="nvlink3")
    (tmp_path / "mine").write_text("a file", encoding="utf-8")
    with pytest.raises(InputError, match="--out"):
        write(out, tmp_path / "mine")
