"""CSV: our own tables (`kernel_*`, `gemm_*`, `collective_*`: a column ``metric``), or a user's own with columns that
are named as people name them: M, N, K, dtype, time_us, tflops, size, busbw_gbps, ranks …

A unit is the ending of a column (``time_us``, ``latency_ms``, ``busbw_GBps``, ``size_mib``); a time without one is
taken in seconds and a size in bytes. Case, spaces and punctuation of column names do not count. A column that is not
known is left out and named; a line that lacks a figure, or holds one that is none, is skipped with its reason.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping

from simkit.errors import InputError
from simkit.operators import COLLECTIVES, KERNELS
from simkit.readers._common import Asked, Read, Row, Source, row

PRIORITY = 30
TIME = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "usec": 1e-6, "ns": 1e-9, "": 1.0}
SIZE = {"": 1.0, "b": 1.0, "bytes": 1.0, "kb": 1e3, "kib": 2.0**10, "mb": 1e6, "mib": 2.0**20, "gb": 1e9,
        "gib": 2.0**30}  # fmt: skip
RATE = {"bps": 1.0, "mbps": 1e6, "gbps": 1e9, "gbs": 1e9, "mbs": 1e6, "tbs": 1e12, "": 1e9}
FLOPS = {"": 1e12, "s": 1e12}
NAMES: Mapping[str, tuple[str, ...]] = {
    "op": ("op", "operator", "operation", "collective", "kernel", "name", "test"),
    "dtype": ("dtype", "datatype", "type", "precision"),
    "m": ("m",), "n": ("n",), "k": ("k",), "batch": ("batch", "b", "batchsize", "bs"),
    "heads": ("heads", "nheads", "numheads", "h"), "kv_heads": ("kvheads", "numkvheads"),
    "head_dim": ("headdim", "d", "headsize"), "q_len": ("qlen", "seqlenq", "sq"),
    "kv_len": ("kvlen", "seqlenk", "sk", "seqlen"), "ranks": ("ranks", "gpus", "nranks", "worldsize", "ngpus"),
    "gpus_per_node": ("gpuspernode",), "nics_per_node": ("nicspernode",), "device": ("device", "gpu", "gpuname"),
    "intra": ("intra",), "inter": ("inter",), "engine": ("engine",), "notes": ("notes", "note"), "id": ("id",),
    "source": ("source",), "where": ("where",),
}  # fmt: skip
TIMES = ("time", "latency", "duration", "elapsed", "t", "avgtime", "meantime", "mediantime")
SIZES = ("bytes", "size", "msgsize", "messagesize", "nbytes")
ALIASES = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
           "alltoall": "all_to_all", "sendrecv": "send_recv", "matmul": "gemm", "mm": "gemm", "linear": "gemm",
           "bmm": "gemm", "copy": "memory", "stream": "memory", "memcpy": "memory",
           "flashattention": "attention_prefill", "attention": "attention_prefill",
           "prefill": "attention_prefill", "decode": "attention_decode"}  # fmt: skip
DTYPES = {"float32": "fp32", "float": "fp32", "f32": "fp32", "float16": "fp16", "half": "fp16", "f16": "fp16",
          "bfloat16": "bf16", "bfp16": "bf16", "float8": "fp8", "e4m3": "fp8", "tensorfloat32": "tf32"}  # fmt: skip
NEEDS = {"gemm": ("m", "n", "k"), "memory": ("bytes",), "attention_prefill": ("heads", "kv_len"),
         "attention_decode": ("heads", "kv_len")}  # fmt: skip


def matches(source: Source) -> bool:
    first = source.head.lstrip().split("\n", 1)[0]
    return first.count(",") >= 1 and not first.lstrip().startswith(("{", "[", "#"))


def read(source: Source, asked: Asked) -> Read:
    """The rows of a table. Raises InputError where it is no CSV, where columns tell no time, or no line can be used."""
    try:
        lines = list(csv.reader(source.text.splitlines(), strict=True))
    except csv.Error as error:
        raise InputError(f"is no valid CSV ({error})", file=source.name) from None
    header = [name.strip() for name in lines[0]]
    out = Read(file=source.name, kind="table", unit="lines", total=len(lines), used=1)
    ours = "metric" in header and "value" in header
    columns = {} if ours else _columns(header, source)
    if not ours:
        read_from = {at for at, _ in columns.values()}
        out.left_out = [title for at, title in enumerate(header) if at not in read_from]
    for number, cells in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in cells):
            out.skip("blank")
        elif len(cells) != len(header):
            out.skip("another number of cells than the header")
        else:
            made = _ours(dict(zip(header, (c.strip() for c in cells), strict=True)), asked) if ours else _theirs(
                cells, columns, asked
            )
            if isinstance(made, str):
                out.skip(made)
                continue
            made.setdefault("id", f"{source.stem}-{number}")
            made.setdefault("source", source.name)
            out.rows.append(made)
            out.used += 1
    if not out.rows:
        why = "; ".join(f"{n} lines: {reason}" for reason, n in out.skipped.most_common(3)) or "no line"
        raise InputError(f"holds no measurement that can be used ({why})", file=source.name)
    return out


def _ours(cells: Row, asked: Asked) -> Row | str:
    """A row of our own columns, as it stands but for a device that it does not name."""
    if cells.get("metric") not in ("time_s", "busbw"):
        return f"metric {cells.get('metric') or '(blank)'} is no time of an operator"
    if not cells.get("value"):
        return "no value"
    if not _finite(cells["value"]):
        return "the value is no positive number"
    op = cells.get("op") or "gemm"
    if op not in KERNELS | COLLECTIVES:
        return f"op {op} is not fitted"
    if not cells.get("device"):
        if not asked.device:
            return "no device (give --device)"
        cells["device"] = asked.device
    return _placed(cells, asked) if op in COLLECTIVES else cells


def _placed(cells: Row, asked: Asked) -> Row | str:
    if not cells.get("bytes") or not cells.get("ranks"):
        return "a collective without bytes or ranks"
    if not cells.get("intra") and not cells.get("inter"):
        per_node = cells.get("gpus_per_node") or str(asked.gpus_per_node or cells["ranks"])
        if not per_node.isdigit() or not _finite(cells["ranks"]):
            return "ranks or GPUs a node are no numbers"
        between = float(cells["ranks"]) > float(per_node)
        cells |= {"inter" if between else "intra": asked.link, "gpus_per_node": per_node}
        if between and asked.nics_per_node and not cells.get("nics_per_node"):
            cells["nics_per_node"] = str(asked.nics_per_node)
    return cells


def _columns(header: list[str], source: Source) -> dict[str, tuple[int, float]]:
    """{name: (position, factor to SI)}. Raises InputError where no column tells a time."""
    found: dict[str, tuple[int, float]] = {}
    known = {alias: name for name, aliases in NAMES.items() for alias in aliases}
    for at, title in enumerate(header):
        plain = re.sub(r"[^a-z0-9/]", "", title.lower()).replace("/", "")
        if plain in known:
            found.setdefault(known[plain], (at, 1.0))
            continue
        for name, stems, units in (("time", TIMES, TIME), ("bytes", SIZES, SIZE), ("busbw", ("busbw",), RATE),
                                   ("algbw", ("algbw",), RATE), ("tflops", ("tflops", "tflop"), FLOPS)):  # fmt: skip
            unit = next((plain[len(s) :] for s in sorted(stems, key=len, reverse=True) if plain.startswith(s)), None)
            if unit is not None and unit in units:
                found.setdefault(name, (at, units[unit]))
                break
    if not {"time", "busbw", "algbw", "tflops"} & set(found):
        what = "has no column that tells a time"
        hint = "name it time_s, time_us, latency_ms, busbw_gbps or tflops; or use a column metric, as our tables do"
        raise InputError(what, file=source.name, value=",".join(header)[:60], hint=hint)
    return found


def _theirs(cells: list[str], columns: Mapping[str, tuple[int, float]], asked: Asked) -> Row | str:
    """A line of a user's own columns as a row."""
    said = {name: cells[at].strip() for name, (at, _) in columns.items() if cells[at].strip()}
    numbers: dict[str, float] = {}
    for name in ("time", "bytes", "busbw", "algbw", "tflops", "m", "n", "k", "batch", "heads", "kv_heads", "head_dim",
                 "q_len", "kv_len", "ranks"):  # fmt: skip
        if name in said:
            if not _finite(said[name]):
                return f"{name} is no positive number"
            numbers[name] = float(said[name]) * columns[name][1]
    op = _op(said, numbers)
    if op not in KERNELS | COLLECTIVES:
        return f"op {op} is not fitted" if op else "neither an op nor m, n, k or ranks"
    if missing := [name for name in NEEDS.get(op, ("bytes", "ranks")) if name not in numbers]:
        return f"{op} without {' and '.join(missing)}"
    seconds = _seconds(op, numbers)
    if seconds is None:
        return f"no time for {op}"
    device = asked.named(said.get("device", ""))
    if not device:
        return "the device has no profile (give --device)"
    dtype = re.sub(r"[^a-z0-9]", "", said.get("dtype", "").lower())
    made = row(
        **{k: said[k] for k in ("id", "source", "where", "engine", "notes", "intra", "inter", "gpus_per_node",
                                "nics_per_node") if k in said},
        **{k: f"{numbers[k]:.15g}" for k in ("m", "n", "k", "batch", "heads", "kv_heads", "head_dim", "q_len", "kv_len",
                                            "bytes", "ranks") if k in numbers},
        op=op, dtype=DTYPES.get(dtype, dtype), device=device, metric="time_s", value=seconds,
    )  # fmt: skip
    if op == "attention_prefill":
        made.setdefault("q_len", made["kv_len"])
    return _placed(made, asked) if op in COLLECTIVES else made


def _op(said: Mapping[str, str], numbers: Mapping[str, float]) -> str:
    if "op" in said:
        text = said["op"].lower()
        plain = re.sub(r"[^a-z0-9]", "", text.removesuffix("_perf"))
        return ALIASES.get(plain, text.replace("-", "_").removesuffix("_perf"))
    return "gemm" if {"m", "n", "k"} <= set(numbers) else ""


def _seconds(op: str, numbers: Mapping[str, float]) -> float | None:
    """The time, or what a rate and the work make of it."""
    from simkit.collectives import ring

    if "time" in numbers:
        return numbers["time"]
    if op == "gemm" and "tflops" in numbers:
        return 2.0 * numbers.get("batch", 1.0) * numbers["m"] * numbers["n"] * numbers["k"] / numbers["tflops"]
    if op in COLLECTIVES and "busbw" in numbers:
        return float(ring.wire_bytes(op, ranks=numbers["ranks"], nbytes=numbers["bytes"])) / numbers["busbw"]
    return numbers["bytes"] / numbers["algbw"] if op in COLLECTIVES and "algbw" in numbers else None


def _finite(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return math.isfinite(value) and value > 0.0
