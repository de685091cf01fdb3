"""One scenario before and after a change: what moves is the change, and the terms still sum to the step."""

from __future__ import annotations

import math

import pytest

from simkit import predict
from simkit.errors import InputError
from simkit.whatif import TOGETHER, whatif

JOB = {"model": "bert-large", "cluster": "8x4x2080ti", "inter": "10gbe"}


def test_the_base_is_predict_and_each_change_too() -> None:
    found = whatif({**JOB, "micro_batch": 8, "grad_accum": 1, "method": "s-sgd"}, [{"inter": "100gbe"}])
    base = predict(**JOB, micro_batch=8, grad_accum=1, method="s-sgd")
    after = predict(**{**JOB, "inter": "100gbe"}, micro_batch=8, grad_accum=1, method="s-sgd")
    assert found.base.iteration_time_s == base.iteration_time_s
    assert found.cases[0].report is not None
    assert found.cases[0].report.iteration_time_s == after.iteration_time_s


def test_what_was_chosen_is_held_and_replan_chooses_anew() -> None:
    """ACP-SGD is chosen over 10 GbE, S-SGD within one node: a change of the cluster alone keeps the method."""
    change = [{"cluster": "1x4x2080ti"}]
    held, anew = whatif(JOB, change).cases[0].report, whatif(JOB, change, replan=True).cases[0].report
    assert held is not None
    assert anew is not None
    assert (held.scenario["method"], anew.scenario["method"]) == ("acp-sgd", "s-sgd")
    assert held.scenario["micro_batch"] == predict(**JOB).scenario["micro_batch"]


def test_differences_sum_to_the_change_of_the_step() -> None:
    found = whatif({"model": "llama-2-7b", "cluster": "2x8xa100", "zero": 3}, [{"recompute": "full"}, {"tp": 2}])
    for case in found.cases:
        assert case.report is not None
        rows = found.differences(case)
        step = case.report.iteration_time_s - found.base.iteration_time_s
        assert math.fsum(r["change_s"] for r in rows) == pytest.approx(step, rel=1e-4, abs=1e-5)
        total = math.fsum(r["after_gib"] for r in found.memory(case))
        assert total == pytest.approx(case.report.memory.device_bytes / 2**30, rel=1e-9)


def test_the_global_batch_is_held_where_it_divides_else_the_accumulation() -> None:
    base = {"model": "llama-2-7b", "cluster": "1x8xa100", "zero": 3, "micro_batch": 2, "grad_accum": 2}
    wider, odd, micro = whatif(
        base, [{"cluster": "2x8xa100"}, {"cluster": "1x6xa100"}, {"micro_batch": 4}]
    ).cases[:3]
    assert wider.report is not None
    assert odd.report is not None
    assert micro.report is not None
    assert [wider.report.scenario[k] for k in ("global_batch", "micro_batch", "grad_accum")] == [32, 2, 1]
    assert [odd.report.scenario[k] for k in ("global_batch", "micro_batch", "grad_accum")] == [24, 2, 2]
    assert "24" in odd.note
    assert [micro.report.scenario[k] for k in ("global_batch", "micro_batch", "grad_accum")] == [32, 4, 1]


def test_sequence_parallelism_follows_tensor_parallelism() -> None:
    base = {"model": "llama-2-7b", "cluster": "1x8xa100", "zero": 1, "tp": 2, "sp": 2, "micro_batch": 1}
    case = whatif(base, [{"tp": 4}]).cases[0]
    assert case.report is not None
    assert (case.report.scenario["tp"], case.report.scenario["sp"], case.report.scenario["dp"]) == (4, 4, 2)


def test_a_change_that_is_refused_is_a_case_with_its_reason() -> None:
    found = whatif({"model": "llama-2-7b", "cluster": "1x8xa100", "zero": 1}, [{"tp": 3}, {"precision": "fp32"}])
    assert "does not divide" in found.cases[0].reason
    assert found.cases[1].report is not None
    assert found.cases[2].label == TOGETHER
    assert "refused" in found.to_dict()["cases"][0]


def test_bad_input() -> None:
    with pytest.raises(InputError, match="--change is missing"):
        whatif(JOB, [])
    with pytest.raises(InputError, match="intre"):
        whatif(JOB, [{"intre": "10gbe"}])
    with pytest.raises(InputError, match="too many"):
        whatif(JOB, [{"micro_batch": i} for i in range(1, 30)])


def test_a_job_over_peers_keeps_its_batch() -> None:
    job = {"model": "bert-large", "cluster": "8x3080", "method": "decentralized"}
    found = whatif(job, [{"inter": "1Gb/s@10ms"}])
    after = found.cases[0].report
    assert after is not None
    assert after.scenario["method"] == "decentralized"
    assert [after.scenario.get(k) for k in ("micro_batch", "grad_accum")] == [
        found.base.scenario.get(k) for k in ("micro_batch", "grad_accum")
    ]
