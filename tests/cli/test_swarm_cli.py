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
                                 ["--churn", "exponential:1ms"], ["--churn", "exponential:"],
                                 ["--churn", "correlated:4h,every=1us,share=0.3"], ["--slow-factor", "0.5"],
                                 ["--method", "s-sgd"], ["--method", "local-sgd"], ["--beside", "foo"],
                                 ["--wiring", "stochastic", "--goodput-above", "0.9"], ["--task", "inference"]])
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], bad: list[str]) -> None:
    code, out, err = ask(capsys, *bad)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(("flag", "value", "way_out"), [
    ("--checkpoint-rate", "0", "above 0"), ("--slow-for", "0s", "above 0"), ("--slow-every", "0s", "above 0"),
    ("--recruit", "0s", "above 0"), ("--startup", "-1s", "at least 0"), ("--spares-by", "foo", "fastest"),
    ("--hours", "1e12", "up to 1e+06"), ("--backup-pool", "-1", "from 0 to 9999999"), ("--slow-factor", "0", "above 0"),
    ("--beside", "foo", "devices"), ("--replications", "0", "from 1"), ("--goodput-above", "3", "between"),
])  # fmt: skip
def test_complaints_name_the_flag_and_a_way_out(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, way_out: str
) -> None:
    code, out, err = ask(capsys, f"{flag}={value}")
    assert (code, out) == (2, "")
    assert err.startswith(f"simkit: {flag} = ")
    assert way_out in err.partition(";")[2]


@pytest.mark.parametrize("flag", ["--html", "--trace"])
def test_files_are_checked_before_anything_is_computed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("simkit.swarm.study", lambda *a, **k: pytest.fail("computed first"))
    for bad in (tmp_path, tmp_path / "nowhere" / "x.html", tmp_path / ("x" * 300)):
        code, out, err = ask(capsys, flag, str(bad))
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def peers_of(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = main(["swarm", *flags, "--model", "bert-large", "--hours", "0.1", "--json"])
    out, err = capsys.readouterr()
    return code, out, err


def test_peers_may_be_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, device in ((["--peers", "3"], "3x3080"), (["--peers", "3", "--cluster", "4090"], "3x4090")):
        code, out, err = peers_of(capsys, *flags)
        assert code == 0, err
        answer = json.loads(out)
        assert answer["plan"]["peers"] == 3
        assert answer["assumptions"][0].startswith(f"cluster = {device}")
    for flags in (["--peers", "0"], ["--peers", "5xfoo"], ["--peers", "3", "--cluster", "4x3080"]):
        code, out, err = peers_of(capsys, *flags)
        assert (code, out) == (2, "")
        assert err.startswith("simkit: --peers = ")


def test_one_history_says_that_it_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, "--quiet")
    assert "one history" in out
    assert "--replications" in out
    _, out, _ = ask(capsys, "--json", "--replications", "2", "--churn", "exponential:1h")
    answer = json.loads(out)
    for name in ("goodput", "lost_work_fraction", "utilisation", "stalled_fraction"):
        low, high = answer["interval_95"][name]
        assert 0.0 <= low <= answer[name] <= high <= 1.0
    low, high = answer["interval_95"]["useful_samples_per_s"]
    assert 0.0 <= low <= high <= answer["ideal_samples_per_s"] * (1.0 + 1e-12)
    assert "cut to what can be" in answer["interval_method"]
