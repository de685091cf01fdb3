"""Counts, caches and FLOPs against values of public reports (BR-numbers) and against hand computation."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.count import (
    attention_flops_per_token,
    by_module,
    checkpoint_bytes,
    count,
    flops_per_sample,
    kv_bytes_per_token,
    kv_cache_bytes,
    matmul_params,
)
from simkit.errors import InputError
from simkit.spec.adapters import lora_params, lora_tensors
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.models import model, model_names, pretraining_model

GIB = 2.0**30
TERA = 1e12


def spec_of(net: Model) -> TransformerSpec:
    assert isinstance(net.spec, TransformerSpec)
    return net.spec


def training_flops(name: str, seq_len: int, sequences: int, *, causal_halved: bool) -> tuple[float, float]:
    """(matmuls, attention) of one training step: three times the forward pass."""
    net = model(name)
    tokens = sequences * seq_len
    attention = attention_flops_per_token(spec_of(net), seq_len, causal_halved=causal_halved)
    return 3 * 2 * matmul_params(net) * tokens, 3 * attention * tokens


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("qwen3-4b", 147456),  # BR-05: 2·36·8·128·2; the wrong head_dim of 80 would give 92160
        ("llama-2-7b", 524288),  # BR-07: 2·32·32·128·2
        ("llama-3-8b", 131072),  # 2·32·8·128·2
        ("deepseek-v3", 70272),  # BR-38: 61·(512 + 64)·2
        ("mistral-nemo", 163840),  # 2·40·8·128·2
        ("gemma-7b", 458752),  # 2·28·16·256·2
        ("falcon-7b", 8192),  # multi-query: 2·32·1·64·2
        ("bert-base", 0),
        ("vit-base", 0),
        ("resnet-50", 0),
    ],
)
def test_kv_bytes_per_token(name: str, per_token: float) -> None:
    assert kv_bytes_per_token(model(name), "bf16") == per_token


@pytest.mark.parametrize(
    ("name", "tokens", "gib"),
    [
        ("gemma-3-27b", 131072, 10.40625),  # BR-38: (10·131072 + 52·1024)·2·16·128·2 bytes
        ("deepseek-v3", 163840, 10.72265625),  # BR-38
        ("llama-3-70b", 131072, 40.0),  # BR-40
        ("llama-3-8b", 131072, 16.0),  # BR-40
    ],
)
def test_kv_cache(name: str, tokens: int, gib: float) -> None:
    assert kv_cache_bytes(model(name), tokens) / GIB == pytest.approx(gib, rel=1e-12)


def test_windows_do_not_matter_before_they_are_full() -> None:
    net = model("gemma-3-27b")
    assert kv_cache_bytes(net, 1000) == 1000 * kv_bytes_per_token(net)
    assert kv_bytes_per_token(net) * 131072 / GIB == 62.0  # BR-38: the naive figure


def test_kv_dtype_halves() -> None:
    net = model("llama-2-7b")
    assert kv_bytes_per_token(net, "fp8") == kv_bytes_per_token(net, "fp16") / 2


def test_encoder_decoder_also_keeps_its_source() -> None:
    # t5-base: 12 decoder blocks, 12 heads of 64, keys and values, two bytes.
    net = model("t5-base")
    assert kv_bytes_per_token(net) == 12 * 2 * 12 * 64 * 2
    assert kv_cache_bytes(net, 10, source_tokens=30) == 40 * 12 * 2 * 12 * 64 * 2


def test_weight_bytes_take_the_dtype_asked_for() -> None:
    """BR-21: 141107412992 B = 131.42 GiB; BR-07: 13.48 GB."""
    assert checkpoint_bytes(model("llama-3.1-70b"), "fp16") == 141107412992
    assert checkpoint_bytes(model("llama-3.1-70b"), "fp16") / GIB == pytest.approx(131.42, abs=0.005)
    assert checkpoint_bytes(model("llama-2-7b"), "fp16") / 1e9 == pytest.approx(13.48, abs=0.005)
    assert count(model("bert-base"), dtype="fp16")["checkpoint_bytes"] == 2 * 109482240
    assert count(model("bert-base"))["checkpoint_bytes"] == 4 * 109482240


def test_mxfp4_experts_give_the_printed_checkpoint() -> None:
    # The model card of gpt-oss-20b prints a checkpoint of 12.8 GiB, that of the 120b one of 60.8 GiB.
    assert checkpoint_bytes(model("gpt-oss-20b"), "mxfp4") / GIB == pytest.approx(12.8, abs=0.05)
    assert checkpoint_bytes(model("gpt-oss-120b"), "mxfp4") / GIB == pytest.approx(60.8, abs=0.05)


def test_causal_and_full_attention() -> None:
    """BR-61: Llama-2-7B, 8192 tokens, batch 4, in TFLOP a step; and at 129024 tokens."""
    matmuls, full = training_flops("llama-2-7b", 8192, 4, causal_halved=False)
    _, halved = training_flops("llama-2-7b", 8192, 4, causal_halved=True)
    assert matmuls / TERA == pytest.approx(1299.00, abs=0.01)
    assert full / TERA == pytest.approx(422.21, abs=0.01)
    assert halved / TERA == pytest.approx(211.11, abs=0.01)
    whole = sum(training_flops("llama-2-7b", 129024, 4, causal_halved=False))
    masked = sum(training_flops("llama-2-7b", 129024, 4, causal_halved=True))
    assert whole / TERA == pytest.approx(125194.40, abs=0.01)
    # The report's 72826.86 is matmuls plus half of the attention.
    assert masked / TERA == pytest.approx(72826.86, abs=0.01)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-70b", "qwen3-32b", "mistral-nemo"])
def test_gated_grouped_layers_by_formula(name: str) -> None:
    """BR-60: forward 2(2·h·n·d + 2·h·n_kv·d + 3·h·f) + 4·s·n·d per token and layer, plus the head 2·h·V."""
    net = model(name)
    s = spec_of(net)
    h, q, kv = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim
    expected = s.layers * (2 * (2 * h * q + 2 * h * kv + 3 * h * s.ffn) + 4 * 4096 * q) + 2 * h * s.vocab
    assert count(net, seq_len=4096)["flops_per_token_forward"] == expected


def test_lookup_is_no_matmul() -> None:
    """BR-62: Llama-3-8B at 2904 tokens/s on an A100 (312 TFLOP/s), 8192 tokens: 53.9 % without the look-up."""
    net = model("llama-3-8b")
    per_token = 3 * count(net, seq_len=8192)["flops_per_token_forward"]
    assert 2904 * per_token / 312e12 == pytest.approx(0.539, abs=0.0005)
    with_lookup = per_token + 6 * 128256 * 4096
    assert 2904 * with_lookup / 312e12 == pytest.approx(0.568, abs=0.0005)


def test_tied_head_stays_a_matmul() -> None:
    # gpt2: 12 layers of 12·768² weights (4 attention, 8 MLP), and the tied 50257 x 768 head.
    assert matmul_params(model("gpt2")) == 12 * 12 * 768**2 + 50257 * 768


def test_mlm_head_counts_and_pooled_heads_do_not() -> None:
    # bert-base: 12·12·768² in the blocks; pre-training adds one dense layer and the tied 30528 x 768 decoder.
    assert matmul_params(model("bert-base")) == 12 * 12 * 768**2
    assert matmul_params(pretraining_model(model("bert-base"))) == 12 * 12 * 768**2 + 768**2 + 30528 * 768


def test_only_active_experts_work() -> None:
    # Mixtral: attention 4096·(4096 + 1024 + 1024 + 4096), router 8·4096, two of eight experts of 3·4096·14336.
    layer = 4096 * (2 * 4096 + 2 * 1024) + 8 * 4096 + 2 * 3 * 4096 * 14336
    assert matmul_params(model("mixtral-8x7b")) == 32 * layer + 32000 * 4096


def test_image_networks_by_known_multiply_adds() -> None:
    # torchvision prints 4.09 and 15.47 GMAC for ResNet-50 and VGG-16, 17.56 for ViT-B/16; one of them is two FLOPs.
    assert flops_per_sample(model("resnet-50")) / 2e9 == pytest.approx(4.09, abs=0.005)
    assert flops_per_sample(model("resnet-152")) / 2e9 == pytest.approx(11.51, abs=0.005)
    assert flops_per_sample(model("vgg-16")) / 2e9 == pytest.approx(15.47, abs=0.005)
    assert flops_per_sample(model("vit-base")) / 2e9 == pytest.approx(17.56, abs=0.01)


def test_non_embedding_count_of_pythia() -> None:
    """EleutherAI prints 805736448 for the 1B and 6444163072 for the 6.9B model."""
    assert count(model("pythia-1b"))["params_no_embedding"] == 805736448
    assert count(model("pythia-6.9b"))["params_no_embedding"] == 6444163072


def test_adapters_on_all_seven_layers() -> None:
    """BR-47: TinyLlama-1.1B, rank 64: 50462720 trainable, 1150511104 in all."""
    net = model("tinyllama-1.1b")
    assert lora_params(net, rank=64) == 50462720
    assert net.params + lora_params(net, rank=64) == 1150511104
    names = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    assert lora_params(net, rank=64, targets=names) == 50462720


def test_adapters_on_query_and_value() -> None:
    # Llama-2-7B, rank 8 on q and v: 32 layers x 2 x 8 x (4096 + 4096).
    assert lora_params(model("llama-2-7b"), rank=8, targets=("q_proj", "v_proj")) == 4194304
    shapes = [t.shape for t in lora_tensors(model("llama-2-7b"), rank=8, targets=("q_proj",))[:2]]
    assert shapes == [(8, 4096), (4096, 8)]


@pytest.mark.parametrize(
    ("name", "targets", "rank", "expected"),
    [
        # PEFT prints 4,194,304 trainable parameters for rank 8 on q and v of a 7B Llama, 524,288 a unit of rank.
        ("llama-2-7b", "q_proj v_proj", 8, 4194304),
        # Fused layers wholly adapted: one pair on 3·4096 outputs in each of 32 layers.
        ("qwen-7b", "q_proj k_proj v_proj", 8, 32 * 8 * (4096 + 3 * 4096)),
        ("chatglm3-6b", "q_proj k_proj v_proj", 8, 28 * 8 * (4096 + 4096 + 2 * 256)),
        # Fused layers partly adapted: a pair for each part.
        ("gpt-neox-20b", "q_proj v_proj", 8, 44 * 8 * 2 * (6144 + 6144)),
        ("falcon-40b", "q_proj,v_proj", 8, 60 * 8 * (8192 + 8192 + 8192 + 512)),
        ("phi-3-mini", "gate_proj", 4, 32 * 4 * (3072 + 8192)),
        # Own names, roles of another family, and a gate that GPT-2 has not.
        ("gpt2", "c_attn", 8, 12 * 8 * (768 + 3 * 768)),
        ("opt-1.3b", "gate_proj up_proj down_proj", 8, 24 * 8 * 2 * (2048 + 8192)),
        ("bert-base", "q_proj,o_proj", 8, 12 * 8 * 2 * (768 + 768)),
        ("t5-base", "q_proj", 8, (12 + 2 * 12) * 8 * (768 + 768)),
        # Every one of eight experts has adapters of its own.
        ("mixtral-8x7b", "down_proj", 8, 32 * 8 * 8 * (14336 + 4096)),
        ("gpt-oss-20b", "down_proj", 8, 24 * 32 * 8 * (2880 + 2880)),
        ("gpt-oss-20b", "up_proj", 8, 24 * 32 * 8 * (2880 + 2880)),
    ],
)
def test_adapter_targets_are_roles(name: str, targets: str, rank: int, expected: int) -> None:
    assert lora_params(model(name), rank=rank, targets=targets) == expected


def test_seven_roles_are_all_linear_layers() -> None:
    roles = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
    for name in model_names():
        net = model(name)
        if isinstance(net.spec, TransformerSpec) and not net.spec.mla:
            assert lora_params(net, rank=4, targets=roles) == lora_params(net, rank=4), name


@pytest.mark.parametrize(("targets", "match"), [("q_prj", "q_proj"), ("", "names no layer"), ((), "names no layer")])
def test_wrong_adapter_targets(targets: str | tuple[str, ...], match: str) -> None:
    with pytest.raises(InputError, match=match):
        lora_params(model("llama-2-7b"), rank=8, targets=targets)


def test_modules_sum_to_the_count() -> None:
    for name in model_names():
        net = model(name)
        assert sum(by_module(net).values()) == net.params, name


def test_every_model_counts() -> None:
    for name in model_names():
        found = count(model(name))
        assert found["params"] >= found["params_active"] > 0, name
        assert 0 < found["params_no_embedding"] <= found["params"], name
        assert found.get("flops_per_token_forward", found.get("flops_per_sample_forward")) > 0, name


def test_convention_is_stated() -> None:
    found = count(model("llama-2-7b"), seq_len=2048, causal_halved=True)
    assert "halved" in found["flops_convention"]
    assert "2048" in found["flops_convention"]


def test_unknown_dtype_is_bad_input() -> None:
    with pytest.raises(InputError, match="bf16"):
        count(model("gpt2"), dtype="bf61")


@pytest.mark.parametrize("seq_len", [0, -1])
def test_negative_length_is_bad_input(seq_len: int) -> None:
    with pytest.raises(InputError, match="seq_len"):
        count(model("gpt2"), seq_len=seq_len)


def test_window_shortens_attention() -> None:
    """mistral-7b, window 4096, s = 8192: mean keys w(1 - w/2s) = 3072 with the mask, 4096 without."""
    s = spec_of(model("mistral-7b"))
    assert attention_flops_per_token(s, 8192) == 32 * 4 * 4096 * 4096
    assert attention_flops_per_token(s, 8192, causal_halved=True) == 32 * 4 * 4096 * 3072
    exact = np.mean([min(i + 1, 4096) for i in range(8192)])
    assert exact == pytest.approx(3072, rel=2e-4)
