"""A grid of scenarios at once: every point's time, memory and money, to a file or as the best of them.

Axes: A,B,C or START:STOP:COUNT (evenly spaced), START:STOP:COUNT:log, START:STOP:*FACTOR; several --grid give every
combination. A point that cannot be predicted, or does not fit, keeps its row with the reason. Examples:

  simkit sweep --cluster 8x4x2080ti --method acp-sgd --grid inter=1Gb/s@5us:800Gb/s@5us:4000 --out all.csv
  simkit sweep --cluster 8x8xa100 --model llama-7b --grid tp=1,2,4,8 --grid micro_batch=1:8:*2 --by tokens_per_s_per_gpu
"""

from __future__ import annotations

import argparse
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError

MAX_JSON = 20_000
SHOWN = ("iteration_time_s", "samples_per_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib", "usd_per_step")


def configure(parser: _flags.Parser) -> None:
    parser.add_argument(
        "--grid", action="append", default=[], metavar="FIELD=VALUES", help="an axis; repeatable, last varies fastest"
    )
    parser.add_argument("--out", metavar="FILE", help="write every point: .csv, or .parquet (extra `fit`)")
    parser.add_argument("--best", type=int, default=10, metavar="N", help="points to show (default 10)")
    parser.add_argument(
        "--by", default="samples_per_s", metavar="METRIC", help="what is best: samples_per_s (default), usd_per_step, …"
    )
    _flags.add_scenario(parser)
    parser.usage = "%(prog)s [FILE] --grid FIELD=VALUES [FLAGS]"
    _flags.add_forms(parser, "json", html="the metric over one or two axes")


def run(args: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from simkit.grids import axes, setting
    from simkit.sweep import Sweep
    from simkit.sweep_files import Best, rows, writing

    grid: dict[str, Any] = {}
    for text in args.grid:
        name, values = setting(text)
        if name.replace("-", "_") in grid:
            raise InputError("is given twice", key="--grid", value=name, hint="write one --grid for each field")
        grid[name.replace("-", "_")] = values
    if not 1 <= args.best <= 1000:
        raise InputError("is not possible", key="--best", value=args.best, hint="give 1 to 1000")
    asked = Sweep(_flags.scenario(args), axes(grid))
    if args.json and asked.points > MAX_JSON and not args.out:
        hint = "write them with --out FILE.csv; --json then holds the best alone"
        raise InputError(f"would hold more than {MAX_JSON} points", key="--json", value=asked.points, hint=hint)
    best = Best(asked, args.by.replace("-", "_"), args.best)
    every: list[dict[str, Any]] = []
    surface = _surface(asked, best.metric) if args.html else None
    with writing(args.out, asked.columns) if args.out else nullcontext() as append:
        for block in asked.blocks():
            best.add(block)
            if append is not None:
                append(block)
            elif args.json:
                every += rows(block)
            if surface is not None:
                surface.add(block)
    if args.out:
        _output.remark(args, f"wrote {args.out}")
    if surface is not None:
        from simkit.plot_sweep import sweep_page

        _output.write_page(args, sweep_page(asked, best, surface))
    if args.json:
        from simkit.render import to_json

        counts = {"points": best.points, "answered": best.answered, "fitting": best.fitting, "by": best.metric}
        _output.emit(to_json(counts | {"best": best.rows} | ({} if args.out else {"rows": every})))
    else:
        _text(args, asked, best)
    return 0


def _surface(asked: Any, metric: str) -> Any:
    from simkit.plot_page import graph_objects
    from simkit.plot_sweep import Surface

    graph_objects()
    return Surface(asked, metric)


def _text(args: argparse.Namespace, asked: Any, best: Any) -> None:
    from simkit.sweep_files import place, short

    names = [axis.name for axis in asked.axes]
    shown = [n for n in dict.fromkeys((best.metric, *SHOWN)) if any(n in row for row in best.rows) and n not in names]
    if best.rows:
        heads = (*names, *shown, "fits")
        lines = [
            (
                *(place(axis, row) for axis in asked.axes),
                *(short(row.get(n)) for n in shown),
                "yes" if row["fits"] else "NO",
            )
            for row in best.rows
        ]
        _output.emit(_output.listing(heads, lines, right=tuple(range(len(names), len(heads) - 1))))
    refused = best.points - best.answered
    unfit = best.answered - best.fitting
    line = f"{best.points:,} points: {best.fitting:,} fit, {unfit:,} do not, {refused:,} refused; best by {best.metric}"
    _output.emit(line)
    if not best.answered:
        first = next(asked.blocks())
        _output.emit(f"! {first['refused'][0]}")
