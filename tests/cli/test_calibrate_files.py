"""`simkit calibrate` of one's own files, as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from simkit.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fake_measurements import nccl_log


def test_a_log_becomes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = str(nccl_log(tmp_path / "ar.log")), str(tmp_path / "mine")
    assert main(["calibrate", "--data", log, "--device", "a100", "--link", "nvlink3", "--out", out]) == 0
    text, remarks = capsys.readouterr()
    assert "nccl-tests" in text
    assert "skipped" in text
    assert "all_reduce" in text
    assert "--profiles" in remarks
    assert main(["predict", "--cluster", "1x8xa100", "--model", "gpt2", "--profiles", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


def test_json_is_the_object_alone_and_nothing_is_written_without_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(nccl_log(tmp_path / "ar.log"))
    assert main(["calibrate", "--data", log, "--link", "nvlink3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    file = found["files"][0]
    assert file["total"] == file["used"] + sum(s["count"] for s in file["skipped"])
    assert found["fits"][0]["dataset"] == ["ar"]
    assert found["written"] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ar.log"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "x"), "--device or --link"),
        (("--device", "a100", "--write"), "--write"),
        (("--device", "a100", "--gpus-per-node", "0"), "--gpus-per-node"),
        (("--device", "a100"), "told too little"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(nccl_log(tmp_path / "ar.log"))
    assert main(["calibrate", "--data", log, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_without_scipy_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, package=None: None if name == "scipy" else found(name, package)
    )
    assert main(["calibrate", "--data", str(tmp_path), "--device", "a100"]) == 2
    assert "simkit-perf[fit]" in capsys.readouterr().err


def test_rates_that_no_link_has_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 GiB at 1e17 byte/s is over before a kernel is launched."""
    rows = "".join(f"all_reduce,{2**n},8,99999999\n" for n in (28, 29, 30))
    (tmp_path / "l.csv").write_text("op,size,ranks,busbw_gbps\n" + rows, encoding="utf-8")
    words = ["--data", str(tmp_path / "l.csv"), "--link", "ib-hdr", "--device", "a100", "--out", str(tmp_path / "out")]
    assert main(["calibrate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "too little" in err
    assert not (tmp_path / "out").exists()
