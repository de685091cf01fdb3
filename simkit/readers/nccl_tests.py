"""Text that nccl-tests and rccl-tests print (``all_reduce_perf`` and its fellows), alone or in the log of a launcher.

    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
         1048576        262144     float     sum      -1    35.10   29.87   52.28      0    34.92   30.03   52.55      0

Columns are those of the header, so that versions with and without ``redop`` and ``root`` are read; the out-of-place
time is taken, the in-place one where there is none. Ranks, hosts and devices come from the lines ``# Rank 0 … on HOST
device 0 [0x8d] NAME``; without them the ranks follow from busbw over algbw, which is 2(n-1)/n for an all-reduce and
(n-1)/n for what moves each byte once (nccl-tests, doc/PERFORMANCE.md). `size` is that of the tables: the gathered size
of an all-gather, the whole input of a reduce-scatter.
"""

from __future__ import annotations

import re
from collections import Counter

from simkit.collectives import ring
from simkit.errors import InputError
from simkit.readers._common import Asked, Read, Source, row

PRIORITY = 20
OPS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce": "reduce",
    "sendrecv": "send_recv", "gather": "", "scatter": "", "hypercube": "",
}  # fmt: skip
"""Test -> operator of the tables; empty: not a collective that simkit prices."""
DTYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "int8": "int8", "uint8": "int8", "fp8_e4m3": "fp8",
          "f8e4m3": "fp8", "f8e5m2": "fp8", "fp8_e5m2": "fp8"}  # fmt: skip
TOLERANCE = 0.05
"""Share by which printed figures may disagree: they have two decimals."""
LEAST_GBps = 0.5
"""Printed rates below which two decimals say too little."""
_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:|\s*\d+:\s(?=\s*[#\d]))")
_TEST = re.compile(r"\b([a-z_]+?)_perf(?:_mpi)?\b")
_RANK = re.compile(r"\bRank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_HEADER = re.compile(r"\bsize\b.*\bcount\b.*\btime\b.*\balgbw\b.*\bbusbw\b")
_SUMMARY = re.compile(r"Out of bounds|Avg bus bandwidth|Collective test concluded|nThread|NCCL version|Using devices")


def matches(source: Source) -> bool:
    return _HEADER.search(source.head) is not None


class _Test:
    """What is known of the test whose lines are being read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: dict[int, tuple[str, str]] = {}
        self.columns: list[str] = []
        self.in_place_first = False
        self.settled = False
        self.op, self.count = "", 0

    @property
    def per_node(self) -> int:
        return max(Counter(host for host, _ in self.ranks.values()).values(), default=0)

    @property
    def hosts(self) -> int:
        return len({host for host, _ in self.ranks.values()})

    @property
    def device(self) -> str:
        return next((name for _, name in self.ranks.values()), "")


def read(source: Source, asked: Asked) -> Read:
    """The rows of a log. Raises InputError where it holds no line that could be read."""
    out = Read(file=source.name, kind="nccl-tests", unit="lines")
    named = _TEST.search(source.stem)
    test = _Test(_known(named[1]) if named else "")
    lines = [_PREFIX.sub("", line) for line in source.text.splitlines()]
    for number, line in enumerate(lines, start=1):
        out.total += 1
        told = _told(line, test)
        if told is not None:
            test = told
            out.used += 1
            continue
        if test.columns and not test.settled:
            _settle(test, lines[number - 1 :])
        if (reason := _read(line, number, test, source, asked, out)) != "":
            out.skip(reason)
    if not out.rows:
        why = out.skipped.most_common(3)
        said = "; ".join(f"{n} lines: {reason}" for reason, n in why)
        what = f"holds no measurement that can be used ({said})"
        raise InputError(what, file=source.name, hint="see --device and --link")
    return out


def _known(name: str) -> str:
    """The test of a program's name, longest first: ``build/all_reduce`` ends in ``reduce`` too."""
    return next((test for test in sorted(OPS, key=len, reverse=True) if name.endswith(test)), "")


def _told(line: str, test: _Test) -> _Test | None:
    """The test as this line changes it; None where the line is no header."""
    body = line.strip().lstrip("#").strip()
    if rank := _RANK.search(body):
        if int(rank[1]) in test.ranks and test.columns:
            test = _Test(test.name)
        test.ranks[int(rank[1])] = (rank[2], rank[3])
        return test
    if _HEADER.search(body):
        test.columns = body.replace("# wrong", "#wrong").split()
        return test
    if "out-of-place" in body and "in-place" in body.replace("out-of-place", ""):
        test.in_place_first = body.startswith("in-place")
        return test
    if not re.match(r"\d+\s+\d+\s", body) and (found := _TEST.search(body)) and _known(found[1]) != "":
        # A launcher's line or `# Collective test starting: …`: what was known of the ranks belongs to the test before.
        return _Test(_known(found[1]))
    return None


def _read(line: str, number: int, test: _Test, source: Source, asked: Asked, out: Read) -> str:
    """Takes a line of figures; the reason where it is skipped, empty where it is not."""
    body = line.strip()
    if not body.lstrip("#").strip():
        return "blank"
    cells = body.split()
    if not (cells[0].isdigit() and len(cells) > 4 and cells[1].isdigit()):
        return "summary or settings" if _SUMMARY.search(body) else "no line of figures"
    if not test.columns:
        return "figures before any header"
    if len(cells) != len(test.columns):
        return "as many figures as the header has columns are not there (cut off?)"
    figures = _figures(cells, test)
    if figures is None:
        return "time, algbw or busbw is no number"
    time_us, algbw, busbw, wrong = figures
    size = int(cells[0])
    if wrong not in ("0", "N/A", "0e+00") and not re.fullmatch(r"[0-9.]+e-\d+", wrong):
        return f"wrong results ({wrong} elements)" if wrong.isdigit() else "wrong results"
    if size == 0 or time_us <= 0.0:
        return "no bytes were moved"
    if algbw >= LEAST_GBps and abs(size / time_us / 1e3 / algbw - 1.0) > TOLERANCE:
        return "size over time is not the printed algbw"
    made = _row(cells, size, time_us, busbw / algbw if algbw >= LEAST_GBps else None, test, asked)
    if isinstance(made, str):
        return made
    out.used += 1
    out.rows.append(
        {"id": f"{source.stem}-{number}", "source": source.name, "where": f"line {number}"} | made
    )
    return ""


def _figures(cells: list[str], test: _Test) -> tuple[float, float, float, str] | None:
    """(time in us, algbw, busbw, wrong) out of place; in place where there is no other."""
    starts = [i for i, name in enumerate(test.columns) if name == "time"]
    if test.in_place_first:
        starts.reverse()
    for at in starts:
        names = dict(zip(test.columns[at : at + 4], cells[at : at + 4], strict=False))
        try:
            time_us, algbw, busbw = (float(names[n]) for n in ("time", "algbw", "busbw"))
        except (KeyError, ValueError):
            continue
        return time_us, algbw, busbw, names.get("#wrong", names.get("error", "0"))
    return None


def _row(
    cells: list[str], size: int, time_us: float, ratio: float | None, test: _Test, asked: Asked
) -> dict[str, str] | str:
    """The row, or why there is none."""
    if not test.op:
        if test.name:
            return f"{test.name} is no collective that simkit prices"
        return "the log does not say which test it is of (name the file like all_gather_perf.txt)"
    op, ranks = test.op, test.count
    if not ranks:
        return "neither lines `# Rank …` nor busbw over algbw tell the ranks"
    if ranks < 2:
        return "one rank: nothing moves"
    factor = float(ring.wire_bytes(op, ranks=ranks, nbytes=1.0))
    if ratio is not None and abs(ratio / factor - 1.0) > TOLERANCE:
        return f"busbw over algbw is not that of {op} over {ranks} ranks"
    device = asked.named(test.device)
    if not device:
        return "the device has no profile (give --device)"
    dtype = DTYPES.get(dict(zip(test.columns, cells, strict=True)).get("type", ""))
    return row(
        **_place(test, ranks, asked), op=op, dtype=dtype, bytes=size, ranks=ranks, device=device, metric="time_s",
        value=time_us * 1e-6, notes="nccl-tests",
    )  # fmt: skip


def _place(test: _Test, ranks: int, asked: Asked) -> dict[str, object]:
    """Which link carried it: between hosts where there were several, else inside the one."""
    per_node = asked.gpus_per_node or test.per_node or ranks
    if test.hosts > 1 or ranks > per_node:
        return {"inter": asked.link, "gpus_per_node": per_node, "nics_per_node": asked.nics_per_node}
    return {"intra": asked.link, "gpus_per_node": ranks}


def _settle(test: _Test, lines: list[str]) -> None:
    """The operator and the ranks of a test, where need be from the line of the largest rate that follows."""
    best: tuple[float, float, dict[str, str]] | None = None
    for i, line in enumerate(lines):
        cells = line.split()
        if i and _HEADER.search(line):
            break
        if len(cells) != len(test.columns) or not cells[0].isdigit():
            continue
        found = _figures(cells, test)
        if found is not None and found[1] >= LEAST_GBps and (best is None or found[2] > best[0]):
            best = (found[2], found[2] / found[1], dict(zip(test.columns, cells, strict=True)))
    ratio = best[1] if best is not None else None
    test.op = OPS.get(test.name, "") if test.name else _guessed(best[2], best[1]) if best is not None else ""
    test.count = len(test.ranks) or _ranks(test.op, ratio)
    test.settled = True


def _guessed(named: dict[str, str], ratio: float) -> str:
    """The operator by its columns and busbw over algbw; empty where several look alike."""
    reduces, root = named.get("redop", "none") not in ("none", ""), named.get("root", "-1")
    if root == "0":
        return ("reduce" if reduces else "broadcast") if abs(ratio - 1.0) < 0.005 else ""
    if reduces:
        return "all_reduce" if ratio > 0.998 else "reduce_scatter" if ratio < 0.985 else ""
    # An all-gather and an all-to-all print the same.
    return "send_recv" if "root" in named and abs(ratio - 1.0) < 0.002 else ""


def _ranks(op: str, ratio: float | None) -> int:
    """n of 2(n-1)/n or (n-1)/n, 0 where the ratio does not tell it."""
    whole = 2.0 if op == "all_reduce" else 1.0
    if ratio is None or not 0.0 < ratio < whole * 0.99:
        return 0
    n = 1.0 / (1.0 - ratio / whole)
    return round(n) if abs(n - round(n)) < 0.1 else 0
