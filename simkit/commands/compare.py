"""Clusters, methods or any other field side by side, with ratios to the first case.

A flag may be repeated or hold a comma list; several such flags give every combination (at most 1,000). Examples:

  simkit compare --cluster 50x3080 --cluster 4xH100-PCIe
  simkit compare --cluster 8x4x2080ti --inter 10gbe --method s-sgd,power-sgd,acp-sgd --csv
"""

from __future__ import annotations

import argparse

from simkit.commands import _flags, _output
from simkit.errors import InputError


def configure(parser: _flags.Parser) -> None:
    _flags.add_scenario(parser, several=True)
    _flags.add_forms(parser, "json", "markdown", "csv", html="where the time goes, memory, throughput of every case")
    parser.add_argument(
        "--fail-if-unfit", action="store_true", help="exit code 3 where a case does not fit into memory"
    )


def run(args: argparse.Namespace) -> int:
    from simkit.compare import compare

    axes = {name: _flags.values(name, texts) for name, texts in _flags.given(args).items()}
    if not any(len(values) > 1 for values in axes.values()):
        raise InputError(
            "has one case only", key="compare", hint="repeat a flag or give a comma list: --method s-sgd,acp-sgd"
        )
    # The first case stands in for the axes, so that a flag also settles what two imported files disagree on.
    base = _flags.base(args, {name: values[0] for name, values in axes.items()} if args.sources else None)
    found = compare([base], **axes)
    found.base  # noqa: B018  # raises the reason where nothing could be predicted
    if args.html:
        from simkit.plot import comparison_page

        _output.write_page(args, comparison_page(found))
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(found.to_dict()))
    elif args.markdown:
        _output.emit(found.to_markdown())
    elif args.csv:
        _output.emit(found.to_csv())
    else:
        _output.emit(found.to_text(**_output.terminal()))
    return 3 if args.fail_if_unfit and not all(r.fits for r in found.reports) else 0

