"""Whatever is typed, the command line answers or refuses in one line: 2,000 tries over flags and scenario files."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simkit.cli import main
from simkit.spec.scenario import FIELDS

CALM = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, print_blob=False)

NAMES = {
    "model": ("resnet-50", "resnet-18", "bert-base", "gpt2", "vgg-16", "llama2-7b", "resnet50", "bert"),
    "cluster": ("50x3080", "8x4x2080ti", "1x1x3080", "3080", "4xH100-PCIe", "2x8xa100", "30x3080+20x4090", "2xdgx-a100",
                "0x3080", "x", "1e9x3080"),
    "intra": ("nvlink2", "pcie3x16", "pcie4x16", "64GB/s@5us", "nvlink"),
    "inter": ("10gbe", "1gbe", "ib-edr", "wan-100mbps", "25Gb/s@30us", "100Mb/s@20ms", "-1Gb/s@1us", "1Gb/s"),
    "method": ("s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd", "local-sgd"),
    "algorithm": ("auto", "ring", "tree", "double-tree", "halving-doubling", "hierarchical", "direct"),
    "stack": ("pytorch", "horovod", "megatron", "mystack"),
}  # fmt: skip
JUNK = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        (
            "",
            " ",
            "nan",
            "-inf",
            "1e400",
            "0",
            "-1",
            "1e9",
            "true",
            "no",
            "0x10",
            "½",
            "--",
            "-",
            "../..",
            "\0",
            "a\nb",
            "%s",
            "{}",
        )
    ),
)


def value_of(name: str) -> st.SearchStrategy[Any]:
    """Mostly sensible values of a field, junk now and then."""
    spec = FIELDS[name]
    if name in NAMES:
        good: st.SearchStrategy[Any] = st.sampled_from(NAMES[name])
    elif spec.choices:
        good = st.sampled_from(spec.choices)
    elif spec.kind == "bool":
        good = st.booleans()
    elif spec.kind == "int":
        good = st.one_of(
            st.integers(1, 64), st.integers(1, 4), st.sampled_from((0, 1, 2, 4, 8, 32, 512, 10**6, 10**12, 10**30))
        )
    else:
        good = st.one_of(st.floats(0, 1), st.floats(), st.sampled_from((1e9, 1e300)))
    return st.integers(0, 19).flatmap(lambda die: JUNK if die == 0 else good)


FIELD = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), value_of(name)))
ENTRIES = st.lists(FIELD, max_size=6)
COMMANDS = st.sampled_from(("predict", "predict", "predict", "compare", "trace"))
FORMS = st.sampled_from(
    ((), ("--json",), ("--csv",), ("--markdown",), ("--quiet",), ("--fail-if-unfit",), ("--no-calibration",))
)


def try_out(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    said = err.getvalue()
    assert code in (0, 2, 3), (arguments, code, said)
    assert "Traceback" not in out.getvalue() + said
    if code == 2:
        assert out.getvalue() == "", arguments
        assert said.startswith("simkit: "), arguments
        assert said.count("\n") == 1, (arguments, said)
        assert len(said.splitlines()) == 1, (arguments, said)
        assert len(said) < 2000
    elif "--json" in arguments and not {"-h", "--help", "help"} & set(arguments):
        json.loads(out.getvalue(), parse_constant=lambda word: pytest.fail(f"{word} in {arguments}"))


def as_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [f"{flag}={value}"]


@settings(CALM, max_examples=900)
@given(command=COMMANDS, entries=ENTRIES, form=FORMS)
def test_flags(command: str, entries: list[tuple[str, Any]], form: tuple[str, ...]) -> None:
    form = {"trace": (), "compare": ("--seed=1,2", *form)}.get(command, form)
    try_out([command, *(text for name, value in entries for text in as_flag(name, value)), *form])


@settings(CALM, max_examples=150)
@given(
    words=st.lists(
        st.one_of(
            JUNK,
            st.sampled_from(
                (
                    "predict",
                    "compare",
                    "count",
                    "devices",
                    "links",
                    "show",
                    "add",
                    "--json",
                    "--set",
                    "--tp",
                    "--help",
                    "tp=2",
                    "-1",
                    "gpt2",
                )
            ),
        ),
        max_size=6,
    )
)
def test_words(words: list[str]) -> None:
    # Two words name a file to write to; everything else only reads.
    try_out([w for w in words if w not in ("--html", "--output")])


def to_yaml(entries: dict[str, Any]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in entries.items())


def to_toml(entries: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return json.dumps(value) if isinstance(value, str) else repr(value)

    return "".join(f"{name} = {text(value)}\n" for name, value in entries.items())


def broken(text: str, cut: int, junk: str) -> str:
    """The text cut off, or with something foreign in it."""
    place = cut % (len(text) + 1)
    return text[:place] if len(junk) % 2 else text[:place] + junk + text[place:]


@pytest.mark.parametrize(
    ("suffix", "form"), [("yaml", to_yaml), ("toml", to_toml), ("json", json.dumps)], ids=("yaml", "toml", "json")
)
def test_files(suffix: str, form: Callable[[dict[str, Any]], str], tmp_path: Path) -> None:
    path = tmp_path / f"run.{suffix}"

    @settings(CALM, max_examples=320)
    @given(
        entries=ENTRIES,
        harm=st.booleans(),
        cut=st.integers(0, 200),
        junk=st.one_of(JUNK, st.sampled_from(("[", "{", ":", "=", "nan", "\ufeff", "\t- "))),
    )
    def run(entries: list[tuple[str, Any]], harm: bool, cut: int, junk: str) -> None:
        text = form(dict(entries))
        path.write_bytes((broken(text, cut, junk) if harm else text).encode("utf-8", "surrogatepass"))
        try_out(["predict", str(path), "--json"])

    run()
