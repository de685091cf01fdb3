"""Local SGD: the arithmetic of rounds, traffic, and what an average over lines costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simkit
from simkit.decentral_local import round_of, traffic_cut
from simkit.errors import InputError, RefusedError


def test_a_round_by_hand() -> None:
    """100 steps of 1 s and 25 s of averaging: 80 % busy. Hidden behind 10 steps: 15 s remain."""
    assert round_of(100, 1.0, 25.0).utilisation == pytest.approx(0.8)
    assert round_of(100, 1.0, 25.0, overlap_steps=10).exposed_s == pytest.approx(15.0)
    assert round_of(100, 1.0, 25.0, overlap_steps=25).exposed_s == 0.0
    # Four fragments of 6.25 s, each hidden behind 5 steps: 4 x 1.25 s are waited for.
    assert round_of(100, 1.0, 6.25, fragments=4, overlap_steps=5).exposed_s == pytest.approx(5.0)


@given(st.integers(1, 500), st.floats(0.01, 10.0), st.floats(0.0, 500.0), st.integers(1, 8), st.integers(0, 50))
def test_a_line_carries_what_it_can(steps: int, inner: float, fragment: float, parts: int, overlap: int) -> None:
    found = round_of(steps, inner, fragment, fragments=parts, overlap_steps=overlap)
    assert found.end_s >= max(steps * inner, parts * fragment) * (1 - 1e-12)
    assert found.end_s <= steps * inner + parts * fragment + 1e-9
    assert 0.0 < found.utilisation <= 1.0


def test_traffic_of_published_settings() -> None:
    """DiLoCo communicates 500 times less (H = 500, same dtype; arXiv 2311.08105); INTELLECT-1 400 times (100 steps,
    int8 for fp32; arXiv 2412.01152)."""
    assert traffic_cut(500, "fp32") == 500.0
    assert traffic_cut(100, "int8") == 400.0


GIVEN = {"method": "local-sgd", "cluster": "4x3080", "model": "gpt2", "micro_batch": 4, "grad_accum": 2}


def test_the_inner_step_is_the_ordinary_one() -> None:
    found = simkit.predict(**GIVEN, inter="100Mb/s@5ms", inner_steps=50)
    one = simkit.predict(cluster="1x1x3080", model="gpt2", micro_batch=4, grad_accum=2)
    assert found.extras["round"]["inner_s"] == pytest.approx(one.iteration_time_s)
    assert sum(v for k, v in found.breakdown.items() if k != "compute_s") == pytest.approx(found.iteration_time_s)
    assert found.samples_per_s == pytest.approx(4 * 8 / found.iteration_time_s)
    # Every step the same gradients: H = 1 waits 50 times as long.
    every = simkit.predict(**GIVEN, inter="100Mb/s@5ms", inner_steps=1)
    assert every.breakdown["outer_comm_s"] == pytest.approx(50 * found.breakdown["outer_comm_s"])


def test_longer_rounds_and_smaller_elements_wait_less() -> None:
    waits = [simkit.predict(**GIVEN, inter="100Mb/s@5ms", inner_steps=h).extras["utilisation"]["mean"]
             for h in (1, 10, 100, 1000)]  # fmt: skip
    assert waits == sorted(waits)
    a = simkit.predict(**GIVEN, inter="100Mb/s@5ms", inner_steps=50)
    b = simkit.predict(**GIVEN, inter="100Mb/s@5ms", inner_steps=50, outer_dtype="int8")
    c = simkit.predict(**GIVEN, inter="100Mb/s@5ms", inner_steps=50, fragments=4, overlap_steps=20)
    assert b.iteration_time_s < a.iteration_time_s
    assert c.iteration_time_s < a.iteration_time_s


def test_the_slowest_worker_sets_the_round() -> None:
    slow = simkit.predict(**{**GIVEN, "cluster": "4x3080"}, inter="1gbe", inner_steps=10).extras["round"]["inner_s"]
    mixed = simkit.predict(**{**GIVEN, "cluster": "2x3080+2x4090"}, inter="1gbe", inner_steps=10).extras["round"]
    assert mixed["inner_s"] == pytest.approx(slow)


def test_the_bottleneck_is_that_of_the_step_shown() -> None:
    """Where averaging is longest it is named; else the share of computing is of the step with its average."""
    given = {"method": "local-sgd", "cluster": "50x3080", "model": "gpt2", "outer_dtype": "int8"}
    near = simkit.predict(**given, inter="wan-100mbps", inner_steps=500)
    share = (near.breakdown["forward_s"] + near.breakdown["backward_s"]) / near.iteration_time_s
    assert f"compute is {share:.0%} of the step" in near.bottleneck
    assert f"averaging among workers is {near.breakdown['outer_comm_s'] / near.iteration_time_s:.0%}" in near.bottleneck
    far = simkit.predict(**given, inter="wan-100mbps", inner_steps=400)
    assert far.breakdown["outer_comm_s"] > far.breakdown["forward_s"] + far.breakdown["backward_s"]
    assert far.bottleneck.startswith("averaging among 50 workers")


def test_peers_may_be_a_number() -> None:
    found = simkit.predict(method="local-sgd", peers="4", model="gpt2", inter="1gbe", inner_steps=50)
    assert found.extras["round"]["workers"] == 4
    with pytest.raises(InputError, match="8 of the cluster"):
        simkit.predict(method="local-sgd", peers="4", cluster="8x3080", model="gpt2")


@pytest.mark.parametrize(("fields", "error", "said"), [
    ({"cluster": "1x8xh100"}, InputError, "one worker"),
    ({"wire": "int8"}, RefusedError, "wire"),
    ({"fragments": 20, "inner_steps": 10}, InputError, "fragments"),
    ({"task": "inference"}, RefusedError, "trains"),
    ({"global_batch": 30, "grad_accum": None}, InputError, "divisible"),
])
def test_what_makes_no_sense_is_refused(fields: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        simkit.predict(**{**GIVEN, "inter": "1gbe", **fields})
