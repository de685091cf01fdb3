"""`simkit sweep` as a user meets it: a process, its streams, its files and its exit code."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = ("--model", "resnet-50", "--cluster", "2x2x2080ti", "--precision", "fp32", "--micro-batch", "32")
GRID = ("--grid", "inter=1Gb/s@50us:25Gb/s@50us:4", "--grid", "method=s-sgd,acp-sgd")


def simkit(*arguments: str, code: int = 0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SIMKIT_")}
    paths = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "simkit.cli", "sweep", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**clean, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def complaint(*arguments: str, cwd: Path = ROOT) -> str:
    done = simkit(*arguments, code=2, cwd=cwd)
    assert done.stdout == ""
    assert done.stderr.startswith("simkit: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_the_best_points_come_first() -> None:
    done = simkit(*JOB, *GRID, "--best", "3", "--by", "samples_per_s")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["inter", "method", "samples_per_s"]
    rates = [float(line.split()[2]) for line in lines[1:4]]
    assert rates == sorted(rates, reverse=True)
    assert lines[-1].startswith("8 points: 8 fit, 0 do not, 0 refused")


def test_json_holds_every_point_and_equals_predict() -> None:
    found = json.loads(simkit(*JOB, *GRID, "--json").stdout)
    assert (found["points"], found["answered"], found["fitting"]) == (8, 8, 8)
    assert len(found["rows"]) == 8
    assert found["best"][0]["samples_per_s"] == max(row["samples_per_s"] for row in found["rows"])
    from simkit.predict import predict

    row = found["rows"][5]
    same = predict(
        model="resnet-50",
        cluster="2x2x2080ti",
        precision="fp32",
        micro_batch=32,
        inter=row["inter"],
        method=row["method"],
    )
    assert row["iteration_time_s"] == pytest.approx(same.iteration_time_s, rel=1e-12)


def test_csv_holds_a_row_for_every_point(tmp_path: Path) -> None:
    out = tmp_path / "all.csv"
    done = simkit(*JOB, *GRID, "--grid", "dp=4,3", "--out", str(out))
    assert f"wrote {out}" in done.stderr
    rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 16
    good, bad = rows[0], rows[1]
    assert (good["dp"], good["fits"], good["refused"]) == ("4", "true", "")
    assert bad["dp"] == "3"
    assert "dp" in bad["refused"]
    assert (bad["iteration_time_s"], bad["fits"], bad["global_batch"]) == ("", "", "")
    terms = ("forward_s", "backward_s", "compression_s", "exposed_comm_s", "optimizer_s", "host_s")
    assert sum(float(good[t]) for t in terms) == pytest.approx(float(good["iteration_time_s"]), rel=1e-12)
    assert float(good["inter_Bps"]) == 1.25e8
    assert os.listdir(tmp_path) == ["all.csv"]


def test_a_file_appears_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "all.csv"
    out.write_text("before")
    assert "no known metric" in complaint(*JOB, *GRID, "--by", "speed", "--out", str(out))
    assert out.read_text() == "before"
    assert os.listdir(tmp_path) == ["all.csv"]


def test_parquet_or_one_line_that_says_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "all.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        assert "simkit-perf[fit]" in complaint(*JOB, *GRID, "--out", str(out))
        assert os.listdir(tmp_path) == []
        return
    import pyarrow.parquet as pq

    simkit(*JOB, *GRID, "--grid", "dp=4,3", "--out", str(out))
    table = pq.read_table(out).to_pydict()
    assert len(table["method"]) == 16
    assert table["iteration_time_s"][0] > 0
    assert table["iteration_time_s"][1] is None


def test_a_page_of_one_and_of_two_axes(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    for grid, kind in ((GRID[:2], "Line of"), (GRID, "Heat map of")):
        page = tmp_path / "a.html"
        simkit(*JOB, *grid, "--html", str(page))
        text = page.read_text(encoding="utf-8")
        assert f"{kind} samples_per_s over inter" in text


def test_points_that_do_not_fit_or_cannot_be_are_counted() -> None:
    done = simkit("--model", "gpt2", "--cluster", "1x8xa100", "--grid", "tp=1,3", "--grid", "micro_batch=1,100000")
    assert "4 points: 1 fit, 1 do not, 2 refused" in done.stdout
    done = simkit("--model", "gpt2", "--cluster", "1x8xa100", "--grid", "tp=3")
    assert "! the product of tp 3" in done.stdout


def test_where_every_point_is_refused_the_reason_is_said() -> None:
    done = simkit("--grid", "cluster=8x4x2080tii,3x2080tii")
    assert "2 points: 0 fit, 0 do not, 2 refused" in done.stdout
    assert "'2080tii' is no known device" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--grid", "has no axis", "micro_batch=1,2,4")),
        (("--grid", "tpp=1,2"), ("'tpp'", "no known axis", "'tp'")),
        (("--grid", "tp"), ("is no axis",)),
        (("--grid", "tp=1,2", "--grid", "tp=4"), ("given twice",)),
        (("--grid", "micro_batch=1:8:"), ("micro_batch", "is no range")),
        (("--grid", "micro_batch=1:1e5:100000", "--grid", "grad_accum=1:1e5:100000"), ("10000000000", "at most 1e+08")),
        (("--grid", "micro_batch=1:30000:30000", "--json"), ("30000", "--out")),
        (("--grid", "rank=1,2", "--out", "points.txt"), ("points.txt", ".csv or .parquet")),
        (("--grid", "rank=1,2", "--out", "nowhere/points.csv"), ("cannot be written",)),
        (("--grid", "rank=1,2", "--best", "0"), ("--best", "1 to 1000")),
        (("--grid", "rank=1,2", "--by", "speed"), ("--by", "'speed'")),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    line = complaint(*arguments, cwd=tmp_path)
    assert all(word in line for word in words), line
    assert os.listdir(tmp_path) == []
