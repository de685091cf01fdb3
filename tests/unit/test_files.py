"""Scenario files: the three formats say the same, and whatever is wrong is said in one line that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simkit.errors import InputError
from simkit.spec.files import MAX_FILE_BYTES, apply_set, read_scenario, write_text

TEXTS = {
    "run.yaml": "model: bert-large\ncluster: 8x4x2080ti\nmicro-batch: 8\ncompile: no\nmethod:\n",
    "run.toml": 'model = "bert-large"\ncluster = "8x4x2080ti"\nmicro_batch = 8\ncompile = false\n',
    "run.json": '{"model": "bert-large", "cluster": "8x4x2080ti", "micro_batch": 8, "compile": false, "method": null}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_formats_say_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TEXTS[name])
    wanted = {"model": "bert-large", "cluster": "8x4x2080ti", "micro_batch": 8, "compile": False}
    assert read_scenario(tmp_path / name) == wanted


def test_yaml_surprises_do_not_happen(tmp_path: Path) -> None:
    """YAML 1.1 reads these as False, 8, a text, and False; the fields want a name, 10, 0.001 and a name."""
    (tmp_path / "a.yaml").write_text("overlap: 'none'\nrank: 010\ndensity: 1e-3\nmodel: no\n")
    assert read_scenario(tmp_path / "a.yaml") == {"overlap": "none", "rank": 10, "density": 0.001, "model": "no"}


BAD = [
    ("a.yaml", "modell: bert-large\n", "a.yaml:1: key = 'modell'", "'model'"),
    ("a.yaml", "model: gpt2\nmodel: bert-large\n", "a.yaml:2: model", "given twice"),
    ("a.yaml", "micro_batch: 1\nmicro-batch: 2\n", "a.yaml:2: micro_batch", "given twice"),
    ("a.yaml", "model: gpt2\ntp: [1, 2]\n", "a.yaml:2: tp", "is a list"),
    ("a.yaml", "model: gpt2\ntp: {a: 2}\n", "a.yaml:2: tp", "is a table"),
    ("a.yaml", "- gpt2\n", "a.yaml: ", "no keys at its top level"),
    ("a.yaml", "model: [gpt2\n", "a.yaml:2: ", "no valid YAML"),
    ("a.yaml", "model: gpt2\n---\nmodel: gpt2\n", "a.yaml:2: ", "no valid YAML"),
    ("a.yaml", "density: .nan\n", "a.yaml:1: density = '.nan'", "not a number"),
    ("a.yaml", "density: nan\n", "a.yaml:1: density = 'nan'", "not finite"),
    ("a.yaml", "# nothing\n", "a.yaml: ", "holds no key"),
    ("a.yaml", "? [a]\n: b\n", "a.yaml:1: ", "no name"),
    ("a.yaml", "recompute: no\n", "a.yaml:1: recompute = 'no'", "'none'"),
    ("a.yaml", "[" * 5000, "a.yaml", "YAML|nested"),
    ("a.toml", "density = nan\n", "a.toml:1: density", "not finite"),
    ("a.toml", 'model = "gpt2"\ndensity = inf\n', "a.toml:2: density", "not finite"),
    ("a.toml", "tp = 0\n", "a.toml:1: tp = 0", "too small; at least 1"),
    ("a.toml", "tp = -4\n", "a.toml:1: tp = -4", "too small"),
    ("a.toml", "seed = 2020-01-01\n", "a.toml:1: seed", "not a number"),
    ("a.toml", "tp = [1, 2]\n", "a.toml:1: tp", "is a list"),
    ("a.toml", "[tp]\nx = 1\n", "a.toml:1: tp", "is a table"),
    ("a.toml", "tp = 1\ntp = 2\n", "a.toml:2: ", "no valid TOML"),
    ("a.toml", "tp = \n", "a.toml:1: ", "no valid TOML"),
    ("a.toml", "tp = 1" + "0" * 400 + "\n", "a.toml:1: tp", "not finite"),
    ("a.toml", "tp = 1" + "0" * 5000 + "\n", "a.toml", "no valid TOML"),
    ("a.json", '{"model": "gpt2", "tp": 2', "a.json:1: ", "cut off"),
    ("a.json", "", "a.json:1: ", "cut off"),
    ("a.json", '{"density": NaN}', "a.json: ", "NaN, which is no JSON number"),
    ("a.json", '{"density": -Infinity}', "a.json: ", "-Infinity, which is no JSON number"),
    ("a.json", '{"tp": 2, "tp": 4}', "a.json:1: tp", "given twice"),
    ("a.json", '{"tp": {"x": 1}, "dp": 2}', "a.json:1: tp", "is a table"),
    ("a.json", '["gpt2"]', "a.json: ", "no keys at its top level"),
    ("a.json", '{"tp": true}', "a.json:1: tp = True", "not a number"),
    ("a.json", '{"tp": 1' + "0" * 9000 + "}", "a.json:1: tp", "not finite"),
    ("a.json", "[" * 100000, "a.json", "JSON"),
    ("a.json", '{\n"tp": 2.5}', "a.json:2: tp = 2.5", "not a whole number; for example 3"),
    ("a.txt", "model = gpt2", "a.txt: ", "name it .yaml, .toml or .json"),
]


@pytest.mark.parametrize(("name", "text", "start", "what"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, name: str, text: str, start: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=what) as caught:
        read_scenario(tmp_path / name)
    line = str(caught.value)
    assert line.startswith(str(tmp_path / start))
    assert "\n" not in line
    assert len(line) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: gpt2\nstack: \xe9t\xe9\n")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "huge.json").write_text(" " * (MAX_FILE_BYTES + 1))
    cases = {
        "latin.yaml": "latin.yaml:2: is not UTF-8",
        "folder.json": "is a directory",
        "huge.json": "larger than 1024 KiB",
        "missing.toml": "does not exist",
        "nul\0.toml": "cannot be read",
        "x" * 300 + ".toml": "cannot be read",
    }
    for name, what in cases.items():
        with pytest.raises(InputError, match=what):
            read_scenario(tmp_path / name)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: gpt2\n")
    path.chmod(0)
    with pytest.raises(InputError, match="permission denied"):
        read_scenario(path)


def test_set_wins_over_the_file_and_takes_away() -> None:
    given = {"model": "gpt2", "tp": 2}
    assert apply_set(given, ["micro-batch=4", "tp=", "model = bert-large"]) == {"model": "bert-large", "micro_batch": 4}
    assert given == {"model": "gpt2", "tp": 2}


@pytest.mark.parametrize(
    ("setting", "what"),
    [("tp", "is no setting; write --set key=value"), ("tpp=2", "'tp'"), ("tp=0", "too small"), ("=3", "no setting")],
)
def test_a_bad_setting(setting: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        apply_set({}, [setting])


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    write_text(path, "old")
    with pytest.raises(InputError, match="surrogates"):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]
    with pytest.raises(InputError, match="is a directory"):
        write_text(tmp_path, "x")
    with pytest.raises(InputError, match="cannot be written"):
        write_text(tmp_path / "no" / "out.html", "x")
