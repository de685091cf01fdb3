"""Predicts every row of measured tables and scores the predictions.

A table is a CSV whose columns are names of the vocabulary plus id, source, metric and value; a row without a value is
predicted and not scored; one that cannot be predicted is refused with its reason and counted. Errors:
predicted/measured - 1 of a time or memory, measured/predicted - 1 of a rate; bias is their mean. Examples:

  simkit validate my-runs.csv
  simkit validate tables/*.csv --json --rows predictions.csv --html parity.html
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError

SCORES = ("mape", "median_ape", "p90_ape", "bias", "coverage_90")
HEADS = ("", "rows", "MAPE", "median", "90th pct", "bias", "in 90 % int.")


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s FILE.csv [FILE.csv …] [FLAGS]"
    parser.add_argument("files", nargs="*", metavar="FILE.csv", help="measured table")
    parser.add_argument("--scoreboard", action="store_true", help="score the tables that ship, as Markdown")
    parser.add_argument("--models", action="append", default=[], metavar="FILE.csv", help="further architectures")
    _flags.add_profiles(parser)
    parser.add_argument("--no-calibration", action="store_true", help="datasheets and priors only")
    parser.add_argument(
        "--rows", metavar="OUT.csv", help="write id, metric, predicted, low, high, refused of every row"
    )
    _flags.add_forms(parser, "json", "markdown", "csv", html="predicted over measured, scores by source and device")


def run(args: argparse.Namespace) -> int:
    if args.scoreboard:
        from simkit.scoreboard import scoreboard

        _output.emit(scoreboard().rstrip("\n"))
        return 0
    if not args.files:
        raise InputError(
            "needs a table", key="validate", hint="give a CSV file, or --scoreboard for the tables that ship"
        )
    from simkit.validate import score, summary, write_rows

    folders, models = _flags.profiles(args), tuple(args.models)
    rows = score(args.files, models=models, profiles=folders, calibration=not args.no_calibration)
    found = summary(rows)
    if args.rows:
        try:
            write_rows(rows, Path(args.rows))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"cannot be written ({reason})", file=args.rows, hint="give a file to write") from None
        _output.remark(args, f"wrote {args.rows}")
    if args.html:
        from simkit.plot import validation_page

        _output.write_page(args, validation_page(found, [p for r in rows if (p := _point(r))]))
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(found))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv([{"table": table, "name": name, **entry} for table, name, entry in _entries(found)]))
    elif args.markdown:
        from simkit.render_tables import markdown_table

        _output.emit(markdown_table(HEADS, [_line(name, entry) for _, name, entry in _entries(found)]))
    else:
        _text(args, found)
    return 0


def _text(args: argparse.Namespace, found: dict[str, Any]) -> None:
    tables = ("all",) if args.quiet else ("all", "by_metric", "by_device", "by_file")
    for table in tables:
        lines = [_line(name, entry) for kind, name, entry in _entries(found) if kind == table]
        heads = (table.replace("_", " "), *HEADS[1:])
        _output.emit(_output.listing(heads, lines, right=tuple(range(1, len(heads)))))
    refused = found["refused"]
    _output.emit(f"{found['predicted']} of {found['rows']} rows predicted, {len(refused)} refused")
    if not args.quiet:
        for entry in refused[:20]:
            _output.emit(f"! {entry['id'] or 'a row without id'}: {entry['reason']}")
        if len(refused) > 20:
            _output.emit(f"! and {len(refused) - 20} more; --json lists all")


def _entries(found: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    entries = [("all", "all", {key: found.get(key) for key in ("rows", *SCORES)})]
    for table in ("by_metric", "by_source", "by_device", "by_file"):
        entries += [(table, name, entry) for name, entry in found[table].items()]
    return entries


def _line(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    scores = ("" if entry.get(key) is None else f"{entry[key]:.1%}" for key in SCORES)
    return (name, str(entry["rows"]), *scores)


def _point(row: Any) -> dict[str, Any] | None:
    if row.predicted is None or row.value is None:
        return None
    return {
        "id": row.id,
        "source": row.source,
        "metric": row.metric,
        "measured": row.value,
        "predicted": row.predicted,
    }
