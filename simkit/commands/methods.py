"""The gradient-exchange methods, fusion rules and collective algorithms there are.

Examples:

  simkit methods
  simkit methods acp-sgd
"""

from __future__ import annotations

import argparse
import inspect

from simkit import plugins
from simkit.commands import _flags, _output
from simkit.spec.scenario import FIELDS

FOLDERS = {
    "method": "simkit.compressors",
    "fusion": "simkit.fusion",
    "algorithm": "simkit.collectives",
    "method (peers)": "simkit.methods",
    "placement": "simkit.placement",
    "wire": "simkit.wire",
}
"""What is listed, by flag; work over peers has values of `method` of its own."""


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s [NAME] [FLAGS]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="print what is known about one of them")
    _flags.add_forms(parser, "json")


def run(args: argparse.Namespace) -> int:
    every = [(kind, name, _doc(package, name)) for kind, package in FOLDERS.items() for name in plugins.names(package)]
    # A rule that a method uses of itself (greedy, of acp-sgd) is no value of the flag: told when asked for by name.
    found = [row for row in every if args.name or _is_value(row[0], row[1])]
    if args.name:
        from simkit.errors import unknown

        hits = [row for row in found if row[1] == args.name.strip().lower()]
        if not hits:
            raise unknown("method", args.name, [name for _, name, _ in found])
        _output.emit("\n\n".join(f"{name} ({kind})\n\n{doc}" for kind, name, doc in hits))
    elif args.json:
        from simkit.render import to_json

        _output.emit(to_json({kind: {n: doc for k, n, doc in found if k == kind} for kind in FOLDERS}))
    else:
        rows = [(name, kind, doc.splitlines()[0] if doc else "") for kind, name, doc in found]
        _output.emit(_output.listing(("name", "flag", "what it does"), [(n, f"--{k}", d) for n, k, d in rows]))
    return 0


def _is_value(kind: str, name: str) -> bool:
    spec = FIELDS.get(kind)
    return spec is None or not spec.choices or name in spec.choices


def _doc(package: str, name: str) -> str:
    return inspect.getdoc(plugins.get(package, name)) or ""
