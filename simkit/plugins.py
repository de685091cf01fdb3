"""A plug-in is a file whose name is its key, imported when it is asked for.

``names("simkit.collectives")`` lists the modules of that folder which do not start with an underscore;
``get("simkit.collectives", "double-tree")`` imports ``simkit/collectives/double_tree.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from functools import cache
from types import ModuleType

from simkit.errors import unknown


@cache
def names(package: str) -> tuple[str, ...]:
    """The keys of a plug-in folder, sorted; an underscore in a file name is a dash in the key."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(package)
    found = pkgutil.iter_modules(list(spec.submodule_search_locations))
    return tuple(sorted(m.name.replace("_", "-") for m in found if not m.name.startswith("_")))


@cache
def get(package: str, key: str) -> ModuleType:
    """The plug-in of that name. Raises InputError, naming the nearest key, when there is none."""
    if key not in names(package):
        kind = package.rsplit(".", 1)[-1].rstrip("s").replace("_", " ")
        raise unknown(kind, key, names(package))
    return importlib.import_module(f"{package}.{key.replace('-', '_')}")
