"""How sure we are: 90 % intervals from the residuals of the scored tables, by regime (`hwprofiles/intervals.toml`).

A regime is what the prediction rests on: ``one-device``, ``exchange`` (several devices that hold the whole model),
``sharded`` (tensor, pipeline, context or expert parallelism, ZeRO), each ``-assumed`` where a device, link or stack has
no measurement behind it. The factors are the 5 % and 95 % quantiles of measured/predicted over the rows of that regime,
so the interval covers nine rows in ten of the data it was learned from; `simkit calibrate` rewrites them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files

from simkit.evaluate import Evaluation, is_sharded
from simkit.spec.resolve import Resolved

REGIMES = tuple(f"{name}{rest}" for name in ("one-device", "exchange", "sharded") for rest in ("", "-assumed"))
FALLBACK = (0.6, 1.6)
"""Where no table holds a row of the regime: assumed."""


def regime(resolved: Resolved, found: Evaluation) -> str:
    """The regime of one prediction."""
    plan = resolved.plan
    name = "one-device" if plan.world == 1 else "sharded" if is_sharded(plan) else "exchange"
    measured = found.pricing.evidence["ceiling"] != "assumed" and found.pricing.evidence["memory"] != "assumed"
    if plan.world > 1 and measured:
        cluster = resolved.cluster
        links = [
            link
            for link, used in (
                (cluster.intra, any(g.gpus_per_node > 1 for g in cluster.groups)),
                (cluster.inter, cluster.nodes > 1),
            )
            if used and link is not None
        ]
        measured = all(link.calibration for link in links)
    if resolved.warnings:
        measured = False
    return name if measured else f"{name}-assumed"


@lru_cache(maxsize=1)
def factors() -> dict[str, tuple[float, float]]:
    """{regime: (low, high)} of measured over predicted time."""
    text = files("simkit.hwprofiles").joinpath("intervals.toml").read_text(encoding="utf-8")
    return {name: (float(t["low"]), float(t["high"])) for name, t in tomllib.loads(text).get("regime", {}).items()}


def interval(metrics: Mapping[str, float], resolved: Resolved, found: Evaluation) -> dict[str, tuple[float, float]]:
    """{metric: (low, high)}; rates are the inverse of times."""
    low, high = factors().get(regime(resolved, found), FALLBACK)
    return {
        name: (value * low, value * high) if name.endswith("time_s") else (value / high, value / low)
        for name, value in metrics.items()
    }
