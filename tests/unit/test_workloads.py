"""Every network of the zoo as a Program: the FLOPs that `simkit.count` states, each gradient ready once, in order."""

from __future__ import annotations

import time

import numpy as np
import pytest

from simkit import count
from simkit.errors import InputError
from simkit.program import Program, basis
from simkit.spec.model import ConvSpec, Model, TransformerSpec
from simkit.spec.models import model, model_names, pretraining_model
from simkit.spec.resolve import at_image_size
from simkit.workloads import Numerics, program

EVERY = model_names()
KINDS = ("bert-large", "t5-base", "vit-base", "falcon-7b", "gemma-2-2b", "gpt-oss-20b", "mixtral-8x7b",
         "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "llama-3-8b", "gpt2", "resnet-50", "vgg-16-bn")
MIXED = Numerics(element_bytes=2.0, cast_bytes=6.0, attention="flash")


def tokens_of(net: Model, seq_len: int = 128) -> int:
    spec = net.spec
    if not isinstance(spec, TransformerSpec):
        return 0
    return (spec.image_size // spec.patch) ** 2 + 1 if spec.kind == "vit" else seq_len


def counted(net: Model, seq_len: int) -> float:
    """Forward FLOPs of one sample as `simkit.count` has them; pooled heads see one vector a sequence."""
    spec = net.spec
    if not isinstance(spec, TransformerSpec) or spec.kind == "vit":
        return count.flops_per_sample(net)
    per_token = 2.0 * count.matmul_params(net) + count.attention_flops_per_token(spec, seq_len)
    return seq_len * per_token + sum(2.0 * t.numel for t in net.tensors if t.pooled and len(t.shape) > 1)


def executed(found: Program, seq_len: int, *, backward: bool = False) -> float:
    side = found.backward if backward else found.forward
    return float(side.at(basis(1, seq_len))[0].flops @ side.counts)


@pytest.mark.parametrize("name", EVERY)
def test_forward_flops_are_those_counted(name: str) -> None:
    net = model(name)
    s = tokens_of(net)
    found = program(net, Numerics())
    expected = counted(net, s)
    assert float(basis(1, s) @ found.model_flops) == pytest.approx(expected, rel=1e-12)
    assert executed(found, s) == pytest.approx(expected, rel=1e-12)
    # Backward: both gradients of every product, but no input gradient of what reads the images.
    spec = net.spec
    skipped = 0.0
    if isinstance(spec, ConvSpec):
        first = spec.layers[0]
        skipped = 2.0 * first.c_in * first.c_out * first.kernel**2 * first.h_out * first.w_out
    elif isinstance(spec, TransformerSpec) and spec.kind == "vit":
        skipped = 2.0 * (s - 1) * spec.channels * spec.patch**2 * spec.hidden
    assert executed(found, s, backward=True) == pytest.approx(2 * expected - skipped, rel=1e-12)


@pytest.mark.parametrize("numerics", [Numerics(), MIXED], ids=["fp32", "mixed"])
@pytest.mark.parametrize("name", EVERY)
def test_every_gradient_is_ready_once_and_in_order(name: str, numerics: Numerics) -> None:
    net = pretraining_model(model(name))
    found = program(net, numerics)
    assert sorted(found.tensor_index.tolist()) == list(range(len(net.tensors)))
    assert np.all(np.diff(found.ready) >= 0)
    assert found.ready[0] >= 0
    assert found.ready[-1] < len(found.backward.order)


@pytest.mark.parametrize("name", KINDS)
def test_the_first_gradients_are_those_of_the_last_layers(name: str) -> None:
    """The head's weight is among the first tenth, the first layer's among the last, as DDP's bucket order assumes."""
    net = model(name)
    order = [net.tensors[i] for i in program(net, Numerics()).tensor_index]
    layers = [t.layer for t in order if t.layer >= 0]
    tenth = max(len(layers) // 10, 1)
    assert min(layers[:tenth]) > max(layers[-tenth:])


@pytest.mark.parametrize(("name", "limit_s"), [("bert-large", 0.015), ("llama-3.1-405b", 0.060)])
def test_building_is_fast(name: str, limit_s: float) -> None:
    net = model(name)
    times = []
    for _ in range(5):
        program.cache_clear()
        begin = time.perf_counter()
        program(net, MIXED)
        times.append(time.perf_counter() - begin)
    assert min(times) < limit_s


def test_bert_large_layer_by_hand() -> None:
    """Layer: 2·(4 h² + 8 h²) a token and 4·s·h of attention; head on 15 % of the positions; NSP and pooler once."""
    net = pretraining_model(model("bert-large"))
    h, s, vocab = 1024, 128, 30528
    layers = 24 * (24 * h * h * s + 4 * s * s * h)
    heads = 0.15 * s * (2 * h * h + 2 * h * vocab) + 2 * h * h + 2 * 2 * h
    found = program(net, Numerics(head_share=0.15))
    assert float(basis(1, s) @ found.model_flops) == pytest.approx(layers + heads, rel=1e-12)


def test_flash_halves_only_causal_self_attention() -> None:
    for name, halved in (("llama-2-7b", 0.5), ("bert-base", 1.0), ("vit-base", 1.0)):
        net = model(name)
        spec = net.spec
        assert isinstance(spec, TransformerSpec)
        s = tokens_of(net, 2048)
        core = spec.layers * 4.0 * spec.heads * spec.head_dim * s * s
        math, flash = (executed(program(net, Numerics(attention=kind)), s) for kind in ("math", "flash"))
        assert math - flash == pytest.approx((1 - halved) * core, rel=1e-9, abs=1.0)
    # T5: encoder blocks and cross-attention see everything, decoder blocks look back: one core in three is halved.
    net, s = model("t5-base"), 512
    math, flash = (executed(program(net, Numerics(attention=kind)), s) for kind in ("math", "flash"))
    assert math - flash == pytest.approx(12 * 0.5 * 4.0 * 768 * s * s, rel=1e-9)


def test_flash_backward_is_two_and_a_half_times() -> None:
    net = model("llama-2-7b")
    s = 1024
    found = program(net, Numerics(attention="flash"))
    core = 32 * 0.5 * 4.0 * 4096 * s * s
    products = executed(found, s) - core
    assert executed(found, s, backward=True) == pytest.approx(2 * products + 2.5 * core, rel=1e-12)


def test_a_sliding_window_bounds_attention() -> None:
    """gemma-3-1b: 26 layers, every sixth global, 512 keys in the others; counted in full as min(s, window)."""
    net = model("gemma-3-1b")
    spec = net.spec
    assert isinstance(spec, TransformerSpec)
    s, w = 4096, 512
    found = program(net, Numerics(attention="flash", windowed=True))
    assert float(basis(1, s) @ found.model_flops) == pytest.approx(counted(net, s), rel=1e-12)
    everything = program(net, Numerics(attention="flash"))
    # The kernel runs the unmasked pairs: s²/2 or, in 22 local layers, s·w - w²/2.
    saved = 22 * 2.0 * 4 * 2 * 256 * (s * s / 2 - (s * w - w * w / 2))
    assert executed(everything, s) - executed(found, s) == pytest.approx(saved, rel=1e-9)


def test_experts_run_in_their_copies_and_on_their_share_of_tokens() -> None:
    net = model("mixtral-8x7b")
    found = program(net, Numerics())
    rows = [i for i, m in enumerate(found.forward.modules) if m == "experts"]
    columns, _ = found.forward.at(basis(4, 1024))
    products = [i for i in rows if columns.batch[i] > 0]
    assert {columns.batch[i] for i in products} == {8.0}
    assert {columns.m[i] for i in products} == {4 * 1024 * 2 / 8}


@pytest.mark.parametrize("name", ["resnet-50", "vgg-16", "vit-base"])
def test_larger_images_cost_more_and_keep_the_weights(name: str) -> None:
    small = model(name)
    large = at_image_size(small, 448)
    assert large is at_image_size(small, 448)
    assert at_image_size(small, 224) is small
    ratio = counted(large, tokens_of(large)) / counted(small, tokens_of(small))
    # Twice the side is four times the positions; ViT adds attention, the classifier of VGG does not grow.
    assert 3.9 < ratio < 4.5
    assert {t.name: t.shape for t in large.tensors if t.module != "embedding"} == {
        t.name: t.shape for t in small.tensors if t.module != "embedding"
    }
    grown = large.params - small.params
    assert grown == ((28**2 - 14**2) * 768 if name == "vit-base" else 0)


def test_an_image_that_patches_do_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="256"):
        at_image_size(model("vit-base"), 250)


def test_the_sum_of_gradient_positions_does_not_depend_on_numerics() -> None:
    """Casting adds operators; it never changes which gradient comes before which."""
    for name in KINDS:
        net = model(name)
        plain, mixed = program(net, Numerics()), program(net, MIXED)
        assert [net.tensors[i].layer for i in plain.tensor_index] == [net.tensors[i].layer for i in mixed.tensor_index]


@pytest.mark.parametrize("name", KINDS)
def test_a_compiler_never_adds_bytes_or_kernels(name: str) -> None:
    net = model(name)
    eager, compiled = program(net, Numerics()), program(net, Numerics(compiled=True))
    for side in ("forward", "backward"):
        e, c = getattr(eager, side), getattr(compiled, side)
        s = tokens_of(net)
        for column in ("nbytes", "kernels"):
            old, new = (float(getattr(x.at(basis(4, s))[0], column) @ x.counts) for x in (e, c))
            assert new <= old
