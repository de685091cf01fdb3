"""Do the examples run, and do they still say what is written beside them?"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NEEDS = {"own_module": "torch"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    needed = NEEDS.get(script.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed (extra `kernels`)")
    path = os.pathsep.join(p for p in (str(EXAMPLES), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == script.with_suffix(".out").read_text(encoding="utf-8")


def test_every_output_has_its_script() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.out")} == {p.stem for p in SCRIPTS}
    assert len(SCRIPTS) >= 4
