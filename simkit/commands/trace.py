"""A Chrome/Perfetto trace of the simulated step: one track a stream and device.

Open the file in ui.perfetto.dev or chrome://tracing. Examples:

  simkit trace --cluster 8x4x2080ti --inter 10gbe --model resnet-50 --output step.json
  simkit trace run.yaml --html step.html
"""

from __future__ import annotations

import argparse

from simkit.commands import _flags, _output
from simkit.errors import InputError


def configure(parser: _flags.Parser) -> None:
    _flags.add_scenario(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.json",
        help="where to write the trace (default: standard output, or only the page with --html)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--html", metavar="FILE", help="write a self-contained page with the timeline (extra `plot`)")


def run(args: argparse.Namespace) -> int:
    from simkit.predict import predict_scenario
    from simkit.render import to_json
    from simkit.render_tables import label, trace_note
    from simkit.spec.files import write_text
    from simkit.trace import chrome_trace

    report = predict_scenario(_flags.scenario(args), spans=True, beside=False)
    if args.html:
        from simkit.plot import trace_page

        _output.write_page(args, trace_page(report))
    if args.output or not args.html:
        if report.timeline is None or not report.timeline.spans:
            hint = "leave tp, pp, cp, ep, zero and offload out; `simkit predict --breakdown` shows them too"
            raise InputError("a trace is drawn of data parallelism alone", hint=hint)
        events = chrome_trace(report.timeline, device_names=report.device_names, label=label(report))
        if args.output:
            _output.remark(args, f"wrote {write_text(args.output, to_json(events))}")
        else:
            _output.emit(to_json(events))
    if note := trace_note(report):
        _output.remark(args, note)
    return 0
