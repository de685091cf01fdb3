"""Where cards at home equal a data centre: throughput over that of a reference, by bandwidth and micro-batches.

A number above 1 is a point at which the peers are faster. Examples:

  simkit map --cluster 50x3080 --model gpt3-2.7b
  simkit map --cluster 50x3080 --model gpt3-2.7b --wire int8 --html map.html --png map.png
  simkit map --cluster 30x3080+20x4090 --model llama-2-7b --bandwidth 100Mb/s:10Gb/s:9 --micro-batches 8:512:*4 --json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from simkit.commands import _flags, _output
from simkit.errors import InputError, RefusedError

if TYPE_CHECKING:
    from simkit.report import Report
    from simkit.spec.scenario import Scenario

BANDWIDTHS = "10Mb/s:100Gb/s:13"
COUNTS = "1:1024:*4"
LATENCY = "10ms"
VARIED = {"grad_accum": "--micro-batches", "inter": "--bandwidth and --latency", "task": "", "method": "", "wiring": ""}
"""Fields that a map settles itself, and the flags that say it."""
NEUTRAL = {"method": ("decentralized",), "task": ("pretrain", "finetune"), "wiring": ("fixed",)}
LATENCIES = "1ms,10ms,30ms,100ms,300ms"


def configure(parser: _flags.Parser) -> None:
    parser.add_argument("--bandwidth", default=BANDWIDTHS, metavar="RANGE",
                        help=f"rates of all lines, START:STOP:COUNT (even ratios) or a list; {BANDWIDTHS}")
    parser.add_argument("--micro-batches", default=COUNTS, metavar="RANGE",
                        help=f"micro-batches of a pipeline and step: a list or a range; {COUNTS}")
    parser.add_argument("--latency", default=LATENCY, metavar="TIME", help=f"between two peers; {LATENCY}")
    parser.add_argument("--latencies", default=LATENCIES, metavar="LIST", help=f"latencies to try; {LATENCIES}")
    parser.add_argument("--reference", default="", metavar="CLUSTER", help="what to compare with; 4xh100-pcie-80gb")
    parser.add_argument("--png", metavar="FILE", help="also write the map as a picture (needs Chromium and playwright)")
    _flags.add_scenario(parser)
    _flags.add_forms(parser, "json", "csv", html="the map and its crossings")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from simkit.decentral import asked
    from simkit.decentral_map import mapped
    from simkit.decentral_report import reference

    given = _flags.scenario(args)
    _refuse(given)
    rates, counts = _rates(args.bandwidth), _counts(args.micro_batches)
    scenario = given.with_(method="decentralized")
    question, notes = asked(scenario)
    values: dict[str, Any] = dict(question.resolved.values()) | {"global_batch": question.samples}
    try:
        other = reference(scenario, values, args.reference)
    except (InputError, RefusedError) as error:
        if not args.reference:
            raise
        raise InputError(f"cannot be compared with: {error}", key="--reference", value=args.reference) from None
    found = mapped(
        question, bandwidths=rates, latency_s=_seconds(args.latency, "--latency"),
        counts=counts, reference_rate=other.samples_per_s,
        latencies_s=[_seconds(x, "--latencies") for x in args.latencies.split(",")],
    )  # fmt: skip
    assumed = _assumed(scenario, args, other, notes)
    title = f"{_peers(question)} against {other.scenario['cluster']}, {question.resolved.model.name}"
    if args.html or args.png:
        from simkit.plot_map import map_page, write_png

        page = map_page(found, title, assumed)
        if args.html:
            _output.write_page(args, page)
        if args.png:
            write_png(page, args.png)
            _output.remark(args, f"wrote {args.png}")
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(_object(found, other, title, assumed)))
    elif args.csv:
        from simkit.render import rows_to_csv

        _output.emit(rows_to_csv(_rows(found)))
    else:
        _text(found, title, other.samples_per_s)
        if not args.quiet:
            from simkit.render_text import Line, print_parts

            lines = [Line(text=""), Line(text="Assumed (not given)", style="bold")]
            _output.emit(print_parts([*lines, *(Line(text=f"- {n}") for n in assumed)], **_output.terminal()))
    return 0


def _refuse(scenario: Scenario) -> None:
    """Raises InputError for a field that the map would ignore."""
    for name, flag in VARIED.items():
        if scenario.given(name) and scenario.get(name) not in NEUTRAL.get(name, ()):
            why = "is what a map varies" if flag else "is no question of a map, which trains in pipelines over peers"
            raise InputError(why, file=scenario.file, key=name, value=scenario.get(name),
                             hint=f"give {flag}" if flag else "leave it out, or ask `simkit predict`")  # fmt: skip


def interval(other: Report) -> tuple[float, float]:
    """90 % interval of a ratio, as factors of it: that of the peers' step and that of the reference, on logarithms and
    independent."""
    from math import exp, hypot, log

    from simkit.decentral_report import SPREAD

    low, high = (x / other.samples_per_s for x in other.interval_90["samples_per_s"])
    return exp(-hypot(log(SPREAD[1]), log(high))), exp(hypot(log(SPREAD[0]), log(low)))


def _assumed(scenario: Scenario, args: argparse.Namespace, other: Report, notes: list[str]) -> list[str]:
    from simkit.decentral_report import CONVENTIONS

    said = [n for n in notes if not n.startswith("inter")]
    if not scenario.given("exchange"):
        said.append("exchange = s-sgd: none given; compressed gradients need less bandwidth")
    if not scenario.given("recompute"):
        said.append("recompute = whichever is faster at a point: it costs a forward pass and frees memory for larger "
                    "stages and micro-batches")  # fmt: skip
    if not args.reference:
        said.append(f"reference = {other.scenario['cluster']}: none given")
    said.append("the reference runs the same network and batch as `simkit predict` plans it there")
    if not other.fits:
        said.append(f"the reference does NOT fit: {other.memory.why_not}; its throughput is as if memory were ample")
    low, high = interval(other)
    return [*said, *CONVENTIONS, f"90 % interval of a ratio = {low:.2f} to {high:.2f} times it: of both throughputs, "
            "taken as independent; that of the peers is assumed"]  # fmt: skip


def _peers(question: Any) -> str:
    counted: dict[str, int] = {}
    for peer in question.peers:
        counted[peer.device] = counted.get(peer.device, 0) + 1
    return "+".join(f"{n}x{d}" for d, n in counted.items())


def _rates(text: str) -> list[float]:
    """byte/s of every rate, rising."""
    import numpy as np

    from simkit.units import parse

    pieces = text.split(":")
    if len(pieces) == 1:
        rates = [parse(x.strip(), "Bps", key="--bandwidth") for x in text.split(",")]
    elif len(pieces) == 3 and pieces[2].isdigit() and 2 <= int(pieces[2]) <= 1000:
        low, high = (parse(x.strip(), "Bps", key="--bandwidth") for x in pieces[:2])
        _positive(min(low, high), "--bandwidth", text)
        rates = [float(x) for x in np.geomspace(low, high, int(pieces[2]))]
    else:
        raise InputError("is no range of rates", key="--bandwidth", value=text, hint=f"as in {BANDWIDTHS}")
    _positive(min(rates), "--bandwidth", text)
    return sorted(set(rates))


def _seconds(text: str, key: str) -> float:
    from simkit.units import parse

    found = parse(text.strip(), "s", key=key)
    if found < 0.0:
        raise InputError("is negative", key=key, value=text, hint="as in 20ms")
    return found


def _positive(value: float, key: str, text: str) -> None:
    if not value > 0.0:
        raise InputError("is not positive", key=key, value=text)


def _counts(text: str) -> list[int]:
    from simkit.decentral import MAX_COUNT
    from simkit.grids import axis

    found = sorted({int(x) for x in axis("grad_accum", text).values})
    if found[-1] > MAX_COUNT:
        raise InputError("is too many", key="--micro-batches", value=found[-1], hint=f"at most {MAX_COUNT}")
    return found


def _rows(found: Any) -> list[dict[str, Any]]:
    return [
        {"bandwidth_Bps": float(found.bandwidth_Bps[i]), "latency_s": found.latency_s, "micro_batches": count,
         "samples_per_s": float(found.rate[i, k]), "ratio": float(found.ratio[i, k]),
         "pipelines": int(found.pipelines[i, k]), "stages": int(found.depth[i, k]),
         "micro_batch": int(found.micro_batch[i, k]), "recompute": str(found.recompute[i, k]),
         "fits": bool(found.rate[i, k] > 0.0)}
        for i in range(len(found.bandwidth_Bps)) for k, count in enumerate(found.counts)
    ]  # fmt: skip


def _object(found: Any, other: Report, title: str, assumed: list[str]) -> dict[str, Any]:
    return {
        "title": title, "reference": {"scenario": dict(other.scenario), "samples_per_s": other.samples_per_s},
        "ratio_interval_90": list(interval(other)), "assumptions": assumed, "points": _rows(found),
        "crossings": {
            "bandwidth_Bps": [{"micro_batches": n, "bandwidth_Bps": x}
                              for n, x in zip(found.counts, found.bandwidth_crossings(), strict=True)],
            "micro_batches": [{"bandwidth_Bps": float(b), "micro_batches": x}
                              for b, x in zip(found.bandwidth_Bps, found.count_crossings(), strict=True)],
            "latency_s": [{"bandwidth_Bps": float(b), "latency_s": x}
                          for b, x in zip(found.bandwidth_Bps, found.latency_crossings(), strict=True)],
        },
    }  # fmt: skip


def _text(found: Any, title: str, reference_rate: float) -> None:
    from simkit.units import format_bits, format_s

    _output.emit(f"{title}: times the reference's {reference_rate:.4g} samples/s")
    heads = ("line", *(f"{n} mb" for n in found.counts), "equal from", "up to latency")
    rows = []
    for i, bandwidth in enumerate(found.bandwidth_Bps):
        count, latency = found.count_crossings()[i], found.latency_crossings()[i]
        limit = "" if latency is None else format_s(latency)
        cells = (format_bits(bandwidth), *(_ratio(x) for x in found.ratio[i]),
                 "never" if count is None else f"{count:.0f} mb", limit)  # fmt: skip
        # A narrow column of names wraps at spaces.
        rows.append(tuple(cell.replace(" ", "") for cell in cells))
    _output.emit(_output.listing(heads, rows, right=tuple(range(1, len(heads)))))
    for n, x in zip(found.counts, found.bandwidth_crossings(), strict=True):
        _output.emit(f"{n} micro-batches: {'never' if x is None else 'equal from ' + format_bits(x)}")


def _ratio(value: float) -> str:
    return f"{value:.3g}" if value > 0.0 else "-"
