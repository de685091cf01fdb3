"""What every law of churn has, and the text that names one: ``LAW[:MEAN][,PARAMETER=VALUE]…``.

A law is a module with ``PARAMETERS`` {name: (dimension, default)}, ``sample(rng, p)``, the seconds of a session of a
peer that has just come, ``biased(rng, p)``, the whole session of a peer met at a random time (its density is
proportional to length times frequency: renewal theory, D. R. Cox, "Renewal Theory" (1962), section 5.4), and
``mean_session_s(p)``. It may have ``intensity(t_s, p)``, the rate of arrivals relative to its mean, with ``PEAK(p)``
above it; ``outages(rng, p, horizon_s)``, the (start, length) of outages that take a share of a region's peers,
with their rate ``outages_per_s(p)``; and ``visits(p)``, a list of stays that replaces all draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from simkit import plugins
from simkit.errors import InputError, unknown
from simkit.units import format_s, parse

PACKAGE = "simkit.churn"
LONGEST_S = 3.6e12
"""A thousand million hours: whoever stays longer does not leave; the law ``none`` says so."""
Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A stay that is given rather than drawn."""

    name: str
    join_s: float
    leave_s: float
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Churn:
    """A law with its parameters."""

    key: str
    p: Parameters

    @property
    def law(self) -> ModuleType:
        return plugins.get(PACKAGE, self.key)

    def sample(self, rng: np.random.Generator) -> float:
        """Seconds that a peer which comes now will stay."""
        return float(self.law.sample(rng, self.p))

    def residual(self, rng: np.random.Generator) -> float:
        """Seconds that a peer which is there already will still stay: a uniform share of a length-biased session."""
        return float(rng.random() * self.law.biased(rng, self.p))

    def mean_session_s(self) -> float:
        return float(self.law.mean_session_s(self.p))

    def intensity(self, t_s: float) -> float:
        """Rate of arrivals relative to its mean."""
        found = getattr(self.law, "intensity", None)
        return 1.0 if found is None else float(found(t_s, self.p))

    def peak(self) -> float:
        found = getattr(self.law, "peak", None)
        return 1.0 if found is None else float(found(self.p))

    def outages(self, rng: np.random.Generator, horizon_s: float) -> list[tuple[float, float]]:
        """(start, length) of outages up to the horizon; none but for laws that have them."""
        found = getattr(self.law, "outages", None)
        return [] if found is None else list(found(rng, self.p, horizon_s))

    def outages_per_s(self) -> float:
        """Expected outages a second; 0 for laws without."""
        found = getattr(self.law, "outages_per_s", None)
        return 0.0 if found is None else float(found(self.p))

    def visits(self) -> tuple[Visit, ...] | None:
        """The stays of a trace; None where they are drawn."""
        found = getattr(self.law, "visits", None)
        return None if found is None else tuple(found(self.p))

    @property
    def text(self) -> str:
        """The law in words, as it can be given again."""
        units = {name: "s" if kind in ("s", "clock") else "" for name, (kind, _) in self.law.PARAMETERS.items()}
        shown = [f"{name}={_shown(value)}{units[name]}" for name, value in self.p.items()]
        return self.key + (":" + ",".join(shown) if shown else "")


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def churn(text: str, *, key: str = "churn", file: str = "") -> Churn:
    """The law that a text names; the first parameter may go without its name.

    >>> churn("weibull:4h,shape=0.6").p["shape"]
    0.6

    Raises InputError for an unknown law or parameter, for a value without sense, and for a parameter given twice.
    """
    if not isinstance(text, str) or not text.strip():
        raise InputError("names no law", key=key, value=text, file=file, hint=f"one of {', '.join(_laws())}")
    name, colon, rest = text.strip().partition(":")
    name = name.strip().lower().replace("_", "-")
    if name not in _laws():
        raise unknown("law of churn", name, _laws(), key=key, file=file)
    law = plugins.get(PACKAGE, name)
    known: Mapping[str, tuple[str, Any]] = law.PARAMETERS
    given: dict[str, Any] = {}
    if colon and not all(piece.strip() for piece in rest.split(",")):
        raise InputError("has an empty parameter", key=key, value=text, file=file,
                         hint=f"`{name}` alone takes the defaults; {_hint(name, known)}")  # fmt: skip
    for i, piece in enumerate(rest.split(",") if colon else ()):
        head, equals, value = piece.partition("=")
        if not equals:
            if i or not known:
                raise InputError("is no NAME=VALUE", key=key, value=text, file=file, hint=_hint(name, known))
            head, value = next(iter(known)), piece
        head = head.strip().lower().replace("-", "_")
        if head not in known:
            raise unknown("parameter", head, tuple(known), key=f"{key} {name}", file=file)
        if head in given:
            raise InputError(f"gives {head} twice", key=key, value=text, file=file, hint="keep one of the two")
        given[head] = _value(value.strip(), known[head][0], f"{key} {head}", file)
    values = {head: given.get(head, default) for head, (_, default) in known.items()}
    found = Churn(key=name, p=values)
    _check(found, text, key, file)
    return found


def _laws() -> tuple[str, ...]:
    return plugins.names(PACKAGE)


def _hint(name: str, known: Mapping[str, tuple[str, Any]]) -> str:
    return f"parameters of {name}: {', '.join(known) or 'none'}"


def _value(text: str, dimension: str, key: str, file: str) -> Any:
    if dimension == "text":
        return text
    if dimension == "clock":  # an hour of the day: 20 or 20h
        return parse(text if not _bare(text) else f"{text} h", "s", key=key, file=file)
    if dimension == "s" and _bare(text):
        raise InputError("has no unit", key=key, value=text, file=file, hint="write 4h, 30min or 90s")
    return parse(text, dimension, key=key, file=file)


def _bare(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check(found: Churn, text: str, key: str, file: str) -> None:
    law = found.law
    for name, value in found.p.items():
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0.0):
            raise InputError(f"has a negative or infinite {name}", key=key, value=text, file=file,
                             hint=f"give a finite {name} of at least 0")  # fmt: skip
        if law.PARAMETERS[name][0] == "s" and value > LONGEST_S:
            raise _too_long(name, text, key, file)
    if complaint := getattr(law, "complaint", lambda p: "")(found.p):
        raise InputError(complaint, key=key, value=text, file=file, hint=_hint(found.key, law.PARAMETERS))
    mean = found.mean_session_s()
    if not mean > 0.0:
        raise InputError(f"has a mean session of {format_s(mean)}", key=key, value=text, file=file,
                         hint="give a time above 0, as 4h")  # fmt: skip
    if LONGEST_S < mean < math.inf:
        raise _too_long("mean session", text, key, file)


def _too_long(what: str, text: str, key: str, file: str) -> InputError:
    return InputError(f"has a {what} above 1e9 h", key=key, value=text, file=file,
                      hint="give at most 1e9h; the law none is for peers that never leave")  # fmt: skip
