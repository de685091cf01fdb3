"""Bytes on a device, recounted from the literature, and the sentence that says how a job would fit."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from simkit import predict
from simkit.memory import CONTEXT_DEFAULT_BYTES, FRAGMENTATION
from simkit.program import basis
from simkit.report import Report
from simkit.spec.load import device
from simkit.spec.model import TransformerSpec
from simkit.spec.models import model, pretraining_model
from simkit.units import GIB
from simkit.workloads import Numerics, program

BIG = "1x1xb300-sxm"
SIXTEEN = {"element_bytes": 2.0, "cast_bytes": 0.0}


def states(report: Report) -> float:
    items = report.memory.items_bytes
    return items["weights"] + items["gradients"] + items["optimizer"]


def layer_bytes(name: str, *, b: int, s: int, **numerics: object) -> float:
    """Saved bytes of one block."""
    found = program(model(name), Numerics(**SIXTEEN, **numerics))
    _, saved = found.forward.at(basis(b, s))
    return float(found.blocks.counts[0] @ saved)


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "s"), [(1, 2048), (4, 512), (3, 1000)])
@pytest.mark.parametrize("name", ["gpt3-175b", "gpt3-13b", "gpt2"])
def test_korthikanti_layer_is_exact(name: str, b: int, s: int) -> None:
    """arXiv 2205.05198, equation 1: s·b·h (34 + 5 a·s/h) bytes, 16 bits, dropout, math kernel."""
    spec = model(name).spec
    assert isinstance(spec, TransformerSpec)
    h, a = spec.hidden, spec.heads
    assert layer_bytes(name, b=b, s=s, attention="math") == 34 * s * b * h + 5 * a * s * s * b


def test_flash_drops_the_quadratic_term() -> None:
    """BR-32: 34·s·b·h at s 4096, b 1, h 8192 and nothing in s²; beyond it one fp32 log-sum-exp a head and row."""
    s, b = 4096, 1
    spec = model("gpt3-175b").spec
    assert isinstance(spec, TransformerSpec)
    flash = layer_bytes("gpt3-175b", b=b, s=s, attention="flash")
    assert flash == 34 * s * b * spec.hidden + 4 * s * b * spec.heads
    assert layer_bytes("gpt3-175b", b=b, s=2 * s, attention="flash") == 2 * flash


def test_selective_recomputation() -> None:
    """BR-32: it leaves 34·s·b·h a layer (and the scores of the layer being replayed); with flash it changes nothing."""
    at = basis(2, 1024)
    net = model("gpt3-13b")
    spec = net.spec
    assert isinstance(spec, TransformerSpec)
    h, a, s, b = spec.hidden, spec.heads, 1024, 2
    math = program(net, Numerics(**SIXTEEN, attention="math"))
    dropped = math.kept_bytes(at) - math.kept_bytes(at, "selective")
    assert dropped == (spec.layers - 1) * 5 * a * s * s * b
    assert math.kept_bytes(at) - spec.layers * (34 * s * b * h + 5 * a * s * s * b) < 8 * s * b * h
    flash = program(net, Numerics(**SIXTEEN, attention="flash"))
    assert flash.kept_bytes(at, "selective") == flash.kept_bytes(at)
    assert flash.replayed("selective").sum() == 0


def test_full_recomputation_keeps_two_bytes_an_element_and_layer() -> None:
    """arXiv 2205.05198, section 5: 2·s·b·h·L, with the one layer that is being replayed and what stands outside."""
    net, s, b = model("gpt3-13b"), 2048, 1
    spec = net.spec
    assert isinstance(spec, TransformerSpec)
    found = program(net, Numerics(**SIXTEEN, attention="flash"))
    kept = found.kept_bytes(basis(b, s), "full")
    inputs, layer = 2 * s * b * spec.hidden * spec.layers, layer_bytes("gpt3-13b", b=b, s=s, attention="flash")
    assert inputs + layer <= kept < inputs + layer + 8 * s * b * spec.hidden


def test_gated_mlp_by_hand() -> None:
    """Llama, 16 bits, flash, per token: RMSNorm 2·(2 + 4)·h; q, k, v 3·2·h, their input 2·h, the context 2·h and 4·a;
    the MLP's input 2·h once for gate and up; SiLU input 2·f, two factors 4·f, product 2·f."""
    h, f, a, s = 4096, 11008, 32, 512
    expected = s * (12 * h + 6 * h + 2 * h + 2 * h + 4 * a + 2 * h + 8 * f)
    assert layer_bytes("llama-2-7b", b=1, s=s, attention="flash") == expected


def test_resnet_50_activations_against_the_literature() -> None:
    """Outputs of all convolutions: 11.1 M elements (Radosavovic et al., arXiv 2003.13678, ResNet-50). Batch norm keeps
    each of them in fp32 and, with the in-place ReLU behind it, so does the next convolution: about twice 4 bytes."""
    found = program(model("resnet-50"), Numerics())
    kept = found.kept_bytes(basis(64, 0))
    assert kept == pytest.approx(2 * 4 * 11.1e6 * 64, rel=0.05)
    assert 5.0 < kept / GIB < 6.0


def test_vgg_keeps_what_its_pools_need() -> None:
    """VGG-11 by hand, fp32, one image: conv inputs, pool inputs with 8-byte indices, inputs of three linear layers."""
    sides = [(3, 224), (64, 112), (128, 56), (256, 56), (256, 28), (512, 28), (512, 14), (512, 14)]
    pools = [(64, 224), (128, 112), (256, 56), (512, 28), (512, 14)]
    conv = sum(4 * c * side * side for c, side in sides)
    pool = sum(4 * c * side * side + 8 * c * (side // 2) ** 2 for c, side in pools)
    linear = 4 * (25088 + 4096 + 4096)
    assert program(model("vgg-11"), Numerics()).kept_bytes(basis(1, 0)) == conv + pool + linear


# -- states and logits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.1-70b", "llama-2-7b"])
def test_states_are_sixteen_bytes_a_parameter(name: str) -> None:
    """BR-22, BR-25 (stage 0): 16 N, never four times the 16-bit weights."""
    report = predict(model=name, cluster=BIG, precision="bf16", optimizer="adamw", micro_batch=1, seq_len=128)
    assert states(report) == 16 * model(name).params


def test_states_in_round_numbers() -> None:
    """BR-22: 70B 1128.9 GB = 1051.3 GiB, 7B 107.8 GB; BR-25: 7.5 B parameters 120 GB."""
    for name, gigabytes in (("llama-3.1-70b", 1128.9), ("llama-2-7b", 107.8)):
        report = predict(model=name, cluster=BIG, precision="bf16", optimizer="adamw", micro_batch=1, seq_len=128)
        assert round(states(report) / 1e9, 1) == gigabytes
    assert 16 * 7.5e9 == 120e9


def test_states_with_sixteen_bit_copies_are_eighteen_bytes() -> None:
    """BR-23: DeepSpeed counts 18 N before sharding: the 16-bit copies of what is multiplied come on top of 16 N."""
    net = model("llama-2-7b")
    report = predict(model="llama-2-7b", cluster=BIG, precision="bf16", optimizer="adamw", micro_batch=1, seq_len=128)
    looked_up = 32000 * 4096
    vectors = sum(t.numel for t in net.tensors if len(t.shape) == 1)
    assert states(report) + report.memory.items_bytes["casts"] == 18 * net.params - 2 * (looked_up + vectors)


@pytest.mark.parametrize(("optimizer", "each"), [("sgd", 8), ("sgd-momentum", 12), ("adam", 16), ("lamb", 16)])
def test_states_by_optimizer(optimizer: str, each: int) -> None:
    report = predict(model="gpt2", cluster=BIG, precision="fp32", optimizer=optimizer, micro_batch=1)
    assert states(report) == each * model("gpt2").params
    assert report.memory.items_bytes["casts"] == 0


def test_sixteen_bit_master_weights_halve_every_state() -> None:
    common = {"model": "gpt2", "cluster": BIG, "precision": "bf16", "optimizer": "adamw", "micro_batch": 1}
    report = predict(master_dtype="bf16", **common)
    assert states(report) == 8 * model("gpt2").params
    assert report.memory.items_bytes["casts"] == 0


def test_logits_are_counted_once_each() -> None:
    """BR-31: one fp32 tensor of 65,536 x 128,000 logits is 33.6 GB; eager cross-entropy holds four of 4 bytes."""
    one = 65536 * 128000 * 4
    assert round(one / 1e9, 1) == 33.6
    net = model("llama-3-8b")
    found = program(net, Numerics())
    vocab = 128256
    assert float(basis(1, 65536) @ found.logits) == 4 * 65536 * vocab * 4
    bf16 = program(net, Numerics(element_bytes=2.0))
    assert float(basis(1, 65536) @ bf16.logits) == 14 * 65536 * vocab


def test_logits_of_gemma_2_as_measured() -> None:
    """arXiv 2411.09009: the head of Gemma-2 2B takes 28 GB for 8,192 tokens, the gradient of its weight included."""
    found = program(model("gemma-2-2b"), Numerics(element_bytes=2.0))
    head = float(basis(1, 8192) @ found.logits) + 2 * 256000 * 2304
    assert head == pytest.approx(28 * GIB, rel=0.10)


def test_a_masked_head_holds_its_share_of_the_positions() -> None:
    found = program(pretraining_model(model("bert-base")), Numerics(head_share=0.15))
    assert float(basis(8, 128) @ found.logits) == pytest.approx(0.15 * 8 * 128 * 30528 * 16)


def test_states_matter_less_as_sequences_grow() -> None:
    """BR-47: what an adapter saves, gradients and optimizer, is fixed; activations grow, so the ratio tends to 1."""
    def ratio(seq_len: int) -> float:
        report = predict(model="tinyllama-1.1b", cluster=BIG, precision="bf16", attention="flash", seq_len=seq_len,
                         optimizer="adamw", micro_batch=1)
        saved = report.memory.items_bytes["gradients"] + report.memory.items_bytes["optimizer"]
        return 1 - saved / report.memory.allocated_bytes

    ratios = [ratio(s) for s in (256, 2048, 16384, 131072)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.6
    assert ratios[-1] > 0.95


# -- the device -------------------------------------------------------------------------------------------------------


def test_a_ten_gigabyte_card_offers_less_than_its_label() -> None:
    """BR-36: an RTX 3080 has 10 GiB less the context: below 10.0e9·1.07 B."""
    report = predict(model="resnet-50", cluster="1x1x3080", micro_batch=8)
    assert report.memory.capacity_bytes < 10.0e9 * 1.07
    assert report.memory.capacity_bytes == device("3080").memory_bytes - CONTEXT_DEFAULT_BYTES
    kept_free = predict(model="resnet-50", cluster="1x1x3080", micro_batch=8, memory_reserve_gib=2.0)
    assert kept_free.memory.capacity_bytes == report.memory.capacity_bytes - 2 * GIB


def test_what_the_allocator_and_the_driver_see_is_ordered() -> None:
    for name, cluster in (("resnet-50", "1x1x3080"), ("bert-large", "2x8xa100"), ("llama-2-7b", "1x8xh100")):
        found = predict(model=name, cluster=cluster, micro_batch=1).memory
        assert found.allocated_bytes < found.reserved_bytes < found.device_bytes
        assert found.reserved_bytes == pytest.approx(found.allocated_bytes * (1 + FRAGMENTATION))
        assert sum(found.items_bytes.values()) == pytest.approx(found.device_bytes)
        assert all(v >= 0 for v in found.items_bytes.values())


def test_the_smallest_card_of_a_mixed_cluster_decides() -> None:
    both = predict(model="resnet-50", cluster="1x1x3080+1x1x4090", micro_batch=8)
    small = predict(model="resnet-50", cluster="2x1x3080", micro_batch=8)
    assert both.memory.capacity_bytes == small.memory.capacity_bytes


def test_publicly_known_verdicts() -> None:
    """Full fine-tuning of 7B under Adam does not fit 80 GB; BERT-Base at 32 x 128 does fit 11 GB in fp32."""
    assert not predict(model="llama-2-7b", cluster="1x1xa100", optimizer="adamw", micro_batch=1, seq_len=512).fits
    assert predict(model="bert-base", cluster="1x1x2080ti", precision="fp32", micro_batch=32, seq_len=128).fits


# -- the way out ------------------------------------------------------------------------------------------------------

KNOB = re.compile(r"(micro_batch|grad_accum|recompute|zero|tp|dp)=(\w+)")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["resnet-50", "vgg-16", "bert-base", "gpt2-medium", "vit-base", "tinyllama-1.1b"]),
    card=st.sampled_from(["2080ti", "3080", "4090", "a100"]),
    micro_batch=st.integers(1, 2048),
    grad_accum=st.integers(1, 4),
    attention=st.sampled_from(["math", "flash"]),
    ranks=st.sampled_from([1, 4]),
)
def test_the_way_out_really_fits(
    name: str, card: str, micro_batch: int, grad_accum: int, attention: str, ranks: int
) -> None:
    fields = {"model": name, "cluster": f"1x{ranks}x{card}", "attention": attention, "optimizer": "sgd"}
    given_ = {**fields, "micro_batch": micro_batch, "grad_accum": grad_accum}
    report = predict(**given_)
    assume(not report.fits)
    said = dict(KNOB.findall(report.memory.way_out)) if " fits" in report.memory.way_out else {}
    if not said:
        least = predict(**fields, micro_batch=1, grad_accum=1, recompute="full")
        assert not least.fits, report.memory.way_out
        return
    taken = {"micro_batch": micro_batch, "grad_accum": grad_accum, "dp": ranks}
    taken |= {k: int(v) for k, v in said.items() if k != "recompute"}
    recompute = said.get("recompute", "none")
    assert taken["micro_batch"] * taken["grad_accum"] * taken["dp"] == micro_batch * grad_accum * ranks
    assert predict(**fields, **taken, recompute=recompute).fits


def test_what_recomputation_costs_is_what_it_then_takes() -> None:
    common = {"model": "gpt3-2.7b", "cluster": "1x8xh100", "attention": "math", "optimizer": "adamw", "seq_len": 2048}
    first = predict(**common, micro_batch=2, grad_accum=1)
    assert not first.fits
    found = re.search(r"recompute=(\w+) fits; recomputation adds (\d+)%", first.memory.way_out)
    assert found, first.memory.way_out
    knobs = {k: int(v) for k, v in KNOB.findall(first.memory.way_out) if k != "recompute"}
    plain = predict(**common, **({"micro_batch": 2, "grad_accum": 1} | knobs))
    again = predict(**common, **({"micro_batch": 2, "grad_accum": 1} | knobs), recompute=found[1])
    assert again.fits

    def compute_s(report: Report) -> float:
        return report.breakdown["forward_s"] + report.breakdown["backward_s"]

    assert compute_s(again) / compute_s(plain) - 1 == pytest.approx(int(found[2]) / 100, abs=0.02)


def test_states_that_are_too_large_are_named() -> None:
    way_out = predict(model="llama-2-7b", cluster="1x1x4090", optimizer="adamw", micro_batch=1).memory.way_out
    assert "weights, gradients and optimizer alone are" in way_out
    assert "fits" not in way_out


# -- recomputation in time --------------------------------------------------------------------------------------------


def test_recomputation_costs_time_where_it_saves_memory() -> None:
    common = {"model": "gpt2-xl", "cluster": "1x1xh100", "micro_batch": 8, "seq_len": 1024}
    for attention in ("math", "flash"):
        runs = {r: predict(**common, attention=attention, recompute=r) for r in ("none", "selective", "full")}
        times = [runs[r].iteration_time_s for r in ("none", "selective", "full")]
        sizes = [runs[r].memory.items_bytes["activations"] for r in ("none", "selective", "full")]
        assert times == sorted(times)
        assert sizes == sorted(sizes, reverse=True)
        if attention == "flash":
            assert times[0] == times[1]
            assert sizes[0] == sizes[1]
        forward = runs["none"].breakdown["forward_s"]
        added = runs["full"].breakdown["backward_s"] - runs["none"].breakdown["backward_s"]
        # Blocks are replayed, embedding and head are not.
        assert 0.8 * forward < added < forward
