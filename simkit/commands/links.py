"""The links there are, inside a node, between nodes and over the internet, or one with its figures and sources.

Examples:

  simkit links
  simkit links show 10gbe
"""

from __future__ import annotations

import argparse

from simkit.commands import _flags, _output, _profile
from simkit.errors import InputError
from simkit.units import format_bits, format_Bps, format_s


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s [list [TEXT] | show NAME] [FLAGS]"
    parser.add_argument(
        "action", nargs="?", choices=("list", "show"), default="list", help="what to do (default: list)"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="the link to show; with list, a text that names must contain"
    )
    _flags.add_profiles(parser)
    _flags.add_forms(parser, "json", "csv")


def run(args: argparse.Namespace) -> int:
    from simkit.spec import load

    folders = _flags.profiles(args)
    if args.action == "show":
        if not args.name:
            raise InputError("lacks the name", key="links show", hint="for example `simkit links show 10gbe`")
        _profile.show(load.link(args.name, profiles=folders), folders, as_json=args.json, as_csv=args.csv)
        return 0
    names = _profile.matching("link", args.name, load.link_names(folders))
    links = [load.link(name, profiles=folders) for name in names]
    if args.json or args.csv:
        _profile.emit_data(links, as_json=args.json)
        return 0
    rows = []
    for link in links:
        rate = format_Bps(link.Bps) if link.scope == "gpu" else format_bits(link.Bps)
        if link.up_Bps is not None:
            rate += f" down, {format_bits(link.up_Bps)} up"
        rows.append(
            (link.name, link.scope, rate, format_s(link.latency_s), link.transport, "yes" if link.calibration else "")
        )
    _output.emit(
        _output.listing(("link", "per", "rate, one direction", "latency", "transport", "fitted"), rows, right=(2, 3))
    )
    return 0
