"""The declared exceptions: what no operator table tells, fitted on end-to-end rows of data-parallel training.

- stack ``pytorch``: bytes an eager framework moves per byte counted; time of a convolution relative to the product of
the
  same shape (fp32, tensor cores): three constants. Stack ``horovod``: seconds per message.
- devices without an operator table: the ceiling of products (RTX 2080 Ti fp32, V100 SXM2 fp32 and fp16).
- links without one: latency and rate of 10 and 100 GbE over TCP, and of copies staged through the host on PCIe 3.

Every constant is one per device, link or stack; the evidence of each Fit says ``end-to-end``. Loss: soft L1 of the
log error; a table weighs as the square root of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simkit.errors import SimkitError
from simkit.evaluate import evaluate
from simkit.intervals import regime
from simkit.planner import planned
from simkit.spec import priors
from simkit.spec.hardware import Cluster, Fit, Link
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import FIELDS, Scenario
from simkit.spec.stack import Stack

Row = Mapping[str, str]
Fits = dict[str, dict[str, dict[str, Fit]]]
"""{"devices" | "links" | "stacks": {name: {fit name: Fit}}}."""
V100_SXM = ("v100-sxm2-16gb", "v100-sxm2-32gb")
CEILINGS: tuple[tuple[tuple[str, ...], str], ...] = ((("rtx2080ti",), "fp32"), (V100_SXM, "fp32"), (V100_SXM, "fp16"))
"""One ceiling each: chips that differ in memory only share it."""
FOREIGN = ("MXNet", "OneFlow")
"""Frameworks that notes name on rows of stack ``pytorch``: such rows are scored and never fitted."""
LINKS = (("10gbe", "all_reduce"), ("100gbe", "all_reduce"), ("pcie3x16", "all_reduce+staged"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A measured step: the resolved scenario, its seconds, the table it stands in."""

    resolved: Resolved
    seconds: float
    table: str


def runs(tables: Mapping[str, Sequence[Row]]) -> list[Run]:
    """The rows that state a rate or a time of a whole step, ran on their stack and that simkit can resolve."""
    out = []
    for table, rows in tables.items():
        for row in rows:
            if row.get("metric") not in ("samples_per_s", "iteration_time_s", "tokens_per_s_per_gpu") or not row.get(
                "value"
            ):
                continue
            if any(framework in row.get("notes", "") for framework in FOREIGN):
                continue
            try:
                resolved = planned(resolve(Scenario.of({k: v for k, v in row.items() if k in FIELDS and v})))
            except SimkitError:
                continue
            value = float(row["value"])
            plan = resolved.plan
            of_rate = plan.global_batch * (plan.seq_len / plan.world if row["metric"] == "tokens_per_s_per_gpu" else 1)
            seconds = value if row["metric"] == "iteration_time_s" else of_rate / value
            out.append(Run(resolved=resolved, seconds=seconds, table=table))
    return out


class Overlay:
    """Replaces calibrations in resolved scenarios, keeping one object per device, link and stack of a trial."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits
        self._made: dict[tuple[str, int], Any] = {}

    def _with(self, kind: str, thing: Any) -> Any:
        key = (kind, id(thing))
        if key not in self._made:
            # What is shipped now must not leak into what replaces it.
            self._made[key] = replace(thing, calibration=self._fits.get(kind, {}).get(thing.name, {}))
        return self._made[key]

    def cluster(self, cluster: Cluster) -> Cluster:
        key = ("cluster", id(cluster))
        if key not in self._made:

            def link(x: Link | None) -> Link | None:
                return None if x is None else self._with("links", x)

            groups = tuple(replace(g, device=self._with("devices", g.device)) for g in cluster.groups)
            self._made[key] = replace(cluster, groups=groups, intra=link(cluster.intra), inter=link(cluster.inter))
        made: Cluster = self._made[key]
        return made

    def stack(self, stack: Stack) -> Stack:
        """A stack takes the constants of its parents unless it has its own."""
        stacks = self._fits.get("stacks", {})
        inherited: dict[str, Fit] = {}
        for name in (*reversed(stack.parents), stack.name):
            inherited |= stacks.get(name, {})
        key = ("stack", id(stack))
        if key not in self._made:
            self._made[key] = replace(stack, calibration=inherited)
        made: Stack = self._made[key]
        return made

    def __call__(self, resolved: Resolved) -> Resolved:
        return replace(resolved, cluster=self.cluster(resolved.cluster), stack=self.stack(resolved.stack))


def errors(found: Sequence[Run], fits: Fits) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Predicted over measured time of each run, less one, under trial fits."""
    overlay = Overlay(fits)
    return np.array([evaluate(overlay(run.resolved)).end_s / run.seconds - 1.0 for run in found])


def solve(found: Sequence[Run], trial: Callable[[Sequence[float]], Fits], start: Sequence[float]) -> list[float]:
    """The positive constants with the least soft-L1 log error; a table weighs as the square root of its rows."""
    from scipy.optimize import least_squares

    counts = {table: sum(r.table == table for r in found) for table in {r.table for r in found}}
    weight = np.array([counts[r.table] ** -0.25 for r in found])

    def residual(logs: Any) -> Any:
        return weight * np.log1p(errors(found, trial([float(x) for x in np.exp(logs)])))

    logs = np.log(np.asarray(start))
    bounds = (logs - 3.0, logs + 3.0)
    best = least_squares(
        residual, logs, bounds=bounds, loss="soft_l1", f_scale=0.02, diff_step=0.02, x_scale=0.3, max_nfev=40
    )
    return [float(x) for x in np.exp(best.x)]


def fitted(name: str, values: dict[str, float], found: Sequence[Run], fits: Fits, note: str = "") -> Fit:
    mape = float(np.mean(np.abs(errors(found, fits)))) if found else None
    return Fit(
        name=name,
        values=values,
        dataset=tuple(sorted({r.table for r in found})),
        rows=len(found),
        mape=mape,
        evidence="end-to-end",
        note=note,
    )


def merged(*parts: Fits) -> Fits:
    """The union of fits; later parts win."""
    out: Fits = {"devices": {}, "links": {}, "stacks": {}}
    for part in parts:
        for kind, named in part.items():
            for name, fits in named.items():
                out[kind].setdefault(name, {}).update(fits)
    return out


# -- one device ----------------------------------------------------------------------------------------------------


def fit_compute(found: Sequence[Run], operators: Fits) -> Fits:
    """Stack and device constants from the runs on one device."""
    single = [r for r in found if r.resolved.plan.dp == 1]
    if not single:
        return {}

    def trial(p: Sequence[float]) -> Fits:
        return merged(operators, _compute_fits(p))

    best = solve(single, trial, (1.2, 0.9, 1.2, 1.0, 1.0, 0.9))
    final, fits = trial(best), _compute_fits(best)
    for named in fits.values():
        for name, tables in named.items():
            for key, fit in tables.items():
                on = [r for r in single if name == "pytorch" or r.resolved.device.name == name]
                tables[key] = fitted(key, dict(fit.values), on, final, fit.note)
    return fits


def _compute_fits(p: Sequence[float]) -> Fits:
    """Trial constants as Fits: elementwise, convolution fp32 and tensor, then one ceiling per entry of `CEILINGS`."""

    def one(name: str, note: str = "", **values: float) -> Fit:
        return Fit(name=name, values=values, note=note, evidence="end-to-end")

    stack = {"eager": one("eager", elementwise=p[0]), "conv": one("conv", fp32=p[1], tensor=p[2])}
    devices: dict[str, dict[str, Fit]] = {}
    for (names, dtype), ceiling in zip(CEILINGS, p[3:], strict=True):
        for name in names:
            key = f"gemm.{dtype}"
            devices.setdefault(name, {})[key] = one(
                key, "no operator table of this device", ceiling=ceiling, depth=60.0
            )
    return {"stacks": {"pytorch": stack}, "devices": devices}


# -- links ---------------------------------------------------------------------------------------------------------


def fit_network(found: Sequence[Run], before: Fits) -> tuple[Fits, Fit]:
    """(links of `LINKS` and the message cost of Horovod, the ``interference`` prior), from all runs on several
    devices."""
    several = [r for r in found if r.resolved.plan.dp > 1]
    if not several:
        return {}, _interference(0.0)
    start = (13e-6, 1.14e9, 15e-6, 2.3e9, 24e-6, 4.76e9, 9e-5, 0.2)

    def within(p: Sequence[float]) -> Fits:
        # The prior is read while runs are priced, so the trial value is put in its place first.
        priors.set_trial({**priors.priors(), "interference": _interference(p[7])})
        return merged(before, _network_fits(*p[:7]))

    best = solve(several, within, start)
    final, fits = within(best), _network_fits(*best[:7])
    for named in fits.values():
        for name, tables in named.items():
            for key, fit in tables.items():
                on = [r for r in several if name in (r.resolved.stack.name, *_links(r))]
                tables[key] = fitted(key, dict(fit.values), on, final, fit.note)
    hidden = [r for r in several if r.resolved.plan.overlap == "wfbp"]
    note = "NCCL kernels beside back-propagation; pooled over all devices"
    return fits, fitted("interference", {"seconds_per_second": best[7]}, hidden, final, note)


def _links(run: Run) -> tuple[str, ...]:
    cluster = run.resolved.cluster
    return tuple(link.name for link in (cluster.intra, cluster.inter) if link is not None)


def _network_fits(
    a10: float, b10: float, a100: float, b100: float, staged_a: float, staged_b: float, message: float
) -> Fits:
    def law(name: str, **values: float) -> Fit:
        return Fit(name=name, values=values, note="no operator table of this link", evidence="end-to-end")

    return {
        "links": {
            "10gbe": {"all_reduce": law("all_reduce", alpha_s=a10, c=0.0, Bps=b10)},
            "100gbe": {"all_reduce": law("all_reduce", alpha_s=a100, c=0.0, Bps=b100)},
            "pcie3x16": {
                "all_reduce+staged": law("all_reduce+staged", a_s=0.0, a1_s=2.0 * staged_a, c=0.0, Bps=staged_b)
            },
        },
        "stacks": {"horovod": {"message": law("message", seconds=message)}},
    }


def _interference(rho: float) -> Fit:
    return Fit(name="interference", values={"seconds_per_second": rho}, evidence="end-to-end")


def residuals(found: Sequence[Run], fits: Fits) -> list[tuple[float, str]]:
    """(predicted/measured - 1, regime) of each run."""
    overlay, out = Overlay(fits), []
    for run in found:
        resolved = overlay(run.resolved)
        answer = evaluate(resolved)
        out.append((answer.end_s / run.seconds - 1.0, regime(resolved, answer)))
    return out


def summary(found: Sequence[Run], fits: Fits, *, single: bool | None = None) -> str:
    """Rows and mean absolute error by table, as one line; single: runs on one device (or on several) alone."""
    parts = []
    for table in sorted({r.table for r in found}):
        chosen = [r for r in found if r.table == table and (single is None or (r.resolved.plan.world == 1) == single)]
        if chosen:
            parts.append(f"{table} {len(chosen)} rows {np.mean(np.abs(errors(chosen, fits))):.1%}")
    return ", ".join(parts) or "no rows"
