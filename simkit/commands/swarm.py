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
import math
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError

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

    scenario = _flags.scenario(args, **_peers(args))
    beside = DATACENTRE if args.beside is None else None if args.beside == "none" else args.beside
    answer, work, runs = study(
        scenario, replications=args.replications, workers=args.workers, goodput_above=args.goodput_above,
        beside=beside, record=bool(args.trace), **knobs(args),
    )  # fmt: skip
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


def _peers(args: argparse.Namespace) -> dict[str, Any]:
    """`--peers 50x3080` names a cluster, `--peers FILE.csv` a table of peers."""
    text = args.field_peers
    if text is None or text.lower().endswith(".csv"):
        return {}
    if args.field_cluster is not None:
        raise InputError("is given beside --cluster", key="--peers", value=text, hint="give one of them")
    args.field_peers = None
    return {"cluster": text}


def knobs(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SwarmConfig` that flags give."""
    from simkit import plugins
    from simkit.churn._common import churn
    from simkit.units import parse

    if not 0.0 < args.hours < 1e6 or math.isnan(args.hours):
        raise InputError("is no length of a run", key="--hours", value=args.hours, hint="give hours above 0")
    found: dict[str, Any] = {"churn": churn(args.churn, key="--churn"), "horizon_s": args.hours * 3600.0}
    for flag, (name, kind, _) in _KNOBS.items():
        text = getattr(args, f"knob_{name}")
        if text is None:
            continue
        if kind == "text":
            if name in _POLICIES:
                plugins.get(f"simkit.policies.{name}", text)
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
        raise InputError("is no count", key=key, value=text, hint="give a whole number")
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
