"""The answer: totals, itemised terms, what bounds them, how sure we are, and every assumption made.

Keys of `Report.to_dict()` carry their unit; an absent key means not applicable, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from simkit.errors import unknown
from simkit.memory import Memory
from simkit.timeline import Timeline

__all__ = ["BREAKDOWNS", "Memory", "Report", "Sensitivity", "Term"]

BREAKDOWNS = ("layers", "modules", "operators")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One line of the ledger: seconds of a part of the step, what bounds it, and on what evidence it rests
    (``datasheet fitted end-to-end assumed``)."""

    name: str
    seconds: float
    bound: str
    evidence: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Elasticity d ln(step time) / d ln(input): -0.8 means 1 % more of it makes the step 0.8 % shorter."""

    name: str
    elasticity: float
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `simkit.predict` returns. `scenario` is the resolved one; `assumptions` lists each default filled in."""

    scenario: Mapping[str, Any]
    iteration_time_s: float
    samples_per_s: float
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    breakdown: Mapping[str, float]
    ledger: tuple[Term, ...] = ()
    memory: Memory
    interval_90: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    bottleneck: str = ""
    cost: Mapping[str, float] = field(default_factory=dict)
    """cost_usd_per_hour, cost_usd, energy_j, power_w, duration_s, usd_per_step, energy_j_per_step …"""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Which ranks talk over which link, and how large each group is."""
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures worth printing beside the answer: params, flops per step, gradient bytes, wire bytes, buckets …"""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Failures, checkpoints and restarts (`simkit.goodput.failures`), where the scenario asks for them."""
    imported: Mapping[str, Any] = field(default_factory=dict)
    """What files of other frameworks gave: lists ``mapped``, ``ignored`` (with the reason) and ``auto``."""
    sections: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """Further tables of name and figure, each with its title, that belong to the kind of job."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the JSON object that belong to the kind of job; they win over those of every report."""
    timeline: Timeline | None = None
    device_names: tuple[str, ...] = ()
    beside: tuple[Report, ...] = ()
    """The same job elsewhere, where a comparison belongs to the answer (50x3080 beside 4xH100-PCIe)."""
    sensitivities_fn: Any = None
    parts_fn: Any = None
    shown: tuple[str, ...] = ()
    """Which breakdowns every form of the answer shows besides: ``layers modules operators``."""
    later: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)
    """Makes the fields that `deferred` left open."""

    @classmethod
    def deferred(cls, later: Callable[[str], Any], names: frozenset[str], **values: Any) -> Report:
        """A Report whose fields `names` are made by `later(name)` when first read: a search asks for the time of a
        million jobs and for the words of one. All else is as if they had been given."""
        report = object.__new__(cls)
        put = object.__setattr__
        put(report, "later", later)
        for name, value in values.items():
            put(report, name, value)
        for name, default in _defaults().items():
            if name not in values and name not in names:
                put(report, name, default() if callable(default) else default)
        return report

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Reached where a field is still open; names that are no field are refused as always."""
            if name not in self.__slots__ or name == "later" or self.later is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = self.later(name)
            object.__setattr__(self, name, value)
            return value

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """The five inputs that would change the step time most, computed when first asked for."""
        return tuple(self.sensitivities_fn()) if self.sensitivities_fn is not None else ()

    def parts(self, by: str) -> tuple[Any, ...]:
        """Where a micro-batch goes by ``layers``, ``modules`` or ``operators``: `simkit.breakdown.Part`, worked out
        when asked for. Raises InputError for another word."""
        if by not in BREAKDOWNS:
            raise unknown("breakdown", by, BREAKDOWNS)
        return tuple(self.parts_fn(by)) if self.parts_fn is not None else ()

    def to_dict(self) -> dict[str, Any]:
        """The object of design section 6, ready for JSON."""
        from simkit.render import to_dict

        return to_dict(self)

    def to_markdown(self) -> str:
        from simkit.render import to_markdown

        return to_markdown(self)

    def to_csv(self) -> str:
        from simkit.render import to_csv

        return to_csv(self)

    def __str__(self) -> str:
        from simkit.render import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        from simkit.render import to_html_fragment

        return to_html_fragment(self)


@lru_cache(maxsize=1)
def _defaults() -> Mapping[str, Any]:
    """{field: default, or what makes it}, but for `later`."""
    found = {}
    for one in fields(Report):
        if one.name != "later" and (one.default is not MISSING or one.default_factory is not MISSING):
            found[one.name] = one.default if one.default is not MISSING else one.default_factory
    return found
