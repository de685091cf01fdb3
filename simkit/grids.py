"""Axes of a sweep: what a user writes becomes an array of values of one field of the vocabulary.

    1,2,4,8                 a list; each entry may itself be a range
    START:STOP:COUNT        COUNT values, evenly spaced, both ends included
    START:STOP:COUNT:log    the same evenly spaced in the logarithm
    START:STOP:*FACTOR      START, START·FACTOR, … as long as STOP is not passed

Counts (``micro_batch``) are rounded to whole numbers, of which each is kept once. Links (``intra``, ``inter``) are
ranges
of RATE@LATENCY, ``1Gb/s@5us:800Gb/s@5us:4000``: rate and latency run side by side. Names and choices are lists only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.errors import InputError, unknown
from simkit.spec.scenario import FIELDS, clean
from simkit.units import parse as quantity

Array = NDArray[np.float64]

MAX_POINTS = 10**8
LINKS = ("intra", "inter")
FORMS = "write A,B,C or START:STOP:COUNT, START:STOP:COUNT:log, START:STOP:*FACTOR"
_EXACT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """One field and the values it takes, in order.

    values: whole numbers, floats, or objects (texts, truth values). Bps, latency_s: of a link axis whose every value
    is a RATE@LATENCY, else None; then `values` is empty and `text` writes a value down.
    """

    name: str
    values: NDArray[Any]
    Bps: Array | None = None
    latency_s: Array | None = None

    def __len__(self) -> int:
        return len(self.values) if self.Bps is None else len(self.Bps)

    @property
    def described(self) -> bool:
        """Whether the axis is rates and latencies, which formulas take as arrays."""
        return self.Bps is not None

    def value(self, index: int) -> Any:
        """The value at a position, as a Scenario takes it."""
        if self.Bps is not None and self.latency_s is not None:
            return text(float(self.Bps[index]), float(self.latency_s[index]))
        found = self.values[index]
        return found.item() if isinstance(found, np.generic) else found

    def column(self, index: NDArray[np.int64]) -> NDArray[Any]:
        """The values at many positions; each is written down once."""
        if self.Bps is None:
            return self.values[index]
        used, where = np.unique(index, return_inverse=True)
        return np.array([self.value(int(i)) for i in used], dtype=object)[where]


def text(Bps: float, latency_s: float) -> str:
    """RATE@LATENCY with every digit that matters.

    >>> text(1.25e9, 3e-5)
    '10Gb/s@30us'
    """
    return f"{_short(Bps * 8e-9)}Gb/s@{_short(latency_s * 1e6)}us"


def _short(value: float) -> str:
    """Without the last digits where they are rounding alone."""
    short = f"{value:.14g}"
    return short if math.isclose(float(short), value, rel_tol=5e-16) else repr(float(value))


def axes(grid: Mapping[str, Any]) -> tuple[Axis, ...]:
    """The axes of ``{field: text of the forms above, value, or sequence of values}``; their product is the grid.

    Raises InputError for an unknown field, a malformed range, a bad value, and more than `MAX_POINTS` points.
    """
    found: list[Axis] = []
    total = 1
    for key, given in grid.items():
        name = str(key).strip().replace("-", "_")
        if name not in FIELDS:
            raise unknown("axis", key, FIELDS, key="--grid", see="simkit sweep --help")
        if any(axis.name == name for axis in found):
            raise InputError("is given twice", key="--grid", value=name, hint="write one --grid for each field")
        found.append(axis(name, given))
        total *= len(found[-1])
        if total > MAX_POINTS:
            raise InputError(
                "has too many points", key="--grid", value=total, hint=f"at most {MAX_POINTS:.0e}; take fewer values"
            )
    return tuple(found)


def setting(given: str) -> tuple[str, str]:
    """(field, values) of one ``FIELD=VALUES``. Raises InputError where there is no equals sign."""
    name, equals, values = given.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(
            "is no axis", key="--grid", value=given, hint="write --grid micro_batch=1,2,4 or --grid rank=1:64:*2"
        )
    return name.strip(), values.strip()


def axis(name: str, given: Any) -> Axis:
    """One axis. Raises InputError as `axes`."""
    if isinstance(given, str):
        parts: Sequence[Any] = [part.strip() for part in given.split(",")]
    elif isinstance(given, Iterable):
        parts = list(given)
    else:
        parts = [given]
    if not len(parts):
        raise InputError("is an empty list", key=name, hint=FORMS)
    if any(isinstance(p, str) and not p.strip() for p in parts):
        raise InputError("holds an empty entry", key=name, value=given, hint="separate values by one comma")
    if name in LINKS:
        return _links(name, parts)
    kind = FIELDS[name].kind
    if kind in ("int", "float"):
        return Axis(name=name, values=_once(np.concatenate([_numbers(name, kind, part) for part in parts])))
    values = list(dict.fromkeys(clean(name, part) for part in parts))
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return Axis(name=name, values=out)


def _once(values: NDArray[Any]) -> NDArray[Any]:
    """Each value once, in the order of its first appearance."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _numbers(name: str, kind: str, part: Any) -> NDArray[Any]:
    if not (isinstance(part, str) and ":" in part):
        return np.array([clean(name, part.item() if isinstance(part, np.generic) else part)])
    start, stop, steps = _range(name, part)
    low, high = (_number(name, end) for end in (start, stop))
    values = _spaced(name, part, steps, low, high)
    if kind == "int":
        values = np.rint(values)
    for end in (float(values.min()), float(values.max())):
        clean(name, end)
    return values.astype(np.int64) if kind == "int" else values


def _number(name: str, end: str) -> float:
    return float(clean(name, end))


def _range(name: str, part: str) -> tuple[str, str, str]:
    pieces = [piece.strip() for piece in part.split(":")]
    if len(pieces) not in (3, 4) or not all(pieces) or (len(pieces) == 4 and pieces[3].lower() != "log"):
        raise InputError("is no range", key=name, value=part, hint=FORMS)
    return pieces[0], pieces[1], ":".join(pieces[2:]).lower()


def _spaced(name: str, part: str, steps: str, low: float, high: float) -> Array:
    """The values of one range between two numbers."""
    along = _places(name, part, steps, low, high)
    if steps.startswith("*") or steps.endswith(":log"):
        _positive(name, part, low, high)
        values: Array = low * (high / low) ** along
    else:
        values = low + (high - low) * along
    values[along == 0.0], values[along == 1.0] = low, high
    return values


def _positive(name: str, part: str, low: float, high: float) -> None:
    if low <= 0.0 or high <= 0.0:
        raise InputError("needs ends greater than zero", key=name, value=part, hint="or take START:STOP:COUNT")


def _places(name: str, part: str, steps: str, low: float, high: float) -> Array:
    """Where between the ends (0 to 1; of the logarithm for factors and ``log``) the values of a range lie."""
    if steps.startswith("*"):
        _positive(name, part, low, high)
        factor = quantity(steps[1:] or "?", "ratio", key=f"factor of {name}")
        rising = high >= low
        if factor <= 0.0 or factor == 1.0 or (factor > 1.0) != rising:
            raise InputError(
                "has a factor that never reaches its end", key=name, value=part, hint="as in 1:64:*2 or 64:1:*0.5"
            )
        count = math.floor(math.log(high / low) / math.log(factor) + _EXACT) + 1
        _bounded(name, part, count)
        step = math.log(factor) / math.log(high / low) if count > 1 else 0.0
        return np.asarray(np.arange(count) * step)
    digits = steps.removesuffix(":log")
    if not re.fullmatch(r"[0-9]{1,12}", digits) or int(digits) < 1:
        raise InputError("has no count of at least 1", key=name, value=part, hint=FORMS)
    _bounded(name, part, int(digits))
    if int(digits) == 1 and low != high:
        hint = "the third number counts the values, both ends included, as in 0:3:4"
        raise InputError("has two ends for one value", key=name, value=part, hint=hint)
    return np.linspace(0.0, 1.0, int(digits)) if int(digits) > 1 else np.zeros(1)


def _bounded(name: str, part: str, count: int) -> None:
    if count > MAX_POINTS:
        raise InputError("has too many values", key=name, value=part, hint=f"at most {MAX_POINTS:.0e}")


# -- links -----------------------------------------------------------------------------------------------------------


def _links(name: str, parts: Sequence[Any]) -> Axis:
    """Rates and latencies where every entry has both, else names, one by one."""
    texts = [str(clean(name, part)) for part in parts]
    if any(":" in part and "@" not in part for part in texts):
        bad = next(part for part in texts if ":" in part and "@" not in part)
        raise InputError(
            "is no range of links", key=name, value=bad, hint="write 1Gb/s@5us:800Gb/s@5us:4000, or names in a list"
        )
    if not all("@" in part for part in texts):
        if any(":" in part for part in texts):
            raise InputError(
                "mixes names and ranges", key=name, value=",".join(texts), hint="sweep them one after the other"
            )
        return Axis(name=name, values=np.array(list(dict.fromkeys(texts)), dtype=object))
    rates, latencies = zip(*(_link_range(name, part) for part in texts), strict=True)
    return Axis(name=name, values=np.zeros(0), Bps=np.concatenate(rates), latency_s=np.concatenate(latencies))


def _link_range(name: str, part: str) -> tuple[Array, Array]:
    if ":" not in part:
        Bps, latency_s = _link(name, part)
        return np.array([Bps]), np.array([latency_s])
    start, stop, steps = _range(name, part)
    (low, first), (high, last) = _link(name, start), _link(name, stop)
    if steps.startswith("*") and low == high:
        raise InputError(
            "has a factor but no range of rates", key=name, value=part, hint="as in 1Gb/s@5us:800Gb/s@5us:*2"
        )
    rates = _spaced(name, part, steps, low, high)
    along = _places(name, part, steps, low, high)
    logarithmic = steps.startswith("*") or steps.endswith(":log")
    if logarithmic and first != last:
        _positive(name, part, first, last)
        latencies: Array = first * (last / first) ** along
    else:
        latencies = first + (last - first) * along
    latencies[along == 0.0], latencies[along == 1.0] = first, last
    return rates, latencies


def _link(name: str, given: str) -> tuple[float, float]:
    """(rate, latency) of one RATE@LATENCY, by the rules of `simkit.spec.load`."""
    from simkit.spec.load import link

    found = link(given, key=name)
    return found.Bps, found.latency_s


__all__ = ["MAX_POINTS", "Axis", "axes", "axis", "setting", "text"]
