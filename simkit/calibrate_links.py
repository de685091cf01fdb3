"""Fits the law of every link from tables of measured collectives, and writes it below the facts of the link's profile.

Inside a node, per operation and device (w = bytes the busiest rank sends, n = ranks):

    t = a + a1 (n-1) + c sqrt(w) + w / B(n)       and, for a call which the host launches one by one, max(t, floor)

Between nodes alpha, c and B per NIC are fitted through `simkit.network` itself, with the law inside the node held
fixed, so that other node and NIC counts follow. Least squares on log(predicted/measured) with a soft-L1 loss; which of
the rates and ramps depend on n is decided by the Bayesian information criterion. Laboratories that measured the same
device, link and operation are fitted together and their separate residuals are written into the note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.calibrate_samples import Row, Sample, samples
from simkit.collectives import ring
from simkit.collectives._law import LAUNCH_S, law
from simkit.errors import InputError
from simkit.network import CollectiveCost, collective
from simkit.spec.hardware import Cluster, Device, Fit, Group, Link

Floats = NDArray[np.float64]
MARKER = "# --- fitted: written by simkit calibrate, do not edit by hand ---"
_FULL_LAW_ROWS = 8  # below this only the constants that the rows show are fitted
_RATE_ROWS = 2  # a rate that rests on one run is no calibration
_LATENCY_BYTES = 4096.0
_BANDWIDTH_BYTES = 16e6
_SOFT = 0.1
# A fit pooled over devices speaks for the link itself only if it looks like the link: outside of this share of the line
# rate the hosts (sockets, bridges, switches), not the link, made the number.
_PLAUSIBLE = (0.25, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The samples of one fit as arrays."""

    n: Floats
    w: Floats
    t: Floats
    eager: Floats

    @classmethod
    def of(cls, group: Sequence[Sample]) -> _Columns:
        n = np.array([float(s.ranks) for s in group])
        w = np.array([float(ring.wire_bytes(s.op, ranks=s.ranks, nbytes=s.nbytes)) for s in group])
        t = np.array([s.seconds for s in group])
        return cls(n=n, w=w, t=t, eager=np.array([float(s.eager) for s in group]))


def _solve(
    model: Callable[[Floats], Floats], start: Sequence[float], t: Floats, *, most: Sequence[float] | None = None
) -> tuple[Floats, float]:
    """Positive constants, none above `most`, that minimise the soft-L1 log residual, and the cost."""
    from scipy.optimize import least_squares

    def residual(logs: Floats) -> Floats:
        ratio: Floats = np.log(np.maximum(model(np.exp(logs)), 1e-15) / t)
        return ratio

    upper = np.full(len(start), 46.0) if most is None else np.log(most)
    found = least_squares(residual, np.log(start), loss="soft_l1", f_scale=_SOFT, bounds=(-46.0, upper))
    constants: Floats = np.exp(found.x)
    return constants, float(found.cost)


def _fit_law(group: list[Sample], line_Bps: float) -> tuple[dict[str, float], list[Sample], Floats]:
    """Constants of the full law, the samples and their predictions; the form with the lowest BIC of three."""
    d = _Columns.of(group)
    counts = np.unique(d.n)
    place = np.searchsorted(counts, d.n)
    has_floor = 0 < d.eager.sum() < len(d.eager)
    best: tuple[float, dict[str, float], Floats] | None = None
    for per_count_c, per_count_b in ((False, False), (False, True), (True, True)):
        n_c, n_b = (len(counts) if per_count_c else 1), (len(counts) if per_count_b else 1)

        def split(p: Floats, n_c: int = n_c, n_b: int = n_b) -> tuple[Floats, Floats]:
            return p[3 : 3 + n_c], p[3 + n_c : 3 + n_c + n_b]

        def model(p: Floats, n_c: int = n_c, n_b: int = n_b) -> Floats:
            c, b = split(p, n_c, n_b)
            t = p[0] + p[1] * (d.n - 1) + c[place * (n_c > 1)] * np.sqrt(d.w) + d.w / b[place * (n_b > 1)]
            floored: Floats = np.where(d.eager * has_floor > 0, np.maximum(t, p[2]), t)
            return floored

        start = [1e-5, 1e-6, 4e-5, *[1e-9] * n_c, *[line_Bps * 0.5] * n_b]
        p, cost = _solve(model, start, d.t)
        # Soft-L1 cost in units of its scale plays the part of the negative log likelihood.
        score = 2 * cost / _SOFT**2 + (2 + has_floor + n_c + n_b) * math.log(len(d.t))
        if best is None or score < best[0]:
            c, b = split(p, n_c, n_b)
            values = {"a_s": p[0], "a1_s": p[1] if len(counts) > 1 else 0.0}
            values |= {f"c@{counts[i]:g}" if n_c > 1 else "c": c[i] for i in range(n_c)}
            values |= {f"Bps@{counts[i]:g}" if n_b > 1 else "Bps": b[i] for i in range(n_b)}
            if len(counts) == 1:
                values["a_s"] += p[1] * (counts[0] - 1)
            values |= {"floor_s": p[2]} if has_floor else {}
            best = (score, {k: float(v) for k, v in values.items()}, model(p))
    assert best is not None
    return best[1], group, best[2]


def _fit_few(group: Sequence[Sample], link: Link) -> tuple[dict[str, float], list[Sample], Floats] | None:
    """With few rows: rates from huge messages, latency from tiny ones, else from the datasheet; None without a rate."""
    prior = law(replace(link, calibration={}), group[0].op, "", staged=group[0].staged)
    f = 2 if group[0].op == "all_reduce" else 1
    step_s = prior.step_s * f
    tiny = [s for s in group if s.nbytes <= _LATENCY_BYTES]
    huge = [s for s in group if s.nbytes >= _BANDWIDTH_BYTES]
    counts = [n for n in sorted({s.ranks for s in huge}) if sum(s.ranks == n for s in huge) >= _RATE_ROWS]
    if not counts and len(huge) >= _RATE_ROWS:
        counts = [0]
    if not counts:
        return None
    values = {"a_s": LAUNCH_S, "a1_s": step_s, "c": 0.0}
    if len(tiny) >= _RATE_ROWS:
        step_s = max(0.0, float(np.median([(s.seconds - LAUNCH_S) / (s.ranks - 1) for s in tiny])))
        values["a1_s"] = step_s
    for n in counts:
        mine = _Columns.of([s for s in huge if n in (0, s.ranks)])
        carried_s = mine.t - LAUNCH_S - step_s * (mine.n - 1)
        if not (carried_s > 0.0).all():
            # Faster than a launch and the link's latency alone: no rate explains it.
            return None
        rate = float(np.exp(np.mean(np.log(mine.w / carried_s))))
        values[f"Bps@{n}" if n else "Bps"] = rate
    used = tiny if len(tiny) >= _RATE_ROWS else []
    used = used + [s for s in huge if s.ranks in counts or 0 in counts]
    fit = Fit(name="", values=values)
    trial = law(replace(link, calibration={group[0].op: fit}), group[0].op, "")
    d = _Columns.of(used)
    return values, used, trial.a_s + trial.step_s * f * (d.n - 1) + d.w / trial.rate_Bps(d.n)


def _spread(group: Sequence[Sample], predicted: Floats) -> str:
    """MAPE and bias of each laboratory, where there are several."""
    error = predicted / np.array([s.seconds for s in group]) - 1
    labs = sorted({s.lab for s in group})
    if len(labs) < 2:
        return ""
    parts = []
    for lab in labs:
        mine = error[[s.lab == lab for s in group]]
        parts.append(f"{lab} {len(mine)} rows MAPE {np.abs(mine).mean():.1%} bias {mine.mean():+.1%}")
    return "; ".join(parts)


def _as_fit(name: str, values: dict[str, float], group: Sequence[Sample], predicted: Floats, note: str = "") -> Fit:
    error = np.abs(predicted / np.array([s.seconds for s in group]) - 1)
    notes = [text for text in (note, _spread(group, predicted)) if text]
    sizes, counts = [s.nbytes for s in group], [float(s.ranks) for s in group]
    return Fit(
        name=name,
        values=values,
        dataset=tuple(sorted({s.table for s in group})),
        rows=len(group),
        valid={"bytes": (min(sizes), max(sizes)), "ranks": (min(counts), max(counts))},
        mape=float(error.mean()),
        evidence="fitted",
        note="; ".join(notes),
    )


def _groups(found: Iterable[Sample], key: Callable[[Sample], tuple[str, str]]) -> dict[tuple[str, str], list[Sample]]:
    out: dict[tuple[str, str], list[Sample]] = {}
    for s in found:
        out.setdefault(key(s), []).append(s)
    return dict(sorted(out.items()))


def _name(s: Sample, device: str) -> str:
    at, staged, engine = f"@{device}" * bool(device), "+staged" * s.staged, f"/{s.engine}" * bool(s.engine)
    return s.op + at + staged + engine


def _fit_intra(found: Sequence[Sample], link: Callable[[str], Link]) -> dict[str, dict[str, Fit]]:
    fits: dict[str, dict[str, Fit]] = {}
    inside = [s for s in found if s.link and not s.inter]
    by_device = _groups(inside, lambda s: (s.link, _name(s, s.device)))
    # For devices nobody measured: all devices of a link together, engines' own kernels left out.
    pooled = _groups([s for s in inside if not s.engine], lambda s: (s.link, _name(s, "")))
    for (link_name, name), group in {**by_device, **pooled}.items():
        one = link(link_name)
        many = len(group) >= _FULL_LAW_ROWS and len({s.nbytes for s in group}) >= 5
        solved = _fit_law(group, one.Bps) if many else _fit_few(group, one)
        if solved is None:
            continue
        values, used, predicted = solved
        if "@" not in name and not _plausible(values, one, group[0].staged):
            continue
        devices = sorted({s.device for s in used})
        note = f"pooled over {', '.join(devices)}" if "@" not in name and len(devices) > 1 else ""
        fits.setdefault(one.name, {})[name] = _as_fit(name, values, used, predicted, note)
    return fits


def _plausible(values: Mapping[str, float], link: Link, staged: bool) -> bool:
    low, high = _PLAUSIBLE
    shares = [v / link.Bps for k, v in values.items() if k.startswith("Bps")]
    return staged or all(low <= share <= high for share in shares)


def _fit_inter(
    found: Sequence[Sample],
    intra: Mapping[str, Mapping[str, Fit]],
    link: Callable[[str], Link],
    device: Callable[[str], Device],
    thorough: bool,
) -> dict[str, dict[str, Fit]]:
    fits: dict[str, dict[str, Fit]] = {}
    for (link_name, op), group in _groups([s for s in found if s.inter], lambda s: (s.inter, s.op)).items():
        if len(group) < _FULL_LAW_ROWS:
            continue
        base = replace(link(link_name), calibration={})
        layouts = _groups(
            group, lambda s: (f"{s.link} {s.device}", f"{s.ranks} {s.per_node} {s.nics} {s.algorithm}")
        )
        parts = [_InterPart.of(part, base, intra, link, device) for part in layouts.values()]
        ordered = [s for part in layouts.values() for s in part]
        measured = np.array([s.seconds for s in ordered])

        values, predicted = _inter_law(op, parts, base, measured, thorough)
        highest = max(v for k, v in values.items() if k.startswith("Bps"))
        note = f"{highest / base.Bps:.0%} of the line rate of a NIC; law inside the node held fixed"
        fits.setdefault(base.name, {})[op] = _as_fit(op, values, ordered, predicted, note)
    return fits


def _inter_law(
    op: str, parts: Sequence[_InterPart], base: Link, measured: Floats, thorough: bool
) -> tuple[dict[str, float], Floats]:
    """Constants between nodes and their predictions. Where the rows name their algorithm, the rate may also depend on
    the number of nodes, if that lowers the information criterion: what is left then is how a library pipelines it."""
    counts = sorted({part.nodes for part in parts})
    forms = [[0]] + ([counts] if len(counts) > 1 and all(part.algorithm for part in parts) else [])
    best: tuple[float, dict[str, float], Floats] | None = None
    for form in forms:

        def values(p: Floats, form: Sequence[int] = form) -> dict[str, float]:
            rates = {f"Bps@{n}" if n else "Bps": float(v) for n, v in zip(form, p[2:], strict=True)}
            return {"alpha_s": float(p[0]), "c": float(p[1]), **rates}

        def model(p: Floats, values: Callable[[Floats], dict[str, float]] = values) -> Floats:
            return np.concatenate([part.seconds(op, values(p)) for part in parts])

        p, cost = _inter_constants(model, base, measured, len(form), thorough)
        score = 2 * cost / _SOFT**2 + len(p) * math.log(len(measured))
        if best is None or score < best[0]:
            best = (score, values(p), model(p))
    assert best is not None
    return best[1], best[2]


def _inter_constants(
    model: Callable[[Floats], Floats], base: Link, measured: Floats, rates: int, thorough: bool
) -> tuple[Floats, float]:
    """(alpha, c and the rates of a NIC; cost). Where the links inside the nodes are the slower ones at the first rate
    tried, nothing there tells in which direction it lies: then, if `thorough`, lower ones are tried too."""
    most = [1.0, 1.0, *[base.Bps] * rates]
    p, cost = _solve(model, [base.latency_s, 1e-9, *[base.Bps * 0.8] * rates], measured, most=most)
    if thorough and abs(p[2] / (base.Bps * 0.8) - 1.0) < 1e-6:
        for share in (0.4, 0.2, 0.1, 0.05):
            other, lower = _solve(model, [base.latency_s, 1e-9, *[base.Bps * share] * rates], measured, most=most)
            p, cost = (other, lower) if lower < cost else (p, cost)
    return p, cost


@dataclass(frozen=True, slots=True, kw_only=True)
class _InterPart:
    """Samples of one layout, priced by the network model with trial constants."""

    cluster: Cluster
    ranks: int
    nbytes: Floats
    algorithm: str | None = None

    @classmethod
    def of(
        cls,
        group: Sequence[Sample],
        base: Link,
        intra: Mapping[str, Mapping[str, Fit]],
        link: Callable[[str], Link],
        device: Callable[[str], Device],
    ) -> _InterPart:
        s = group[0]
        inner = link(s.link) if s.link else None
        inner = None if inner is None else replace(inner, calibration=intra.get(inner.name, inner.calibration))
        nodes = -(-s.ranks // s.per_node)
        kinds = (Group(nodes=nodes, gpus_per_node=s.per_node, device=device(s.device)),)
        cluster = Cluster(groups=kinds, intra=inner, inter=base, nics_per_node=s.nics, p2p=not s.staged)
        sizes = np.array([x.nbytes for x in group])
        return cls(cluster=cluster, ranks=s.ranks, nbytes=sizes, algorithm=s.algorithm or None)

    @property
    def nodes(self) -> int:
        return self.cluster.nodes

    def seconds(self, op: str, values: Mapping[str, float]) -> Floats:
        assert self.cluster.inter is not None
        trial = Fit(name=op, values=values)
        cluster = replace(self.cluster, inter=replace(self.cluster.inter, calibration={op: trial}))
        return np.asarray(self._cost(op, cluster).seconds)

    def _cost(self, op: str, cluster: Cluster) -> CollectiveCost:
        return collective(op, nbytes=self.nbytes, cluster=cluster, ranks=self.ranks, algorithm=self.algorithm)


def fit_links(
    tables: Mapping[str, Sequence[Row]],
    *,
    link: Callable[[str], Link] | None = None,
    device: Callable[[str], Device] | None = None,
    thorough: bool = False,
) -> dict[str, dict[str, Fit]]:
    """{link: {name: Fit}} from tables {file name: rows as dicts of text}; rows without a collective are passed over.

    Rows between nodes are fitted last, on top of the law inside the node. link, device: how a name becomes its facts
    (default: the shipped profiles, without calibration). thorough: look for a rate between nodes from several starts.
    """
    if link is None or device is None:
        from simkit.spec import load

        link = link or (lambda name: load.link(name, calibration=False))
        device = device or (lambda name: load.device(name, calibration=False))
    found = samples(tables)
    intra = _fit_intra(found, link)
    inter = _fit_inter(found, intra, link, device, thorough)
    names = sorted({*intra, *inter})
    return {name: {**intra.get(name, {}), **inter.get(name, {})} for name in names}


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def fit_toml(fits: Mapping[str, Fit]) -> str:
    """The calibration tables of one profile as TOML, five significant digits, sorted by name."""
    lines = []
    for name, fit in sorted(fits.items()):
        key = f"calibration.{_toml(name)}"
        values = ", ".join(f"{_toml(k)} = {_toml(float(v))}" for k, v in fit.values.items())
        lines += ["", f"[{key}]", f"values = {{ {values} }}", f"dataset = {_toml(fit.dataset)}", f"rows = {fit.rows}"]
        if fit.mape is not None:
            lines.append(f"mape = {_toml(float(fit.mape))}")
        lines += [f"evidence = {_toml(fit.evidence)}", f"note = {_toml(fit.note)}", "", f"[{key}.valid]"]
        lines += [f"{k} = [{low:.15g}, {high:.15g}]" for k, (low, high) in fit.valid.items()]
    return "\n".join(lines) + "\n"


def write_link_fits(fits: Mapping[str, Mapping[str, Fit]], hwprofiles_dir: str | Path) -> list[Path]:
    """Replaces what stands below the marker line of each link's profile; each file changes in one step or not at all.

    Returns the files written. Raises InputError when a link has no profile in that folder.
    """
    import os

    written = []
    for name, tables in sorted(fits.items()):
        path = Path(hwprofiles_dir) / "links" / f"{name}.toml"
        if not path.is_file():
            raise InputError("has no profile", file=str(path), key="link", value=name)
        facts = path.read_text(encoding="utf-8").partition(MARKER)[0].rstrip("\n")
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        partial.write_text(f"{facts}\n\n{MARKER}\n{fit_toml(tables)}", encoding="utf-8")
        partial.replace(path)
        written.append(path)
    return written
