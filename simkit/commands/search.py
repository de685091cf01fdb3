"""Every way to divide a job over a cluster, ranked by time, cost or memory, with what was struck out and why.

tp, pp, vpp, cp, ep, zero, recompute and micro_batch are tried; a flag fixes its field, a comma list is what to try of
it. Several clusters (or links, stacks, precisions …) are ranked together. Examples:

  simkit search --cluster 16x8xh100 --inter ib-ndr --model llama-3.1-70b --global-batch 1024 --top 5
  simkit search --cluster 4x8xa100 --model llama-2-13b --stack megatron --tp 2,4,8 --recompute selective --by memory
  simkit search --cluster 8x8xa100,4x8xh100 --model llama-2-13b --global-batch 512 --by cost --csv
"""

from __future__ import annotations

import argparse
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError

FIGURES = ("step", "tokens/s/GPU", "samples/s", "memory", "used", "USD/1M samples")
MOST = 100_000


def configure(parser: _flags.Parser) -> None:
    from simkit.search import BY, FREE

    parser.add_argument("--top", type=int, default=10, metavar="K", help="plans to show (default 10)")
    parser.add_argument("--by", default="time", metavar="FIGURE", help=f"what is best: {', '.join(BY)} (default time)")
    parser.add_argument(
        "--free", type=float, default=FREE, metavar="SHARE", help=f"share of the memory left over (default {FREE:.2g})"
    )
    _flags.add_scenario(parser, several=True)
    _flags.add_forms(parser, "json", "csv")
    parser.add_argument("--fail-if-unfit", action="store_true", help="exit code 3 where no plan fits into memory")


def run(args: argparse.Namespace) -> int:
    from simkit.search import BY, search_scenario
    from simkit.spec.scenario import clean

    if args.by not in BY:
        from simkit.errors import unknown

        raise unknown("ranking", args.by, BY, key="--by")
    if not 1 <= args.top <= MOST:
        raise InputError("is not possible", key="--top", value=args.top, hint=f"give 1 to {MOST:,}")
    if not 0.0 <= args.free < 1.0:
        raise InputError("is no share", key="--free", value=args.free, hint="0 to 0.99")
    given = {name: _flags.values(name, texts) for name, texts in _flags.given(args).items()}
    lists = {name: [clean(name, v) for v in values] for name, values in given.items() if len(values) > 1}
    single = {name: values[0] for name, values in given.items() if len(values) == 1}
    found = search_scenario(_flags.base(args, single), lists, by=args.by, free=args.free)
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(found.to_dict(args.top)))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv([{"rank": i} | c.row() for i, c in enumerate(found.top(args.top), start=1)]))
    else:
        _text(args, found)
    return 3 if args.fail_if_unfit and not found.candidates else 0


def _text(args: argparse.Namespace, found: Any) -> None:
    from simkit.search import SHOWN, ordered

    best = found.candidates[0] if found.candidates else found.leanest
    shown = list(found.top(args.top)) or [found.leanest]
    rows = [c.row() for c in shown]
    varied = list(best.varied)
    # A column that says the same of every plan is said once, above.
    names = [n for n in SHOWN if len({r[n] for r in rows}) > 1 or (n in ("tp", "pp", "zero", "micro_batch"))]
    same = [f"{n} = {rows[0][n]}" for n in SHOWN if n not in names]
    if len({r["global_batch"] for r in rows}) == 1:
        same.append(f"global_batch = {rows[0]['global_batch']}")
    cluster = "several clusters" if "cluster" in varied else best.resolved.cluster.spec
    _output.emit(f"{best.resolved.model.name} · {cluster} · every plan shown: {', '.join(same)}")
    heads = (*varied, *names, *FIGURES)
    lines = [(*(str(r[n]) for n in (*varied, *names)), *_figures(r)) for r in rows]
    _output.emit(_output.listing(heads, lines, right=tuple(range(len(varied), len(heads)))))
    fit = f"{len(found.candidates):,} of {found.asked:,} plans fit with {found.free:.0%} of the memory left over"
    _output.emit(f"{fit}; best by {found.by}" if found.candidates else f"{fit}; shown is the leanest")
    _output.emit(f"best: simkit predict {_base(args)}{best.flags()}")
    if not args.quiet:
        _output.emit("\nStruck out")
        heads = ("plans", "reason")
        _output.emit(_output.listing(heads, [(f"{n:,}", r) for r, n in ordered(found.pruned)], right=(0,)))
        _output.emit("\nAssumed (not given)")
        for note in found.assumptions:
            _output.emit(f"- {note}")


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    from simkit.units import format_s

    rate = row.get("tokens_per_s_per_gpu")
    usd = row.get("usd_per_million_samples")
    return (
        format_s(row["iteration_time_s"]),
        "" if rate is None else f"{rate:,.0f}",
        f"{row['samples_per_s']:.4g}",
        f"{row['peak_memory_gib']:.1f} GiB",
        f"{row['memory_used']:.0%}",
        "" if usd is None else f"{usd:,.0f}" if usd >= 100 else f"{usd:.3g}",
    )


def _base(args: argparse.Namespace) -> str:
    """What was asked, as flags, without what the plan gives."""
    from simkit.search_space import SEARCHED

    parts = [args.file] if args.file else []
    parts += [f"--set {text}" for text in args.set] + [f"--from {name}" for name in args.sources]
    for name, texts in _flags.given(args).items():
        values = _flags.values(name, texts)
        if name not in SEARCHED and name != "global_batch" and len(values) == 1:
            parts.append(f"--{name.replace('_', '-')} {values[0]}")
    return " ".join([*parts, ""]) if parts else ""
