"""The declared exceptions of LLM training: constants that only end-to-end rows tell, at most three a stack.

Per software stack: ``elementwise`` (bytes an eager framework moves per byte counted), ``host_kernel_s`` (time in which
its host launches an operator), ``step_s`` (what it adds to a step and nothing hides), ``interference`` (seconds of
compute that a second of hidden communication costs) or ``attention`` (time of its attention kernels over that of the
operator tables'); three of them at most, inherited ones included. Per device one ``sustained`` factor: the clock under
load over that of the short runs of operator tables; consumer cards keep 1, for what one table would give them others
contradict. Per link without an operator table its rate; the latency is held at that of a step over RDMA, since no row
tells it. `PROBLEMS` lists which constants are fitted together on which tables; each is one per stack, device or link,
never per model, row or table. Tables that no problem lists (`pretrain_megatron_ci`) are scored and never fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from simkit.calibrate_runs import Fits, Run, fitted, merged, solve
from simkit.spec.hardware import Device, Fit
from simkit.spec.priors import sustained_pool

START = {"elementwise": 1.2, "host_kernel_s": 8e-6, "step_s": 5e-3, "interference": 0.4, "attention": 1.2}
SUSTAINED = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Constants fitted together. stacks: {name: constants}; devices: groups of profiles that share one sustained factor
    (chips that differ in memory only); links: {name: (latency s, held; starting byte/s)}."""

    tables: tuple[str, ...]
    stacks: Mapping[str, tuple[str, ...]]
    devices: tuple[tuple[str, ...], ...] = ()
    links: Mapping[str, tuple[float, float]] = ()  # type: ignore[assignment]

    def start(self) -> list[float]:
        """The starting point, in the order in which `fits` reads its constants."""
        values = [START[c] for constants in self.stacks.values() for c in constants]
        values += [SUSTAINED for _ in self.devices]
        return values + [rate for _, rate in dict(self.links).values()]

    def fits(self, p: Sequence[float]) -> Fits:
        """Trial constants as Fits."""
        left = iter(p)
        out: Fits = {"stacks": {}, "devices": {}, "links": {}}
        for name, constants in self.stacks.items():
            values = {c: next(left) for c in constants}
            found = out["stacks"].setdefault(name, {})
            if "attention" in values:
                found["attention"] = Fit(
                    name="attention", values={"time": values.pop("attention")}, evidence="end-to-end",
                    note="time of its kernels over that of those in the operator tables",
                )  # fmt: skip
            if values:
                found["eager"] = Fit(name="eager", values=values, evidence="end-to-end")
        for names in self.devices:
            factor = next(left)
            for name in names:
                note = "clock under load over that of the operator tables"
                out["devices"][name] = {
                    "sustained": Fit(name="sustained", values={"factor": factor}, evidence="end-to-end", note=note)
                }
        for name, (latency_s, _) in dict(self.links).items():
            values = {"alpha_s": latency_s, "c": 0.0, "Bps": next(left)}
            out["links"][name] = {
                "all_reduce": Fit(
                    name="all_reduce", values=values, evidence="end-to-end", note="no operator table of this link"
                )
            }
        return out

    def rows(self, found: Sequence[Run]) -> list[Run]:
        """The runs of its tables on its stacks."""
        return [r for r in found if r.table in self.tables and r.resolved.stack.name in self.stacks]


_ALL = ("elementwise", "host_kernel_s", "step_s")
PROBLEMS = (
    Problem(
        tables=("pretrain_vtrain", "pretrain_bigscience", "pretrain_megatron_papers"),
        stacks={"megatron-deepspeed": _ALL, "megatron": ("elementwise",)},
        devices=(("a100-sxm4-80gb", "a100-sxm4-40gb"), ("v100-sxm3-32gb",)),
        links={"omnipath-100": (10e-6, 6e9)},
    ),
    Problem(
        tables=("pretrain_llm_foundry", "pretrain_llm_foundry_old"),
        # What PyTorch's own sharding and operators cost, for every stack that is made of them; Composer's attention.
        stacks={"pytorch-fsdp": ("elementwise", "interference"), "composer": ("attention",)},
        devices=(("h100-sxm5-80gb",),),
    ),
    Problem(tables=("pretrain_internevo",), stacks={"internevo": ("elementwise",)}),
    Problem(tables=("pretrain_flagperf",), stacks={"paddle": ("elementwise",)}),
    Problem(
        tables=("pretrain_hf_two_cards",),
        stacks={"hf-trainer": _ALL},
    ),
    Problem(
        tables=("pretrain_llmq_consumer",),
        stacks={"llmq": _ALL},
    ),
)


def fit_training(found: Sequence[Run], before: Fits) -> Fits:
    """The constants of every problem in turn, each with those before it held fixed."""
    fits = before
    out: Fits = {"stacks": {}, "devices": {}, "links": {}}
    for problem in PROBLEMS:
        rows = problem.rows(found)
        if not rows:
            continue

        def trial(p: Sequence[float], problem: Problem = problem, fits: Fits = fits) -> Fits:
            return merged(fits, problem.fits(p))

        best = problem.fits(solve(rows, trial, problem.start()))
        fits = merged(fits, best)
        for kind, named in best.items():
            for name, tables in named.items():
                for key, fit in tables.items():
                    on = [r for r in rows if kind == "stacks" and r.resolved.stack.name == name] or rows
                    out[kind].setdefault(name, {})[key] = fitted(key, dict(fit.values), on, fits, fit.note)
    return out


def pooled_sustained(fits: Fits, devices: Mapping[str, Device]) -> dict[str, Fit]:
    """``sustained.<architecture>.<FLOP per clock>``: the median factor of measured chips of one kind, for those of the
    same kind that no run was measured on (a GeForce, whose processor does half as much a clock, is another kind)."""
    listed: dict[str, list[tuple[str, Fit]]] = {}
    for name, found in fits.get("devices", {}).items():
        pool = sustained_pool(devices[name]) if "sustained" in found else None
        if pool is not None:
            listed.setdefault(pool, []).append((name, found["sustained"]))
    return {
        pool: Fit(
            name=pool,
            values={"factor": median(fit["factor"] for _, fit in members)},
            rows=len(members),
            evidence="end-to-end",
            note=f"pooled over {', '.join(name for name, _ in members)}",
            dataset=tuple(sorted({t for _, fit in members for t in fit.dataset})),
        )
        for pool, members in sorted(listed.items())
    }
