"""Is it true of runs we can repeat? The recorded runs of `validation/testbed`, predicted from its recorded profiles.

The testbed needs root; these tests read what it recorded. Its README says how to take the runs again.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTBED = Path(__file__).resolve().parents[2] / "validation" / "testbed"
EMULATED = 0.05
"""Bound of every run whose compute is emulated."""


def module(name: str) -> ModuleType:
    """A file of the testbed, which is no package."""
    if str(TESTBED) not in sys.path:
        sys.path.insert(0, str(TESTBED))
    spec = importlib.util.spec_from_file_location(f"testbed_{name}", TESTBED / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


predict = module("predict")
RUNS = list(predict.emulated())


def test_what_is_recorded_covers_rates_ranks_methods_and_buckets() -> None:
    assert {r.mbps for r in RUNS} == {100, 300, 1000}
    assert {r.ranks for r in RUNS} == {2, 3, 4}
    assert {r.method for r in RUNS} == {"s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"}
    assert len({r.name.rpartition("/")[2] for r in RUNS}) == 3
    for path in predict.RESULTS.glob("emulated-*.json"):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            assert len(run["seconds"]) >= 10
            # No run can be faster than its compute.
            case = run["case"]
            assert min(run["seconds"]) > case["forward_s"] + sum(layer["backward_s"] for layer in case["layers"])


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.mbps}-{r.ranks}-{r.name}")
def test_every_run_with_emulated_compute_is_predicted(run) -> None:  # type: ignore[no-untyped-def]
    assert abs(run.error) <= EMULATED, f"measured {run.measured_s:.4f} s, predicted {run.predicted_s:.4f} s"


def test_the_ranks_fill_buckets_as_ddp_does() -> None:
    emulate = module("emulate")
    # First bucket closes at 1 MiB, the others at the cap; the last takes what is left.
    sizes = [700_000, 700_000, 3_000_000, 900_000, 4_000_000, 10]
    assert emulate.buckets(sizes, 4 * 2**20) == [[0, 1], [2, 3, 4], [5]]
    assert emulate.buckets(sizes, 0) == [[i] for i in range(6)]
    assert emulate.buckets(sizes, None) == [list(range(6))]


@pytest.mark.parametrize(
    ("method", "step", "sent"),
    [
        ("s-sgd", 0, [4 * 60 * 50]),
        ("sign-sgd", 0, [4 * 94]),
        ("topk-sgd", 0, [8 * 30]),
        ("power-sgd", 0, [4 * 60 * 4, 4 * 50 * 4]),
        ("acp-sgd", 0, [4 * 60 * 4]),
        ("acp-sgd", 1, [4 * 50 * 4]),
    ],
)
def test_the_bytes_of_the_methods(method: str, step: int, sent: list[int]) -> None:
    """3,000 elements: 94 words of 32 signs, 30 pairs at a density of 1 %."""
    assert math.ceil(3000 / 32) == 94
    case = {"method": method, "rank": 4, "density": 0.01}
    assert module("emulate").message_bytes(case, [60, 50], step) == sent


# -- real training -------------------------------------------------------------------------------------------------

TRAINED, TRAINED_MEAN = 0.22, 0.09
"""What the recorded runs are held to, to be tightened only. The aim is 0.15 and 0.08: README of the testbed."""
WITHIN_AIM, AIM = 29, 0.15
"""Runs that must be within the aim."""
APART, WRONG = 0.15, 1
"""Two methods are in an order where their measured times differ by more than this; pairs that may be the wrong way."""
TRAINING = list(predict.trained())
QUIET = [r for r in TRAINING if r.quiet]


def test_training_is_recorded_at_both_rates_with_every_method_in_one_bucket_and_several() -> None:
    kinds = {(*r.name.split("/"), r.mbps) for r in TRAINING}
    methods = ("s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd")
    models, buckets = ("transformer", "convnet"), ("one", "several")
    assert kinds == {(m, k, b, r) for m in models for k in methods for b in buckets for r in (100, 1000)}


def test_enough_runs_were_quiet_to_say_anything() -> None:
    assert len(QUIET) >= len(TRAINING) / 2


@pytest.mark.parametrize("run", QUIET, ids=lambda r: f"{r.mbps}-{r.name}")
def test_every_quiet_run_of_training_is_predicted(run) -> None:  # type: ignore[no-untyped-def]
    assert abs(run.error) <= TRAINED, f"measured {run.measured_s:.4f} s, predicted {run.predicted_s:.4f} s"


def test_quiet_runs_of_training_are_predicted_on_average() -> None:
    assert sum(abs(r.error) for r in QUIET) / len(QUIET) <= TRAINED_MEAN
    assert sum(abs(r.error) <= AIM for r in QUIET) >= WITHIN_AIM


def test_the_order_of_the_methods_is_right() -> None:
    groups: dict[tuple[str, str, int], list[object]] = {}
    for run in QUIET:
        model, _, buckets = run.name.split("/")
        groups.setdefault((model, buckets, run.mbps), []).append(run)
    wrong = []
    for key, runs in groups.items():
        for a in runs:
            for b in runs:
                apart = a.measured_s < (1.0 - APART) * b.measured_s  # type: ignore[attr-defined]
                if apart and a.predicted_s >= b.predicted_s:  # type: ignore[attr-defined]
                    wrong.append((*key, a.method, b.method))  # type: ignore[attr-defined]
    assert len(wrong) <= WRONG, wrong
