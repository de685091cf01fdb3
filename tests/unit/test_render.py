"""The forms of an answer, checked on a Report whose figures are round and known."""

from __future__ import annotations

import csv
import io
import json
import math
import re

import fake_report as fake
import numpy as np
import pytest

from simkit.render import flatten, plain, to_csv, to_dict, to_html_fragment, to_json, to_markdown
from simkit.render_tables import number, per_sample, ratios, verdict
from simkit.render_text import to_text


def test_the_object_has_the_keys_others_build_on() -> None:
    found = to_dict(fake.report())
    wanted = {
        "iteration_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "mfu", "hfu", "peak_allocated_gib",
        "peak_reserved_gib", "peak_memory_gib", "fits", "breakdown", "memory", "per_stage", "interval_90", "bottleneck",
        "sensitivities", "cost_usd_per_hour", "assumptions", "warnings", "scenario", "versions",
    }  # fmt: skip
    assert wanted <= set(found)
    assert (found["peak_allocated_gib"], found["peak_reserved_gib"], found["peak_memory_gib"]) == (7.0, 7.25, 7.75)
    assert found["memory"] == {
        "weights_gib": 1.5, "gradients_gib": 1.5, "optimizer_gib": 3.0, "activations_gib": 1.0, "context_gib": 0.5,
    }  # fmt: skip
    assert found["interval_90"] == {"iteration_time_s": [0.9, 1.15]}
    assert set(found["versions"]) == {"simkit", "profiles"}


def test_the_disjoint_terms_sum_to_the_step() -> None:
    terms = dict(to_dict(fake.report())["breakdown"])
    assert terms.pop("compute_s") == pytest.approx(0.65)  # 0.2 + 0.4 + 0.05
    assert math.fsum(terms.values()) == pytest.approx(1.0, rel=1e-12)


def test_absent_means_not_applicable() -> None:
    found = to_dict(fake.report(tokens_per_s=None, tokens_per_s_per_gpu=None, hfu=None, cost={}, interval_90={}))
    assert not {"tokens_per_s", "tokens_per_s_per_gpu", "hfu", "cost_usd_per_hour", "why_not", "energy_j"} & set(found)
    assert found["fits"] is True


def test_does_not_fit_says_why_and_what_would() -> None:
    short = fake.memory(fits=False, why_not="needs 12 GiB of 9.5 GiB", way_out="micro_batch = 1 fits")
    report = fake.report(memory=short)
    assert to_dict(report)["why_not"] == "needs 12 GiB of 9.5 GiB"
    for text in (to_text(report, width=200), to_markdown(report), to_html_fragment(report)):
        assert "NO" in text
        assert "micro_batch = 1 fits" in text


def test_json_is_deterministic_and_strict() -> None:
    report = fake.report(facts={"bad": float("nan"), "worse": math.inf, "np": np.float64(2.5), "many": np.arange(2)})
    text = to_json(to_dict(report))
    assert text == to_json(to_dict(report))
    found = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    assert found["facts"] == {"np": 2.5, "many": [0, 1]}
    assert list(found) == sorted(found)


def test_plain_keeps_zero_and_false() -> None:
    assert plain({"a": 0, "b": False, "c": None, "d": (1.0, None)}) == {"a": 0, "b": False, "d": [1.0]}


def test_csv_has_one_row_a_report_under_one_header() -> None:
    text = to_csv([fake.report(), fake.h100()])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 2
    assert rows[0]["iteration_time_s"] == "1.0"
    assert rows[0]["memory.weights_gib"] == "1.5"
    assert rows[0]["interval_90.iteration_time_s.low"] == "0.9"
    assert (rows[0]["scenario.micro_batch"], rows[1]["scenario.micro_batch"]) == ("2", "")
    assert None not in rows[0]


def test_flatten_names_nested_keys() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": ["x", "y"]}) == {"a.b.c": 1, "d": "x | y"}


def test_ratios_by_hand() -> None:
    """7.2 USD/h at 100 samples/s is 20 USD a million samples; 10.8 USD/h at 200 is 15. 180 J against 22.5 a sample."""
    base, other = fake.report(), fake.h100()
    assert per_sample(base) == pytest.approx({"usd_per_million_samples": 20.0, "kwh_per_million_samples": 50.0})
    found = ratios(base, other)
    assert found == pytest.approx(
        {
            "iteration_time": 0.5,
            "throughput": 2,
            "price_per_hour": 1.5,
            "price_per_sample": 0.75,
            "energy_per_sample": 0.25,
        }
    )
    assert (
        verdict(base, other) == "1x4xh100-pcie: 2 times the throughput, 25% cheaper for the same work, 75% less energy"
    )
    assert "1.33 times as dear for the same work, 4 times the energy" in verdict(other, base)


@pytest.mark.parametrize("width", [60, 80, 110])
def test_text_is_plain_and_fits_its_width(width: int) -> None:
    text = to_text(fake.report(beside=(fake.h100(),)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    for figure in (
        "1 s (90 %: 900 ms to 1.15 s)",
        "51,200 tokens/s",
        "25.0%",
        "7.75 GiB",
        "7.20 USD",
        "-0.30",
        "0.75×",
    ):
        assert figure in text
    assert "…" not in text


def test_text_in_colour_and_in_ascii() -> None:
    report = fake.report(beside=(fake.h100(),))
    colored = to_text(report, color=True)
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored).split() == to_text(report).split()
    assert to_text(fake.report(beside=(fake.h100(),)), ascii_only=True).isascii()


def test_brief_text_holds_the_head_and_the_warnings_only() -> None:
    text = to_text(fake.report(), brief=True)
    assert "Step time" in text
    assert "1gbe was never fitted" in text
    assert "Where the time goes" not in text


def test_no_number_is_cut_where_a_table_needs_more_than_the_terminal() -> None:
    others = tuple(fake.h100() for _ in range(7))
    text = to_text(fake.report(beside=others), width=60)
    (row,) = (line for line in text.splitlines() if "0.25×" in line)
    assert row.split()[-8:] == ["1×", *["0.25×"] * 7]


def test_notebook_fragment_escapes_and_has_no_script() -> None:
    text = to_html_fragment(fake.report(assumptions=("<script>alert(1)</script> & more",)))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_markdown_escapes_the_bar() -> None:
    assert "a\\|b" in to_markdown(fake.report(assumptions=("a|b",)))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234.5, "1,234"), (12.3456, "12.35"), (0.00123456, "0.001235"), (5e9, "5,000,000,000")],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text
