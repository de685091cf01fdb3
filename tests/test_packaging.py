"""Is what is installed whole, small and separate from the checkout?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDER = {name: path for name, path in SETUPTOOLS["package-dir"].items() if name != "simkit"}
LIMIT_MB = 110
"""What the base install may add to an empty virtual environment (README)."""
KEPT_OUT = ("torch", "plotly", "pandas", "scipy")
PACKAGES = sorted(
    {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "simkit").rglob("__init__.py")} | set(FOLDER)
)
SLOW = "1" in (os.environ.get("SIMKIT_SLOW"), os.environ.get("SIMKIT_WHEEL"))
slow = pytest.mark.skipif(not SLOW, reason="builds and installs a wheel; SIMKIT_WHEEL=1 runs it")


def test_every_folder_of_code_is_a_package() -> None:
    """setup.py finds packages by their `__init__.py`, and adds the folders that package-dir maps."""
    bare = {p.parent for p in (ROOT / "simkit").rglob("*.py") if not (p.parent / "__init__.py").is_file()}
    assert not bare
    assert all((ROOT / path / "__init__.py").is_file() for path in FOLDER.values())


def test_every_data_file_of_a_package_is_installed() -> None:
    for package in PACKAGES:
        folder = ROOT / FOLDER.get(package, package.replace(".", "/"))
        patterns = SETUPTOOLS["package-data"].get(package, [])
        taken = {p for pattern in patterns for p in folder.glob(pattern)}
        inner = [folder / name.rpartition(".")[2] for name in PACKAGES if name.startswith(f"{package}.")]
        data = {p for p in folder.rglob("*") if p.suffix in (".toml", ".csv", ".json") or p.name == "py.typed"}
        left = {p for p in data - taken if not any(p.is_relative_to(i) for i in inner)}
        assert not left, f"{package}: package-data lacks {sorted(map(str, left))[:3]}"


def test_the_version_is_said_once_and_alike() -> None:
    import simkit

    assert simkit.__version__ == PROJECT["project"]["version"]
    assert f"## {simkit.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_heavy_packages_stay_in_extras() -> None:
    base = " ".join(PROJECT["project"]["dependencies"])
    assert not [name for name in KEPT_OUT if name in base]
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"plot", "fit", "kernels", "dashboard", "cluster", "test", "all"} <= set(extras)


def size_mb(folder: Path) -> float:
    """Disk use in 1e6 bytes, each file in whole blocks of 4096 bytes as `du` counts it."""
    return (
        sum(-(-p.stat().st_size // 4096) * 4096 for p in folder.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: a `build/` left in the checkout would put files into the wheel that are gone from the source.
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source") / "simkit"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "venv", "out")
    shutil.copytree(ROOT, source, ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, timeout=300)
    (found,) = out.glob("*.whl")
    return found


@slow
def test_the_wheel_is_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        folder = ROOT / FOLDER.get(package, package.replace(".", "/"))
        kept = [p for p in folder.rglob("*") if p.suffix in (".py", ".toml", ".csv")]
        inside = {f"{package.replace('.', '/')}/{p.relative_to(folder).as_posix()}" for p in kept}
        assert inside <= names, f"the wheel lacks {sorted(inside - names)[:3]}"
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"simkit"}


@slow
def test_an_installed_wheel_predicts_and_is_small(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    before = size_mb(home)
    python = home / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=600)
    added = size_mb(home) - before

    def output(*command: str | Path) -> str:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout

    assert "bert-large" in output(home / "bin" / "simkit", "predict", "--cluster", "50x3080")
    assert str(home) in output(python, "-c", "import simkit; print(simkit.__file__)")
    listed = output(python, "-m", "pip", "list", "--format=freeze")
    assert not [name for name in KEPT_OUT if f"\n{name}==" in f"\n{listed}"]
    print(f"the base install adds {added:.1f} MB to {before:.1f} MB")
    assert added <= LIMIT_MB, f"the base install adds {added:.0f} MB"
