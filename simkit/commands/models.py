"""The models of the zoo, with their parameter counts.

Examples:

  simkit models
  simkit models llama
"""

from __future__ import annotations

import argparse

from simkit.commands import _flags, _output


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s [TEXT] [FLAGS]"
    parser.add_argument("text", nargs="?", metavar="TEXT", help="list only names that contain TEXT")
    parser.add_argument(
        "--models", action="append", default=[], metavar="FILE.csv", help="table of further architectures; repeatable"
    )
    _flags.add_forms(parser, "json", "csv")


def run(args: argparse.Namespace) -> int:
    from simkit.errors import unknown
    from simkit.spec import models

    names = [n for n in models.model_names() if not args.text or args.text.lower() in n.lower()]
    if not names:
        raise unknown("model", args.text, models.model_names(), see="simkit models")
    found = [models.model(name) for name in names]
    if args.json or args.csv:
        from simkit.render import rows_to_csv, to_json

        rows = [{"model": n, "params": m.params, "workload": m.workload} for n, m in zip(names, found, strict=True)]
        _output.emit(to_json(rows) if args.json else rows_to_csv(rows))
    else:
        lines = [(n, f"{m.params:,}", m.workload) for n, m in zip(names, found, strict=True)]
        _output.emit(_output.listing(("model", "parameters", "workload"), lines, right=(1,)))
    return 0
