"""The command line as a user meets it: a process, its two streams and its exit code."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "--model",
    "resnet-50",
    "--cluster",
    "2x2x2080ti",
    "--inter",
    "10gbe",
    "--precision",
    "fp32",
    "--micro-batch",
    "32",
)


def simkit(*arguments: str, code: int = 0, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SIMKIT_")}
    paths = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "simkit.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**clean, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8", **environment},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def complaint(*arguments: str, cwd: Path = ROOT) -> str:
    """The one line on standard error of a command that must be refused."""
    done = simkit(*arguments, code=2, cwd=cwd)
    assert done.stdout == ""
    assert done.stderr.startswith("simkit: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_help_and_version() -> None:
    assert simkit().stdout == simkit("--help").stdout
    for command in (
        "predict",
        "compare",
        "validate",
        "calibrate",
        "trace",
        "count",
        "devices",
        "links",
        "models",
        "methods",
    ):
        assert f"  {command} " in simkit("--help").stdout
        text = simkit(command, "--help").stdout
        assert f"simkit {command}" in text
    assert simkit("--version").stdout.startswith("simkit 0.")


def test_help_lists_a_flag_for_every_field() -> None:
    from simkit.spec.scenario import FIELDS

    text = simkit("predict", "--help").stdout
    assert all(f"--{name.replace('_', '-')} " in text for name in FIELDS)


def test_a_stranger_gets_an_explained_answer() -> None:
    done = simkit("predict", "--cluster", "50x3080")
    assert done.stderr == ""
    for words in (
        "Step time",
        "Throughput",
        "Fits",
        "Bound by",
        "Where the time goes",
        "The same job elsewhere",
        "Assumed",
    ):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout


def test_json_is_the_object_alone_and_the_same_every_time() -> None:
    arguments = ("predict", *SMALL, "--json")
    first, second = simkit(*arguments), simkit(*arguments)
    assert first.stdout == second.stdout
    assert first.stderr == ""
    found = json.loads(first.stdout, parse_constant=lambda word: pytest.fail(word))
    wanted = {
        "iteration_time_s", "samples_per_s", "mfu", "hfu", "peak_allocated_gib", "peak_reserved_gib", "peak_memory_gib",
        "fits", "breakdown", "memory", "per_stage", "interval_90", "bottleneck", "sensitivities", "cost_usd_per_hour",
        "assumptions", "warnings", "scenario", "versions",
    }  # fmt: skip
    assert wanted <= set(found)
    assert found["samples_per_s"] == pytest.approx(2 * 2 * 32 / found["iteration_time_s"])
    terms = {k: v for k, v in found["breakdown"].items() if k != "compute_s"}
    assert math.fsum(terms.values()) == pytest.approx(found["iteration_time_s"], rel=1e-9)
    assert found["scenario"]["micro_batch"] == 32
    assert len(found["sensitivities"]) == 5
    low, high = found["interval_90"]["iteration_time_s"]
    assert low < found["iteration_time_s"] < high


def test_csv_and_markdown() -> None:
    (row,) = csv.DictReader(io.StringIO(simkit("predict", *SMALL, "--csv").stdout))
    assert row["scenario.micro_batch"] == "32"
    assert simkit("predict", *SMALL, "--markdown").stdout.startswith("## resnet-50")
    complaint("predict", *SMALL, "--csv", "--json")


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: resnet-50\ncluster: 2x2x2080ti\nmicro_batch: 4\nprecision: fp32\nseed: 1\n")

    def batch(*more: str) -> int:
        return json.loads(simkit("predict", str(path), "--json", *more).stdout)["scenario"]["micro_batch"]

    assert batch() == 4
    assert batch("--set", "micro_batch=8") == 8
    assert batch("--micro_batch", "16", "--set", "micro-batch=8") == 16


def test_does_not_fit_is_an_answer_unless_asked() -> None:
    arguments = (
        "predict",
        "--model",
        "bert-large",
        "--cluster",
        "1x1x2080ti",
        "--micro-batch",
        "4096",
        "--seq-len",
        "512",
    )
    found = json.loads(simkit(*arguments, "--json").stdout)
    assert found["fits"] is False
    assert found["why_not"]
    assert found["iteration_time_s"] > 0
    simkit(*arguments, "--fail-if-unfit", code=3)
    simkit("predict", *SMALL, "--fail-if-unfit")


def test_no_calibration_and_booleans() -> None:
    done = json.loads(simkit("predict", *SMALL, "--no-calibration", "--no-p2p", "--compile", "--json").stdout)
    assert done["scenario"]["p2p"] is False
    assert done["scenario"]["compile"] is True


BAD = {
    ("predict", "--cluster", "50x3081"): ("rtx3080", "3081"),
    ("predict", "--model", "bert-lage"): ("bert-large",),
    ("predict", "--cluster", "8x4x2080ti", "--inter", "10gbee"): ("10gbe",),
    ("predict", "--cluster", "8x4x2080ti", "--inter", "25Gb/x@30us"): ("Gb/x", "25Gb/s"),
    ("predict", "--cluster", "8x4x2080ti", "--inter", "25GHz@30us"): ("hz", "25Gb/s"),
    ("predict", "--cluster", "8x4x2080ti", "--inter", "25Gb/s"): ("latency", "25Gb/s@30us"),
    ("predict", "--set", "modle=gpt2"): ("'model'",),
    ("predict", "--set", "model"): ("--set key=value",),
    ("predict", "--micro-batch", "0"): ("micro_batch", "at least 1"),
    ("predict", "--micro-batch", "-4"): ("micro_batch", "at least 1"),
    ("predict", "--micro-batch", "2.5"): ("whole number",),
    ("predict", "--density", "nan"): ("density", "not finite"),
    ("predict", "--cluster", "0x3080"): ("0x3080",),
    ("predict", "--cluster", "1000000000x3080"): ("1000000000",),
    ("predict", "--cluster", "2x2x2080ti", "--dp", "3"): ("dp", "4"),
    ("predict", "--cluster", "2x2x2080ti", "--global-batch", "30"): ("global_batch", "4"),
    ("predict", "--method", "power-sdg"): ("power-sgd",),
    ("predict", "--recompute", "ful"): ("full",),
    ("predict", "--micro-bach", "4"): ("--micro-batch",),
    ("predict", "--micro", "4"): ("--micro-batch",),
    ("predict", "--micro-batch"): ("expected one argument",),
    ("predict", "50x3080"): ("--cluster 50x3080",),
    ("predict", "missing.yaml"): ("does not exist",),
    ("predict", "--profiles", "missing"): ("folder",),
    ("predict", "--html", "/"): ("directory",),
    ("compare", "--cluster", "50x3080"): ("one case", "comma list"),
    ("compare", "--tp", "1,,2"): ("empty entry",),
    ("compare", "--seed", ",".join(map(str, range(1001)))): ("at most 1000",),
    ("predicct",): ("predict",),
    ("--jsn", "predict"): ("before the command",),
    ("count",): ("MODEL",),
    ("count", "llama2-7"): ("llama",),
    ("count", "llama2-7b", "--dtype", "fp17"): ("fp16",),
    ("devices", "show"): ("name", "rtx3080"),
    ("devices", "show", "rtx3081"): ("rtx3080",),
    ("devices", "shw"): ("shw",),
    ("devices", "add", "my-gpu", "--memory", "24 GiB"): ("--bandwidth",),
    ("links", "show", "11gbe"): ("gbe",),
    ("models", "no-such-thing-here"): ("simkit models",),
    ("methods", "acp"): ("acp-sgd",),
    ("calibrate",): ("--data",),
    ("calibrate", "--data", "missing"): ("missing", "folder"),
    ("calibrate", "--data", "tests", "--dir", "missing"): ("--dir", "folder"),
    ("validate", "missing.csv"): ("does not exist",),
    ("validate", "."): ("directory",),
    ("trace", *SMALL, "--output", "/no/such/folder/t.json"): ("cannot be written",),
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_line_with_the_way_out(arguments: tuple[str, ...]) -> None:
    line = complaint(*arguments)
    for words in BAD[arguments]:
        assert words in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "density = nan\n", ("a.toml:1", "density", "finite")),
        ("a.json", '{"model": "gpt2"', ("a.json:1", "cut off")),
        ("a.yaml", "modell: gpt2\n", ("a.yaml:1", "'model'")),
        ("a.yaml", "tp: 0\n", ("a.yaml:1", "tp", "at least 1")),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / name).write_text(text)
    line = complaint("predict", name, cwd=tmp_path)
    assert all(word in line for word in words)


def test_control_characters_of_a_name_are_escaped() -> None:
    assert "\\x1b[31mred.yaml" in complaint("predict", "\x1b[31mred.yaml")


def test_a_directory_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").mkdir()
    assert "is a directory" in complaint("predict", "run.yaml", cwd=tmp_path)


def test_compare_clusters_and_methods() -> None:
    done = simkit(
        "compare",
        "--cluster",
        "8x4x2080ti",
        "--inter",
        "10gbe",
        "--method",
        "s-sgd,power-sgd",
        "--method",
        "acp-sgd",
        "--json",
    )
    found = json.loads(done.stdout)
    assert [case["label"] for case in found["cases"]] == ["s-sgd", "power-sgd", "acp-sgd"]
    assert found["cases"][0]["ratios"]["throughput"] == 1.0
    table = simkit("compare", "--cluster", "50x3080", "--cluster", "4xH100-PCIe", "--model", "bert-large").stdout
    assert "50x3080" in table
    assert "times the throughput" in table
    rows = list(csv.DictReader(io.StringIO(simkit("compare", *SMALL[:-1], "16,32", "--csv").stdout)))
    assert [row["scenario.micro_batch"] for row in rows] == ["16", "32"]


def test_count_as_published() -> None:
    """Llama-2-7B: 6,738,415,616 parameters; fp16 KV cache 524,288 bytes a token."""
    found = json.loads(simkit("count", "llama2-7b", "--json").stdout)
    assert found["params"] == 6738415616
    assert found["kv_bytes_per_token"] == 524288
    assert sum(found["by_module"].values()) == 6738415616
    assert "6,738,415,616" in simkit("count", "llama2-7b").stdout


def test_listings() -> None:
    assert "ga102-whitepaper" in simkit("devices", "show", "RTX 3080").stdout
    devices = json.loads(simkit("devices", "--json").stdout)
    (card,) = (d for d in devices if d["name"] == "rtx3080")
    assert card["peak_flops"]["fp16"] == 59.5e12  # NVIDIA's GA102 white paper, fp32 accumulation
    assert json.loads(simkit("links", "show", "10gbe", "--json").stdout)["Bps"] == 1.25e9
    assert "resnet-50" in simkit("models", "resnet").stdout
    assert {"s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"} <= set(
        json.loads(simkit("methods", "--json").stdout)["method"]
    )


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    simkit("devices", "add", "my-gpu", "--memory", "24 GiB", "--bandwidth", "1008 GB/s", "--peak", "fp16=165.2TFLOP/s",
           "--peak", "fp32=82.6TFLOP/s", "--dir", str(tmp_path))  # fmt: skip
    shown = json.loads(simkit("devices", "show", "my-gpu", "--profiles", str(tmp_path), "--json").stdout)
    assert (shown["memory_bytes"], shown["memory_Bps"]) == (24 * 2**30, 1008e9)
    assert "my-gpu" in simkit("devices", "list", "my", SIMKIT_PROFILES=str(tmp_path)).stdout
    simkit("predict", "--cluster", "2x1xmy-gpu", "--profiles", str(tmp_path))
    assert "exists already" in complaint(
        "devices",
        "add",
        "my-gpu",
        "--memory",
        "1 GiB",
        "--bandwidth",
        "1 GB/s",
        "--peak",
        "fp32=1TFLOP/s",
        "--dir",
        str(tmp_path),
    )


def test_validate_scores_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "id,source,model,cluster,inter,precision,micro_batch,metric,value\n"
        "a,me,resnet-50,1x1x2080ti,,fp32,64,samples_per_s,250\n"
        "b,me,resnet-50,1x1x2080ti,,fp32,64,samples_per_s,\n"
        "c,me,no-such-model,1x1x2080ti,,fp32,64,samples_per_s,250\n"
    )
    done = simkit("validate", "mine.csv", "--json", "--rows", "out.csv", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["rows"], found["predicted"]) == (3, 2)
    (refused,) = found["refused"]
    assert refused["id"] == "c"
    assert "no-such-model" in refused["reason"]
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert found["mape"] == pytest.approx(abs(250 / float(rows[0]["predicted"]) - 1))
    assert "1 refused" in simkit("validate", "mine.csv", cwd=tmp_path).stdout


def test_trace_is_a_chrome_trace(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    job = (*SMALL, "--method", "s-sgd")
    done = simkit("trace", *job, "--output", str(path))
    assert done.stdout == ""
    events = json.loads(path.read_text())["traceEvents"]
    step_s = json.loads(simkit("predict", *job, "--json").stdout)["iteration_time_s"]
    end_us = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert end_us == pytest.approx(step_s * 1e6, rel=1e-6)
    assert json.loads(simkit("trace", *job).stdout)["traceEvents"] == events


def test_a_trace_of_alternating_steps_says_so() -> None:
    """ACP-SGD sends P in one step and Q in the next; the predicted step is their mean."""
    assert "first of the alternating kinds of step" in simkit("trace", *SMALL, "--method", "acp-sgd").stderr


def test_quiet_leaves_the_head_lines() -> None:
    text = simkit("predict", *SMALL, "--quiet").stdout
    assert "Step time" in text
    assert "Assumed" not in text


def test_a_terminal_without_utf8_gets_ascii() -> None:
    assert simkit("predict", *SMALL, PYTHONIOENCODING="ascii").stdout.isascii()


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m simkit.cli devices | head -1; echo code ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("code 0", "code 141")


def test_a_fault_is_one_line_and_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import simkit.commands.methods as methods
    from simkit.cli import main

    def broken(args: object) -> int:
        raise ZeroDivisionError("by zero\nreally")

    monkeypatch.setattr(methods, "run", broken)
    assert main(["methods"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "ZeroDivisionError: by zero really" in error
    with pytest.raises(ZeroDivisionError):
        main(["methods", "--debug"])


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import simkit.commands.methods as methods
    from simkit.cli import main

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "run", interrupted)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "simkit: interrupted\n"


def test_the_predict_path_imports_nothing_heavy() -> None:
    code = (
        "import sys; from simkit.cli import main; main(['predict', '--cluster', '50x3080'])\n"
        "heavy = {'pydantic', 'yaml', 'simpy', 'pandas', 'scipy', 'plotly', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
