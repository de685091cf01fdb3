"""Which plans a search tries, whether their figures are those of `predict`, and whether the first is the best."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from simkit import predict
from simkit.errors import InputError, RefusedError
from simkit.search import FREE, Found, search
from simkit.units import GIB

SMALL = {"model": "llama-2-7b", "cluster": "1x4xa100", "global_batch": 16, "seq_len": 2048, "stack": "megatron"}


@pytest.fixture(scope="module")
def small() -> Found:
    return search(**SMALL)


def test_the_figures_are_those_of_predict(small: Found) -> None:
    for one in small.candidates[:8] + small.candidates[-4:]:
        report = predict(**SMALL, **{k: v for k, v in one.fields.items() if k not in SMALL}, method="s-sgd")
        assert one.iteration_time_s == pytest.approx(report.iteration_time_s, rel=1e-12)
        assert one.peak_memory_gib == pytest.approx(report.memory.device_bytes / GIB, rel=1e-12)
        assert one.samples_per_s == pytest.approx(report.samples_per_s, rel=1e-12)
        assert one.usd == pytest.approx(report.cost["usd_per_step"] / 16 * 1e6, rel=1e-12)


def test_the_best_is_the_best_of_all_that_predict_answers(small: Found) -> None:
    """Every combination asked of `predict` one by one; those that leave a tenth of the memory free count."""
    best = float("inf")
    for tp, pp, zero, recompute, micro in itertools.product(
        (1, 2, 4), (1, 2, 4), (0, 1, 2, 3), ("none", "selective", "full"), (1, 2, 4, 8, 16)
    ):
        fields = {"tp": tp, "sp": tp, "pp": pp, "zero": zero, "recompute": recompute, "micro_batch": micro}
        if tp * pp > 4 or (pp > 1 and zero > 1) or 16 % (4 // (tp * pp) * micro):
            continue
        report = predict(**SMALL, **fields, method="s-sgd")
        if report.memory.reserved_bytes <= (1.0 - FREE) * report.memory.capacity_bytes:
            best = min(best, report.iteration_time_s)
    plain = [c for c in small.candidates if c.plan.vpp == 1]
    assert plain[0].iteration_time_s == pytest.approx(best, rel=1e-12)


def test_every_combination_is_a_plan_or_has_a_reason(small: Found) -> None:
    assert small.asked == len(small.candidates) + sum(small.pruned.values())
    assert any("memory" in reason for reason in small.pruned)


def test_the_order_is_that_of_the_figure_asked_for() -> None:
    for by, figure in (("time", "iteration_time_s"), ("memory", "peak_memory_gib"), ("cost", "usd")):
        values = [getattr(c, figure) for c in search(**SMALL, tp=[1, 2], pp=1, by=by).candidates]
        assert len(values) > 3
        assert values == sorted(values)


def test_tensor_parallelism_stays_within_a_node_and_divides_the_heads() -> None:
    found = search(model="llama-2-7b", cluster="4x2xa100", global_batch=32, recompute="none", vpp=1)
    assert {c.plan.tp for c in found.candidates} <= {1, 2}
    wide = search(model="llama-2-7b", cluster="4x2xa100", global_batch=32, recompute="none", vpp=1, tp=[2, 4])
    assert {c.plan.tp for c in wide.candidates} == {2, 4}


def test_a_pipeline_takes_whole_chunks_and_zero_1_at_most() -> None:
    found = search(model="llama-2-7b", cluster="1x8xa100", global_batch=64, tp=1, micro_batch=1)
    over = [c.plan for c in found.candidates if c.plan.pp > 1]
    assert over
    assert all(p.zero <= 1 and 32 % (p.pp * p.vpp) == 0 for p in over if p.vpp > 1)
    assert all(p.grad_accum % p.pp == 0 for p in over if p.vpp > 1)


def test_the_global_batch_is_one_for_all_and_a_multiple_of_the_gpus() -> None:
    """2^19 tokens of 2,048 are 256 samples; 384 GPUs take 384."""
    found = search(model="llama-2-7b", cluster="48x8xa100", seq_len=2048, vpp=1, pp=[1, 2], recompute="none")
    assert {c.plan.global_batch for c in found.candidates} == {384}
    given = search(model="llama-2-7b", cluster="1x8xa100", seq_len=2048, micro_batch=2, vpp=1)
    assert {c.plan.global_batch for c in given.candidates} == {16}


def test_several_clusters_are_ranked_together() -> None:
    found = search(model="llama-2-7b", cluster=["1x8xa100", "1x8xh100"], global_batch=64, vpp=1, pp=1, by="cost")
    assert {c.varied["cluster"] for c in found.candidates} == {"1x8xa100", "1x8xh100"}
    usd = [c.usd for c in found.candidates]
    assert usd == sorted(usd)
    assert found.candidates[0].flags().startswith("--cluster 1x8x")


def test_experts_are_divided_over_data_ranks() -> None:
    found = search(model="mixtral-8x7b", cluster="2x8xh100", global_batch=32, seq_len=2048, tp=1, pp=1)
    degrees = Counter(c.plan.ep for c in found.candidates)
    assert set(degrees) <= {1, 2, 4, 8}
    assert max(degrees) > 1


def test_where_nothing_fits_states_go_to_the_host_and_else_the_leanest_is_named() -> None:
    found = search(model="llama-2-7b", cluster="1x2x4090", global_batch=8, seq_len=2048, vpp=1)
    assert found.candidates
    assert all(c.plan.offload != "none" for c in found.candidates)
    assert any("offload" in note for note in found.assumptions)
    none = search(model="llama-2-7b", cluster="1x2x4090", global_batch=8, seq_len=2048, vpp=1, offload="none")
    assert not none.candidates
    assert none.leanest is not None
    assert not none.leanest.fits


def test_networks_that_only_divide_their_data() -> None:
    found = search(model="resnet-50", cluster="1x4xa100", global_batch=256)
    assert {(c.plan.tp, c.plan.pp, c.plan.zero, c.plan.dp) for c in found.candidates} == {(1, 1, 0, 4)}


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="by"):
        search(**SMALL, by="speed")
    with pytest.raises(InputError, match="free"):
        search(**SMALL, free=1.0)
    with pytest.raises(InputError, match="tp"):
        search(**SMALL, tp=[1, "two"])
    with pytest.raises(InputError, match="empty"):
        search(**SMALL, tp=[])
    with pytest.raises(RefusedError, match="no plan can be priced"):
        search(model="llama-2-7b", cluster="1x3xa100", tp=[2])
    with pytest.raises(RefusedError, match="peers"):
        search(model="bert-large", cluster="8x3080", method="decentralized")
    with pytest.raises(RefusedError, match="peers"):
        search(model="bert-large", cluster="8x3080", task="inference")


def test_the_same_search_gives_the_same_answer(small: Found) -> None:
    assert search(**SMALL).to_dict(20) == small.to_dict(20)
