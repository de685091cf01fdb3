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
    parser.usage = "%(prog)s MODEL [FLAGS]"
    parser.add_argument("model", metavar="MODEL", help="zoo name, path of a config.json, or module:callable")
    parser.add_argument("--dtype", metavar="NAME", help="dtype of the weights, instead of the model's own")
    parser.add_argument(
        "--seq-len", metavar="N", help="sequence length at which attention is counted, instead of the model's own"
    )
    parser.add_argument("--causal-halved", action="store_true", help="count only the unmasked half of causal attention")
    parser.add_argument(
        "--models", action="append", default=[], metavar="FILE.csv", help="table of further architectures; repeatable"
    )
    _flags.add_forms(parser, "json", "markdown", "csv", html="parameters by module")


def run(args: argparse.Namespace) -> int:
    from simkit.count import count
    from simkit.spec import models
    from simkit.spec.scenario import clean

    seq_len = None if args.seq_len is None else clean("seq_len", args.seq_len)
    model = models.model(args.model, models_files=tuple(args.models), seq_len=seq_len)
    found = count(model, dtype=args.dtype, seq_len=seq_len, causal_halved=args.causal_halved)
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
        from simkit.render_tables import markdown_table

        _output.emit(markdown_table(("figure", args.model), _rows(found)))
    else:
        words = ("source", "notes", "flops_convention")
        _output.emit(
            _output.listing(("", args.model), _rows({k: v for k, v in found.items() if k not in words}), right=(1,))
        )
        for key, text in _rows({k: v for k, v in found.items() if k in words}):
            _output.emit(f"{key.replace('_', ' ')}: {text}")
    return 0


def _rows(found: Mapping[str, Any], indent: str = "") -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, value in found.items():
        if isinstance(value, Mapping) and value:
            rows += [(f"{indent}{key}", ""), *_rows(value, indent + "  ")]
        elif isinstance(value, Mapping):
            continue
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            whole = isinstance(value, int) or value == int(value)
            rows.append((f"{indent}{key}", f"{int(value):,}" if whole else f"{value:,.6g}"))
        elif isinstance(value, (list, tuple)):
            rows += [(f"{indent}{key}", str(entry)) for entry in value]
        elif value not in (None, ""):
            rows.append((f"{indent}{key}", str(value)))
    return rows
