"""Finding a profile by any of its names, and reading its TOML with errors that name file, key, value and way out.

A profile is a file ``<root>/<kind>s/<stem>.toml``. The user's roots come first (the argument, then the environment
variable SIMKIT_PROFILES), the shipped one last; a user's root may also hold the files flat. The stem is the name, and
`aliases` inside the file are further names. Case, spaces, dashes and the words NVIDIA, GeForce and Tesla do not count.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from simkit.errors import InputError, unknown
from simkit.spec.hardware import Fit
from simkit.units import parse

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")
KINDS = ("device", "link", "machine")
MARKER = "# --- fitted: written by simkit calibrate, do not edit by hand ---"
_ALIASES = re.compile(r"^aliases\s*=\s*\[(.*?)\]", re.MULTILINE | re.DOTALL)
_STRING = re.compile(r'"([^"\n]*)"|\'([^\'\n]*)\'')


def fold(name: str) -> str:
    """The form in which names are compared: ``"NVIDIA GeForce RTX 3080" -> "rtx3080"``; the dot of 2.5gbe stays."""
    return re.sub(r"nvidia|geforce|tesla", "", re.sub(r"[^a-z0-9.]", "", name.lower()))


@lru_cache(maxsize=1)
def shipped() -> Path:
    """The folder of the shipped profiles, in a wheel (``simkit/hwprofiles``) or in a checkout (beside ``simkit``)."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "hwprofiles", package.parent / "hwprofiles"):
        if (folder / "sources.toml").is_file():
            return folder
    from importlib.resources import files

    return Path(str(files("simkit.hwprofiles")))


@lru_cache(maxsize=1)
def _shipped_alone() -> tuple[Path, ...]:
    return (shipped(),)


def roots(profiles: Iterable[str | Path] = ()) -> tuple[Path, ...]:
    """Every root, the one that wins first. Raises InputError where a user's folder does not exist."""
    given = [("profiles", str(p)) for p in profiles]
    variable = os.environ.get("SIMKIT_PROFILES")
    if not given and not variable:
        return _shipped_alone()
    given += [("SIMKIT_PROFILES", p) for p in (variable or "").split(os.pathsep) if p]
    for key, text in given:
        if "\0" in text or not Path(text).is_dir():
            raise InputError("is no folder", key=key, value=text, hint="give a folder with devices/ or links/ in it")
    return (*(Path(text) for _, text in given), shipped())


@lru_cache(maxsize=256)
def _folder(kind: str, root: Path) -> Mapping[str, Path]:
    """Stem -> file of one root."""
    found: dict[str, Path] = {}
    for path in sorted(root.glob("*.toml")) if root != shipped() else ():
        if path.is_file() and re.search(rf"^\s*\[{kind}\]", _peek(path), re.MULTILINE):
            found[path.stem] = path
    found.update((path.stem, path) for path in sorted((root / f"{kind}s").glob("*.toml")))
    return MappingProxyType(found)


@lru_cache(maxsize=256)
def _aliases(kind: str, root: Path) -> Mapping[str, Path]:
    """Folded alias -> file of one root, read with a regular expression: parsing a hundred files takes too long."""
    found: dict[str, Path] = {}
    for path in _folder(kind, root).values():
        match = _ALIASES.search(_peek(path))
        for double, single in _STRING.findall(match[1]) if match else ():
            found.setdefault(fold(double or single), path)
    return MappingProxyType(found)


@lru_cache(maxsize=256)
def _stems(kind: str, root: Path) -> Mapping[str, Path]:
    """Folded stem -> file of one root."""
    return MappingProxyType({fold(stem): path for stem, path in _folder(kind, root).items()})


def _peek(path: Path) -> str:
    """The text of a file for the alias search; what is unreadable has no alias and is reported when it is asked for."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


_derived: list[Callable[[], None]] = []


def remembered(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """`function` with its last 1,024 answers kept until a profile is written (`forget`)."""
    cached = lru_cache(maxsize=1024)(function)
    _derived.append(cached.cache_clear)
    return cached


def forget() -> None:
    """Drops what was cached, after a profile was written."""
    for cached in (_folder, _stems, _aliases, _found, _read):
        cached.cache_clear()
    for clear in _derived:
        clear()


def names(kind: str, profiles: Iterable[str | Path] = ()) -> tuple[str, ...]:
    """The stems of every profile of a kind (``device``, ``link``, ``machine``), sorted."""
    return tuple(sorted({stem for root in roots(profiles) for stem in _folder(kind, root)}))


def find(kind: str, name: str, profiles: Iterable[str | Path] = ()) -> Path | None:
    """The file of that name or alias, or None. A name that ends in ``.toml`` is a path."""
    if name.endswith(".toml") and "\0" not in name:
        return Path(name)
    return _found(kind, name, roots(profiles))


@lru_cache(maxsize=4096)
def _found(kind: str, name: str, where: tuple[Path, ...]) -> Path | None:
    key = fold(name)
    if not key:
        return None
    for root in where:
        files = _folder(kind, root)
        if name in files:
            return files[name]
        if key in _stems(kind, root):
            return _stems(kind, root)[key]
        if key in _aliases(kind, root):
            return _aliases(kind, root)[key]
    return None


def locate(kind: str, name: object, profiles: Iterable[str | Path] = (), *, key: str = "") -> Path:
    """As `find`, but raises InputError with the nearest names when there is none."""
    if not isinstance(name, str) or not name.strip():
        raise InputError("is no name", key=key or kind, value=name, hint=f"`simkit {kind}s` lists the known names")
    path = find(kind, name.strip(), profiles)
    if path is not None:
        return path
    known = set(names(kind, profiles))
    for root in roots(profiles):
        for file in _folder(kind, root).values():
            match = _ALIASES.search(_peek(file))
            known.update(double or single for double, single in (_STRING.findall(match[1]) if match else ()))
    raise unknown(kind, name, sorted(known), key=key or kind, see=f"simkit {kind}s")


@lru_cache(maxsize=1024)
def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except tomllib.TOMLDecodeError as error:
        reason = f"is not valid TOML: {error}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {error.start}"
    except FileNotFoundError:
        reason = "does not exist"
    except IsADirectoryError:
        reason = "is a folder, not a file"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    raise InputError(reason, file=str(path), hint="see hwprofiles/devices for the shape of a profile")


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises InputError: broken TOML (with its line), a folder, unreadable, not UTF-8."""
    return _read(path)


class Table:
    """One table of a profile; each value is taken once by its type, and `done` refuses what nobody asked for.

    Every method raises InputError naming file, key, value and the way out. `absent` collects the keys that were left
    out and took a default.
    """

    def __init__(self, data: object, *, file: Path, name: str) -> None:
        if not isinstance(data, dict):
            raise InputError("is missing" if data is None else "is no table", file=str(file), key=f"[{name}]",
                             hint=f"begin it with the line [{name}]")
        self.data: dict[str, Any] = data
        self.file, self.name = str(file), name
        self.asked: list[str] = []
        self.absent: list[str] = []

    def fail(self, key: str, what: str, hint: str = "") -> InputError:
        return InputError(what, file=self.file, key=f"{self.name}.{key}", value=self.data.get(key), hint=hint)

    def _take(self, key: str, default: object, kinds: tuple[type, ...], expected: str) -> Any:
        self.asked.append(key)
        if key not in self.data:
            if default is ...:
                raise InputError("is missing", file=self.file, key=f"{self.name}.{key}", hint=f"give {expected}")
            self.absent.append(key)
            return default
        value = self.data[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.fail(key, "has the wrong type", f"give {expected}")
        return value

    def text(self, key: str, default: object = ..., *, one_of: tuple[str, ...] = ()) -> str:
        value: str = self._take(key, default, (str,), "a text in quotes")
        if one_of and value not in one_of:
            raise unknown(key, value, one_of, file=self.file, key=f"{self.name}.{key}")
        if key in self.data and not value.strip():
            raise self.fail(key, "is empty", "give a text in quotes")
        return value

    def flag(self, key: str, default: object = ...) -> bool:
        value: bool = self._take(key, default, (bool,), "true or false")
        return value

    def integer(self, key: str, default: object = ..., *, low: int = 1, high: int = 1_000_000) -> int:
        value: int = self._take(key, default, (int,), f"a whole number from {low} to {high}")
        if key in self.data and not low <= value <= high:
            raise self.fail(key, "is out of range", f"give a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: object = ...) -> float:
        value = self._take(key, default, (int, float), "a number")
        if key in self.data and not math.isfinite(value):
            raise self.fail(key, "is not finite", "give a number")
        return float(value)

    def strings(self, key: str, default: object = ()) -> tuple[str, ...]:
        value = self._take(key, default, (list, tuple), "a list of texts")
        if not all(isinstance(item, str) for item in value):
            raise self.fail(key, "holds something that is no text", 'write it as ["a", "b"]')
        return tuple(value)

    def table(self, key: str, default: object = ...) -> dict[str, Any]:
        value: dict[str, Any] = self._take(key, default, (dict,), f"a table [{self.name}.{key}]")
        return value

    def quantity(self, key: str, dimension: str, default: object = ..., *, low: float = 0.0, high: float = math.inf,
                 zero: bool = False) -> float:
        """A text with its unit, as an SI float in (low, high]; `zero` admits 0."""
        value = self._take(key, default, (str, int, float), f"a text with its unit, such as {_EXAMPLE[dimension]!r}")
        if key not in self.data:
            return float(value)
        full = f"{self.name}.{key}"
        if not isinstance(value, str) or not re.search(r"[A-Za-z%]\s*$", value):
            raise self.fail(key, "has no unit", f"write it as {_EXAMPLE[dimension]!r}")
        number = parse(value, dimension, key=full, file=self.file)
        if number < 0 or (number == 0 and not zero):
            raise self.fail(key, "must be greater than zero", f"write it as {_EXAMPLE[dimension]!r}")
        if number and not low <= number <= high:
            raise self.fail(key, f"is implausible (not between {low:g} and {high:g} in SI units)", "check its unit")
        return number

    def optional(self, key: str, dimension: str, *, low: float = 0.0, high: float = math.inf) -> float | None:
        """As `quantity`, or None where the key is absent."""
        if key not in self.data:
            self.asked.append(key)
            return None
        return self.quantity(key, dimension, low=low, high=high)

    def done(self) -> None:
        for key in self.data:
            if key not in self.asked:
                raise unknown("key", key, self.asked, file=self.file, key=f"{self.name} key")


_EXAMPLE = {"bytes": "80 GiB", "Bps": "3.35 TB/s", "flops": "312 TFLOP/s", "s": "30us", "hz": "1.71 GHz", "w": "320 W",
            "usd": "699 USD", "usd_per_hour": "0.15 USD/h"}


def sources(table: Table) -> dict[str, str]:
    """The ``sources`` of a table; an unquoted ``peak.fp32`` (a nested table to TOML) is flattened."""
    flat: dict[str, str] = {}
    for key, value in table.table("sources", {}).items():
        for full, text in ((f"{key}.{k}", v) for k, v in value.items()) if isinstance(value, dict) else ((key, value),):
            if not isinstance(text, str):
                raise InputError("is no source key", file=table.file, key=f"{table.name}.sources.{full}", value=text,
                                 hint="give a key of sources.toml in quotes")
            flat[full] = text
    return flat


def calibration(data: object, *, file: Path) -> Mapping[str, Fit]:
    """The ``[calibration.<name>]`` tables of a profile as Fits."""
    fits: dict[str, Fit] = {}
    for name, entry in Table({} if data is None else data, file=file, name="calibration").data.items():
        table = Table(entry, file=file, name=f"calibration.{name}")
        values = table.table("values")
        numbers = Table(values, file=file, name=f"calibration.{name}.values")
        ranges = table.table("valid", {})
        for key, pair in ranges.items():
            good = isinstance(pair, list) and len(pair) == 2 and all(
                isinstance(x, (int, float)) and not isinstance(x, bool) and not math.isnan(x) for x in pair)
            if not good or pair[0] > pair[1]:
                raise InputError("is no range", file=str(file), key=f"calibration.{name}.valid.{key}", value=pair,
                                 hint="write it as [low, high]")
        fits[name] = Fit(
            name=name,
            values=MappingProxyType({key: numbers.number(key) for key in values}),
            dataset=table.strings("dataset"),
            rows=table.integer("rows", 0, low=0, high=10**9),
            valid=MappingProxyType({key: (float(pair[0]), float(pair[1])) for key, pair in ranges.items()}),
            mape=table.number("mape") if "mape" in table.data else None,
            evidence=table.text("evidence", "fitted", one_of=("fitted", "end-to-end", "assumed")),
            note=table.text("note", "") if table.data.get("note") else "",
        )
        table.asked += ["mape", "note"]
        table.done()
    return MappingProxyType(fits)
