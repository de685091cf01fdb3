"""Measures this machine: rows that `simkit validate` scores, and a profile of it for --profiles.

Suites: device (streams, products, launch), operators (also attention, convolutions, norms, optimizers), links
(collectives), train (training steps), inference. A run that is interrupted keeps what it measured; the same command
goes on from there. Examples:

  simkit measure device --quick
  simkit measure operators --out my-machine --threads 1
  simkit measure links --ranks 2 --out my-machine
  simkit validate my-machine/tables/*.csv --profiles my-machine
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simkit.commands import _flags, _output
from simkit.errors import InputError

FIELDS = ("name", "ranks", "link", "rate", "launch", "address", "model", "batch", "seq_len")


def configure(parser: _flags.Parser) -> None:
    parser.usage = "%(prog)s device|links|operators|train|inference [FLAGS]"
    parser.add_argument("suite", metavar="SUITE", help="device, links, operators, train or inference")
    parser.add_argument("--out", metavar="DIR", default="measured", help="folder to write to (default: measured)")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repeats: seconds instead of minutes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu (default) or cuda")
    parser.add_argument("--threads", metavar="N", type=int, help="threads of the CPU, 1 or more (default: all)")
    parser.add_argument("--name", metavar="NAME", help="name of the machine's profile (default: from its processor)")
    group = parser.add_argument_group("links")
    group.add_argument("--ranks", metavar="N", type=int, help="processes that talk, 2 to 64 (default: 2)")
    group.add_argument("--link", metavar="NAME", help="name of the link's profile (default: loopback)")
    group.add_argument("--rate", metavar="RATE", help="line rate of the link where it is known: 1Gb/s")
    group.add_argument("--launch", metavar="COMMAND", help="what starts a rank elsewhere: 'ssh node{rank}'")
    group.add_argument("--address", metavar="HOST", help="where rank 0 listens (default: 127.0.0.1)")
    group = parser.add_argument_group("train and inference")
    group.add_argument("--model", metavar="NAME", help="train: module:callable that returns an nn.Module")
    group.add_argument("--batch", metavar="N", type=int, help="samples of a step")
    group.add_argument("--seq-len", metavar="N", type=int, help="inference: tokens of a prompt")
    _flags.add_forms(parser, "json")


def run(args: argparse.Namespace) -> int:
    from simkit import measure

    _check(args)
    options = measure.Options(
        out=Path(args.out),
        device=args.device,
        threads=args.threads or 0,
        quick=args.quick,
        **{k: getattr(args, k) for k in FIELDS},
    )
    with _ended_like_ctrl_c(), _bar(args) as progress:
        done = measure.measure(args.suite, options, progress=progress)
    if args.json:
        from simkit.render import to_json

        _output.emit(to_json(_as_data(done)))
    else:
        _text(args, done)
    return 130 if done.interrupted else 0


def _check(args: argparse.Namespace) -> None:
    """Raises InputError for what the parser lets pass and the library reads as "not given"."""
    if args.threads is not None and args.device == "cuda":
        raise InputError("are of the CPU", key="--threads", value=args.threads, hint="leave it out with --device cuda")
    if args.threads is not None and args.threads < 1:
        hint = "1 or more; leave it out for all the CPU has"
        raise InputError("is out of range", key="--threads", value=args.threads, hint=hint)
    if not args.out:
        raise InputError("is empty", key="--out", value=args.out, hint="give a folder")


@contextlib.contextmanager
def _ended_like_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the run as an interrupt does: what was measured is kept, and the ranks end."""
    import signal
    import threading

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # handlers are the main thread's
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _as_data(done: Any) -> dict[str, Any]:
    return {
        "measured": done.measured,
        "kept": done.kept,
        "skipped": dict(done.skipped),
        "interrupted": done.interrupted,
        "files": [str(path) for path in done.files],
    }


def _text(args: argparse.Namespace, done: Any) -> None:
    for case, reason in done.skipped.items():
        _output.remark(args, f"skipped {case}: {reason}")
    kept = f", {done.kept} kept from before" if done.kept else ""
    _output.emit(f"measured {done.measured}{kept}{', interrupted: run it again to go on' if done.interrupted else ''}")
    for path in done.files:
        _output.emit(f"wrote {path}")
    if done.files:
        _output.remark(args, f"score it: simkit validate {args.out}/tables/*.csv --profiles {args.out}")


@contextlib.contextmanager
def _bar(args: argparse.Namespace) -> Iterator[Any]:
    """A progress bar on standard error, where somebody is looking."""
    import sys

    if args.quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda what, done, total: bar.update(task, description=what[:40], completed=done, total=total)
