"""Scenario files: YAML, TOML or JSON with the names of the vocabulary as keys, one value a key.

A YAML scalar is taken as it is written and converted by the field's own rule, so that YAML 1.1's surprises (``no`` as
a Boolean, ``010`` as 8, ``1e-3`` as text, ``12:30`` as 750) cannot happen. Every error names file, line where it is
known, key, value and the way out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec.scenario import FIELDS, clean

MAX_FILE_BYTES = 2**20
"""A scenario is a page of text; a larger file is the wrong file."""

_Entry = tuple[str, Any, int]


def read_scenario(path: str | Path) -> dict[str, Any]:
    """The checked values of a scenario file, {field: value}, in the order of the file.

    The suffix decides the format: ``.yaml .yml .toml .json``. A key may be written with dashes. A null or empty value
    means absent. Raises InputError where the file cannot be read, is malformed, or holds a key or value that the
    vocabulary does not know.
    """
    path = Path(path)
    readers = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}
    reader = readers.get(path.suffix.lower())
    text = read_text(path, what="a scenario file (.yaml, .toml or .json)")
    if reader is None:
        raise InputError("is no scenario file", file=str(path), hint="name it .yaml, .toml or .json")
    values: dict[str, Any] = {}
    for key, value, line in reader(text, str(path)):
        where = f"{path}:{line}" if line else str(path)
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise unknown("key", key, FIELDS, file=where)
        if name in values:
            raise InputError("is given twice", file=where, key=name, hint="keep one of the two")
        if isinstance(value, (dict, list)):
            kind = "a list" if isinstance(value, list) else "a table"
            hint = "a scenario holds one value a key; `simkit compare` takes several, comma-separated"
            raise InputError(f"is {kind}", file=where, key=name, hint=hint)
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        values[name] = clean(name, value, file=where)
    if not values:
        raise InputError("holds no key", file=str(path), hint="write for example `cluster: 50x3080`")
    return values


def apply_set(values: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """`values` with each ``key=value`` of `settings` put in; an empty value takes the key away.

    Raises InputError for a setting without ``=``, an unknown key or a bad value.
    """
    merged = dict(values)
    for setting in settings:
        key, equals, value = setting.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name:
            raise InputError("is no setting", file="--set", value=setting, hint="write --set key=value")
        if name not in FIELDS:
            raise unknown("key", name, FIELDS, file="--set")
        if value.strip():
            merged[name] = clean(name, value, file="--set")
        else:
            merged.pop(name, None)
    return merged


def read_text(path: str | Path, *, what: str = "a file", limit: int = MAX_FILE_BYTES) -> str:
    """The UTF-8 text of a file. Raises InputError where it is missing, a directory, unreadable, too large, no text."""
    path = Path(path)
    try:
        if path.is_dir():
            raise InputError("is a directory", file=str(path), hint=f"give {what}")
        with path.open("rb") as handle:
            raw = handle.read(limit + 1)
    except FileNotFoundError:
        raise InputError("does not exist", file=str(path), hint=f"give {what}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read ({reason.lower()})", file=str(path), hint=f"give {what}") from None
    if len(raw) > limit:
        raise InputError(f"is larger than {limit // 1024} KiB", file=str(path), hint=f"give {what}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError("is not UTF-8 text", file=f"{path}:{line}", hint="save it as UTF-8") from None


def write_text(path: str | Path, text: str) -> Path:
    """Writes a file as a whole or not at all: a temporary neighbour, then a rename.

    Raises InputError where the folder is missing or may not be written.
    """
    with whole_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as handle:
        handle.write(text)
    return Path(path)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary neighbour of `path` to write to, renamed to it at the end; gone where anything is raised before.

    Raises InputError where the folder is missing or may not be written.
    """
    path = Path(path)
    if path.is_dir():
        raise InputError("is a directory", file=str(path), hint="give the name of the file to write")
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None
    try:
        os.close(descriptor)
        yield Path(temporary)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except (OSError, UnicodeError) as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _unwritable(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(f"cannot be written ({reason.lower()})", file=str(path), hint="give a folder you may write")


def _yaml(text: str, file: str) -> Iterator[_Entry]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "malformed"
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        raise InputError(f"is no valid YAML ({problem})", file=where, hint="write one `key: value` a line") from None
    except RecursionError:
        raise InputError("is nested too deeply", file=file, hint="write one `key: value` a line") from None
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise _no_mapping(file, "`key: value`")
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise InputError("has a key that is no name", file=f"{file}:{line}", hint="write `key: value`")
        if isinstance(value, yaml.ScalarNode):
            null = value.style is None and value.value in ("", "~", "null", "Null", "NULL")
            yield key.value, None if null else value.value, line
        else:
            yield key.value, [] if isinstance(value, yaml.SequenceNode) else {}, line


def _toml(text: str, file: str) -> Iterator[_Entry]:
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        line = re.search(r"\(at line (\d+)", message)
        where = f"{file}:{line[1]}" if line else file
        raise InputError(
            f"is no valid TOML ({_plain(message)})", file=where, hint="write one `key = value` a line"
        ) from None
    except (RecursionError, ValueError):
        raise InputError("is no valid TOML", file=file, hint="write one `key = value` a line") from None
    for key, value in table.items():
        yield (
            key,
            _bounded(value),
            _line_of(text, rf"^\s*[\"']?{re.escape(key)}[\"']?\s*=|^\s*\[+\s*[\"']?{re.escape(key)}\b"),
        )


def _json(text: str, file: str) -> Iterator[_Entry]:
    pairs: list[tuple[str, Any]] = []

    def keep(items: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = items
        return dict(items)

    def constant(word: str) -> float:
        raise InputError(f"holds {word}, which is no JSON number", file=file, hint="write a finite number")

    try:
        top = json.loads(text, object_pairs_hook=keep, parse_constant=constant, parse_int=_json_int)
    except json.JSONDecodeError as error:
        cut = " (cut off?)" if error.pos >= len(text.rstrip()) else ""
        what = f"is no valid JSON ({error.msg[:1].lower()}{error.msg[1:]}, column {error.colno}){cut}"
        raise InputError(what, file=f"{file}:{error.lineno}", hint='write {"key": value, …}') from None
    except (RecursionError, ValueError):
        raise InputError("is no valid JSON", file=file, hint='write {"key": value, …}') from None
    if not isinstance(top, dict):
        raise _no_mapping(file, '{"key": value, …}')
    # The hook runs last for the outermost object, so `pairs` holds its entries, repeated keys included.
    for key, value in pairs:
        yield key, value, _line_of(text, rf"\"{re.escape(key)}\"\s*:")


def _json_int(digits: str) -> float | int:
    return int(digits) if len(digits) < 300 else math.inf


def _bounded(value: Any) -> Any:
    """Dates become text, integers beyond any float infinity, so that the field's own rule refuses them in one line."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return math.inf
    return value if isinstance(value, (bool, int, float, str, dict, list)) else str(value)


def _no_mapping(file: str, form: str) -> InputError:
    return InputError("holds no keys at its top level", file=file, hint=f"write {form}")


def _line_of(text: str, pattern: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return (
        text[: found.start()].count("\n") + 1 + found[0][: len(found[0]) - len(found[0].lstrip())].count("\n")
        if found
        else 0
    )


def _plain(message: str) -> str:
    return re.sub(r"\s*\(at [^)]*\)", "", message)[:1].lower() + re.sub(r"\s*\(at [^)]*\)", "", message)[1:]
