"""What the importers share: documents, drafts with their ledger, and how several become one scenario."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simkit.errors import InputError
from simkit.spec.files import read_text
from simkit.spec.model import Model
from simkit.spec.scenario import Scenario, clean

ASSUMED_DEVICE = "h100"
"""Where the files tell how many GPUs there are and nobody tells which."""
MAX_DEPTH, MAX_KEYS = 12, 5000
NO_EFFECT = "does not change the time or memory of a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file: its text, and the mapping it holds where it is JSON, YAML or TOML (else None)."""

    file: str
    text: str
    data: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key of a file. `field` and `set` where it gave something; `reason` where it did not. weak: follows from
    the key without being said there, so that any other file or key wins."""

    file: str
    key: str
    value: str
    field: str = ""
    set: Any = None
    reason: str = ""
    weak: bool = False


class Draft:
    """What one file gives, collected key by key."""

    def __init__(self, file: str, kind: str) -> None:
        self.file, self.kind = file, kind
        self.mapped: list[Entry] = []
        self.ignored: list[Entry] = []
        self.auto: list[Entry] = []
        self.network: Model | None = None
        self.incomplete: InputError | None = None
        """Why the architecture could not be built, raised where nobody gives a model."""
        self.steps: tuple[str, int] | None = None
        """The key and number of steps of the whole job: samples once the global batch is known."""
        self.nodes: int | None = None
        self.gpus_per_node: int | None = None

    def put(self, field: str, value: Any, key: str, source: Any = None, *, weak: bool = False) -> None:
        """`key` of the file sets a field of the vocabulary. Raises InputError under the names of the file."""
        shown = value if source is None else source
        try:
            checked = clean(field, value)
        except InputError as error:
            raise InputError(error.what, file=self.file, key=key, value=shown, hint=error.hint) from None
        told = Entry(file=self.file, key=key, value=_text(shown), field=field, set=checked, weak=weak)
        self.mapped = [e for e in self.mapped if e.field != field or (weak and not e.weak)]
        if not (weak and any(e.field == field for e in self.mapped)):
            self.mapped.append(told)

    def part(self, field: str, value: Any, key: str, source: Any = None) -> None:
        """`key` sets a part of the architecture (shown as ``model.FIELD``)."""
        shown = _text(value if source is None else source)
        self.mapped.append(Entry(file=self.file, key=key, value=shown, field=f"model.{field}", set=value))

    def ignore(self, key: str, value: Any, reason: str = NO_EFFECT) -> None:
        self.ignored.append(Entry(file=self.file, key=key, value=_text(value), reason=reason))

    def open(self, key: str, value: Any, reason: str = "decided when the job starts") -> None:
        self.auto.append(Entry(file=self.file, key=key, value=_text(value), reason=reason))

    def get(self, field: str, default: Any = None) -> Any:
        """What the file has set a field to so far."""
        return next((e.set for e in self.mapped if e.field == field), default)

    def error(self, what: str, key: str, value: Any = None, hint: str = "") -> InputError:
        return InputError(what, file=self.file, key=key, value=value, hint=hint)

    def whole(self, key: str, value: Any, *, least: int = 1) -> int:
        """A whole number, also as 1.024e3 or "8"."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or number != int(number):
            raise self.error("is not a whole number", key, value, "write for example 8")
        if number < least:
            raise self.error("is too small", key, value, f"at least {least}")
        return int(number)

    def flag(self, key: str, value: Any) -> bool:
        """True or false, also as text; null is false."""
        if value is None or isinstance(value, bool):
            return bool(value)
        text = str(value).strip().lower()
        if text in ("true", "yes", "on", "1", "1.0"):
            return True
        if text in ("false", "no", "off", "0", "0.0", ""):
            return False
        raise self.error("is neither true nor false", key, value, "write true or false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The ledger of all imported files, for the report."""

    mapped: tuple[Entry, ...]
    ignored: tuple[Entry, ...]
    auto: tuple[Entry, ...]
    sources: Mapping[str, Entry] = field(default_factory=dict)
    """{field of the vocabulary: the entry that set it}"""

    def blame(self, error: InputError, values: Mapping[str, Any]) -> InputError:
        """The error with the file and key that gave the field it names, where an imported file did."""
        source = self.sources.get(error.key)
        if source is None or values.get(error.key) != source.set:
            return error
        return InputError(error.what, file=source.file, key=source.key, value=error.value, hint=error.hint)

    def to_dict(self, values: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """{mapped, ignored, auto}: plain entries; what other values of the scenario overrode counts as ignored."""
        network = any(e.field == "model" and values.get("model") == e.set for e in self.mapped)
        held: list[Entry] = []
        lost: list[Entry] = []
        for e in self.mapped:
            wins = network if e.field.startswith("model.") else values.get(e.field) == e.set
            (held if wins else lost).append(e)
        over = [replace(e, reason=f"{e.field.split('.')[0]} is given otherwise") for e in lost]
        return {
            "mapped": [_told(e, "field", "set") for e in held],
            "ignored": [_told(e, "reason") for e in (*over, *self.ignored)],
            "auto": [_told(e, "reason") for e in self.auto],
        }


def _told(entry: Entry, *names: str) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("file", "key", "value", *names)}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and abs(value) < 1e15 and value == int(value):
        return str(int(value))
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


def load(path: str | Path) -> Document:
    """Reads a file and, where its suffix names JSON, YAML or TOML, parses it. Raises InputError in one line."""
    path = Path(path)
    text = read_text(path, what="a file of settings")
    parser = {".json": _json, ".yaml": _yaml, ".yml": _yaml, ".toml": _toml}.get(path.suffix.lower())
    data = parser(text, str(path)) if parser else None
    if data is None and text.lstrip().startswith("{"):
        data = _json(text, str(path))
    if data is not None:
        _bounded(data, str(path))
    return Document(file=str(path), text=text, data=data)


def _bounded(data: Mapping[str, Any], file: str) -> None:
    """Refuses what no settings look like: tables nested without end (YAML anchors), thousands of keys."""
    tables, seen = [(data, 1)], 0
    while tables:
        table, depth = tables.pop()
        seen += len(table)
        if depth > MAX_DEPTH or seen > MAX_KEYS:
            what = f"holds more than {MAX_KEYS} keys or {MAX_DEPTH} tables in each other"
            raise InputError(what, file=file, hint="give a file of settings")
        tables += [(v, depth + 1) for v in table.values() if isinstance(v, Mapping)]


def _mapping(data: Any, file: str, form: str) -> Mapping[str, Any]:
    if not isinstance(data, dict) or not data:
        raise InputError("holds no keys at its top level", file=file, hint=f"write {form}")
    return {str(k): v for k, v in data.items()}


def _json(text: str, file: str) -> Mapping[str, Any]:
    def constant(word: str) -> float:
        raise InputError(f"holds {word}, which is no JSON number", file=file, hint="write a finite number")

    try:
        return _mapping(json.loads(text, parse_constant=constant), file, '{"key": value, …}')
    except json.JSONDecodeError as error:
        cut = " (cut off?)" if error.pos >= len(text.rstrip()) else ""
        what = f"is no valid JSON ({error.msg[:1].lower()}{error.msg[1:]}, column {error.colno}){cut}"
        raise InputError(what, file=f"{file}:{error.lineno}", hint='write {"key": value, …}') from None
    except (RecursionError, ValueError):
        raise InputError("is no valid JSON", file=file, hint='write {"key": value, …}') from None


def _yaml(text: str, file: str) -> Mapping[str, Any]:
    import yaml

    try:
        data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "malformed"
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        raise InputError(f"is no valid YAML ({problem})", file=where, hint="write one `key: value` a line") from None
    except (RecursionError, ValueError):
        raise InputError("is no valid YAML", file=file, hint="write one `key: value` a line") from None
    return _mapping(data, file, "`key: value`")


def _toml(text: str, file: str) -> Mapping[str, Any]:
    import tomllib

    try:
        return _mapping(tomllib.loads(text), file, "`key = value`")
    except (RecursionError, ValueError) as error:
        what = f"is no valid TOML ({str(error)[:80]})"
        raise InputError(what, file=file, hint="write one `key = value` a line") from None


def walk(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every leaf of nested tables as (dotted key, value); an empty table is a leaf."""
    leaves: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            leaves += walk(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def is_auto(value: Any) -> bool:
    """The value "auto" of DeepSpeed files that the Hugging Face Trainer fills in."""
    return isinstance(value, str) and value.strip().lower() == "auto"


Rule = Callable[[Draft, str, Any], None]


def sets(field: str, table: Mapping[Any, Any] | None = None) -> Rule:
    """A rule: the key sets `field` to its value, or to what `table` says of it (in lower case)."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if table is None:
            draft.put(field, value, key)
            return
        known = table.get(str(value).strip().lower())
        if known is None:
            draft.ignore(key, value, f"no {field} that simkit knows ({', '.join(map(str, table))})")
        else:
            draft.put(field, known, key, value)

    return rule


def whole(field: str) -> Rule:
    """A rule: the key sets `field` to a whole number."""
    return lambda draft, key, value: draft.put(field, draft.whole(key, value), key, value)


def when(field: str, yes: Any, no: Any = None) -> Rule:
    """A rule for a Boolean key: true sets `yes`; false sets `no`, or nothing where that is the default anyway."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        on = draft.flag(key, value)
        if on or no is not None:
            draft.put(field, yes if on else no, key, value)
        else:
            draft.ignore(key, value, "off")

    return rule


def later(draft: Draft, key: str, value: Any) -> None:
    """A rule for keys that are read together, after or before the others."""


def steps(draft: Draft, key: str, value: Any) -> None:
    """A rule: the steps of the whole job; -1 leaves them open."""
    number = draft.whole(key, value, least=-1)
    if number > 0:
        draft.steps = (key, number)
    else:
        draft.open(key, value)


def because(reason: str) -> Rule:
    """A rule: the key is ignored for this reason."""
    return lambda draft, key, value: draft.ignore(key, value, reason)


def apply(draft: Draft, leaves: Sequence[tuple[str, Any]], rules: Mapping[str, Rule], quiet: Sequence[str]) -> None:
    """Puts every leaf through its rule. quiet: beginnings of keys that change nothing in a step; null is left out."""
    for key, value in leaves:
        if is_auto(value):
            draft.open(key, value)
        elif value is None:
            draft.open(key, value, "null: the default holds")
        elif key in rules:
            rules[key](draft, key, value)
        else:
            known = any(key == q or key.startswith(f"{q}.") for q in quiet)
            draft.ignore(key, value, NO_EFFECT if known else "not known to simkit")


def merge(drafts: Sequence[Draft], given: Scenario) -> Scenario:
    """The fields of all drafts over which `given` wins; see `simkit.spec.imports.scenario`."""
    sources: dict[str, Entry] = {}
    for entry in (e for d in drafts for e in d.mapped if "." not in e.field):
        before = sources.get(entry.field)
        if before is None or (before.weak and not entry.weak):
            sources[entry.field] = entry
        elif not entry.weak and before.set != entry.set and not given.given(entry.field):
            what = f"contradicts {before.key} = {before.value} of {before.file}"
            hint = f"keep one, or give --{entry.field.replace('_', '-')}"
            raise InputError(what, file=entry.file, key=entry.key, value=entry.set, hint=hint)
    kinds = {d.kind for d in drafts}
    if {"megatron", "deepspeed"} <= kinds:
        sources["stack"] = replace(sources["stack"], set="megatron-deepspeed")
    network = next((d.network for d in drafts if d.network is not None), None)
    values = {name: e.set for name, e in sources.items()} | dict(given.values)
    incomplete = next((d.incomplete for d in drafts if d.incomplete is not None), None)
    if incomplete is not None and "model" not in values:
        raise incomplete
    auto, ignored = [e for d in drafts for e in d.auto], [e for d in drafts for e in d.ignored]
    ignored += _length(drafts, values, sources)
    if "cluster" not in values:
        _cluster(drafts, values, auto)
    # The stack follows from the kinds of file and is no key of any.
    mapped = [e for d in drafts for e in d.mapped if e.field != "stack" or not e.weak]
    mapped += [e for e in sources.values() if e not in mapped]
    ledger = Imported(mapped=tuple(mapped), ignored=tuple(ignored), auto=tuple(auto), sources=sources)
    return replace(given, values=values, network=network, imported=ledger)


def _length(drafts: Sequence[Draft], values: dict[str, Any], sources: dict[str, Entry]) -> list[Entry]:
    """Steps as samples, where nothing else says how long the job is; the entries of those that could not be used."""
    unused = []
    for draft in (d for d in drafts if d.steps is not None):
        key, steps = draft.steps or ("", 0)
        told = Entry(file=draft.file, key=key, value=str(steps), field="samples")
        if any(name in values for name in ("samples", "tokens", "epochs")):
            unused.append(replace(told, field="", reason="the length is given otherwise"))
        elif "global_batch" not in values:
            unused.append(
                replace(told, field="", reason="samples follow with a global batch: give --samples or --tokens")
            )
        else:
            values["samples"] = clean("samples", steps * values["global_batch"], file=draft.file)
            sources["samples"] = replace(told, set=values["samples"])
    return unused


def _cluster(drafts: Sequence[Draft], values: dict[str, Any], auto: list[Entry]) -> None:
    """The shape of the cluster where a launcher tells it: the device stays open."""
    for draft in drafts:
        if draft.gpus_per_node is None:
            continue
        shape = f"{draft.nodes or 1}x{draft.gpus_per_node}"
        values["cluster"] = f"{shape}x{ASSUMED_DEVICE}"
        reason = f"the file names {shape} GPUs and no device: {ASSUMED_DEVICE} taken, give --cluster"
        auto.append(Entry(file=draft.file, key="cluster", value=values["cluster"], reason=reason))
        return
