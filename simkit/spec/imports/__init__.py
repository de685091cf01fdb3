"""Settings of other frameworks as scenarios: one file a format, a plug-in with `matches` and `read`.

>>> scenario(["run.sh", "ds_config.json"], {"cluster": "4x8xa100"})    # doctest: +SKIP

A plug-in of this folder has

    PRIORITY             formats are tried in this order, the smallest first
    matches(Document)    whether the file is of its format
    read(Document)       a Draft: what the file gives, what it gives that simkit has no field for, what it leaves open

Nothing is dropped in silence: every key of a file comes out as mapped, ignored (with the reason) or auto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simkit import plugins
from simkit.errors import InputError
from simkit.spec.imports._common import Document, Draft, Imported, load, merge
from simkit.spec.scenario import Scenario

PACKAGE = "simkit.spec.imports"


def detect(document: Document) -> str:
    """The key of the format of a file. Raises InputError where it is none that is known."""
    keys = sorted(plugins.names(PACKAGE), key=lambda key: plugins.get(PACKAGE, key).PRIORITY)
    for key in keys:
        if plugins.get(PACKAGE, key).matches(document):
            return key
    raise InputError("is of no known format", file=document.file, hint=f"known: {', '.join(sorted(keys))}")


def read(path: str | Path) -> Draft:
    """What one file gives.

    Raises InputError where it cannot be read, is malformed, of no known format, or holds a value that its field does
    not take.
    """
    document = load(path)
    draft: Draft = plugins.get(PACKAGE, detect(document)).read(document)
    return draft


def scenario(
    files: Sequence[str | Path],
    fields: Mapping[str, Any] | None = None,
    *,
    file: str = "",
    profiles: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
) -> Scenario:
    """The scenario of `files` together, over which `fields` win.

    Raises InputError where two files contradict each other, where one contradicts itself (train batch = micro-batch ·
    accumulation · data ranks), or where an architecture is spelled out in part and no model is given.
    """
    given = Scenario.of(fields or {}, file=file, profiles=profiles, models=models)
    if not files:
        return given
    return merge([read(path) for path in files], given)


__all__ = ["Document", "Draft", "Imported", "detect", "load", "read", "scenario"]
