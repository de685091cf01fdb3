"""Does the README tell the truth? Each block a reader would paste is run in an empty folder.

``console`` blocks: each line after ``$`` is one command. ``sh run`` and ``python`` blocks: one script each. Plain
``sh`` blocks (the two commands that install) are not run: they would install and test from inside a test.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [body for head, body in BLOCKS if head.strip() == kind]


COMMANDS = [line[2:] for body in blocks("console") for line in body.splitlines() if line.startswith("$ ")]


def environment() -> dict[str, str]:
    scripts = sysconfig.get_path("scripts")
    return os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}", "COLUMNS": "100"}


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 10
    assert len(blocks("sh run")) >= 3
    assert len(blocks("python")) >= 1
    assert all(c.split()[0] == "simkit" for c in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    if "--html" in command and importlib.util.find_spec("plotly") is None:
        pytest.skip("the extra `plot` is not installed")
    words = shlex.split(command)
    out = run(words, tmp_path)
    written = [words[i + 1] for i, w in enumerate(words[:-1]) if w in ("--output", "--html")]
    assert out.strip() or written
    assert all((tmp_path / name).stat().st_size > 0 for name in written)


@pytest.mark.parametrize("script", blocks("sh run"), ids=lambda s: s.split()[0])
def test_script(script: str, tmp_path: Path) -> None:
    assert run(["bash", "-e", "-c", script], tmp_path).strip()


@pytest.mark.parametrize("script", blocks("python"), ids=["python"] * len(blocks("python")))
def test_python(script: str, tmp_path: Path) -> None:
    if "import torch" in script and importlib.util.find_spec("torch") is None:
        pytest.skip("the extra `kernels` is not installed")
    assert run([sys.executable, "-c", script], tmp_path).strip()


def test_the_two_commands_that_install_are_there() -> None:
    commands = [body.strip() for body in blocks("sh")]
    assert len(commands) == 2
    for command in commands:
        script = ROOT / command.removeprefix("./")
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_accuracy_table_promises_no_more_than_is_held() -> None:
    registry = tomllib.loads((ROOT / "validation" / "registry.toml").read_text(encoding="utf-8"))["table"]
    said = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) % \|$", README, flags=re.MULTILINE)
    assert said
    for name, rows, bound in said:
        assert registry[name]["max_mape"] <= int(bound) / 100
        with (ROOT / "validation" / "measured" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            assert sum(1 for row in csv.DictReader(file) if row["value"]) == int(rows)
