"""What is chosen where nothing was given."""

from __future__ import annotations

import pytest

from simkit import predict
from simkit.evaluate import evaluate
from simkit.planner import HEADROOM, planned
from simkit.report import Report
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import Scenario


def plan(**fields: object) -> Resolved:
    return planned(resolve(Scenario.of(fields)))


def used(report: Report) -> float:
    return report.memory.reserved_bytes / report.memory.capacity_bytes


@pytest.mark.parametrize("cluster", ["1x1x3080", "1x1x2080ti", "1x8xa100", "50x3080", "2x8xh100"])
@pytest.mark.parametrize("model", ["resnet-50", "bert-large", "gpt2-xl", "vit-base", "t5-large"])
def test_the_chosen_micro_batch_fits_and_its_double_does_not(model: str, cluster: str) -> None:
    found = plan(model=model, cluster=cluster, optimizer="sgd").plan
    fields = {"model": model, "cluster": cluster, "optimizer": "sgd", "method": found.method}
    chosen = predict(**fields, micro_batch=found.micro_batch, grad_accum=1)
    double = predict(**fields, micro_batch=2 * found.micro_batch, grad_accum=1)
    if found.micro_batch > 1:
        assert used(chosen) <= HEADROOM
        assert chosen.fits
    # Or the batch a rank can use binds.
    assert used(double) > HEADROOM or found.grad_accum == 1


def test_a_given_global_batch_is_kept_and_divided_evenly() -> None:
    for total in (48, 96, 1000, 4 * 1000003, 12 * 10**6):
        found = plan(model="bert-base", cluster="1x4x2080ti", global_batch=total).plan
        assert found.micro_batch * found.grad_accum * found.dp == total


def test_usual_batches() -> None:
    """0.5 M tokens for a decoder of 1.3B (Brown et al. 2020, table 2.1), 256 x 512 tokens for BERT, 1,024 images."""
    assert plan(model="gpt3-xl", cluster="1x8xa100", seq_len=2048).plan.global_batch * 2048 == 2**19
    assert plan(model="bert-large", cluster="1x8xh100", seq_len=512).plan.global_batch * 512 == 2**17
    assert plan(model="resnet-50", cluster="1x8xa100").plan.global_batch == 1024


def test_s_sgd_on_fast_networks_acp_sgd_on_slow_ones() -> None:
    fast = plan(model="bert-large", cluster="2x8xh100", inter="400gbe-rdma")
    slow = plan(model="bert-large", cluster="8x4x2080ti", inter="1gbe")
    assert fast.plan.method == "s-sgd"
    assert slow.plan.method == "acp-sgd"
    assert any("faster than s-sgd" in note for note in slow.assumptions)
    assert any("method = s-sgd" in note for note in fast.assumptions)


def test_the_method_is_chosen_only_where_it_pays_a_tenth() -> None:
    for inter in ("1gbe", "10gbe", "25gbe", "100gbe"):
        chosen = plan(model="bert-base", cluster="4x4x2080ti", inter=inter)
        fields = {"model": "bert-base", "cluster": "4x4x2080ti", "inter": inter,
                  "micro_batch": chosen.plan.micro_batch, "grad_accum": chosen.plan.grad_accum}
        plain, compressed = (predict(method=m, **fields).iteration_time_s for m in ("s-sgd", "acp-sgd"))
        assert (chosen.plan.method == "acp-sgd") == (compressed * 1.1 < plain)


def test_what_was_given_is_never_changed() -> None:
    found = plan(model="bert-large", cluster="8x4x2080ti", inter="1gbe", method="s-sgd", micro_batch=3, grad_accum=2)
    assert (found.plan.method, found.plan.micro_batch, found.plan.grad_accum) == ("s-sgd", 3, 2)
    assert found.open == frozenset()


def test_a_job_that_never_fits_is_answered_all_the_same() -> None:
    found = plan(model="llama-2-70b", cluster="1x1x3080")
    assert found.plan.micro_batch == 1
    assert not any("the largest that fits" in note for note in found.assumptions)
    answer = evaluate(found)
    assert not answer.memory.fits
    assert answer.end_s > 0


def test_a_pipeline_fits_with_all_its_micro_batches_in_flight() -> None:
    job = {"model": "llama-2-13b", "cluster": "2x8xh100", "tp": 2, "pp": 4, "global_batch": 256}
    found = plan(**job).plan
    assert found.micro_batch * found.grad_accum * 2 == 256
    assert predict(**job).fits
