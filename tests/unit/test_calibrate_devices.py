"""Fits of devices: what made the rows is found again, two laboratories are told apart, foreign rows are passed over."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from simkit.calibrate_devices import check, fit_devices, fit_memory, fit_priors
from simkit.calibrate_kernels import fit_attention, fit_products, measured
from simkit.errors import InputError
from simkit.roofline import Law, attention_seconds, matmul_seconds
from simkit.spec import load
from simkit.spec.hardware import Device

A100 = load.device("a100-sxm4-80gb", calibration=False)
LAW = Law(
    peak_flops=312e12, ceiling=0.8, depth=150.0, sm_count=108.0, memory_Bps=0.75 * 2039e9, attention_ceiling=0.55,
    attention_depth=250.0,
)
SHAPES = [(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 12288) for k in (512, 4096, 16384)]


def gemm_row(m: int, n: int, k: int, seconds: float, **more: str) -> dict[str, str]:
    row = {"op": "gemm", "dtype": "bf16", "m": f"{m}", "n": f"{n}", "k": f"{k}", "device": A100.name}
    return {**row, "metric": "time_s", "value": repr(seconds), **more}


def gemm_seconds(m: int, n: int, k: int, law: Law, launch_s: float) -> float:
    sides = (np.array([float(x)]) for x in (1, m, n, k))
    return float(matmul_seconds(*sides, law)[0]) + launch_s


def test_the_constants_behind_the_rows_are_found_again() -> None:
    rows = [gemm_row(m, n, k, gemm_seconds(m, n, k, LAW, 3e-6)) for m, n, k in SHAPES]
    data = measured({"kernel_x": rows}, ("gemm",))[A100.name, "bf16"]
    fit, launch_s = fit_products(data, A100, "bf16", 0.75)
    assert fit["ceiling"] == pytest.approx(0.8, rel=0.01)
    assert fit["depth"] == pytest.approx(150.0, rel=0.1)
    assert fit.mape is not None
    assert fit.mape < 0.01
    assert launch_s is None


def test_two_laboratories_keep_a_ceiling_each_and_the_profile_their_median() -> None:
    tables = {
        name: [gemm_row(m, n, k, gemm_seconds(m, n, k, replace(LAW, ceiling=c), 3e-6)) for m, n, k in SHAPES]
        for name, c in (("kernel_x", 0.9), ("gemm_y", 0.7))
    }
    fit, _ = fit_products(measured(tables, ("gemm",))[A100.name, "bf16"], A100, "bf16", 0.75)
    assert fit["ceiling"] == pytest.approx(0.8, rel=0.01)
    assert fit.mape is not None
    assert fit.mape < 0.01
    assert "gemm_y 0.7" in fit.note
    assert fit.dataset == ("gemm_y", "kernel_x")


def prefill(batch: int, heads: int, length: int, factor: float, engine: str) -> dict[str, str]:
    """Causal attention of head size 128 whose rows see (length + 1)/2 keys on average."""
    sides = (batch * heads, length, length, 128.0 * (length + 1) / length)
    seconds = float(attention_seconds(*(np.array([float(x)]) for x in sides), LAW)[0]) / factor + 1e-5
    row = {"op": "attention_prefill", "dtype": "bf16", "kv_dtype": "bf16", "head_dim": "128", "device": A100.name}
    numbers = {"batch": batch, "heads": heads, "kv_heads": heads, "q_len": length, "kv_len": length}
    told = {"metric": "time_s", "value": repr(seconds), "engine": engine}
    return {**row, **{k: f"{v}" for k, v in numbers.items()}, **told}


def test_attention_is_found_again_beside_a_slower_engine() -> None:
    points = [(b, h, s) for b in (1, 4, 16) for h in (8, 64) for s in (512, 2048, 8192, 16384)]
    rows = [prefill(*p, f, e) for p in points for f, e in ((1.0, "vllm"), (0.8, "trtllm"))]
    data = measured({"kernel_x": rows}, ("attention_prefill",))[A100.name, "bf16"]
    (fit,) = fit_attention(data, A100, "bf16", 0.75)
    assert fit.name == "attention.bf16"
    assert fit["ceiling"] == pytest.approx(0.55, rel=0.05)
    assert fit["other_engine"] == pytest.approx(0.8, rel=0.05)


def test_decoding_streams_its_cache() -> None:
    # 4 sequences of 65,536 keys, 8 groups of 128, two tensors of 2 bytes = 1.074 GB at 60 % of 2039 GB/s, and 10 us.
    rows = []
    for batch in (4, 8, 16, 32, 64):
        nbytes = batch * (65536 * 8 * 128 * 2 * 2 + 2 * 32 * 128 * 2)
        row = {"op": "attention_decode", "dtype": "bf16", "kv_dtype": "bf16", "device": A100.name, "engine": "vllm"}
        numbers = {"batch": batch, "heads": 32, "kv_heads": 8, "head_dim": 128, "q_len": 1, "kv_len": 65536}
        value = nbytes / (0.6 * 2039e9) + 1e-5
        rows.append({**row, **{k: f"{v}" for k, v in numbers.items()}, "metric": "time_s", "value": repr(value)})
    (fit,) = fit_attention(measured({"kernel_x": rows}, ("attention_decode",))[A100.name, "bf16"], A100, "bf16", 0.75)
    assert fit.name == "decode"
    assert fit["fraction"] == pytest.approx(0.6, rel=0.01)


def test_streams_are_the_median_over_tables_of_large_buffers() -> None:
    def row(nbytes: float, share: float) -> dict[str, str]:
        value = repr(nbytes / (share * 2039e9))
        return {"op": "memory", "bytes": f"{nbytes}", "device": A100.name, "metric": "time_s", "value": value}

    tables = {
        "kernel_a": [row(1e9, 0.7), row(1e9, 0.8), row(1e9, 0.9), row(1e6, 3.0)],
        "kernel_b": [row(5e8, 0.6)],
    }
    fit = fit_memory(tables, {A100.name: A100})[A100.name]
    assert fit["fraction"] == pytest.approx((0.8 + 0.6) / 2)
    assert fit.rows == 4


def test_sixteen_bit_rows_are_one_and_other_rows_are_passed_over() -> None:
    rows = [
        gemm_row(512, 512, 512, 1e-5),
        gemm_row(512, 512, 512, 1e-5, dtype="fp16"),
        gemm_row(512, 512, 512, 1e-5, sparsity="2:4"),
        gemm_row(512, 512, 512, 1e-5, metric="busbw"),
        gemm_row(512, 512, 512, 1e-5, dtype="int4wo"),
    ]
    found = measured({"kernel_x": rows}, ("gemm",))
    assert set(found) == {(A100.name, "bf16")}
    assert found[A100.name, "bf16"].size == 2


def test_rows_of_unknown_devices_fit_nothing() -> None:
    rows = [gemm_row(512, 512, k, 1e-5, device="not-a-device") for k in range(64, 1024, 64)]
    assert fit_devices({"kernel_x": rows}, {A100.name: A100}) == {}


def test_priors_carry_measured_devices_to_others() -> None:
    rows = [gemm_row(m, n, k, gemm_seconds(m, n, k, LAW, 3e-6)) for m, n, k in SHAPES]
    rows += [prefill(b, 32, s, 1.0, "vllm") for b in (1, 4, 16) for s in (512, 2048, 8192)]
    devices: dict[str, Device] = {A100.name: A100}
    pooled = fit_priors(fit_devices({"kernel_x": rows}, devices), MappingProxyType(devices))
    assert pooled["gemm.tensor.ampere.2048"]["ceiling"] == pytest.approx(0.8, rel=0.02)
    assert pooled["attention.ampere"]["share"] == pytest.approx(0.55 / 0.8, rel=0.06)


def test_no_table_at_all_is_bad_input() -> None:
    with pytest.raises(InputError, match="no operator table"):
        check({"kernel_x": []})
