"""Degrees of parallelism are chosen where nobody gave any and plain data parallelism never fits; nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkit import predict, sweep
from simkit.predict import predict_scenario
from simkit.search import search
from simkit.spec.scenario import Scenario
from simkit.validate import predict_line

BIG = {"model": "llama-3.1-70b", "cluster": "16x8xh100"}


def test_a_model_that_plain_data_parallelism_cannot_hold_is_divided() -> None:
    """70.6e9 parameters of 16 bytes are 1.13 TB, beyond one GPU and within 128."""
    report = predict(**BIG)
    assert report.fits
    assert report.scenario.get("tp", 1) * report.scenario.get("pp", 1) > 1 or report.scenario["zero"] == 3
    notes = "\n".join(report.assumptions)
    for name in ("tp", "pp", "zero", "recompute", "micro_batch", "grad_accum"):
        assert f"\n{name} = " in notes
    assert "runner-up" in notes


def test_it_is_the_best_of_the_search_and_of_the_flags_it_names() -> None:
    report = predict(**BIG)
    best = search(**BIG, vpp=1).candidates[0]
    assert report.iteration_time_s == pytest.approx(best.iteration_time_s, rel=1e-12)
    again = predict(**BIG, **best.fields)
    assert again.iteration_time_s == pytest.approx(report.iteration_time_s, rel=1e-12)
    assert again.memory.device_bytes == pytest.approx(report.memory.device_bytes, rel=1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "bert-large", "cluster": "8x4x2080ti"},
        {"model": "gpt2-xl", "cluster": "1x8xa100"},
        {"model": "resnet-50", "cluster": "50x3080"},
        {"model": "gpt2-xl", "cluster": "1x8xa100", "micro_batch": 512},
    ],
)
def test_what_fits_stays_plain_data_parallelism(fields: dict[str, object]) -> None:
    """Also a given micro-batch that does not fit where a smaller one does: that answer names the knob."""
    scenario = Scenario.of({"seq_len": 512, **fields} if fields["model"] != "resnet-50" else fields)
    chosen, kept = (predict_scenario(scenario, beside=False, as_ran=ran) for ran in (False, True))
    assert chosen.to_dict() == kept.to_dict()
    assert not any(name in chosen.scenario for name in ("tp", "pp", "zero"))


@pytest.mark.parametrize("given", [{"zero": 1}, {"tp": 2}, {"dp": 8}, {"micro_batch": 1, "grad_accum": 4}])
def test_what_was_given_is_kept(given: dict[str, int]) -> None:
    report = predict(model="llama-2-13b", cluster="1x8xa100", seq_len=512, **given)
    assert report.scenario["dp"] == 8 // given.get("tp", 1)
    assert report.scenario.get("zero", 0) == given.get("zero", 0)
    assert report.scenario.get("pp", 1) == 1


def test_one_gpu_has_nothing_to_divide() -> None:
    report = predict(model="llama-2-7b", cluster="1x1xa100")
    assert not report.fits
    assert report.scenario.get("offload", "none") == "none"


def test_a_given_recomputation_and_batch_are_kept() -> None:
    report = predict(**BIG, recompute="full", global_batch=256, seq_len=2048)
    assert (report.scenario["recompute"], report.scenario["global_batch"]) == ("full", 256)
    assert report.fits


def test_rows_of_measured_tables_are_predicted_as_they_ran() -> None:
    line = {"model": "llama-3.1-70b", "cluster": "16x8xh100", "inter": "ib-ndr", "metric": "fits", "value": "0"}
    assert predict_line(line, models=(), profiles=(), calibration=True)[0] == 0.0


def test_a_sweep_chooses_as_predict_does() -> None:
    given = {"model": "llama-2-13b", "cluster": "1x8xa100", "seq_len": 512}
    found = sweep(**given, grid={"micro_batch": [1, 2, 4, 8]})
    for i, micro in enumerate((1, 2, 4, 8)):
        report = predict(**given, micro_batch=micro)
        assert found["iteration_time_s"][i] == pytest.approx(report.iteration_time_s, rel=1e-12)
        assert bool(found["fits"][i]) == report.fits


def test_where_nothing_fits_the_leanest_plan_is_the_answer() -> None:
    report = predict(model="gpt3-175b", cluster="1x2x3080", seq_len=2048)
    assert not report.fits
    assert any("needs least" in note for note in report.assumptions)


def test_profiles_of_the_user_are_searched_too(tmp_path: Path) -> None:
    from simkit.spec.add import add_device

    add_device("mine", memory="48 GiB", bandwidth="900 GB/s", peak={"bf16": "180 TFLOP/s"}, directory=tmp_path)
    report = predict(model="llama-2-7b", cluster="1x8xmine", profiles=(str(tmp_path),), seq_len=1024)
    assert report.fits
