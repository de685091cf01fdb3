"""Bytes of a rank under every degree: identities of the literature, the cases users trip over, and hand counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit import schedules
from simkit.errors import InputError
from simkit.memory_facts import FACTS, MemoryFacts, memory_facts
from simkit.memory_sharded import StageMemory, in_flight, memory_of_stages
from simkit.memory_states import deepspeed_zero3_bytes, padded_vocabulary, stage_params, state_bytes
from simkit.memory_wayout import way_out
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.models import model
from simkit.spec.plan import Plan
from simkit.units import GIB
from simkit.workloads import Numerics, program

BARE = MemoryFacts(model_weights=True)
BF16 = {"precision": "bf16", "optimizer": "adamw", "attention": "flash", "fusion": "all"}


def plan_of(**fields: object) -> Plan:
    return Plan(**(BF16 | {"micro_batch": 1, "seq_len": 2048} | fields))


def weigh(name: str, plan: Plan, *, facts: MemoryFacts = BARE, held: list[int] | None = None) -> StageMemory:
    found = program(model(name), Numerics(element_bytes=2.0, attention=plan.attention, compiled=plan.compile))
    return memory_of_stages(found, model(name), plan, facts=facts, held=held, workspace_bytes=0.0)


def spec_of(name: str) -> TransformerSpec:
    spec = model(name).spec
    assert isinstance(spec, TransformerSpec)
    return spec


def total(found: StageMemory, *items: str) -> float:
    return float(sum(found.items_bytes[i].max() for i in items))


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.875)])
def test_the_table_of_the_zero_paper(zero: int, gigabytes: float) -> None:
    """BR-25, arXiv 1910.02054 figure 1: 7.5 B parameters over 64 GPUs."""
    net = model("llama-2-7b")
    plan = plan_of(dp=64, zero=zero, shard_group=64)
    found = weigh("llama-2-7b", plan)
    states = total(found, "weights", "gradients", "optimizer")
    assert states / net.params * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_deepspeeds_estimator_of_stage_three() -> None:
    """BR-23: 6,805 M parameters, largest layer 131 M, 4 GPUs; printed as GB, in GiB."""
    run = {o: deepspeed_zero3_bytes(6805e6, 131e6, 4, offload=o) / GIB for o in ("none", "optimizer", "params")}
    assert [round(v, 2) for v in run.values()] == [29.01, 3.66, 0.49]


@pytest.mark.parametrize(("precision", "fixed", "sharded"), [("fp16", 4, 16), ("bf16", 6, 12), ("fp32", 8, 8)])
def test_the_table_of_megatrons_distributed_optimizer(precision: str, fixed: int, sharded: int) -> None:
    """Megatron-core's documentation: 20, 18 and 16 bytes a parameter; 4 + 16/d, 6 + 12/d and 8 + 8/d distributed."""
    each = state_bytes(plan_of(precision=precision), memory_facts("megatron"))
    assert each["weights"] + each["gradients"] == fixed
    assert each["optimizer"] == sharded


def test_pure_bf16_keeps_no_copies() -> None:
    each = state_bytes(plan_of(master_dtype="bf16"), memory_facts("megatron"))
    assert each == {"weights": 2.0, "gradients": 2.0, "optimizer": 4.0}


def test_norms_are_not_divided_by_tensor_parallelism() -> None:
    """BR-09: two norms a layer and the final one, whole on every rank; all else of Llama over tp."""
    net, spec = model("llama-2-7b"), spec_of("llama-2-7b")
    norms = (2 * spec.layers + 1) * spec.hidden
    for tp in (1, 2, 8):
        elements, _ = stage_params(net, plan_of(tp=tp), facts=BARE)
        assert float(elements[0]) == (net.params - norms) / tp + norms


def test_biases_of_row_parallel_products_and_positions_are_whole() -> None:
    """GPT, by hand: two norms of 2 h, two biases of h a layer, the final norm, the table of positions."""
    net, spec = model("gpt3-13b"), spec_of("gpt3-13b")
    h = spec.hidden
    whole = spec.layers * (2 * 2 * h + 2 * h) + 2 * h + spec.max_positions * h
    elements, _ = stage_params(net, plan_of(tp=8), facts=BARE)
    assert float(elements[0]) == (net.params - whole) / 8 + whole


def test_expert_parallelism_divides_routed_experts_alone() -> None:
    """BR-28: EP1 -> EP8 cuts the experts' bytes eightfold and nothing else; their optimizer was sharded already."""
    name = "qwen3-30b-a3b"
    spec = spec_of(name)
    routed = spec.layers * spec.experts * 3 * spec.hidden * spec.moe_ffn
    one, eight = (weigh(name, plan_of(dp=8, ep=x, zero=1, shard_group=8)) for x in (1, 8))
    for item, each in (("weights", 2), ("gradients", 2)):
        assert total(one, item) - total(eight, item) == pytest.approx(routed * each * 7 / 8, rel=1e-12)
    for item in ("optimizer", "activations", "logits", "buffers"):
        assert total(one, item) == pytest.approx(total(eight, item), rel=1e-12)
    _, experts = stage_params(model(name), plan_of(tp=2, dp=4, ep=4), facts=BARE)
    assert float(experts[0]) == routed / 8


def test_an_uneven_pipeline_is_judged_by_its_heaviest_stage() -> None:
    """BR-29: eight layers as 1, 2, 2, 3: embedding first, final norm and head last; the mean hides the last stage."""
    net = cut("llama-2-7b", 8)
    spec = net.spec
    assert isinstance(spec, TransformerSpec)
    h, v, layer = spec.hidden, spec.vocab, 4 * spec.hidden**2 + 3 * spec.hidden * spec.ffn + 2 * spec.hidden
    elements, _ = stage_params(net, plan_of(pp=4), facts=BARE, held=[1, 2, 2, 3])
    assert elements.tolist() == [layer + v * h, 2 * layer, 2 * layer, 3 * layer + h + v * h]
    assert elements.sum() == net.params
    assert elements.max() > 1.3 * elements.mean()
    found = program(net, Numerics(element_bytes=2.0, attention="flash"))
    with pytest.raises(ValueError, match="does not place 8 blocks"):
        memory_of_stages(found, net, plan_of(pp=4), held=[1, 2, 2, 2])


def cut(name: str, layers: int) -> Model:
    from simkit.spec.build import build

    return build(replace(spec_of(name), layers=layers), name=f"{name}-{layers}")


def test_both_ends_of_a_pipeline_hold_a_tied_table() -> None:
    spec = spec_of("gpt2-xl")
    one, _ = stage_params(model("gpt2-xl"), plan_of(), facts=BARE)
    four, _ = stage_params(model("gpt2-xl"), plan_of(pp=4), facts=BARE)
    assert four.sum() - one.sum() == spec.vocab * spec.hidden


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple", "rows"),
    [
        (50257, 1, 128, 50304),
        (50257, 8, 128, 51200),
        (30522, 1, 8, 30528),
        (151669, 4, 128, 152064),
        (151552, 6, 128, 152064),
    ],
)
def test_vocabularies_are_padded(vocab: int, tp: int, multiple: int, rows: int) -> None:
    """BR-15."""
    assert padded_vocabulary(vocab, tp, multiple) == rows


def test_padded_rows_are_weighed() -> None:
    """BR-15: 51,200 rows for 50,257 tokens at TP8, in the tied table and in the logits."""
    plain, padded = (weigh("gpt2-xl", plan_of(tp=8), facts=replace(BARE, vocab_multiple=m)) for m in (0, 128))
    assert total(padded, "weights") - total(plain, "weights") == pytest.approx((51200 - 50257) / 8 * 1600 * 2)
    assert total(padded, "logits") / total(plain, "logits") == pytest.approx(51200 / 50257)


def test_fsdp_gathers_two_blocks_and_the_ends() -> None:
    """By hand, Llama-2 7B over 8 ranks, reduced in fp32: 2 · 2 bytes a block, 2 of the ends, 4 of a gradient."""
    spec = spec_of("llama-2-7b")
    h = spec.hidden
    layer = 4 * h * h + 3 * h * spec.ffn + 2 * h
    ends = 2 * spec.vocab * h + h
    plan = plan_of(dp=8, zero=3, shard_group=8, reduce_dtype="fp32")
    assert total(weigh("llama-2-7b", plan), "gathered") == (2 * 2 + 4) * layer + 2 * ends
    assert total(weigh("llama-2-7b", plan_of(dp=8, zero=2, shard_group=8)), "gathered") == 0


def test_hybrid_sharding_divides_by_its_group() -> None:
    full, hybrid = (weigh("llama-2-7b", plan_of(dp=64, zero=3, shard_group=g)) for g in (64, 8))
    for item in ("weights", "gradients", "optimizer"):
        assert total(hybrid, item) == pytest.approx(8 * total(full, item))


def test_offload_leaves_the_device() -> None:
    common = {"dp": 4, "zero": 3, "shard_group": 4}
    runs = {o: weigh("llama-2-7b", plan_of(**common, offload=o)) for o in ("none", "optimizer", "params")}
    n = model("llama-2-7b").params
    assert total(runs["none"], "optimizer") == pytest.approx(12 * n / 4)
    assert total(runs["optimizer"], "optimizer", "gradients") == 0
    assert total(runs["optimizer"], "weights") == pytest.approx(2 * n / 4)
    assert total(runs["params"], "optimizer", "gradients", "weights") == 0
    assert total(runs["params"], "gathered") == total(runs["none"], "gathered") > 0


# -- activations -------------------------------------------------------------------------------------------------------


def layer_bytes(name: str, plan: Plan, **changed: object) -> float:
    """Of one block of a middle stage with one micro-batch in flight."""
    spec = spec_of(name)
    found = weigh(name, replace(plan, pp=4, grad_accum=1, **changed))
    return float(found.items_bytes["activations"][1]) / (spec.layers / 4)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikanti_with_tensor_and_sequence_parallelism(t: int) -> None:
    """arXiv 2205.05198, equations 2 and 4: s·b·h (10 + 24/t + 5 a·s/(h·t)); all over t with sequence parallelism."""
    name, b, s = "gpt3-175b", 2, 2048
    spec = spec_of(name)
    h, a = spec.hidden, spec.heads
    plan = plan_of(tp=t, micro_batch=b, seq_len=s, attention="math")
    assert layer_bytes(name, plan) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)), rel=1e-12)
    assert layer_bytes(name, plan, sp=t) == pytest.approx(s * b * h * (34 + 5 * a * s / h) / t, rel=1e-12)
    # Flash: no term in s², one fp32 log-sum-exp a head and row (BR-32).
    flash = s * b * h * 34 / t + 4 * a * s * b / t
    assert layer_bytes(name, plan, sp=t, attention="flash") == pytest.approx(flash, rel=1e-12)


@pytest.mark.parametrize(("a", "h", "saved"), [(96, 12288, 0.70), (128, 20480, 0.65)])
def test_what_selective_recomputation_saves(a: int, h: int, saved: float) -> None:
    """arXiv 2205.05198, section 5: 70 % of the activations of GPT-3 and 65 % of those of the 530B model, s 2048.

    The one block being replayed is counted apart: five stages of many layers."""
    net = cut_to(a, h)
    plan = plan_of(tp=8, sp=8, pp=4, attention="math", grad_accum=1)
    found = program(net, Numerics(element_bytes=2.0, attention="math"))
    runs = {
        r: memory_of_stages(found, net, replace(plan, recompute=r), facts=BARE).items_bytes["activations"][1]
        for r in ("none", "selective")
    }
    block = float(runs["none"]) / 24 * 5 * a * 2048 / (34 * h + 5 * a * 2048)
    assert 1 - (float(runs["selective"]) - block) / float(runs["none"]) == pytest.approx(saved, abs=0.006)


def cut_to(heads: int, hidden: int) -> Model:
    from simkit.spec.build import build

    spec = replace(
        spec_of("gpt3-175b"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        hidden=hidden,
        ffn=4 * hidden,
        layers=96,
    )
    return build(spec, name="cut")


def test_full_recomputation_keeps_inputs_and_one_block() -> None:
    """2·s·b·h a layer and micro-batch, over sp; one replayed block (arXiv 2205.05198, section 5)."""
    name, b, s = "gpt3-13b", 1, 2048
    spec = spec_of(name)
    h = spec.hidden
    plan = plan_of(pp=4, grad_accum=8, recompute="full", micro_batch=b, seq_len=s, tp=2, sp=2)
    found = weigh(name, plan).items_bytes["activations"]
    block = (34 * s * b * h + 4 * spec.heads * s * b) / 2
    assert found[1] == pytest.approx(3 * spec.layers / 4 * 2 * s * b * h / 2 + block)
    assert found[2] == pytest.approx(2 * spec.layers / 4 * 2 * s * b * h / 2 + block)


def test_selective_recomputation_of_every_second_product() -> None:
    """By hand, a token of Llama-3 8B and a block in bf16: its input 2 h, q 2 h, v 2 h/4, gate 2 f, down 2 h (products
    1, 3, 5 and 7 of q, k, v, o, gate, up, down), attention 2 h and 4 bytes a head; one whole block being replayed."""
    name, tokens, spec = "llama-3-8b", 8192, spec_of("llama-3-8b")
    h, f = spec.hidden, spec.ffn
    facts = replace(BARE, selective="products")
    plan = plan_of(pp=4, grad_accum=1, micro_batch=2, seq_len=4096)
    none, chosen = (
        float(weigh(name, replace(plan, recompute=r), facts=facts).items_bytes["activations"][1])
        for r in ("none", "selective")
    )
    block = none / 8
    each = 2 * h + 2 * h + 2 * h / 4 + 2 * f + 2 * h + 2 * h + 4 * spec.heads
    assert chosen == pytest.approx(8 * tokens * each + block)
    both = weigh(name, replace(plan, recompute="selective", attention="math"), facts=facts)
    assert both.allocated_bytes == pytest.approx(
        weigh(name, replace(plan, recompute="selective", attention="math")).allocated_bytes
    )


def test_context_parallelism_divides_the_tokens() -> None:
    for name in ("llama-2-7b", "gpt3-13b"):
        two = weigh(name, plan_of(cp=2, seq_len=4096))
        half = weigh(name, plan_of(seq_len=2048))
        for item in ("activations", "logits", "transient"):
            assert total(two, item) == pytest.approx(total(half, item))


def test_logits_stand_on_the_last_stage_over_tp() -> None:
    """BR-31: 65,536 tokens of 128,256 classes in fp32 are 33.6 GB; in place 2 + 4 bytes a logit, over tp."""
    plan = plan_of(seq_len=65536, pp=4, tp=4)
    found = weigh("llama-3-8b", plan, facts=replace(BARE, loss="in-place")).items_bytes["logits"]
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert found[3] == 65536 * 128256 / 4 * (2 + 4)
    eager = weigh("llama-3-8b", plan).items_bytes["logits"]
    assert eager[3] == 65536 * 128256 / 4 * (2 + 12)


@pytest.mark.parametrize(("loss", "each"), [("eager", 14), ("in-place", 6), ("fused", 4), ("fused-in-place", 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_loss_holds(loss: str, each: int, compiled: bool) -> None:
    """Bytes a logit in bf16: cast, log-softmax, two gradients in fp32; one fp32 copy; a gradient beside or over them.
    A compiler keeps logits, gradient and one fp32 copy of an eager loss, and leaves the others as they are."""
    each = 8 if compiled and loss == "eager" else each
    found = weigh("llama-2-7b", plan_of(compile=compiled), facts=replace(BARE, loss=loss))
    assert total(found, "logits") == pytest.approx(2048 * 32000 * each)


def test_a_stack_may_keep_its_states_in_sixteen_bits() -> None:
    """llmq's README, allocator state of Qwen2.5-0.5B: 942 MiB each for gradients and both moments, 494 M parameters."""
    n = model("qwen2.5-0.5b").params
    each = state_bytes(plan_of(), memory_facts("llmq"))
    assert each["gradients"] * n / 2**20 == pytest.approx(942, rel=0.001)
    assert each["optimizer"] * n / 2**20 == pytest.approx(2 * 942, rel=0.001)
    assert sum(state_bytes(plan_of(precision="fp32"), memory_facts("llmq")).values()) == 16


def test_what_stacks_keep_besides() -> None:
    """Per token and block: Megatron copies the queries of grouped attention (2 h/t) and not SiLU's result (2 f/t less);
    PaddlePaddle copies the input of four more products (2 h each, whole) under tensor parallelism."""
    name, tokens = "llama-3-8b", 2048
    spec = spec_of(name)
    plan = plan_of(tp=2)
    base = layer_bytes(name, plan)
    queries = replace(BARE, query_copy=True)
    gate = replace(BARE, fused_gate=True)
    inputs = replace(BARE, separate_inputs=True)

    def with_facts(facts: MemoryFacts, **changed: object) -> float:
        found = weigh(name, replace(plan, pp=4, grad_accum=1, **changed), facts=facts)
        return float(found.items_bytes["activations"][1]) / (spec.layers / 4)

    assert with_facts(queries) - base == pytest.approx(tokens * 2 * spec.hidden / 2)
    assert base - with_facts(gate) == pytest.approx(tokens * 2 * spec.ffn / 2)
    assert with_facts(inputs) - base == pytest.approx(tokens * 3 * 2 * spec.hidden)
    assert with_facts(inputs, tp=1) == layer_bytes(name, plan_of())


def test_degree_one_is_plain_data_parallelism() -> None:
    """The stages of one rank are what `memory` says of an unsharded job, but for the gradients of the block at work."""
    from simkit import predict

    for name in ("llama-2-7b", "bert-large", "gpt2-xl"):
        common = {"model": name, "cluster": "1x1xb300-sxm", "precision": "bf16", "optimizer": "adamw", "micro_batch": 2}
        for recompute in ("none", "full"):
            report = predict(**common, seq_len=512, attention="flash", recompute=recompute)
            plain = report.memory.items_bytes
            net = model(name) if name != "bert-large" else None
            if net is None:
                from simkit.spec.models import pretraining_model

                net = pretraining_model(model(name))
            plan = plan_of(micro_batch=2, seq_len=512, recompute=recompute, stack="pytorch")
            share = 0.15 if name == "bert-large" else 1.0
            found = program(net, Numerics(element_bytes=2.0, cast_bytes=6.0, attention="flash", head_share=share))
            staged = memory_of_stages(found, net, plan).stage(0)
            for item in ("weights", "casts", "gradients", "optimizer", "activations", "logits", "workspace", "buffers"):
                assert staged[item] == pytest.approx(plain[item], rel=1e-12), (name, recompute, item)


# -- schedules ---------------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zb"]),
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 24),
    virtual=st.integers(1, 4),
)
def test_in_flight_is_what_the_order_of_events_holds(
    schedule: str, stages: int, micro_batches: int, virtual: int
) -> None:
    """Forward passes begun less backward passes done, counted along each stage's own order of issue."""
    virtual = virtual if schedule == "interleaved" else 1
    told = in_flight(schedule, micro_batches=micro_batches, stages=stages, virtual=virtual)
    for stage in range(stages):
        try:
            order = schedules.get(schedule).order(stage, stages=stages, micro_batches=micro_batches, virtual=virtual)
        except InputError:
            return
        releases = "W" if schedule == "zb" else "B"
        held = most = 0
        for kind, *_ in order:
            held += (kind == "F") - (kind == releases)
            most = max(most, held)
        assert held == 0
        if schedule == "zb":
            assert most <= told[stage] <= max(stages, 1)
        else:
            assert most / virtual == told[stage]


def test_the_bubble_costs_memory_on_the_first_stage() -> None:
    found = weigh("gpt3-13b", plan_of(pp=4, grad_accum=8))
    assert found.in_flight.tolist() == [4, 3, 2, 1]
    kept = found.items_bytes["activations"]
    assert kept[1] / 3 == pytest.approx(kept[2] / 2)
    gpipe = weigh("gpt3-13b", plan_of(pp=4, grad_accum=8, schedule="gpipe")).items_bytes["activations"]
    assert gpipe[1] == pytest.approx(kept[1] / 3 * 8)


# -- arrays ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["llama-3-8b", "gpt3-13b", "qwen3-30b-a3b"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    attention=st.sampled_from(["flash", "math"]),
    zero=st.integers(0, 3),
    stack=st.sampled_from(["pytorch-fsdp", *FACTS]),
    pp=st.sampled_from([1, 2, 4]),
)
def test_arrays_equal_their_points(name: str, recompute: str, attention: str, zero: int, stack: str, pp: int) -> None:
    axes = {
        "micro_batch": [1, 2, 8],
        "seq_len": [512, 2048, 4096],
        "tp": [1, 2, 4],
        "sp": [1, 2, 1],
        "cp": [2, 1, 1],
        "dp": [4, 8, 2],
        "ep": [1, 4, 2],
        "shard_group": [4, 4, 2],
        "grad_accum": [8, 4, 16],
    }
    common = plan_of(recompute=recompute, attention=attention, zero=zero, stack=stack, pp=pp)
    found = program(model(name), Numerics(element_bytes=2.0, attention=attention))
    # dp decides whether there is an exchange at all and stays a number.
    arrays = replace(common, dp=4, **{k: np.array(v) for k, v in axes.items() if k != "dp"})
    together = memory_of_stages(found, model(name), arrays)
    for i in range(3):
        point = replace(common, dp=4, **{k: v[i] for k, v in axes.items() if k != "dp"})
        one = memory_of_stages(found, model(name), point)
        assert together.allocated_bytes[i] == pytest.approx(one.allocated_bytes, rel=1e-12)
        for item, value in one.items_bytes.items():
            assert np.broadcast_to(together.items_bytes[item], (3, pp))[i] == pytest.approx(value, rel=1e-12), item


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 2),
    stack=st.sampled_from([*FACTS]),
)
def test_more_ranks_never_hold_more(tp: int, pp: int, zero: int, stack: str) -> None:
    """States fall with every degree and stage of ZeRO; items are never negative and sum to what is allocated."""
    facts = memory_facts(stack)
    plan = plan_of(tp=tp, pp=pp, zero=zero, dp=8, shard_group=8, grad_accum=8)
    found = weigh("llama-3-8b", plan, facts=facts)
    assert all((v >= 0).all() for v in found.items_bytes.values())
    assert sum(found.items_bytes.values()) == pytest.approx(found.allocated_bytes)
    states = total(found, "weights", "gradients", "optimizer")
    for change in ({"tp": 2 * tp}, {"pp": 2 * pp}, {"zero": zero + 1}):
        less = weigh("llama-3-8b", replace(plan, **change), facts=facts)
        assert total(less, "weights", "gradients", "optimizer") < states


# -- the way out -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["llama-2-7b", "gpt3-13b", "llama-3.1-70b", "qwen3-30b-a3b"]),
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 4]),
    zero=st.integers(0, 1),
    micro_batch=st.sampled_from([1, 4, 16]),
    capacity_gib=st.sampled_from([20, 40, 75]),
)
def test_the_way_out_of_a_sharded_job_fits(
    name: str, tp: int, pp: int, zero: int, micro_batch: int, capacity_gib: int
) -> None:
    """Reading the sentence back gives a plan of the same ranks and samples that fits."""
    plan = plan_of(tp=tp, pp=pp, dp=8, zero=zero, shard_group=8, micro_batch=micro_batch, grad_accum=4)

    def fits(p: Plan) -> bool:
        return float(weigh(name, p).reserved_bytes.max()) <= capacity_gib * GIB

    if fits(plan):
        return
    said = way_out(plan, model(name).spec, fits=fits, added_share=lambda r: 0.3 if r == "full" else 0.0)
    least = replace(plan, micro_batch=1, grad_accum=4 * micro_batch, recompute="full", zero=1 if pp > 1 else 3)
    if not said:
        assert not fits(least)
        return
    words = said.split(" fits")[0].replace(" with ", " and ").split(" and ")
    taken = {k: v if k == "recompute" else int(v) for k, v in (w.split("=") for w in words)}
    assert set(taken) <= {"micro_batch", "grad_accum", "recompute", "zero", "tp", "dp"}
    after = replace(plan, **taken)
    after = replace(after, shard_group=after.dp)
    assert after.global_batch == plan.global_batch
    assert after.world == plan.world
    assert fits(after)


def test_the_way_out_takes_the_cheapest_knob_where_steps_are_priced() -> None:
    plan = plan_of(dp=8, shard_group=8, micro_batch=8, grad_accum=1)
    fits = {"micro": lambda p: p.micro_batch < 8, "zero": lambda p: p.zero > 0}

    def either(p: Plan) -> bool:
        return any(f(p) for f in fits.values())

    def seconds(p: Plan) -> float:
        return 1.0 + (0.2 if p.micro_batch < 8 else 0.0) + 0.05 * p.zero

    said = way_out(plan, spec_of("llama-2-7b"), fits=either, added_share=lambda r: 0.0, step_s=seconds)
    assert said == "zero=1 fits; the step takes 5% longer"


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_a_report_says_which_stage_is_the_heaviest() -> None:
    """Items of the report are those of the fullest stage; every stage adds up; four groups of ranks (dp, tp, pp, cp)
    have three communicators more than one."""
    from simkit import predict
    from simkit.memory import COMMUNICATOR_BYTES, CONTEXT_DEFAULT_BYTES
    from simkit.spec.load import device

    common = {"model": "llama-2-70b", "stack": "megatron", "micro_batch": 1, "grad_accum": 8, "seq_len": 4096}
    degrees = {"tp": 4, "sp": 4, "pp": 4, "cp": 2, "dp": 2, "zero": 1}
    report = predict(**common, **degrees, cluster="8x8xh100", optimizer="adamw").memory
    stages = report.per_stage
    assert len(stages) == 4
    assert report.stage == max(range(4), key=lambda i: stages[i]["reserved"])
    assert stages[report.stage]["device"] == report.device_bytes
    for stage in stages:
        parts = {k: v for k, v in stage.items() if k not in ("allocated", "reserved", "device")}
        assert sum(parts.values()) == pytest.approx(stage["device"])
    context = CONTEXT_DEFAULT_BYTES + 3 * COMMUNICATOR_BYTES
    assert report.capacity_bytes == device("h100").memory_bytes - context


def test_an_overflow_names_the_stage_and_a_knob() -> None:
    from simkit import predict

    common = {"model": "llama-2-70b", "stack": "megatron", "optimizer": "adamw", "seq_len": 4096, "cluster": "8x8xh100"}
    report = predict(**common, tp=4, pp=4, micro_batch=8, grad_accum=8)
    assert not report.fits
    assert report.memory.why_not.startswith("stage 0 of 4 needs")
    assert " fits" in report.memory.way_out
