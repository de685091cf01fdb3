"""One row of an operator table, priced: collectives by the network model, products and streams by the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from simkit import network, roofline
from simkit.errors import InputError, RefusedError
from simkit.price import pricing
from simkit.roofline import Columns
from simkit.spec import load
from simkit.spec.cluster import cluster as parse_cluster
from simkit.spec.hardware import Cluster
from simkit.spec.plan import DTYPE_BYTES
from simkit.spec.stack import DEFAULT, stack

COLLECTIVES = frozenset(
    {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"}
)
INTERVAL = {"collective": (0.7, 1.45), "gemm": (0.8, 1.3), "memory": (0.75, 1.3)}
"""Factors of a 90 % interval per kind of operator, from the residuals that `simkit calibrate` prints."""


def predict_operator(
    row: Mapping[str, str], *, profiles: tuple[str, ...] = (), calibration: bool = True
) -> tuple[float, float, float]:
    """(predicted, low, high) of a row with an `op`. Raises RefusedError for an operator that is not modelled."""
    op = row["op"]
    if op in COLLECTIVES:
        value, _ = network.predict_row(row, _cluster(row, profiles, calibration))
        kind = "collective"
    elif op in ("gemm", "memory") and row.get("sparsity", "") in ("", "none"):
        value, kind = _compute(row, profiles, calibration), op
    else:
        raise RefusedError(f"op = {op} is not modelled yet")
    low, high = INTERVAL[kind]
    if row.get("metric") == "busbw":
        low, high = 1.0 / high, 1.0 / low
    return value, value * low, value * high


def _cluster(row: Mapping[str, str], profiles: tuple[str, ...], calibration: bool) -> Cluster:
    ranks, per_node = _whole(row, "ranks"), _whole(row, "gpus_per_node", _whole(row, "ranks"))
    nodes = -(-ranks // per_node)
    nics = _whole(row, "nics_per_node", 0) or None
    text = f"{nodes}x{min(ranks, per_node)}x{row.get('device', '')}"
    return _parsed(text, row.get("intra") or None, row.get("inter") or None, nics, profiles, calibration)


@lru_cache(maxsize=256)
def _parsed(
    text: str, intra: str | None, inter: str | None, nics: int | None, profiles: tuple[str, ...], calibration: bool
) -> Cluster:
    return parse_cluster(
        text, intra=intra, inter=inter, nics_per_node=nics, profiles=profiles, calibration=calibration
    )[0]


def _whole(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key, "")
    if not text and default is not None:
        return default
    try:
        number = int(float(text))
    except (ValueError, OverflowError):
        raise InputError("is not a whole number", key=key, value=text) from None
    if number < 0:
        raise InputError("is negative", key=key, value=text)
    return number


def _number(row: Mapping[str, str], key: str, default: float = 0.0) -> float:
    text = row.get(key, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise InputError("is not a number", key=key, value=text) from None


def _compute(row: Mapping[str, str], profiles: tuple[str, ...], calibration: bool) -> float:
    dtype = row.get("dtype", "") or "fp32"
    if dtype not in DTYPE_BYTES or dtype in ("int4", "nf4"):
        raise RefusedError(f"dtype = {dtype} is not modelled yet")
    law = pricing(
        load.device(row.get("device", ""), profiles=profiles, calibration=calibration),
        dtype,
        stack(DEFAULT),
        calibration=calibration,
    ).law
    batch, m, n, k = (_number(row, c, 1.0 if c == "batch" else 0.0) for c in ("batch", "m", "n", "k"))
    product = row["op"] == "gemm"
    nbytes = (
        batch * (m * k + k * n + m * n) * DTYPE_BYTES[dtype] if product else _number(row, "bytes") / law.elementwise
    )
    columns = Columns(
        kind=np.array([roofline.GEMM if product else roofline.MEMORY], dtype=np.int8),
        batch=np.array([batch if product else 0.0]),
        m=np.array([m]),
        n=np.array([n]),
        k=np.array([k]),
        nbytes=np.array([nbytes]),
        kernels=np.array([1.0]),
    )
    return float(roofline.seconds(columns, law)[0][0])
