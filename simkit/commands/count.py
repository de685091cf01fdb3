"""Parameters, checkpoint bytes, KV-cache bytes and forward FLOPs of a model.

MODEL is a name of the zoo, the path of a Hugging Face config.json, or module:callable. Examples:

  simkit count llama3-8b
  simkit count ./config.json --json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from simkit.commands import _flags, _output


def configure(parser: _flags.Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="zoo name, path of a config.json, or module:callable")
    parser.add_argument("--dtype", metavar="NAME", help="dtype of the weights, instead of the model's own")
    parser.add_argument("--models", action="append", default=[], metavar="FILE.csv", help="table of further architectures; repeatable")
    _flags.add_forms(parser, "json", "markdown", "csv", html="parameters by module")


def run(args: argparse.Namespace) -> int:
    from simkit.count import count
    from simkit.spec import models

    model = models.model(args.model, models_files=tuple(args.models))
    found = count(model, dtype=args.dtype)
    if args.html:
        from simkit.plot import count_page

        _output.write_page(args, count_page(args.model, found))
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(found))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv([{"model": args.model, **found}]))
    elif args.markdown:
        from simkit.render import markdown_table

        _output.emit(markdown_table(("figure", args.model), _rows(found)))
    else:
        _output.emit(_output.listing(("", args.model), _rows(found), right=(1,)))
    return 0


def _rows(found: Mapping[str, Any], indent: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, value in found.items():
        if isinstance(value, Mapping):
            rows += [(f"{indent}{key}", ""), *_rows(value, indent + "  ")]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            whole = isinstance(value, int) or value == int(value)
            rows.append((f"{indent}{key}", f"{int(value):,}" if whole else f"{value:,.6g}"))
        elif value is not None:
            rows.append((f"{indent}{key}", str(value)))
    return rows
