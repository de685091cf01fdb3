"""simkit predicts how deep-learning work runs on given hardware.

>>> import simkit
>>> report = simkit.predict(model="bert-large", cluster="8x4x2080ti", inter="10gbe", method="acp-sgd", rank=32)

The names are those of the command line, of scenario files and of the columns of measured tables. Nothing heavy is
imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "predict": "simkit.predict",
    "Report": "simkit.report",
    "Scenario": "simkit.spec.scenario",
    "compare": "simkit.compare",
    "search": "simkit.search",
    "sweep": "simkit.sweep",
    "validate": "simkit.validate",
    "whatif": "simkit.whatif",
    "InputError": "simkit.errors",
}
__all__ = [
    "InputError", "Report", "Scenario", "__version__", "compare", "predict", "search", "sweep", "validate", "whatif",
]  # fmt: skip

if TYPE_CHECKING:
    from simkit.compare import compare
    from simkit.errors import InputError
    from simkit.predict import predict
    from simkit.report import Report
    from simkit.search import search
    from simkit.spec.scenario import Scenario
    from simkit.sweep import sweep
    from simkit.validate import validate
    from simkit.whatif import whatif


class _Package(ModuleType):
    """The package as users see it: `simkit.predict` is the function, also after ``import simkit.predict``.

    The import system binds a submodule to its parent under the submodule's name; for the names of the public interface
    that binding is left out, and the function is looked up when it is asked for.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'simkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


sys.modules[__name__].__class__ = _Package
