"""What the benchmarks share: a result line, its target, and the exit code of `--check`."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table. at_least: the target is a lower bound rather than an upper one; target None: no target."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        goal = "" if self.target is None else f"{sign} {self.target:g}"
        verdict = "" if self.target is None else "met" if self.met else "MISSED"
        return f"{self.name:58s} {self.value:10.4g} {self.unit:6s} {goal:>9s} {verdict}"


def median_s(run: Callable[[], object], *, repeat: int = 5, clock: Callable[[], float] = time.process_time) -> float:
    """Median seconds of one call, after one call that is not counted."""
    run()
    found = []
    for _ in range(repeat):
        start = clock()
        run()
        found.append(clock() - start)
    return statistics.median(found)


def finish(results: Sequence[Result], description: str) -> int:
    """Prints the table; with `--check` a missed target is exit code 1."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    args = parser.parse_args()
    for result in results:
        sys.stdout.write(f"{result}\n")
    return int(args.check and not all(r.met for r in results))
