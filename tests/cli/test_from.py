"""`--from FILE` as a user meets it: a process, its streams and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """#!/bin/bash
GPUS=8
torchrun --nproc_per_node $GPUS --nnodes 2 pretrain_gpt.py \\
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 \\
  --vocab-size 50257 --micro-batch-size 8 --global-batch-size 256 --bf16 --lr $LR --tensor-model-parallel-size 2
"""
CONFIG = {"train_batch_size": 256, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": "auto"}


def simkit(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SIMKIT_")}
    paths = os.pathsep.join(filter(None, (str(ROOT), clean.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "simkit.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**clean, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def test_a_script_alone_is_an_answer(folder: Path) -> None:
    answer = json.loads(simkit("predict", "--from", "run.sh", "--json", cwd=folder).stdout)
    scenario = answer["scenario"]
    # 16 GPUs in tensor pairs are 8 data ranks; 256 samples are 8 · 8 · 4.
    assert (scenario["dp"], scenario["tp"], scenario["grad_accum"]) == (8, 2, 4)
    assert scenario["model"] == "megatron-12l-768h-12a"
    assert answer["imported"]["mapped"]
    assert any(e["key"] == "--lr" and "$LR" in e["reason"] for e in answer["imported"]["ignored"])
    assert any(e["key"] == "cluster" for e in answer["imported"]["auto"])


def test_several_files_and_flags_that_win(folder: Path) -> None:
    both = ("--from", "run.sh", "--from", "ds_config.json")
    flags = ("--cluster", "1x8xa100", "--micro-batch", "4", "--json")
    answer = json.loads(simkit("predict", *both, *flags, cwd=folder).stdout)
    scenario = answer["scenario"]
    assert scenario["cluster"].startswith("1x8xa100")
    assert (scenario["stack"], scenario["zero"], scenario["micro_batch"]) == ("megatron-deepspeed", 1, 4)
    # 256 samples over 4 data ranks in micro-batches of 4
    assert (scenario["dp"], scenario["grad_accum"]) == (4, 16)
    lost = [e for e in answer["imported"]["ignored"] if "given otherwise" in e["reason"]]
    assert [e["key"] for e in lost] == ["--micro-batch-size"]


def test_the_text_tells_what_was_read(folder: Path) -> None:
    text = simkit("predict", "--from", "run.sh", cwd=folder).stdout
    assert "Read from files" in text
    assert "--micro-batch-size 8: micro_batch = 8" in text
    assert max(map(len, text.splitlines())) <= 80


def test_other_commands_read_them_too(folder: Path) -> None:
    table = simkit("compare", "--from", "run.sh", "--cluster", "1x8xa100,1x8xh100", "--csv", cwd=folder).stdout
    assert len(table.splitlines()) == 3
    assert "megatron-12l-768h-12a" in table


def test_complaints_name_the_file_and_the_key(folder: Path) -> None:
    (folder / "bad.json").write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": 3}), encoding="utf-8")
    cases = {
        ("bad.json",): "bad.json: train_batch_size = 256 is no multiple of train_micro_batch_size_per_gpu 3",
        ("nothing.json",): "nothing.json: does not exist",
        ("run.sh", "bad.json"): "bad.json: train_batch_size",
    }
    for files, says in cases.items():
        flags = [part for file in files for part in ("--from", file)]
        done = simkit("predict", *flags, cwd=folder, code=2)
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert says in done.stderr


def test_what_resolving_refuses_is_told_in_the_words_of_the_file(folder: Path) -> None:
    # 12 heads are not divided by 8.
    text = SCRIPT.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8")
    (folder / "run.sh").write_text(text, encoding="utf-8")
    done = simkit("predict", "--from", "run.sh", cwd=folder, code=2)
    assert "run.sh: --tensor-model-parallel-size = 8" in done.stderr
