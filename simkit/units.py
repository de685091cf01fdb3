"""Units live at the edge: text in, SI floats inside, text out.

Every number inside simkit is an SI float whose unit is the suffix of its name:

======== ======================= ==================================================
suffix   unit                    remark
======== ======================= ==================================================
_s       second
_bytes   byte
_flops   floating point op       one multiply-add counts two
_Bps     byte per second         per direction unless the name says otherwise
_hz      1/second
_w       watt
_j       joule
_usd     US dollar
_gib     2**30 byte              only in reports
======== ======================= ==================================================

GB is 1e9 bytes and GiB 2**30 bytes; a network rate at the edge is in bit/s ("25Gb/s"), a memory rate in byte/s
("3.35 TB/s"); the case of the letter b decides, as in IEEE 1541.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from simkit.errors import InputError

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB, TIB = 2.0**10, 2.0**20, 2.0**30, 2.0**40

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}


def _units() -> dict[str, tuple[str, float]]:
    table: dict[str, tuple[str, float]] = {}
    for prefix, scale in {**_DECIMAL, **_BINARY}.items():
        table[f"{prefix}B"] = ("bytes", scale)
        table[f"{prefix}b"] = ("bytes", scale / 8)
        table[f"{prefix}bit"] = ("bytes", scale / 8)
        table[f"{prefix}B/s"] = ("Bps", scale)
        table[f"{prefix}b/s"] = ("Bps", scale / 8)
        table[f"{prefix}bit/s"] = ("Bps", scale / 8)
        table[f"{prefix}bps"] = ("Bps", scale / 8)
    for prefix, scale in _DECIMAL.items():
        table[f"{prefix}FLOP/s"] = ("flops", scale)
        table[f"{prefix}FLOPS"] = ("flops", scale)
        table[f"{prefix}OP/s"] = ("flops", scale)
        table[f"{prefix}Hz"] = ("hz", scale)
        table[f"{prefix}W"] = ("w", scale)
    for prefix, scale in _SMALL.items():
        table[f"{prefix}s"] = ("s", scale)
    table |= {
        "min": ("s", 60.0),
        "h": ("s", 3600.0),
        "d": ("s", 86400.0),
        "day": ("s", 86400.0),
        "days": ("s", 86400.0),
    }
    table |= {
        "USD": ("usd", 1.0),
        "USD/h": ("usd_per_hour", 1.0),
        "USD/kWh": ("usd_per_kwh", 1.0),
        "%": ("ratio", 0.01),
    }
    return table


UNITS: Mapping[str, tuple[str, float]] = MappingProxyType(_units())

_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ/%]*)\s*")


def parse(text: str | float | int, dimension: str, *, key: str = "value", file: str = "") -> float:
    """Reads a quantity such as ``"3.35 TB/s"`` as an SI float of the given dimension.

    dimension: one of ``bytes Bps flops hz w s usd usd_per_hour usd_per_kwh ratio``. A bare number is taken as SI.
    Raises InputError when the text is no number, is not finite, or carries a unit of another dimension.
    """
    if isinstance(text, bool):
        raise InputError("is not a quantity", file=file, key=key, value=text, hint=_example(dimension))
    if isinstance(text, (int, float)):
        number = float(text)
        unit = ""
    else:
        match = _QUANTITY.fullmatch(text)
        if not match:
            raise InputError("is not a quantity", file=file, key=key, value=text, hint=_example(dimension))
        number, unit = float(match[1]), match[2]
    if not math.isfinite(number):
        raise InputError("is not finite", file=file, key=key, value=text, hint=_example(dimension))
    if not unit:
        return number
    known = UNITS.get(unit)
    if known is None:
        raise InputError(f"has the unknown unit {unit!r}", file=file, key=key, value=text, hint=_example(dimension))
    if known[0] != dimension:
        raise InputError(
            f"has a unit of {known[0]}, not of {dimension}", file=file, key=key, value=text, hint=_example(dimension)
        )
    return number * known[1]


def _example(dimension: str) -> str:
    examples = {
        "bytes": "write it as '80 GiB' or '25 MB'",
        "Bps": "write it as '25Gb/s' (bits) or '3.35 TB/s' (bytes)",
        "flops": "write it as '312 TFLOP/s'",
        "s": "write it as '30us' or '20ms'",
        "hz": "write it as '1.71 GHz'",
        "w": "write it as '320 W'",
    }
    return examples.get(dimension, "write a number")


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for scale, unit in steps:
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    scale, unit = steps[-1]
    return f"{value / scale:.4g} {unit}"


def format_s(value: float) -> str:
    """Seconds as people read them: ``0.000031 -> '31 us'``, ``93600 -> '26 h'``."""
    if value == 0:
        return "0 s"
    # Long times change the unit late: 90 s, 59 min and 47 h are easier to compare than 1.5 min, 0.98 h and 1.96 days.
    for least, scale, unit in ((2 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "h"), (600.0, 60.0, "min")):
        if abs(value) >= least:
            return f"{value / scale:.4g} {unit}"
    return _scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def format_bytes(value: float) -> str:
    """Bytes in binary units: ``2**31 -> '2 GiB'``."""
    return _scaled(value, ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")))


def format_Bps(value: float) -> str:
    """Byte rates in decimal units: ``3.35e12 -> '3.35 TB/s'``."""
    return _scaled(value, ((TB, "TB/s"), (GB, "GB/s"), (MB, "MB/s"), (KB, "kB/s"), (1, "B/s")))


def format_bits(value: float) -> str:
    """A byte rate as network people write it: ``1.25e9 -> '10 Gb/s'``."""
    return _scaled(value * 8, ((TB, "Tb/s"), (GB, "Gb/s"), (MB, "Mb/s"), (KB, "kb/s"), (1, "b/s")))


def format_flops(value: float) -> str:
    """FLOP/s in decimal units: ``9.89e14 -> '989 TFLOP/s'``."""
    return _scaled(value, ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")))


def format_count(value: float) -> str:
    """A count with its decimal prefix: ``6738415616 -> '6.738 B'``."""
    return _scaled(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))).rstrip()
