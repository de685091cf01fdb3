"""Step time, throughput, memory, money and energy of one job on one cluster, and what bounds it.

What is not given is filled in and stated. Examples:

  simkit predict --cluster 50x3080
  simkit predict --cluster 8x4x2080ti --inter 10gbe --model bert-large --method acp-sgd --rank 32 --json
  simkit predict run.yaml --set micro_batch=4 --html answer.html
  simkit predict --model llama-2-7b --cluster 1x8xa100 --tp 2 --zero 1 --breakdown modules
  simkit predict --from pretrain_gpt.sh --from ds_config.json --cluster 4x8xa100
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from simkit.commands import _flags, _output


def configure(parser: _flags.Parser) -> None:
    _flags.add_scenario(parser)
    _flags.add_forms(parser, "json", "markdown", "csv", html="timeline, where the time goes, memory")
    parser.add_argument(
        "--fail-if-unfit", action="store_true", help="exit code 3 where the job does not fit into memory"
    )
    parser.add_argument(
        "--breakdown",
        action="append",
        default=[],
        choices=("layers", "modules", "operators"),
        help="also show where a micro-batch goes by layer, module or operator; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    from simkit.predict import predict_scenario

    scenario = _flags.scenario(args)
    report = predict_scenario(scenario, spans=True) if args.html else predict_scenario(scenario)
    if args.breakdown:
        report = replace(report, shown=tuple(dict.fromkeys(args.breakdown)))
    if args.html:
        from simkit.plot import report_page

        _output.write_page(args, report_page(report))
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(report.to_dict()))
    elif args.markdown:
        _output.emit(report.to_markdown())
    elif args.csv:
        _output.emit(report.to_csv())
    else:
        from simkit.render_text import to_text

        _output.emit(to_text(report, brief=args.quiet, **_output.terminal()))
    return 3 if args.fail_if_unfit and not report.fits else 0
