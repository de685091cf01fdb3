"""What the points of a sweep share whatever is priced: links as arrays, and the columns that follow from a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from simkit.cost import cost
from simkit.goodput import asked
from simkit.goodput import columns as failure_columns
from simkit.price import Pricing
from simkit.spec.hardware import Cluster, Device, Link
from simkit.spec.model import TransformerSpec
from simkit.spec.resolve import Resolved

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Columns = dict[str, Any]

ELEMENTS = 2**16
"""Numbers of one array while a block is worked on: what a second-level cache holds."""


Known = TypeVar("Known")


@dataclass(frozen=True, kw_only=True, eq=False)
class Lane(Generic[Known]):
    """One device of the cluster, its pricing, and what else is known before the points are."""

    device: Device
    priced: Pricing
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Described links by position: {``intra`` or ``inter``: (rates in byte/s, latencies in s)}."""

    tables: Mapping[str, tuple[Array, Array]]

    def at(self, cluster: Cluster, index: Ints, *, axes: int = 0) -> Cluster:
        """The cluster with these links as arrays of shape (links, 1, ...), ready to meet arrays with so many axes."""
        given: dict[str, Link] = {}
        shape = (-1,) + (1,) * axes
        for name, (rates, latencies) in self.tables.items():
            link: Link | None = getattr(cluster, name)
            if link is not None:
                columns: dict[str, Any] = {
                    "Bps": rates[index].reshape(shape), "latency_s": latencies[index].reshape(shape)
                }  # fmt: skip
                given[name] = replace(link, **columns)
        changed: Cluster = replace(cluster, **given)  # type: ignore[arg-type]
        return changed


def tokens_of(resolved: Resolved) -> int:
    """Tokens of a sample; 0 where samples are no tokens."""
    spec, model = resolved.model.spec, resolved.model
    return resolved.plan.seq_len if isinstance(spec, TransformerSpec) and model.input_kind == "tokens" else 0


def figures(
    resolved: Resolved, tokens: float, *, end_s: Any, breakdown: Mapping[str, Any], busy_s: Any, micro: Any, accum: Any,
    flops: Any, peak_flops: float,
) -> Columns:  # fmt: skip
    """The columns that follow from the end of a step, by the formulas of `simkit.predict`; numbers or arrays."""
    plan, cluster = resolved.plan, resolved.cluster
    samples, tokens = micro * accum * plan.dp, float(tokens)
    money, _, _ = cost(
        cluster, resolved.scenario, step_s=end_s, busy=np.minimum(busy_s / end_s, 1.0), samples_per_step=samples,
        tokens_per_step=samples * tokens,
    )  # fmt: skip
    out: Columns = {
        "micro_batch": micro,
        "grad_accum": accum,
        "global_batch": samples,
        "gpus": cluster.gpus,
        "method": plan.method,
        "iteration_time_s": end_s,
        "samples_per_s": samples / end_s,
        "mfu": 3.0 * flops * accum / (end_s * peak_flops),
        **breakdown,
        **money,
    }
    if tokens:
        out |= {
            "tokens_per_s": samples * tokens / end_s,
            "tokens_per_s_per_gpu": samples * tokens / end_s / cluster.gpus,
        }
    if asked(resolved.scenario):
        out |= failure_columns(resolved, money)
    return {
        name: np.broadcast_to(np.asarray(value, dtype=_kind(value)), np.shape(end_s)) for name, value in out.items()
    }


def _kind(value: Any) -> Any:
    return object if isinstance(value, str) else None


__all__ = ["ELEMENTS", "Columns", "Links", "figures", "tokens_of"]
