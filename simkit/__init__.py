"""simkit predicts how deep-learning work runs on given hardware.

>>> import simkit
>>> report = simkit.predict(model="bert-large", cluster="8x4x2080ti", inter="10gbe", method="acp-sgd", rank=32)

The names are those of the command line, of scenario files and of the columns of measured tables. Nothing heavy is
imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "predict": "simkit.predict",
    "Report": "simkit.report",
    "Scenario": "simkit.spec.scenario",
    "compare": "simkit.compare",
    "validate": "simkit.validate",
    "InputError": "simkit.errors",
}
__all__ = ["InputError", "Report", "Scenario", "__version__", "compare", "predict", "validate"]

if TYPE_CHECKING:
    from simkit.compare import compare
    from simkit.errors import InputError
    from simkit.predict import predict
    from simkit.report import Report
    from simkit.spec.scenario import Scenario
    from simkit.validate import validate


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'simkit' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
