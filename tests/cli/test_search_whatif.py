"""`simkit search` and `simkit whatif` as a user meets them."""

from __future__ import annotations

import csv
import io
import json
import shlex

import pytest

from simkit.cli import main

JOB = ("--model", "llama-2-7b", "--cluster", "1x4xa100", "--seq-len", "2048", "--global-batch", "16")


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if code == 2:
        assert out == ""
        assert err.count("\n") == 1
        return err
    return out


def test_search_shows_plans_reasons_and_the_flags_of_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "search", *JOB, "--top", "3")
    assert "Struck out" in out
    assert "does not fit into memory" in out
    line = next(line for line in out.splitlines() if line.startswith("best: "))
    words = shlex.split(line.removeprefix("best: simkit "))
    step = json.loads(run(capsys, *words, "--json"))["iteration_time_s"]
    found = json.loads(run(capsys, "search", *JOB, "--json"))
    assert found["plans"][0]["iteration_time_s"] == pytest.approx(step, rel=1e-12)


def test_search_as_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "search", *JOB, "--top", "4", "--by", "memory", "--json"))
    assert [p["rank"] for p in found["plans"]] == [1, 2, 3, 4]
    assert found["asked"] == found["fitting"] + sum(p["plans"] for p in found["pruned"])
    rows = list(csv.DictReader(io.StringIO(run(capsys, "search", *JOB, "--top", "4", "--by", "memory", "--csv"))))
    assert [float(r["peak_memory_gib"]) for r in rows] == [p["peak_memory_gib"] for p in found["plans"]]


def test_a_list_is_what_to_try_and_a_value_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "search", *JOB, "--tp", "1,4", "--pp", "1", "--top", "100", "--json"))
    assert {(p["tp"], p["pp"]) for p in found["plans"]} == {(1, 1), (4, 1)}


def test_search_where_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("search", "--model", "llama-2-70b", "--cluster", "1x2x3080", "--offload", "none")
    assert "leanest" in run(capsys, *words)
    run(capsys, *words, "--fail-if-unfit", code=3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search", *JOB, "--by", "speed"), "--by"),
        (("search", *JOB, "--top", "0"), "--top"),
        (("search", *JOB, "--free", "2"), "--free"),
        (("search", *JOB, "--tp", "1,,2"), "empty"),
        (("search", *JOB, "--tp", "1,x"), "tp"),
        (("whatif", *JOB), "--change"),
        (("whatif", *JOB, "--change", "inter"), "FIELD=VALUE"),
        (("whatif", *JOB, "--change", "intre=10gbe"), "intre"),
        (("whatif", *JOB, "--change", "tp=1,tp=2"), "twice"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert said in run(capsys, *words, code=2)


def test_whatif_shows_both_steps(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("whatif", *JOB, "--zero", "3", "--change", "tp=2,sp=2", "--change", "recompute=full")
    out = run(capsys, *words)
    for word in ("before", "tp = 2, sp = 2", "recompute = full", "all together", "step time", "Bound by"):
        assert word in " ".join(out.split())
    found = json.loads(run(capsys, *words, "--json"))
    assert [case["label"] for case in found["cases"]] == ["tp = 2, sp = 2", "recompute = full", "all together"]
    rows = list(csv.DictReader(io.StringIO(run(capsys, *words, "--csv"))))
    step = next(r for r in rows if r["name"] == "iteration_time_s")
    assert float(step["before"]) == found["base"]["iteration_time_s"]


JOB = ("--cluster", "8x4x2080ti", "--inter", "10gbe", "--model", "bert-large")


def test_a_change_alone_that_is_refused_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", *JOB, "--change", "cluster=foo"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "'foo'" in err


def test_changes_of_one_field_are_not_put_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "whatif", *JOB, "--change", "inter=100gbe", "--change", "inter=1gbe")
    assert "all together: the changes exclude each other: inter" in text
    assert "Step time in 90 % of cases" in text
    assert "Assumed (not given)" in text
