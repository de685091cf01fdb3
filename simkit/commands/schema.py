"""The JSON Schema of a scenario file: its keys, their types, bounds and meaning, for editors and other programs.

An editor that is given it completes keys and marks what simkit would refuse. Examples:

  simkit schema > scenario.schema.json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from simkit.commands import _flags, _output
from simkit.errors import RefusedError

if TYPE_CHECKING:
    from pydantic import BaseModel


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s [FLAGS]"


def run(args: argparse.Namespace) -> int:
    from simkit.render import to_json

    _output.emit(to_json({"$schema": "https://json-schema.org/draft/2020-12/schema"} | scenario().model_json_schema()))
    return 0


def scenario() -> type[BaseModel]:
    """The vocabulary as a pydantic model: every field may be left out, none that is not in `FIELDS` may be there."""
    try:
        from pydantic import ConfigDict, Field, create_model
    except ModuleNotFoundError as error:
        raise RefusedError("simkit schema needs pydantic: pip install 'simkit-perf[schema]'") from error

    from simkit.spec.scenario import FIELDS

    fields: dict[str, Any] = {}
    for name, spec in FIELDS.items():
        kind = _kind(spec.kind, spec.choices)
        fields[name] = (kind | None, Field(default=None, description=spec.help, ge=spec.low, le=spec.high))
    doc = "One job as simkit reads it from a YAML, TOML or JSON file; the same names are flags and keywords."
    found: type[BaseModel] = create_model(
        "Scenario", __config__=ConfigDict(extra="forbid", title="simkit scenario"), __doc__=doc, **fields
    )
    return found


def _kind(kind: str, choices: tuple[str, ...]) -> Any:
    from typing import Literal

    if choices:
        return Literal[choices]
    return {"int": int, "float": float, "bool": bool}.get(kind, str)
