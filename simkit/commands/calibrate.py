"""Fits links, devices and priors on tables of measurements, and with --write puts the fits into the profiles.

The same tables give the same files, byte for byte; facts above a profile's marker line are never touched. Examples:

  simkit calibrate --data tables
  simkit calibrate --data tables --write
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError


def configure(parser: _flags.Parser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", required=True, help="folder with kernel_*.csv, gemm_*.csv, collective_*.csv …"
    )
    parser.add_argument("--write", action="store_true", help="replace the fits of the profiles")
    parser.add_argument("--dir", metavar="DIR", help="folder of profiles to write to (default: the shipped ones)")
    _flags.add_forms(parser, "json", "csv")


def run(args: argparse.Namespace) -> int:
    from simkit import calibrate

    folder = Path(args.dir) if args.dir else None
    if folder is not None and not folder.is_dir():
        raise InputError(
            "is no folder", key="--dir", value=args.dir, hint="give a folder with devices/ and links/ in it"
        )
    outcome = calibrate.calibrate(Path(args.data), say=lambda line: _output.remark(args, line))
    rows = calibrate.rows_of(outcome)
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(rows))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv(rows))
    elif not args.quiet:
        heads = ("kind", "name", "fit", "constants", "rows", "MAPE", "evidence")
        _output.emit(_output.listing(heads, [_line(row) for row in rows], right=(4, 5)))
    if args.write:
        for path in _write(outcome, folder):
            _output.remark(args, f"wrote {path}")
    else:
        _output.remark(args, "nothing was written; --write puts the fits into the profiles")
    return 0


def _write(outcome: Any, folder: Path | None) -> list[Path]:
    from simkit import calibrate

    try:
        written = calibrate.write(outcome, folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"cannot be written ({reason})", file=str(error.filename), hint="give a --dir you may write"
        ) from None
    calibrate.forget()
    return written


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    constants = ", ".join(f"{key} {value:.4g}" for key, value in row["values"].items())
    error = "" if row["mape"] is None else f"{row['mape']:.1%}"
    return (row["kind"], row["name"], row["fit"], constants, str(row["rows"]), error, row["evidence"])
