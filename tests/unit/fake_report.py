"""A Report with round numbers, made by hand, for tests of how answers are rendered."""

from __future__ import annotations

from typing import Any

from simkit.report import Memory, Report, Sensitivity, Term
from simkit.spans import Span

GIB = 2.0**30


def memory(**changes: Any) -> Memory:
    values: dict[str, Any] = {
        "items_bytes": {
            "weights": 1.5 * GIB,
            "gradients": 1.5 * GIB,
            "optimizer": 3 * GIB,
            "activations": 1 * GIB,
            "context": 0.5 * GIB,
        },
        "allocated_bytes": 7 * GIB,
        "reserved_bytes": 7.25 * GIB,
        "device_bytes": 7.75 * GIB,
        "capacity_bytes": 9.5 * GIB,
        "fits": True,
    }
    said = changes.pop("way_out", "")
    return Memory(**(values | {"advice": lambda: said} | changes))


def report(**changes: Any) -> Report:
    """A step of 1 s: forward 0.2, backward 0.4, compression 0.05, exposed 0.3, optimizer 0.05; 50 GPUs, 100 samples."""
    values: dict[str, Any] = {
        "scenario": {
            "model": "bert-large",
            "cluster": "50x1xrtx3080",
            "method": "s-sgd",
            "precision": "fp16",
            "micro_batch": 2,
        },
        "iteration_time_s": 1.0,
        "samples_per_s": 100.0,
        "tokens_per_s": 51200.0,
        "tokens_per_s_per_gpu": 1024.0,
        "mfu": 0.25,
        "hfu": 0.3,
        "breakdown": {
            "forward_s": 0.2,
            "backward_s": 0.4,
            "compression_s": 0.05,
            "exposed_comm_s": 0.3,
            "optimizer_s": 0.05,
            "host_s": 0.0,
        },
        "ledger": (Term(name="forward", seconds=0.2, bound="compute", evidence="fitted"),),
        "memory": memory(),
        "interval_90": {"iteration_time_s": (0.9, 1.15)},
        "bottleneck": "the network between nodes: 30 % of the step waits for the gradient exchange",
        "cost": {"cost_usd_per_hour": 7.2, "power_w": 18000.0, "energy_j_per_step": 18000.0, "usd_per_step": 0.002},
        "groups": {"dp": "50 ranks over 1gbe"},
        "assumptions": ("model = bert-large: the usual yardstick",),
        "warnings": ("1gbe was never fitted",),
        "facts": {"params": 336232258},
        "sensitivities_fn": lambda: (Sensitivity(name="inter bandwidth", elasticity=-0.3, value="1 Gb/s"),),
    }
    return Report(**(values | changes))


def h100(**changes: Any) -> Report:
    """Twice the throughput of `report`, 1.5 times its price an hour, half its power."""
    return report(
        scenario={"model": "bert-large", "cluster": "1x4xh100-pcie", "method": "s-sgd", "precision": "fp16"},
        iteration_time_s=0.5,
        samples_per_s=200.0,
        cost={"cost_usd_per_hour": 10.8, "power_w": 9000.0, "energy_j_per_step": 4500.0},
        **changes,
    )


SPANS = (
    Span(name="forward", stream="compute", start_s=0.0, end_s=0.2, kind="forward"),
    Span(name="backward", stream="compute", start_s=0.2, end_s=0.6, kind="backward"),
    Span(name="all-reduce 0", stream="comm", start_s=0.3, end_s=0.9, kind="comm", args=(("bytes", 1e8),)),
    Span(name="optimizer", stream="compute", start_s=0.9, end_s=1.0, kind="optimizer"),
)
