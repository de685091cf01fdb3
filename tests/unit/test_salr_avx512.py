"""The AVX-512 paths on a CPU without them: native.cpp built with a header that computes each instruction by lane."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "kernels" / "salr" / "native.cpp"


def test_the_wide_paths_equal_the_reference(tmp_path: Path) -> None:
    from simkit.kernels.salr import native

    compiler = shutil.which("g++")
    if compiler is None or native.isa() in ("none", "portable"):
        pytest.skip("needs g++ and a CPU with AVX2")
    library = tmp_path / "emulated.so"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DSALR_EMULATED", "-include", HERE / "avx512_emulated.h"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True, timeout=120)
    environment = {**os.environ, "SIMKIT_SALR_LIB": str(library)}
    tests = [f"{HERE / 'test_salr.py'}::{name}" for name in ("test_native_equals_the_reference", "test_extreme_masks")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "skipped" not in done.stdout, "avx512 and avx512bf16 were run"
