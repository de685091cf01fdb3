"""The answer: its arithmetic, its conventions, its words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from simkit import predict
from simkit.errors import InputError
from simkit.spec.models import model

RESNET = {"model": "resnet-50", "cluster": "8x4x2080ti", "inter": "10gbe", "micro_batch": 64, "precision": "fp32"}


def test_mfu_of_llama_2_by_its_definition() -> None:
    """BR-57: the peak is the dense 989 TFLOP/s. A token takes 6 N + 12 L h s, look-up left out of N; 9,600 tokens/s/GPU
    of Llama-2-7B at 4,096 tokens are then 44.7 % (45.5 % with the look-up counted, BR-62), never half of that."""
    report = predict(model="llama-2-7b", cluster="1x8xh100", micro_batch=1, seq_len=4096, precision="bf16")
    matrices = 6738415616 - 32000 * 4096 - (2 * 32 + 1) * 4096
    per_token = 6 * matrices + 12 * 32 * 4096 * 4096
    assert report.tokens_per_s_per_gpu is not None
    assert report.mfu == pytest.approx(report.tokens_per_s_per_gpu * per_token / 989e12, rel=0.001)
    assert 9600 * per_token / 989e12 == pytest.approx(0.447, abs=0.001)
    with_look_up = 9600 * (6 * 6738415616 + 12 * 32 * 4096 * 4096) / 989e12
    assert with_look_up == pytest.approx(0.455, abs=0.001)
    assert report.facts["peak_flops_per_gpu"] == pytest.approx(989e12, rel=0.001)


def test_head_and_look_up_in_mfu() -> None:
    """BR-62: Llama-3-8B, 2,904 tokens/s/GPU on A100 at 8,192: 53.9 % without the look-up."""
    report = predict(model="llama-3-8b", cluster="1x8xa100", micro_batch=1, grad_accum=1, seq_len=8192)
    per_token = report.facts["model_flops_per_gpu_step"] / 8192
    assert 2904 * per_token / 312e12 == pytest.approx(0.539, abs=0.002)
    assert any("no look-up" in line and "not halved" in line for line in report.assumptions)


def test_flops_of_a_step_with_attention_in_full() -> None:
    """BR-61: Llama-2-7B, s 8192, batch 4: 1299.00 TFLOP of weights and 422.21 of attention, 1721.22 together."""
    report = predict(model="llama-2-7b", cluster="1x1xh100", micro_batch=4, grad_accum=1, seq_len=8192)
    assert report.facts["model_flops_per_gpu_step"] / 1e12 == pytest.approx(1721.22, rel=0.001)


def test_tokens_per_step_count_accumulation() -> None:
    """BR-68: micro-batch x accumulation x ranks x length."""
    report = predict(model="gpt2", cluster="1x8xa100", micro_batch=4, grad_accum=16, seq_len=1024)
    assert report.tokens_per_s is not None
    assert report.tokens_per_s * report.iteration_time_s == pytest.approx(4 * 16 * 8 * 1024)
    assert report.samples_per_s * report.iteration_time_s == pytest.approx(4 * 16 * 8)
    once = predict(model="gpt2", cluster="1x8xa100", micro_batch=4, grad_accum=1, seq_len=1024)
    assert report.mfu >= once.mfu


def test_recomputation_counts_in_hfu_never_in_mfu() -> None:
    fields = {"model": "gpt2-xl", "cluster": "1x1xh100", "micro_batch": 4, "grad_accum": 1, "seq_len": 1024}
    none, full = predict(**fields), predict(**fields, recompute="full")
    assert none.hfu == pytest.approx(none.mfu)
    assert full.mfu < none.mfu
    assert full.mfu < full.hfu <= full.mfu * 4 / 3 * (1 + 1e-9)


def test_terms_sum_to_the_step() -> None:
    for method in ("s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"):
        report = predict(**RESNET, method=method)
        assert math.fsum(report.breakdown.values()) == pytest.approx(report.iteration_time_s, rel=1e-9)
        assert {t.name for t in report.ledger} == set(report.breakdown)


def test_images_have_no_tokens() -> None:
    report = predict(**RESNET)
    assert report.tokens_per_s is None
    assert report.fits


def test_image_size_rebuilds_the_network() -> None:
    """A side of 448 has four times the positions: four times the FLOPs of all convolutions."""
    small, large = (predict(**RESNET | {"cluster": "1x1xa100", "micro_batch": 8}, image_size=i) for i in (224, 448))
    ratio = large.facts["model_flops_per_gpu_step"] / small.facts["model_flops_per_gpu_step"]
    assert ratio == pytest.approx(4.0, rel=0.01)
    assert large.facts["params"] == small.facts["params"] == 25557032
    assert large.scenario["image_size"] == 448
    with pytest.raises(InputError, match="below 32"):
        predict(**RESNET, image_size=16)


def test_a_traced_module_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A two-layer perceptron: 2·(784·4096 + 4096·10) FLOPs a sample forward, three times that for MFU."""
    pytest.importorskip("torch")
    (tmp_path / "perceptron_of_a_user.py").write_text(
        "import torch\n\n\ndef net():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(784, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    report = predict(model="perceptron_of_a_user:net", cluster="2x4xa100", inter="10gbe", micro_batch=256, grad_accum=1,
                     method="s-sgd", precision="fp32")
    params = 784 * 4096 + 4096 + 4096 * 10 + 10
    assert report.facts["params"] == params
    assert report.facts["wire_bytes_per_rank"] == 4 * params
    assert report.facts["model_flops_per_gpu_step"] == 3 * 256 * 2 * (784 * 4096 + 4096 * 10)
    assert report.iteration_time_s > 0
    assert report.memory.items_bytes["weights"] == 4 * params


def test_every_default_is_stated() -> None:
    report = predict(cluster="50x3080")
    said = " ".join(report.assumptions)
    for name in ("precision", "optimizer", "micro_batch", "grad_accum", "method", "overlap", "fusion"):
        assert f"{name} =" in said, name
    assert report.beside
    assert report.bottleneck


def test_intervals_hold_the_prediction() -> None:
    report = predict(**RESNET)
    for name, (low, high) in report.interval_90.items():
        assert low < getattr(report, name) < high


def test_scaling_may_hurt_and_says_why() -> None:
    """BR-85: two nodes over a slow line are slower than one; the network is named as what holds the job back."""
    one = predict(model="bert-large", cluster="1x8xv100", micro_batch=16, grad_accum=1, method="s-sgd")
    two = predict(model="bert-large", cluster="2x8xv100", inter="1gbe", micro_batch=16, grad_accum=1, method="s-sgd")
    assert two.samples_per_s < one.samples_per_s
    assert "bandwidth of" in two.bottleneck


def test_the_parameter_count_is_that_of_the_network() -> None:
    assert predict(**RESNET).facts["params"] == model("resnet-50").params == 25557032
