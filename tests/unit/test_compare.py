"""Comparisons: which cases there are, what they are called, and what they are compared with."""

from __future__ import annotations

import csv
import io
from typing import Any

import fake_report as fake
import pytest

from simkit.compare import MAX_CASES, compare, variations
from simkit.errors import InputError, RefusedError


@pytest.fixture(autouse=True)
def predictor(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The predictor replaced: throughput 100 times dp, price fixed; method `bad` is refused. Returns what was asked."""
    import importlib

    asked: list[dict[str, Any]] = []

    def fake_predict(scenario: Any, **options: Any) -> Any:
        asked.append(dict(scenario.values))
        if scenario.get("method") == "bad":
            raise RefusedError("bad is not modelled")
        dp = scenario.get("dp", 1)
        return fake.report(scenario=dict(scenario.values), samples_per_s=100.0 * dp, iteration_time_s=1 / dp)

    monkeypatch.setattr(importlib.import_module("simkit.predict"), "predict_scenario", fake_predict)
    return asked


def test_variations_are_the_cartesian_product_last_field_fastest() -> None:
    assert variations({"dp": [1, 2], "model": "gpt2", "tp": (1, 4)}) == [
        {"dp": 1, "model": "gpt2", "tp": 1},
        {"dp": 1, "model": "gpt2", "tp": 4},
        {"dp": 2, "model": "gpt2", "tp": 1},
        {"dp": 2, "model": "gpt2", "tp": 4},
    ]


def test_too_many_cases_is_bad_input() -> None:
    assert len(variations({"dp": list(range(1, MAX_CASES + 1))})) == MAX_CASES
    with pytest.raises(InputError, match="at most 1000"):
        variations({"dp": list(range(1, 102)), "tp": list(range(1, 11))})
    with pytest.raises(InputError, match="empty list"):
        variations({"dp": []})
    with pytest.raises(InputError, match="'dp'"):
        variations({"dpp": [1]})


def test_ratios_are_to_the_first_case(predictor: list[dict[str, Any]]) -> None:
    found = compare(model="gpt2", dp=[2, 1, 4])
    assert [case.label for case in found.cases] == ["dp=2", "dp=1", "dp=4"]
    assert [entry["ratios"]["throughput"] for entry in found.to_dict()["cases"]] == [1.0, 0.5, 2.0]
    assert found.varied == ("dp",)
    assert all(asked["model"] == "gpt2" for asked in predictor)
    assert "0.5×" in str(found)


def test_a_refused_case_keeps_its_place_and_reason() -> None:
    found = compare(method=["bad", "s-sgd", "acp-sgd"])
    assert found.to_dict()["cases"][0] == {
        "label": "bad",
        "values": {"method": "bad"},
        "refused": "bad is not modelled",
    }
    assert found.base.scenario["method"] == "s-sgd"
    for text in (str(found), found.to_markdown(), found.to_csv(), found._repr_html_()):
        assert "bad is not modelled" in text


def test_all_refused_is_an_error_with_the_reason() -> None:
    with pytest.raises(InputError, match="bad is not modelled"):
        compare([{"method": "bad"}]).base  # noqa: B018


def test_scenarios_and_fields_combine() -> None:
    found = compare([{"model": "gpt2"}, {"model": "bert-large"}], dp=[1, 2])
    assert [case.label for case in found.cases] == ["gpt2, dp=1", "gpt2, dp=2", "bert-large, dp=1", "bert-large, dp=2"]


def test_csv_has_a_row_a_case() -> None:
    rows = list(csv.DictReader(io.StringIO(compare(dp=[1, 2]).to_csv())))
    assert [row["label"] for row in rows] == ["dp=1", "dp=2"]
    assert [float(row["ratios.throughput"]) for row in rows] == [1.0, 2.0]
    assert float(rows[1]["samples_per_s"]) == 200.0
