"""The devices there are, one with all its figures and their sources, or a new one of your own.

Examples:

  simkit devices
  simkit devices show "RTX 3080"
  simkit devices add my-gpu --memory "24 GiB" --bandwidth "1008 GB/s" --peak fp16=165TFLOP/s --dir profiles
"""

from __future__ import annotations

import argparse
from typing import Any

from simkit.commands import _flags, _output, _profile
from simkit.errors import InputError
from simkit.units import format_Bps, format_bytes, format_flops

OPTIONAL = (
    "title",
    "vendor",
    "architecture",
    "power",
    "idle_power",
    "launch_price",
    "rental_price",
    "intra",
    "boost_clock",
    "l2",
)
WHOLE = ("year", "sm_count", "gpus_per_node", "pcie_generation")


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s [list [TEXT] | show NAME | add NAME] [FLAGS]"
    parser.add_argument(
        "action", nargs="?", choices=("list", "show", "add"), default="list", help="what to do (default: list)"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the device to show or add; with list, a text that names must contain"
    )
    _flags.add_profiles(parser)
    _flags.add_forms(parser, "json", "csv")
    group = parser.add_argument_group("a device of your own (add)")
    group.add_argument("--memory", metavar="SIZE", help="as the driver reports it: '24 GiB'")
    group.add_argument("--bandwidth", metavar="RATE", help="of the memory: '1008 GB/s'")
    group.add_argument(
        "--peak",
        action="append",
        default=[],
        metavar="DTYPE=RATE",
        help="dense, fp32 accumulation: fp16=165TFLOP/s; repeatable",
    )
    group.add_argument("--dir", metavar="DIR", help="folder to write to; use it later as --profiles DIR")
    group.add_argument("--force", action="store_true", help="overwrite an existing file")
    for key in OPTIONAL + WHOLE:
        group.add_argument(
            f"--{key.replace('_', '-')}",
            metavar="N" if key in WHOLE else "TEXT",
            help=f"{key.replace('_', ' ')} (optional)",
        )
    group.add_argument(
        "--p2p", choices=("true", "false"), help="GPUs of a host copy to each other over PCIe (optional)"
    )


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "show": _show, "add": _add}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from simkit.spec import load

    folders = _flags.profiles(args)
    names = _profile.matching("device", args.name, load.device_names(folders))
    devices = [load.device(name, profiles=folders) for name in names]
    if args.json or args.csv:
        _profile.emit_data(devices, as_json=args.json)
        return 0
    rows = [
        (
            d.name,
            format_bytes(d.memory_bytes),
            format_Bps(d.memory_Bps),
            *(format_flops(d.peak_flops[t]) if t in d.peak_flops else "" for t in ("fp32", "fp16")),
            "yes" if d.calibration else "",
        )
        for d in devices
    ]
    _output.emit(_output.listing(("device", "memory", "bandwidth", "fp32", "fp16", "fitted"), rows, right=(1, 2, 3, 4)))
    return 0


def _show(args: argparse.Namespace) -> int:
    from simkit.spec import load

    if not args.name:
        raise InputError("lacks the name", key="devices show", hint="for example `simkit devices show rtx3080`")
    folders = _flags.profiles(args)
    _profile.show(load.device(args.name, profiles=folders), folders, as_json=args.json, as_csv=args.csv)
    return 0


def _add(args: argparse.Namespace) -> int:
    from simkit.spec.add import add_device

    for key in ("name", "memory", "bandwidth", "peak", "dir"):
        if not getattr(args, key):
            hint = "`simkit devices --help` has an example"
            raise InputError(f"lacks {'NAME' if key == 'name' else f'--{key}'}", key="devices add", hint=hint)
    peak = {}
    for text in args.peak:
        dtype, equals, rate = text.partition("=")
        if not equals or not rate.strip():
            raise InputError(
                "is no peak", key="--peak", value=text, hint="write DTYPE=RATE, for example fp16=165TFLOP/s"
            )
        peak[dtype.strip()] = rate.strip()
    optional: dict[str, Any] = {key: getattr(args, key) for key in OPTIONAL if getattr(args, key) is not None}
    optional |= {key: _whole(key, getattr(args, key)) for key in WHOLE if getattr(args, key) is not None}
    if args.p2p is not None:
        optional["p2p"] = args.p2p == "true"
    path = add_device(
        args.name,
        memory=args.memory,
        bandwidth=args.bandwidth,
        peak=peak,
        directory=args.dir,
        force=args.force,
        **optional,
    )
    _output.emit(f"wrote {path}; use it with --profiles {args.dir}")
    return 0


def _whole(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            "is not a whole number", key=f"--{key.replace('_', '-')}", value=text, hint="for example 8"
        ) from None
