"""Rows of measured tables as samples of collectives: one call, what it moved, how it was made, how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simkit.collectives import ring
from simkit.network import said_eager, said_p2p

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured call. eager: the time includes the launch by the host; staged: through host memory,
    without P2P; algorithm: the one that ran, empty where the library chose."""

    link: str
    inter: str
    device: str
    op: str
    engine: str
    staged: bool
    eager: bool
    ranks: int
    per_node: int
    nics: int
    nbytes: float
    seconds: float
    lab: str
    table: str
    algorithm: str = ""


def seconds_of(row: Row) -> float | None:
    """The seconds of a row; a busbw row is turned round with the nccl-tests factor. None for any other metric."""
    value = float(row["value"])
    if row["metric"] == "time_s":
        return value
    if row["metric"] == "busbw":
        return float(ring.wire_bytes(row["op"], ranks=int(row["ranks"]), nbytes=float(row["bytes"]))) / value
    return None


def samples(tables: Mapping[str, Sequence[Row]]) -> list[Sample]:
    """The rows of the tables that are collectives with a value, in the order of the tables."""
    found = []
    for table, rows in tables.items():
        for row in rows:
            if not row.get("bytes") or row.get("op", "") not in ring.OPS or not row.get("value"):
                continue
            seconds = seconds_of(row)
            if seconds is None or seconds <= 0:
                continue
            engine = row.get("engine") or "nccl"
            found.append(
                Sample(
                    link=row.get("intra", ""),
                    inter=row.get("inter", ""),
                    device=row["device"],
                    op=row["op"],
                    engine="" if engine == "nccl" else engine,
                    ranks=int(row["ranks"]),
                    per_node=int(row.get("gpus_per_node") or row["ranks"]),
                    nics=int(row.get("nics_per_node") or 1),
                    nbytes=float(row["bytes"]),
                    seconds=seconds,
                    lab=row.get("source", "").partition("@")[0].partition(" ")[0].rstrip(":"),
                    table=table,
                    algorithm=row.get("algorithm", ""),
                    staged=said_p2p(row) is False,
                    eager=said_eager(row),
                )
            )
    return found
