"""A decentralized job under churn: peers come, leave, fail and slow down; what is left of the work, and at what price.

The plan is that of `simkit predict --method decentralized`; the swarm then lives through HOURS of churn. Laws of churn:
exponential:4h, weibull:4h,shape=0.6, pareto:4h,alpha=1.5, empirical:sessions.csv, day-night:4h,amplitude=0.5,peak=2h,
correlated:4h,every=24h,share=0.3,duration=1h, trace:stays.csv, none. Examples:

  simkit swarm --peers 50x3080 --inter wan-1gbps --model bert-large --churn exponential:4h --backup-pool 5 --hours 24
  simkit swarm --peers 60x3080 --model bert-large --dp 5 --pp 10 --goodput-above 0.9 --replications 8 --workers 2
  simkit swarm --peers peers.csv --wiring stochastic --churn weibull:2h,shape=0.5 --json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError
from simkit.spec.scenario import FIELDS

# flag: (field of SwarmConfig, kind, help)
_KNOBS: dict[str, tuple[str, str, str]] = {
    "backup-pool": ("backup_pool", "count", "spare peers beyond those of the plan (default 0)"),
    "arrivals": ("arrivals", "text", "open: volunteers come by themselves; recruit: the broker replaces whom it lost"),
    "recruit": ("recruit_s", "s", "mean time to recruit a replacement (default 10min)"),
    "graceful": ("graceful", "ratio", "share of peers that announce their leave (default 0)"),
    "notice": ("notice_s", "s", "how long ahead (default 2min)"),
    "heartbeat": ("heartbeat_s", "s", "time between heartbeats (default 10s)"),
    "misses": ("misses", "count", "heartbeats missed until a peer is given up (default 3)"),
    "startup": ("startup_s", "s", "from registration to being usable (default 30s)"),
    "broker": ("broker_s", "s", "mean time the broker needs for a request (default 10ms)"),
    "broker-law": ("broker_law", "text", "deterministic, exponential or uniform"),
    "checkpoint-stop": ("checkpoint_s", "s", "time a checkpoint stops the job (default 0: written in the background)"),
    "checkpoint-servers": ("checkpoint_servers", "count", "servers that hold checkpoints (default 1)"),
    "checkpoint-rate": ("checkpoint_Bps", "Bps", "line of each of them (default 1Gb/s)"),
    "slow-every": ("slow_every_s", "s", "mean time until a peer slows down (default never)"),
    "slow-factor": ("slow_factor", "ratio", "how much slower it is then (default 3)"),
    "slow-for": ("slow_s", "s", "mean time it stays slow (default 10min)"),
    "spares-by": ("placement", "text", "which spare takes a place: fastest, longest, cheapest, best-link, uniform"),
    "state-from": ("replacement", "text", "where its state comes from: replica, striped, neighbour, checkpoint"),
    "pool-policy": ("pool", "text", "how many spares to recruit: fixed, share, poisson"),
    "deadline": ("deadline", "text", "when a slow peer is given up: none, fixed, adaptive"),
    "patience": ("patience_s", "s", "how long before peers are moved (default 5min)"),
    "hysteresis": ("hysteresis", "ratio", "how much better it must become (default 0.1)"),
    "relays": ("relays", "count", "relays for firewalled peers (default 1)"),
    "relay-rate": ("relay_Bps", "Bps", "line of each of them (default 1Gb/s)"),
    "bins": ("bins", "count", "points of the timeline (default 96)"),
}
# A field of the vocabulary keeps its own name in messages, where it means something else.
_FLAGS = {name: f"--{flag}" for flag, (name, _, _) in _KNOBS.items() if name not in FIELDS} | {
    "horizon_s": "--hours", "churn": "--churn", "joins": "--storm", "peers": "--peers", "latency_s": "--latency",
    "beside": "--beside", "goodput_above": "--goodput-above", "replications": "--replications", "workers": "--workers",
}  # fmt: skip
LONGEST_H = 1e6
_POLICIES = {"placement", "replacement", "pool", "deadline"}


def configure(parser: _flags.Parser) -> None:
    group = parser.add_argument_group("churn, broker and pool")
    group.add_argument("--churn", default="exponential:4h", metavar="LAW", help="how long peers stay (exponential:4h)")
    group.add_argument("--hours", type=float, default=24.0, metavar="X", help="simulated time (default 24)")
    for flag, (name, kind, text) in _KNOBS.items():
        group.add_argument(f"--{flag}", dest=f"knob_{name}", metavar=kind.upper(), help=text)
    group.add_argument("--storm", action="append", default=[], metavar="TIME=N", help="N peers join at TIME, as 2h=20")
    group.add_argument("--latency", action="append", default=[], metavar="A,B=TIME", help="one way, between regions")
    study = parser.add_argument_group("study")
    study.add_argument("--replications", type=int, default=1, metavar="N", help="independent runs (default 1)")
    study.add_argument("--workers", type=int, default=1, metavar="N", help="processes; they change no answer")
    study.add_argument("--goodput-above", type=float, metavar="X", help="find the smallest backup pool that keeps it")
    study.add_argument("--beside", metavar="CLUSTER", help="compare with it (default 4xh100-pcie-80gb; none: do not)")
    study.add_argument("--trace", metavar="FILE", help="write a Perfetto trace, one track a peer")
    _flags.add_scenario(parser)
    _flags.add_forms(parser, "json", html="work and peers over time")


def run(args: argparse.Namespace) -> int:
    from simkit.swarm import DATACENTRE, study

    _check_files(args)
    peers = args.field_peers
    cluster = _peers(args)
    beside = DATACENTRE if args.beside is None else None if args.beside == "none" else args.beside
    try:
        scenario = _flags.scenario(args, **cluster)
        answer, work, runs = study(
            scenario, replications=args.replications, workers=args.workers, goodput_above=args.goodput_above,
            beside=beside, record=bool(args.trace), **knobs(args),
        )  # fmt: skip
    except InputError as error:
        raise _by_flag(error, peers if cluster else None) from None
    if cluster and peers.isdigit():
        answer["assumptions"].insert(0, f"cluster = {cluster['cluster']}: {peers} peers, of the device "
                                        "of --cluster, else of the default cluster")  # fmt: skip
    title = f"{work.answer.asked.resolved.model.name} on a swarm of {len(work.config.peers)} peers"
    if args.trace:
        from simkit.render import to_json
        from simkit.spec.files import write_text
        from simkit.trace_swarm import swarm_trace

        _output.remark(args, f"wrote {write_text(args.trace, to_json(swarm_trace(runs[0], label=title)))}")
    if args.html:
        from simkit.plot_swarm import swarm_page

        _output.write_page(args, swarm_page(answer, title=title, lines=lines(answer)))
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(answer))
    else:
        _text(args, title, answer)
    return 0


class _ProbeError(Exception):
    """Ends a probe of a file to be written."""


def _check_files(args: argparse.Namespace) -> None:
    """Raises InputError, before anything is computed, where --html or --trace could not be written."""
    from simkit.spec.files import whole_file

    for path in (args.trace, args.html):
        if path:
            try:
                with contextlib.suppress(_ProbeError), whole_file(path):
                    raise _ProbeError
            except OSError as error:
                raise InputError(f"cannot be written ({(error.strerror or str(error)).lower()})", file=path,
                                 hint="give another name") from None  # fmt: skip
    if args.html:
        from simkit.plot_page import graph_objects

        graph_objects()
        if args.trace and os.path.realpath(args.html) == os.path.realpath(args.trace):
            raise InputError("is the file of --trace too", key="--html", value=args.html, hint="give two names")


def _by_flag(error: InputError, peers: str | None) -> InputError:
    """The error under the name of the flag; peers: what --peers gave for a cluster."""
    if error.file:
        return error
    if error.key == "cluster" and peers is not None:
        return InputError(error.what, key="--peers", value=peers, hint=error.hint or "write it as 50x3080")
    flag = _FLAGS.get(error.key)
    return error if flag is None else InputError(error.what, key=flag, value=error.value, hint=error.hint)


def _peers(args: argparse.Namespace) -> dict[str, Any]:
    """`--peers 50x3080` names a cluster, `--peers 50` that many of its device, `--peers FILE.csv` a table of peers."""
    text = args.field_peers
    if text is None or text.lower().endswith(".csv"):
        return {}
    if text.isascii() and text.isdigit():
        return _number(args, text)
    if args.field_cluster is not None:
        raise InputError("is given beside --cluster", key="--peers", value=text, hint="give one of them")
    args.field_peers = None
    return {"cluster": text}


def _number(args: argparse.Namespace, text: str) -> dict[str, Any]:
    """So many peers of the device that the scenario or the default names; a cluster with a number says it itself."""
    from simkit.decentral import DEFAULT_CLUSTER

    if len(text) > 7 or int(text) < 1:
        raise InputError("is no number of peers", key="--peers", value=text, hint="a whole number from 1 to 9999999")
    cluster = args.field_cluster or _flags.base_values(args).get("cluster") or DEFAULT_CLUSTER.partition("x")[2]
    if re.match(r"(\d+x|.*\+)", cluster):
        return {}
    args.field_peers = None
    return {"cluster": f"{text}x{cluster}"}


def knobs(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SwarmConfig` that flags give."""
    from simkit import plugins
    from simkit.churn._common import churn
    from simkit.units import parse

    if not 0.0 < args.hours <= LONGEST_H:
        raise InputError("is no length of a run", key="--hours", value=args.hours,
                         hint=f"give hours above 0, up to {LONGEST_H:g}")  # fmt: skip
    found: dict[str, Any] = {"churn": churn(args.churn, key="--churn"), "horizon_s": args.hours * 3600.0}
    for flag, (name, kind, _) in _KNOBS.items():
        text = getattr(args, f"knob_{name}")
        if text is None:
            continue
        if kind == "text":
            if name in _POLICIES:
                try:
                    plugins.get(f"simkit.policies.{name}", text)
                except InputError as error:
                    raise InputError(error.what, key=f"--{flag}", value=text, hint=error.hint) from None
            found[name] = text
        elif kind == "count":
            found[name] = _count(text, f"--{flag}")
        else:
            found[name] = parse(text, kind, key=f"--{flag}")
    storms = _pairs(args.storm, "--storm")
    found["joins"] = tuple((parse(a, "s", key="--storm"), _count(b, "--storm")) for a, b in storms)
    regions = {}
    for pair, text in _pairs(args.latency, "--latency"):
        a, comma, b = pair.partition(",")
        if not comma:
            raise InputError("names no two regions", key="--latency", value=pair, hint="write eu,us=40ms")
        regions[a.strip(), b.strip()] = parse(text, "s", key="--latency")
    found["latency_s"] = regions
    return found


def _pairs(texts: list[str], key: str) -> list[tuple[str, str]]:
    pairs = [tuple(text.split("=", 1)) for text in texts]
    for pair in pairs:
        if len(pair) != 2:
            raise InputError("is no NAME=VALUE", key=key, value=pair[0], hint="write 2h=20 or eu,us=40ms")
    return [(p[0].strip(), p[1].strip()) for p in pairs]


def _count(text: str, key: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7):
        raise InputError("is no count", key=key, value=text, hint="give a whole number from 0 to 9999999")
    return int(text)


def lines(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The answer in lines: (name, value)."""
    from simkit.units import format_bytes, format_s

    def spread(name: str, form: str = ".4g") -> str:
        found = answer["interval_95"].get(name)
        return f"{answer[name]:{form}}" + (f" (95 %: {found[0]:{form}} to {found[1]:{form}})" if found else "")

    plan = answer["plan"]
    tokens = f", {answer['useful_tokens_per_s']:,.0f} tokens/s" if "useful_tokens_per_s" in answer else ""
    rows = [
        ("Plan", f"{plan['pipelines']} x {plan['stages']} stages, {plan['micro_batches']} micro-batches of "
                 f"{plan['micro_batch']:g}, step {format_s(plan['step_s'])}, {plan['wiring']} wiring"),
        ("Churn", f"{plan['churn']}, {plan['arrivals']} arrivals, {answer['backup_pool']} spare peers"),
        ("Goodput", f"{spread('goodput', '.1%')} of {answer['ideal_samples_per_s']:.4g} samples/s without churn"),
        ("Useful work", f"{spread('useful_samples_per_s')} samples/s{tokens}"),
        ("Lost work", f"{spread('lost_work_fraction', '.2%')} of what was done"),
        ("Recoveries", f"{answer['recoveries']:.4g}: missed after {format_s(answer['detection_s'])}, state in "
                       f"{format_s(answer['takeover_s'])}, standing still {format_s(answer['recovery_s'])}"),
        ("Pipelines", ", ".join(f"{k} {v:.1%}" for k, v in answer["time_by_state"].items() if v >= 5e-4)),
        ("Utilisation", f"{answer['utilisation']:.1%} of the peers' time; p10 to p90 "
                        f"{answer['utilisation_of_peers']['p10']:.1%} to {answer['utilisation_of_peers']['p90']:.1%}"),
        ("State moved", f"{format_bytes(answer['moved_bytes'])}"),
        ("Money", f"{answer['cost_usd_per_hour']:.4g} USD/h rental or {answer['electricity_usd_per_hour']:.3g} USD/h "
                  "electricity"
                  + (f"; {answer['usd_per_million_samples']:.4g} USD and {answer['kwh_per_million_samples']:.4g} kWh a "
                     "million samples" if "usd_per_million_samples" in answer else "")),
    ]  # fmt: skip
    rows.append(("Interval", answer["interval_method"]))
    if "time_to_end_s" in answer:
        rows.append(("The whole job", f"{format_s(answer['time_to_end_s'])}, {answer['cost_usd']:,.4g} USD"))
    return rows + _beside(answer) + _pool(answer)


def _beside(answer: dict[str, Any]) -> list[tuple[str, str]]:
    other = answer.get("datacentre")
    if not other:
        return []
    if "why_not" in other:
        return [(other["cluster"], other["why_not"])]
    text = f"{other['samples_per_s']:.4g} samples/s"
    if "throughput_ratio" in other:
        text += f"; the swarm does {other['throughput_ratio']:.3g} times that"
    if "usd_per_million_samples" in other:
        text += f"; {other['usd_per_million_samples']:.4g} USD a million samples"
    return [(other["cluster"], text + ("" if other["fits"] else " (does not fit)"))]


def _pool(answer: dict[str, Any]) -> list[tuple[str, str]]:
    study = answer.get("backup_pool_for_goodput")
    if not study:
        return []
    what = f"goodput above {study['goodput_above']:.0%}"
    tried = ", ".join(f"{row['backup_pool']}: {row['goodput']:.1%}" for row in study["tried"])
    if study["smallest"] is None:
        return [("Backup pool", f"no pool keeps {what}; tried {tried}")]
    return [("Backup pool", f"{study['smallest']} spare peers keep {what}; tried {tried}")]


def _text(args: argparse.Namespace, title: str, answer: dict[str, Any]) -> None:
    from simkit.render_text import Grid, Line, Part, print_parts

    parts: list[Part] = [Line(text=title, style="bold"), Grid(rows=lines(answer), styles=("cyan",))]
    if not args.quiet:
        parts += [Line(text=""), Line(text="Assumed (not given)", style="bold")]
        parts += [Line(text=f"- {line}") for line in answer["assumptions"]]
    parts += [Line(text=f"! {line}", style="yellow") for line in answer["warnings"]]
    _output.emit(print_parts(parts, **_output.terminal()))
