"""Where peers equal a data centre: crossings by hand, a map that grows where it must, and its page."""

from __future__ import annotations

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

import simkit
from simkit.cli import main
from simkit.commands.map import interval
from simkit.decentral import asked
from simkit.decentral_map import Map, crossing, mapped
from simkit.decentral_report import reference
from simkit.spec.scenario import Scenario

GIVEN = {"method": "decentralized", "cluster": "8x3080", "model": "gpt2-medium", "seq_len": 512}
COMMAND = ["map", "--cluster", "8x3080", "--model", "gpt2-medium", "--seq-len", "512",
           "--bandwidth", "100Mb/s:10Gb/s:2", "--micro-batches", "4,32", "--latencies", "1ms,100ms"]  # fmt: skip


def test_crossings_by_hand() -> None:
    """Half-way on the logarithm between 10 and 1,000 is 100; nothing below 1 never crosses."""
    assert crossing(np.array([10.0, 1000.0]), np.array([0.5, 1.5])) == pytest.approx(100.0)
    assert crossing(np.array([10.0, 1000.0]), np.array([1.5, 2.0])) == 10.0
    assert crossing(np.array([10.0, 1000.0]), np.array([0.5, 0.9])) is None


def test_latency_crosses_downwards() -> None:
    one = np.ones((2, 1), dtype=int)
    made = Map(bandwidth_Bps=np.array([1.0, 2.0]), counts=(1,), latencies_s=(0.01, 1.0), latency_s=0.0,
               reference_rate=1.0, rate=np.ones((2, 1)), pipelines=one, depth=one, micro_batch=one,
               recompute=np.full((2, 1), "none"),
               by_latency=np.array([[1.5, 0.5], [0.9, 0.1]]))  # fmt: skip
    assert made.latency_crossings() == [pytest.approx(0.1), None]


@pytest.fixture(scope="module")
def found() -> Map:
    question, _ = asked(Scenario.of(GIVEN))
    return mapped(question, bandwidths=[1e7, 1e8, 1e9], latency_s=0.01, counts=[4, 32, 128], latencies_s=[0.001, 0.1],
                  reference_rate=100.0)  # fmt: skip


def test_a_map_rises_with_bandwidth_and_micro_batches(found: Map) -> None:
    assert (np.diff(found.rate, axis=0) >= -1e-9 * found.rate[:-1]).all()
    assert (np.diff(found.rate, axis=1) >= -0.02 * found.rate[:, :-1]).all()
    assert (found.by_latency[:, 0] >= found.by_latency[:, 1]).all()


def test_a_point_is_what_predict_says(found: Map) -> None:
    """The plan of a point, asked of `predict` as it stands."""
    i, k = 2, 1
    same = simkit.predict(**GIVEN, inter="8Gb/s@10ms", dp=int(found.pipelines[i, k]), pp=int(found.depth[i, k]),
                          micro_batch=int(found.micro_batch[i, k]), recompute=str(found.recompute[i, k]),
                          grad_accum=32, exchange="s-sgd")  # fmt: skip
    assert same.samples_per_s == pytest.approx(found.rate[i, k], rel=0.02)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["points"]) == 4
    assert answer["reference"]["samples_per_s"] > 0.0
    assert {len(v) for v in answer["crossings"].values()} == {2}
    assert main([*COMMAND, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(r["ratio"]) for r in rows] == pytest.approx([p["ratio"] for p in answer["points"]])
    assert main(COMMAND) == 0
    said = capsys.readouterr().out
    for words in ("equal from", "Assumed (not given)", "recompute = ", "90 % interval of a ratio"):
        assert words in said, words


def test_the_interval_of_a_ratio_by_hand() -> None:
    """Peers 1/1.35 to 1/0.75; a reference without any: those alone. With the same one, sqrt(2) times on logarithms."""
    exact = SimpleNamespace(samples_per_s=10.0, interval_90={"samples_per_s": (10.0, 10.0)})
    assert interval(exact) == pytest.approx((1 / 1.35, 1 / 0.75))
    alike = SimpleNamespace(samples_per_s=10.0, interval_90={"samples_per_s": (7.5, 13.5)})
    assert interval(alike) == pytest.approx((1.35**-(2**0.5), 0.75**-(2**0.5)))


def test_recomputation_is_tried_at_every_point(found: Map) -> None:
    """No point is slower than with either recomputation asked for."""
    for recompute in ("none", "full"):
        question, _ = asked(Scenario.of({**GIVEN, "recompute": recompute}))
        one = mapped(question, bandwidths=[1e7, 1e8, 1e9], latency_s=0.01, counts=[4, 32, 128], latencies_s=[0.001],
                     reference_rate=100.0)  # fmt: skip
        assert (found.rate >= one.rate * (1 - 1e-9)).all()


@pytest.mark.parametrize("bad", [["--bandwidth", "1:2"], ["--bandwidth", "0Mb/s"], ["--micro-batches", "a"],
                                 ["--latency", "-1s"], ["--reference", "8xnothing"],
                                 ["--reference", "0xh100"], ["--micro-batches", "1000000000"],
                                 ["--method", "s-sgd"], ["--task", "inference"], ["--grad-accum", "4"],
                                 ["--inter", "1gbe"], ["--wiring", "stochastic"]])
def test_bad_input_is_one_line(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *bad]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert bad[0].lstrip("-").replace("-", "_") in said.replace("-", "_")


def test_a_reference_of_several_nodes_gets_a_batch_that_divides() -> None:
    """Two nodes of eight cards are 16, not two."""
    other = reference(Scenario.of(GIVEN), {"model": "gpt2", "precision": "bf16", "optimizer": "adamw",
                                           "global_batch": 100}, "2x8xh100")  # fmt: skip
    assert other.scenario["global_batch"] == 96
