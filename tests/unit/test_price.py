"""Which constants a device, a dtype and a stack get, and what they make of a program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simkit.price import Scales, compute, optimizer_seconds, peak, pricing, scaled
from simkit.roofline import Law
from simkit.spec.load import device
from simkit.spec.models import model
from simkit.spec.plan import Plan
from simkit.spec.stack import stack
from simkit.workloads import Numerics, program

LAW = Law(peak_flops=1e14, ceiling=0.8, depth=100.0, sm_count=80.0, memory_Bps=1e12, kernel_s=4e-6)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [("h100", "bf16", 989.0), ("a100", "bf16", 312.0), ("3080", "fp16", 59.5), ("3090", "fp16", 71.0),
     ("4090", "fp16", 165.2), ("5090", "fp16", 209.5), ("a6000", "fp16", 154.8)],
)
def test_peaks_are_dense_with_fp32_accumulation(name: str, dtype: str, tflops: float) -> None:
    """BR-57, BR-58."""
    found, warning = peak(device(name), dtype)
    assert found == pytest.approx(tflops * 1e12, rel=0.005)
    assert warning == ""


def test_fp16_accumulation_only_on_request_and_only_for_fp16() -> None:
    """BR-58: 4090 330 TFLOP/s, twice the rate with fp32 accumulation."""
    card = device("4090")
    assert peak(card, "fp16", fp16_accumulate=True)[0] == pytest.approx(2 * 165.2e12, rel=0.005)
    assert peak(card, "bf16", fp16_accumulate=True)[0] == peak(card, "bf16")[0]


def test_a_missing_dtype_runs_at_the_fp32_rate_and_says_so() -> None:
    card = device("2080ti")
    found, warning = peak(card, "bf16")
    assert found == card.peak_flops["fp32"]
    assert "bf16" in warning
    assert pricing(card, "bf16", stack("pytorch"), calibration=True).warnings == (warning,)


def test_without_calibration_everything_is_assumed() -> None:
    found = pricing(device("a100"), "bf16", stack("pytorch"), calibration=False)
    assert found.evidence["peak"] == "datasheet"
    assert {found.evidence[k] for k in ("ceiling", "memory", "kernel", "stack")} == {"assumed"}
    assert found.law.elementwise == 1.0
    assert found.law.conv == 1.0


def test_fits_are_taken_where_they_exist() -> None:
    card = device("a100")
    found = pricing(card, "bf16", stack("pytorch"), calibration=True)
    assert found.evidence["ceiling"] in ("fitted", "end-to-end")
    fit = card.calibration.get("gemm.bf16") or card.calibration["gemm.fp16"]
    assert found.law.ceiling == fit["ceiling"]
    assert found.law.peak_flops == 312e12


def test_scales_multiply_what_they_name() -> None:
    found = scaled(LAW, Scales(flops=2.0, memory_Bps=3.0, kernel_s=0.5))
    assert (found.peak_flops, found.memory_Bps, found.kernel_s) == (2e14, 3e12, 2e-6)
    same = scaled(LAW, Scales())
    assert all(getattr(same, f) == getattr(LAW, f) for f in ("peak_flops", "memory_Bps", "kernel_s", "ceiling"))


def test_optimizer_by_hand() -> None:
    """100 M parameters at 16 bytes each over 1e12 B/s, and 0.05 launches of 4 us for each of 200 tensors."""
    software = stack("pytorch")
    assert software.optimizer_bytes["sgd"] == 16
    found = optimizer_seconds(100e6, 200, Plan(optimizer="sgd"), software, LAW)
    assert found == pytest.approx(1.6e-3 + 200 * 0.05 * 4e-6, rel=1e-12)
    assert optimizer_seconds(100e6, 200, Plan(optimizer="none"), software, LAW) == 0.0
    adam = optimizer_seconds(100e6, 0, Plan(optimizer="adamw"), software, LAW)
    # accuracy: 40 to 90 bytes a parameter are seen.
    assert 40 <= adam * 1e12 / 100e6 <= 90


def test_a_program_is_priced_operator_by_operator() -> None:
    work = program(model("resnet-18"), Numerics())
    found = compute(work, micro_batch=8, seq_len=0, law=LAW)
    assert found.forward_s.shape == (len(work.forward),)
    assert found.backward_s.shape == (len(work.backward),)
    assert found.total(work.forward, backward=False) == pytest.approx(sum(found.forward_s[work.forward.order]))
    # 3,628,146,688 FLOPs an image (torchvision prints 1.814 G multiply-adds).
    assert found.model_flops == pytest.approx(8 * 2 * 1.814e9, rel=1e-3)
    # Twice the batch costs less than twice the time and more than once.
    twice = compute(work, micro_batch=16, seq_len=0, law=LAW).total(work.forward, backward=False)
    once = found.total(work.forward, backward=False)
    assert once < twice < 2 * once


def test_no_step_beats_the_peak() -> None:
    work = program(model("bert-large"), Numerics())
    found = compute(work, micro_batch=64, seq_len=512, law=replace(LAW, kernel_s=0.0))
    total = found.total(work.forward, backward=False) + found.total(work.backward, backward=True)
    assert total > 3 * float(found.model_flops) / LAW.peak_flops
