"""`simkit measure` as a user meets it: rows, a profile, a score; interrupted, continued, asked for nonsense."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
SIMKIT = [sys.executable, "-m", "simkit.cli"]
QUICK = ["--quick", "--threads", "1", "--name", "box"]


def simkit(*words: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*SIMKIT, *words], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measure")
    for suite in ("device", "links", "train"):
        simkit("measure", suite, *QUICK, "--out", "box", folder=folder)
    return folder


def test_what_was_measured_is_scored(measured: Path) -> None:
    files = [str(p.relative_to(measured)) for p in sorted((measured / "box" / "tables").glob("*.csv"))]
    assert [Path(f).name for f in files] == ["collective_box.csv", "kernel_box.csv", "train_box.csv"]
    done = simkit("validate", *files, "--profiles", "box", "--json", folder=measured)
    score = json.loads(done.stdout)
    assert score["refused"] == []
    assert score["rows"] == score["predicted"] == sum(len(table(measured / f)) for f in files)
    assert set(score["by_device"]) == {"box"}
    # A profile made of these very rows cannot be far off, however busy the machine was.
    assert score["by_file"]["kernel_box.csv"]["median_ape"] < 0.5


def test_a_row_says_on_what_when_and_how_often(measured: Path) -> None:
    for row in table(measured / "box" / "tables" / "kernel_box.csv"):
        assert row["device"] == "box"
        assert "torch" in row["software"]
        assert float(row["p10"]) <= float(row["value"]) <= float(row["p90"])
        assert int(row["repeats"]) >= 2
        assert time.strptime(row["date"], "%Y-%m-%d")


def test_the_profile_predicts_and_is_shown(measured: Path) -> None:
    shown = simkit("devices", "show", "box", "--profiles", "box", folder=measured).stdout
    assert "measured" in shown
    model = next((measured / "box" / "compute").glob("convnet-*.json"))
    words = ["--model", str(model.relative_to(measured)), "--cluster", "2x1xbox", "--inter", "loopback"]
    done = simkit(
        "predict", *words, "--micro-batch", "8", "--precision", "fp32", "--profiles", "box", "--json", folder=measured
    )
    alone = sum(json.loads(model.read_text(encoding="utf-8"))["measured"][k] for k in ("forward_s", "backward_s"))
    assert json.loads(done.stdout)["iteration_time_s"] >= alone


def test_the_same_command_again_measures_nothing(measured: Path) -> None:
    before = (measured / "box" / "tables" / "kernel_box.csv").read_bytes()
    done = simkit("measure", "device", *QUICK, "--out", "box", "--json", folder=measured)
    answer = json.loads(done.stdout)
    assert answer["measured"] == 0
    assert answer["kept"] == len(table(measured / "box" / "tables" / "kernel_box.csv"))
    assert (measured / "box" / "tables" / "kernel_box.csv").read_bytes() == before


def test_calibrate_makes_the_same_profile_of_the_same_tables(measured: Path) -> None:
    profile = measured / "box" / "devices" / "box.toml"
    before = profile.read_bytes()
    simkit("calibrate", "--data", "box/tables", "--profiles", "box", "--write", folder=measured)
    assert profile.read_bytes() == before


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    words = ["measure", "operators", "--threads", "1", "--name", "box", "--out", "box"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*SIMKIT, *words], cwd=tmp_path, text=True, **pipes)
    path = tmp_path / "box" / "tables" / "kernel_box.csv"
    end = time.monotonic() + 120
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in errors
    assert table(path)


def _ranks(parent: int) -> list[int]:
    """Children of a process, of Linux's /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("measuring", [False, True])
def test_ranks_end_with_their_parent(number: signal.Signals, measuring: bool, tmp_path: Path) -> None:
    words = ["measure", "links", "--threads", "1", "--name", "box", "--out", "box"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*SIMKIT, *words], cwd=tmp_path, text=True, **pipes)
    path, end, ranks = tmp_path / "box" / "tables" / "collective_box.csv", time.monotonic() + 120, []  # type: ignore[var-annotated]
    while (len(ranks) < 2 or (measuring and not path.exists())) and time.monotonic() < end:
        time.sleep(0.02)
        ranks = _ranks(process.pid)
    assert len(ranks) == 2
    if measuring:
        os.kill(ranks[1], signal.SIGSTOP)  # it cannot notice for itself that its work is over
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    assert "Traceback" not in errors
    end = time.monotonic() + 20
    while any(map(_alive, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [rank for rank in ranks if _alive(rank)]
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("mine", encoding="utf-8")
    done = simkit("measure", "device", "--quick", "--out", "afile", folder=tmp_path, code=2)
    assert "--out = 'afile' cannot be written" in done.stderr
    assert (tmp_path / "afile").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["measure", "operator"], "did you mean 'operators'"),
        (["measure", "device", "--threads", "4096"], "--threads"),
        (["measure", "device", "--threads", "0"], "leave it out"),
        (["measure", "device", "--batch", "4"], "not for this suite"),
        (["measure", "train", "--batch", "0"], "1 or more"),
        (["measure", "device", "--name", "../x"], "no profile name"),
        (["measure", "device", "--name", ""], "no profile name"),
        (["measure", "links", "--ranks", "1"], "too few"),
        (["measure", "links", "--ranks", "100000"], "out of range; 2 to"),
        (["measure", "links", "--address", "256.1.1.1"], "is no address"),
        (["measure", "train", "--model", "nowhere:nothing"], "cannot be imported"),
        (["measure", "train", "--model", "torch.nn:ReLU"], "example_inputs"),
        (["measure", "device", "--device", "cuda"], "cuda"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = simkit(*words, "--quick", "--out", "box", folder=tmp_path, code=2)
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
