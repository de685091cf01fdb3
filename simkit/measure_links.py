"""Suite ``links``: collectives among ranks, and the profile of the link that joins them.

Ranks are processes of this machine, or of whatever ``--launch`` starts them on ("ssh node{rank}", "ip netns exec
ns{rank}"). gloo runs them on CPUs, NCCL on GPUs. One rank counts as one node, so the rows are of the link between
nodes; gloo's all-reduce is a ring, and is written down and fitted as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simkit.errors import InputError
from simkit.measure import Case
from simkit.measure_crew import Crew
from simkit.measure_machine import Machine
from simkit.spec import profiles
from simkit.units import format_bits, parse

if TYPE_CHECKING:
    from simkit.measure import Options

TABLE = "collective"
TAKES = ("ranks", "link", "rate", "launch", "address")
SIZES = (4, 4096, 16384, 65536, 262144, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 32_000_000)
QUICK_SIZES = (4, 16384, 65536, 262144, 1_000_000, 2_000_000, 4_000_000, 8_000_000)
GATHER_SIZES = (16384, 65536, 262144, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000)
QUICK_GATHER_SIZES = (16384, 1_000_000, 4_000_000)
REPEATS, QUICK_REPEATS = 10, 5
LONGEST_S = 30.0
"""Seconds a case may take by the link's rate; larger messages are left out."""
LATENCY_BYTES = 4096.0
DEFAULT_LINK = "loopback"


def cases(host: Machine, options: Options) -> list[Case]:
    """All-reduces and all-gathers of a ladder of sizes among the ranks. Raises InputError for a rate that is none, and
    what `Crew` raises."""
    ranks, link = 2 if options.ranks is None else options.ranks, options.link or DEFAULT_LINK
    rate = parse(options.rate, "Bps", key="--rate") if options.rate is not None else None
    if rate is not None and rate <= 0.0:
        raise InputError("is out of range", key="--rate", value=options.rate, hint="more than 0, such as 1Gb/s")
    crew = Crew(ranks, "nccl" if host.device == "cuda" else "gloo", launch=options.launch, address=options.address)
    repeats = QUICK_REPEATS if options.quick else REPEATS
    found = []
    quick = {"all_reduce": QUICK_SIZES, "all_gather": QUICK_GATHER_SIZES}
    for op, sizes in (quick if options.quick else {"all_reduce": SIZES, "all_gather": GATHER_SIZES}).items():
        for nbytes in sizes:
            if rate is not None and (repeats + 2) * 2.0 * nbytes / rate > LONGEST_S:
                continue
            fields = {"device": host.name, "op": op, "dtype": "fp32", "bytes": nbytes, "ranks": ranks}
            fields |= {"gpus_per_node": 1, "nics_per_node": 1, "inter": link, "engine": ""}
            if host.device == "cpu":
                fields["algorithm"] = "ring"
            order = {"op": op, "bytes": nbytes, "repeats": repeats}
            found.append(Case(id=f"{link}/{op}/{ranks}/{nbytes}", fields=fields, run=crew.runs(order)))
    return found


# -- the profile ---------------------------------------------------------------------------------------------------


def facts_of_links(tables: Mapping[str, Sequence[Mapping[str, str]]], options: Options) -> dict[Path, str | None]:
    """The facts of every link that the collective tables name, by the file of its profile."""
    rows = [row for table, found in tables.items() if table.startswith(TABLE) for row in found]
    found: dict[Path, str | None] = {}
    for name in sorted({row["inter"] for row in rows if row.get("inter")}):
        path = options.out / "links" / f"{name}.toml"
        found[path] = _facts(path, name, [row for row in rows if row.get("inter") == name], options)
    return found


def _facts(path: Path, name: str, rows: Sequence[Mapping[str, str]], options: Options) -> str:
    """The TOML of the facts. The rate is the one given for the link, else the fastest that was measured."""
    given = options.rate if name == (options.link or DEFAULT_LINK) else None
    kept = profiles.read(path)["link"] if path.exists() and given is None else {}
    source = kept.get("sources", {}).get("rate", "measured")
    if given is not None:
        rate, source = format_bits(parse(given, "Bps", key="--rate")), "user"
    elif source == "user":
        rate = kept["rate"]
    else:
        rate = format_bits(max(_rate(row) for row in rows))
    small = [_step(row) for row in rows if float(row["bytes"]) <= LATENCY_BYTES] or [_step(rows[0])]
    lines = ["[link]", f'title = "{name}, as measured"', 'scope = "nic"', f'rate = "{rate}"']
    lines += [f'latency = "{min(small) * 1e6:.4g}us"', 'transport = "tcp"', "", "[link.sources]"]
    lines += [f'rate = "{source}"', 'latency = "measured"']
    return "\n".join(lines) + "\n"


def _rate(row: Mapping[str, str]) -> float:
    """Bytes a rank sends a second: (n-1)/n of the buffer, twice for an all-reduce."""
    ranks = float(row["ranks"])
    share = (ranks - 1.0) / ranks * (2.0 if row["op"] == "all_reduce" else 1.0)
    return share * float(row["bytes"]) / float(row["value"])


def _step(row: Mapping[str, str]) -> float:
    """Seconds of a step of a ring that moves nothing."""
    return float(row["value"]) / (float(row["ranks"]) - 1.0) / (2.0 if row["op"] == "all_reduce" else 1.0)
