"""Fits what was measured: your own device or link from your files, or all shipped profiles from tables.

With --device or --link, files and folders of any format are read (nccl-tests logs, PyTorch traces, CSV), and the
profile with its fits goes to --out, in force with --profiles. Without them the shipped profiles are fitted from a
folder of tables: the same tables give the same files, byte for byte. Facts above a profile's marker line are never
touched. Examples:

  simkit calibrate --data all_reduce_perf.log --link ib-hdr --device a100 --out my-profiles
  simkit calibrate --data trace.json.gz gemms.csv --device rtx4090 --out my-profiles
  simkit calibrate --data nccl/ --link my-net=100Gb/s@5us --device a10g --nics-per-node 1 --out my-profiles
  simkit calibrate --data tables --write
  simkit calibrate --data my-machine/tables --profiles my-machine --write
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError


def configure(parser: _flags.Parser) -> None:
    parser.add_argument(
        "--data", metavar="PATH", nargs="+", action="extend", required=True, help="files of measurements, or folders"
    )
    mine = parser.add_argument_group("one's own profile")
    mine.add_argument("--device", default="", metavar="NAME", help="the device that was measured")
    mine.add_argument("--link", default="", metavar="NAME", help="the link measured; a new one: NAME=RATE@LATENCY")
    mine.add_argument("--out", metavar="DIR", help="folder for the profiles with their fits, for --profiles")
    mine.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of one node, where the files do not say")
    mine.add_argument("--nics-per-node", type=_count, metavar="N", help="NICs of one node, for a link between nodes")
    _flags.add_profiles(parser)
    shipped = parser.add_argument_group("the shipped profiles")
    shipped.add_argument("--write", action="store_true", help="replace the fits; with --profiles, those of that folder")
    shipped.add_argument("--dir", metavar="DIR", help="folder of profiles to write to (default: the shipped ones)")
    _flags.add_forms(parser, "json", "csv")


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from importlib.util import find_spec

    if find_spec("scipy") is None:
        hint = "pip install 'simkit-perf[fit]'"
        raise InputError("needs scipy, which is not installed", key="calibrate", hint=hint)
    if args.device or args.link or args.out:
        return _user(args)
    from simkit import calibrate

    folder = Path(args.dir) if args.dir else None
    if folder is not None and not folder.is_dir():
        raise InputError(
            "is no folder", key="--dir", value=args.dir, hint="give a folder with devices/ and links/ in it"
        )
    if len(args.data) > 1:
        raise InputError("takes one folder of tables here", key="--data", hint="or name a --device or --link to fit")
    own = _flags.profiles(args)
    if own and folder is not None:
        raise InputError("and --profiles name two folders", key="--dir", hint="leave one out")
    if own:
        outcome = calibrate.own(Path(args.data[0]), Path(own[0]))
    else:
        outcome = calibrate.calibrate(Path(args.data[0]), say=lambda line: _output.remark(args, line))
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
        for path in _write(outcome, Path(own[0]) if own else folder, own=bool(own)):
            _output.remark(args, f"wrote {path}")
    else:
        _output.remark(args, "nothing was written; --write puts the fits into the profiles")
    return 0


def _user(args: argparse.Namespace) -> int:
    from simkit import calibrate_user

    if args.write or args.dir:
        hint = "one's own profile goes to --out; the shipped ones are fitted without --device and --link"
        raise InputError("is for the shipped profiles", key="--write" if args.write else "--dir", hint=hint)
    outcome = calibrate_user.calibrate_user(
        args.data, device=args.device, link=args.link, gpus_per_node=args.gpus_per_node,
        nics_per_node=args.nics_per_node, folders=_flags.profiles(args),
    )  # fmt: skip
    written = calibrate_user.write(outcome, args.out) if args.out else []
    rows = calibrate_user.rows_of(outcome)
    if args.json:
        from simkit.render import to_json

        found = {"files": [read.to_dict() for read in outcome.reads], "fits": rows, "lacking": outcome.lacking}
        _output.emit(to_json(found | {"written": [path.as_posix() for path in written]}))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv(rows))
    else:
        _told(outcome, rows)
    for path in written:
        _output.remark(args, f"wrote {path}; in force with --profiles {args.out}")
    if not args.out:
        _output.remark(args, "nothing was written; --out DIR makes a folder of profiles")
    return 0


def _told(outcome: Any, rows: list[dict[str, Any]]) -> None:
    """What was read of each file, then the fits."""
    for read in outcome.reads:
        used = f"{read.used:,} of {read.total:,} {read.unit} used"
        _output.emit(f"{read.file}: {read.kind}, {used}, {len(read.rows):,} rows")
        for reason, count in sorted(read.skipped.items(), key=lambda item: (-item[1], item[0])):
            _output.emit(f"  skipped {count:,}: {reason}")
        if read.left_out:
            _output.emit(f"  columns left out: {', '.join(read.left_out)}")
    heads = ("kind", "name", "fit", "constants", "rows", "range", "MAPE")
    lines = [
        (r["kind"], r["name"], r["fit"], _constants(r), str(r["rows"]), _range(r), _error(r)) for r in rows
    ]  # fmt: skip
    _output.emit(_output.listing(heads, lines, right=(4, 6)))
    if "host_kernel_s" in outcome.facts:
        _output.emit(f"the host launches a kernel every {outcome.facts['host_kernel_s'] * 1e6:.2f} us")
    for line in outcome.lacking:
        _output.emit(f"! {line}")


def _write(outcome: Any, folder: Path | None, *, own: bool) -> list[Path]:
    from simkit import calibrate

    try:
        if own and folder is not None:
            written = calibrate.write_own(outcome, folder)
        else:
            written = calibrate.write(outcome, folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(
            f"cannot be written ({reason})", file=str(error.filename), hint="give a --dir you may write"
        ) from None
    calibrate.forget()
    return written


def _constants(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in row["values"].items())


def _range(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {low:.4g} to {high:.4g}" for key, (low, high) in row["valid"].items())


def _error(row: dict[str, Any]) -> str:
    return "" if row["mape"] is None else f"{row['mape']:.1%}"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["kind"], row["name"], row["fit"], _constants(row), str(row["rows"]), _error(row), row["evidence"])
