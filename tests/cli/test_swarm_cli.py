"""What a user of `simkit swarm` meets: an answer in text and JSON, pages and traces, and one line for bad input."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest

from simkit.cli import main

BASE = ["swarm", "--peers", "12x3080", "--inter", "wan-1gbps", "--model", "bert-large", "--dp", "2", "--pp", "6",
        "--hours", "4"]  # fmt: skip


def ask(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    code = main([*BASE, *more])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_the_object_alone_and_the_same_on_any_workers(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for workers in ("1", "2"):
        code, out, err = ask(capsys, "--json", "--replications", "2", "--backup-pool", "1", "--workers", workers)
        assert (code, err) == (0, "")
        texts.append(out)
    assert texts[0] == texts[1]
    answer = json.loads(texts[0])
    for key in ("goodput", "useful_tokens_per_s", "lost_work_fraction", "recoveries", "utilisation",
                "throughput_timeline", "cost_usd_per_hour", "datacentre", "assumptions"):  # fmt: skip
        assert key in answer
    assert len(answer["throughput_timeline"]) == 96


def test_text_names_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "--goodput-above", "0.5", "--wiring", "fixed", "--churn", "weibull:3h,shape=0.6")
    assert code == 0
    for word in ("Goodput", "Lost work", "Recoveries", "Utilisation", "Backup pool", "4xh100-pcie-80gb", "Assumed"):
        assert word in out


def test_trace_and_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, page = tmp_path / "t.json", tmp_path / "p.html"
    more = ["--html", str(page)] if importlib.util.find_spec("plotly") else []
    code, _, _ = ask(capsys, "--trace", str(trace), "--quiet", *more)
    assert code == 0
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and e["pid"] > 1}
    assert len(tracks) >= 12
    for track in tracks:
        mine = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine))
    if more:
        assert "Work over time" in page.read_text(encoding="utf-8")


def test_peers_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "peers.csv"
    table.write_text("device,up_Bps,down_Bps,latency_s,count\n3080,100 Mb/s,500 Mb/s,10ms,8\n"
                     "4090,200 Mb/s,1 Gb/s,10ms,4\n", encoding="utf-8")  # fmt: skip
    code = main(["swarm", "--peers", str(table), "--model", "bert-large", "--hours", "1", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert json.loads(out)["plan"]["peers"] == 12


@pytest.mark.parametrize("bad", [["--churn", "foo"], ["--churn", "exponential:4"], ["--backup-pool", "x"],
                                 ["--state-from", "moon"], ["--replications", "0"], ["--storm", "2h"],
                                 ["--hours", "-3"], ["--goodput-above", "3"], ["--latency", "eu=3ms"],
                                 ["--churn", "trace:nowhere.csv"], ["--cluster", "8x3080"], ["--graceful", "7"],
                                 ["--wiring", "stochastic", "--goodput-above", "0.9"], ["--task", "inference"]])
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], bad: list[str]) -> None:
    code, out, err = ask(capsys, *bad)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
