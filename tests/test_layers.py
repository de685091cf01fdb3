"""Is the architecture still there? Import order, no cycles, nothing heavy before it is asked for, files of a size."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "units errors plugins",
    "spec",
    "roofline collectives compressors fusion network wire churn policies",
    "program workloads parallel schedules chain opgraph",
    "price memory count placement",
    "spans timeline exchange train des",
    "report render evaluate decentral methods intervals "
    "planner cost goodput breakdown predict grids sweep search operators swarm",
    "readers validate scoreboard calibrate measure",
    "trace plot dashboard compare whatif",
    "commands cli",
)
"""A module may import from its own line and from those above it; `render_text` belongs to `render`, and so on."""
LAYER = {name: i for i, line in enumerate(LAYERS) for name in line.split()}
HEAVY = {
    "pydantic",
    "simpy",
    "yaml",
    "rich",
    "pandas",
    "scipy",
    "plotly",
    "torch",
    "dash",
    "dask",
    "pyarrow",
    "safetensors",
}
MAX_FILE, MAX_FUNCTION = 450, 70
LARGE: dict[str, int] = {}
"""Files and functions (`file` or `file:function`) above the caps, with a size they may only fall below."""


def modules() -> dict[str, Path]:
    """{dotted name: file} of the package."""
    found = {}
    for path in sorted((ROOT / "simkit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, bool]]:
    """(import statement, whether it runs when the module is imported)."""
    checking = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    late = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, id(node) not in checking | late


def targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES else str(node.module)


def inside(name: str) -> dict[str, bool]:
    """{module of the package that `name` imports: at once}."""
    found: dict[str, bool] = {}
    for node, at_once in statements(TREES[name]):
        for target in targets(node):
            if target.split(".")[0] == "simkit":
                found[target] = found.get(target, False) or at_once
    return found


def layer(name: str) -> int:
    key = name.split(".")[1]
    key = key if key in LAYER else key.partition("_")[0]
    assert key in LAYER, f"{name} has no layer: write {key} into LAYERS of tests/test_layers.py where it belongs"
    return LAYER[key]


@pytest.mark.parametrize("name", [n for n in MODULES if n != "simkit"])
def test_arrows_point_down(name: str) -> None:
    # `simkit` itself holds the version and lazy names, and is no module of any layer.
    # `simkit.kernels` stands beside the layers: the next test but one says who may use it.
    judged = [t for t in inside(name) if t != "simkit" and not t.startswith("simkit.kernels")]
    above = [t for t in judged if layer(t) > layer(name)]
    assert not above, f"{name} (layer {layer(name)}) imports {above} from above"


def test_no_cycles() -> None:
    graph = {name: {t for t, at_once in inside(name).items() if at_once and t != name} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", MODULES)
def test_nothing_heavy_is_imported_at_once(name: str) -> None:
    eager = {t.split(".")[0] for node, at_once in statements(TREES[name]) if at_once for t in targets(node)}
    assert not eager & HEAVY, f"import {sorted(eager & HEAVY)} inside the function that needs it"


def test_the_model_never_imports_the_kernels() -> None:
    modelling = [n for n in MODULES if not n.startswith("simkit.measure")]
    guilty = [n for n in modelling if any(t.startswith("simkit.kernels") for t in inside(n))]
    assert not guilty


@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "text"])
def test_predict_loads_nothing_heavy(form: list[str]) -> None:
    code = (
        "import sys, json; from simkit.cli import main\n"
        f"code = main(['predict', '--cluster', '50x3080', *{form!r}])\n"
        "print(json.dumps([code, sorted({m.split('.')[0] for m in sys.modules})]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    status, loaded = json.loads(done.stderr.strip().splitlines()[-1])
    assert status == 0
    assert not set(loaded) & HEAVY


def test_house_size() -> None:
    sizes = {}
    for path in [*MODULES.values(), *(ROOT / "benchmarks").glob("*.py")]:
        text, file = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        sizes[file] = (len(text.splitlines()), MAX_FILE)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                sizes[f"{file}:{node.name}"] = ((node.end_lineno or 0) - node.lineno + 1, MAX_FUNCTION)
    over = {key: size for key, (size, cap) in sizes.items() if size > LARGE.get(key, cap)}
    assert not over, f"two things in one: {over}"
    small = [key for key in LARGE if key not in sizes or sizes[key][0] <= sizes[key][1]]
    assert not small, f"no longer large, take it off the list: {small}"
