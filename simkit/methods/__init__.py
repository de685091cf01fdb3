"""Ways of working together that are no gradient compressor: one file each, its name is a value of `method`.

Every module offers ``report(scenario, *, spans, beside) -> Report``. `path` finds it; `simkit.predict` asks before it
resolves anything else. Fields that only these methods understand are refused elsewhere, never ignored.
"""

from __future__ import annotations

from types import ModuleType

from simkit import plugins
from simkit.errors import RefusedError
from simkit.spec.scenario import FIELDS, Scenario

OWN = frozenset(name for name, spec in FIELDS.items() if spec.group in ("peers", "inference"))
"""Fields of peers and of inference over them."""


def path(scenario: Scenario) -> ModuleType | None:
    """The module that answers this scenario; None where it is an ordinary job. Raises RefusedError for a field that an
    ordinary job does not have."""
    method = scenario.values.get("method")
    if method is not None and method in plugins.names(__name__):
        return plugins.get(__name__, method)
    if not OWN.isdisjoint(scenario.values) or scenario.values.get("task") == "inference":
        name = next((n for n in scenario if n in OWN), "task = inference")
        known = ", ".join(plugins.names(__name__))
        raise RefusedError(f"{name} belongs to work over peers; add method = one of {known}")
    return None
