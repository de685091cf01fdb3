"""Failures and checkpoints against published optima, by hand, and against a simulation that draws each failure."""

from __future__ import annotations

import math

import numpy as np
import pytest

import simkit
from simkit import goodput as g
from simkit import predict, sweep
from simkit.errors import InputError
from simkit.spec.plan import Plan

HOUR, MINUTE = 3600.0, 60.0


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117.0), (6 * HOUR, 57.0), (15 * MINUTE, 9.1)])
def test_the_optima_of_daly_figures_3_to_5(mtbf_s: float, minutes: float) -> None:
    # Daly (2006), figures 3, 4 and 5: dumps of 5 minutes; printed to two or three digits.
    assert g.daly_s(checkpoint_s=300.0, mtbf_s=mtbf_s) / MINUTE == pytest.approx(minutes, rel=6e-3)
    assert g.optimum_s(checkpoint_s=300.0, mtbf_s=mtbf_s) / MINUTE == pytest.approx(minutes, rel=8e-3)


def test_young_by_hand() -> None:
    # sqrt(2 · 300 · 86,400) = sqrt(51,840,000) = 7,200
    assert g.young_s(checkpoint_s=300.0, mtbf_s=86400.0) == pytest.approx(7200.0, rel=1e-12)


def test_the_exact_optimum_is_the_lambert_function() -> None:
    special = pytest.importorskip("scipy.special")
    ratio = np.logspace(-3, 1.3, 60)
    expected = 1.0 + special.lambertw(-np.exp(-1.0 - ratio)).real
    assert g.optimum_s(checkpoint_s=ratio, mtbf_s=1.0) == pytest.approx(expected, rel=1e-11)


def test_the_exact_optimum_of_tiny_checkpoints_is_youngs() -> None:
    # x + ln(1-x) = -x²/2 - x³/3 - …, so that x = sqrt(2c) (1 - sqrt(2c)/3 + …) for small c.
    ratio = np.logspace(-12, -6, 13)
    x = np.sqrt(2 * ratio)
    assert g.optimum_s(checkpoint_s=ratio, mtbf_s=1.0) == pytest.approx(x * (1 - x / 3 + x * x / 36), rel=1e-8)


@pytest.mark.parametrize("ratio", [1e-6, 1e-2, 1.0, 30.0])
def test_no_neighbour_of_the_optimum_is_better(ratio: float) -> None:
    best = float(g.optimum_s(checkpoint_s=ratio, mtbf_s=1.0))
    at = g.goodput(
        interval_s=best * np.array([0.9, 0.99, 1.0, 1.01, 1.1]), checkpoint_s=ratio, restart_s=0.5, mtbf_s=1.0
    )
    assert np.argmax(at) == 2
    assert 0.0 < at[2] < 1.0


def test_expected_time_by_hand() -> None:
    # M = 1, tau = ln 2, C = 0, R = ln 3: 1 · 3 · (2 - 1) = 3; goodput ln 2 / 3.
    facts = {"interval_s": math.log(2), "checkpoint_s": 0.0, "restart_s": math.log(3), "mtbf_s": 1.0}
    assert g.segment_s(**facts) == pytest.approx(3.0, rel=1e-14)
    split = g.shares(**facts)
    assert split["goodput"] == pytest.approx(math.log(2) / 3, rel=1e-14)
    # A share 1 - 1/3 of all time is spent restarting, the rest is work done twice.
    assert split["restart"] == pytest.approx(2 / 3, rel=1e-14)
    assert split["lost_work"] == pytest.approx(1 / 3 - math.log(2) / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("interval_s", "checkpoint_s", "restart_s", "mtbf_s"),
    [(3600.0, 300.0, 600.0, 6 * HOUR), (550.0, 300.0, 600.0, 15 * MINUTE), (7200.0, 0.0, 0.0, HOUR)],
)
def test_the_simulation_agrees(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> None:
    facts = {"interval_s": interval_s, "checkpoint_s": checkpoint_s, "restart_s": restart_s, "mtbf_s": mtbf_s}
    times = g.simulated_s(work_s=40 * interval_s, runs=400, seed=7, **facts)
    half = 2.576 * times.std(ddof=1) / math.sqrt(len(times))  # 99 % of a normal mean
    assert abs(times.mean() - 40 * float(g.segment_s(**facts))) < half
    assert half < 0.06 * times.mean()
    assert np.array_equal(times, g.simulated_s(work_s=40 * interval_s, runs=400, seed=7, **facts))


def test_without_failures_only_the_checkpoints_cost() -> None:
    # 900 s of work and 100 s of writing: 90 %, and no failure in sight.
    split = g.shares(interval_s=900.0, checkpoint_s=100.0, restart_s=600.0, mtbf_s=1e15)
    assert split["goodput"] == pytest.approx(0.9, rel=1e-9)
    assert split["checkpoint"] == pytest.approx(0.1, rel=1e-9)


def test_arrays_equal_their_points_and_shares_add_up() -> None:
    rng = np.random.default_rng(3)
    tau, dump, restart, mtbf = (rng.uniform(1.0, 2000.0, (4, 50)) for _ in range(4))
    split = g.shares(interval_s=tau, checkpoint_s=dump, restart_s=restart, mtbf_s=mtbf)
    one = g.shares(interval_s=tau[2, 7], checkpoint_s=dump[2, 7], restart_s=restart[2, 7], mtbf_s=mtbf[2, 7])
    assert all(split[k].shape == (4, 50) and split[k][2, 7] == one[k] for k in split)
    assert sum(split.values()) == pytest.approx(np.ones((4, 50)), abs=1e-12)
    best = g.optimum_s(checkpoint_s=dump, mtbf_s=mtbf)
    assert best[1, 3] == g.optimum_s(checkpoint_s=dump[1, 3], mtbf_s=mtbf[1, 3])


def test_limits() -> None:
    assert g.optimum_s(checkpoint_s=0.0, mtbf_s=100.0) == 0.0
    assert g.goodput(interval_s=0.0, checkpoint_s=0.0, restart_s=100.0, mtbf_s=100.0) == pytest.approx(math.exp(-1))
    assert g.goodput(interval_s=0.0, checkpoint_s=1.0, restart_s=0.0, mtbf_s=100.0) == 0.0
    assert g.goodput(interval_s=1e6, checkpoint_s=1.0, restart_s=1.0, mtbf_s=1.0) == 0.0


def test_a_bloom_checkpoint() -> None:
    # BigScience: 176,247 M parameters; 329 GB of bf16 weights alone, 2.3 TB with optimizer states (both binary units).
    plan = Plan(precision="bf16", optimizer="adamw")
    size = g.checkpoint_bytes(176_247e6, plan, autocast=False)
    assert size / 2**40 == pytest.approx(2.3, rel=0.03)
    # 14 bytes a parameter beside 2: seven times the weights.
    assert size / 2**30 == pytest.approx(7 * 329, rel=0.01)


def test_llama_3_trained_more_than_nine_tenths_of_the_time() -> None:
    # arXiv 2407.21783, section 3.3.4: "higher than 90 % effective training time" over those 54 days, restarts and all.
    found = g.terms(
        mtbf_s=g.MTBF_HOURS / 16384 * HOUR, size_bytes=14 * 405e9, rate_Bps=2e12, restart_s=g.RESTART_S, duration_s=1.0
    )
    assert 0.90 < found["goodput"] < 0.95
    # 419 failures in 54 days of wall time, from the expected time and its failures alike
    assert found["expected_failures"] / found["expected_duration_s"] * 54 * 86400 == pytest.approx(419)


def test_terms_take_arrays_and_a_given_interval() -> None:
    mtbf = np.array([[1e3], [1e5]])
    interval = np.array([60.0, 600.0, 6000.0])
    found = g.terms(mtbf_s=mtbf, size_bytes=1e12, rate_Bps=1e11, restart_s=60.0, interval_s=interval, duration_s=1e6)
    one = g.terms(mtbf_s=1e5, size_bytes=1e12, rate_Bps=1e11, restart_s=60.0, interval_s=600.0, duration_s=1e6)
    assert found["goodput"].shape == (2, 3)
    assert found["expected_duration_s"][1, 1] == one["expected_duration_s"]
    # 1e12 / 1e11 = 10 s a checkpoint; Young: sqrt(2 · 10 · 1e5) = 1,414.2 s; no interval beats the optimum.
    assert one["young_interval_s"] == pytest.approx(1414.2136, rel=1e-7)
    best = g.terms(mtbf_s=mtbf, size_bytes=1e12, rate_Bps=1e11, restart_s=60.0)["goodput"]
    assert np.all(found["goodput"] <= best)


def job(**fields: object) -> simkit.report.Report:
    return simkit.predict(model="gpt2", cluster="2x8xa100", inter="ib-hdr", micro_batch=4, grad_accum=1, **fields)


def test_the_report_says_nothing_unasked() -> None:
    assert "goodput" not in job().to_dict()


def test_the_report_of_a_job_of_known_length() -> None:
    report = job(
        tokens=1e12, mtbf_hours=16_000.0, checkpoint_bytes="2 TB", checkpoint_bandwidth="5 GB/s", restart_s=360
    )
    found = report.to_dict()["goodput"]
    assert found["system_mtbf_s"] == pytest.approx(1000 * HOUR)  # 16,000 h over 16 GPUs
    assert found["checkpoint_s"] == pytest.approx(400.0)  # 2e12 / 5e9
    # exp(-R/M) of the time is left by restarts; the rest follows from tau and C by the equation of the module.
    tau = found["checkpoint_interval_s"]
    assert tau == pytest.approx(math.sqrt(2 * 400 * 3.6e6), rel=0.02)
    expected = tau / (3.6e6 * math.exp(1e-4) * math.expm1((tau + 400) / 3.6e6))
    assert found["goodput"] == pytest.approx(expected, rel=1e-12)
    assert found["expected_duration_s"] == pytest.approx(report.cost["duration_s"] / expected, rel=1e-12)
    assert found["expected_cost_usd"] == pytest.approx(report.cost["cost_usd"] / expected, rel=1e-9)
    assert found["expected_failures"] == pytest.approx(found["expected_duration_s"] / 3.6e6, rel=1e-12)
    assert "Failures and checkpoints" in str(report)
    assert "Failures and checkpoints" in report.to_markdown()


def test_the_default_rate_is_that_of_llama_3() -> None:
    # 419 interruptions in 54 days on 16,384 GPUs are one in 54·24/419 = 3.093 hours.
    report = simkit.predict(model="gpt2", cluster="2048x8xh100", inter="400gbe-rdma", micro_batch=1, tokens=1e12)
    assert report.goodput["system_mtbf_s"] == pytest.approx(3.093 * HOUR, rel=1e-3)
    assert any("mtbf_hours" in line for line in report.assumptions)


def test_a_hopeless_job_is_an_answer_with_a_warning() -> None:
    report = job(mtbf_hours=0.5, checkpoint_bytes="10 TB", checkpoint_bandwidth="1 GB/s")
    assert report.goodput["goodput"] < 0.01
    assert any("failures leave" in line for line in report.warnings)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("checkpoint_bandwidth", "2 GB", "not of Bps"),
        ("checkpoint_bytes", "many", "not a quantity"),
        ("checkpoint_bytes", "0 B", "zero"),
        ("mtbf_hours", -1, "too small"),
        ("checkpoint_interval_s", 0, "too small"),
    ],
)
def test_bad_input_names_the_field(field: str, value: object, says: str) -> None:
    with pytest.raises(InputError) as error:
        job(**{field: value})
    assert field in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sweep_over_failures_says_what_predict_says() -> None:
    """Hand-worked besides: 10,000 GPU-hours over 8 GPUs are 4.5e6 s; C = 100 s: Young sqrt(2 C M) = 30,000 s."""
    job = {"model": "gpt2-medium", "cluster": "1x8xa100", "micro_batch": 4, "grad_accum": 1, "seq_len": 512,
           "checkpoint_bytes": "200 GB", "checkpoint_bandwidth": "2 GB/s", "restart_s": 300,
           "tokens": 1e10}  # fmt: skip
    hours = [100.0, 1000.0, 10000.0]
    found = sweep(**job, grid={"mtbf_hours": hours})
    for i, mtbf in enumerate(hours):
        report = predict(**job, mtbf_hours=mtbf)
        for name in ("goodput", "checkpoint_s", "checkpoint_interval_s", "expected_failures", "expected_duration_s"):
            assert found[name][i] == pytest.approx(report.goodput[name], rel=1e-12)
        usd = report.goodput["expected_cost_usd"]
        assert found["expected_cost_usd"][i] == pytest.approx(usd, rel=1e-12)
    last = predict(**job, mtbf_hours=10000.0).goodput
    assert last["system_mtbf_s"] == pytest.approx(4.5e6)
    assert last["young_interval_s"] == pytest.approx(30_000.0)
    # Daly's next terms: 30,000 (1 + sqrt(100 / 9e6) / 3 + 100 / 9e6 / 9) - 100 s.
    assert last["daly_interval_s"] == pytest.approx(30_000 * (1 + (100 / 9e6) ** 0.5 / 3 + 100 / 9e6 / 9) - 100)
    assert (found["goodput"][1:] > found["goodput"][:-1]).all()


def test_a_sweep_that_asks_for_no_failures_has_no_column_of_them() -> None:
    found = sweep(model="gpt2-medium", cluster="1x8xa100", grid={"micro_batch": [1, 2]}, method="s-sgd")
    assert "goodput" not in found
