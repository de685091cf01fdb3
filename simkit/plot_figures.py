"""The figures: timeline, stacked breakdown, memory against capacity, throughput, parity, parameters by module.

Colours are Okabe and Ito's palette, which colour-blind readers can tell apart (jfly.uni-koeln.de/color), and four more
for figures with many parts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simkit.plot_page import Picture, graph_objects
from simkit.render_tables import fits_line, terms
from simkit.units import GIB, format_bytes, format_s

if TYPE_CHECKING:
    from simkit.report import Report
    from simkit.spans import Span
    from simkit.timeline import Timeline

PALETTE = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7",
    "#F0E442", "#8C8C8C", "#AA4499", "#44AA99", "#7F6CC9", "#B8860B",
)  # fmt: skip
COLORS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer": "#009E73",
    "compression": "#E69F00",
    "encode": "#E69F00",
    "between": "#F0E442",
    "decode": "#CC79A7",
    "exposed_comm": "#D55E00",
    "comm": "#D55E00",
    "host": "#8C8C8C",
    "bubble": "#CC79A7",
}
STREAMS = ("compute", "comm", "host")
MANY_STREAMS = 6
"""Rows of a timeline above which they are drawn thin."""
MAX_BARS = 40
Named = Sequence[tuple[str, "Report"]]


def timeline(line: Timeline, *, note: str = "") -> Picture:
    """A Gantt chart of one step: a row a stream, a bar a span; hover shows when, how long and how many bytes."""
    go = graph_objects()
    scale, unit = _time_unit(line.end_s)
    found = {span.stream for span in line.spans}
    streams = [s for s in STREAMS if s in found] + sorted(found - set(STREAMS))
    # Outlines part neighbours of one kind, but would hide spans that are a pixel wide.
    edge = 0.5 if len(line.spans) <= MAX_BARS else 0
    figure = go.Figure()
    for kind in dict.fromkeys(span.kind for span in line.spans):
        spans = [s for s in line.spans if s.kind == kind]
        figure.add_bar(
            name=kind,
            orientation="h",
            y=[s.stream for s in spans],
            base=[s.start_s * scale for s in spans],
            x=[(s.end_s - s.start_s) * scale for s in spans],
            hovertext=[_hover(s) for s in spans],
            hoverinfo="text",
            marker={"color": _color(kind), "line": {"width": edge, "color": "rgba(127,127,127,0.6)"}},
        )
    row = 70 if len(streams) <= MANY_STREAMS else 22
    _dress(figure, height=150 + row * max(1, len(streams)), x=f"time in the step, {unit}", barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=streams[::-1])
    told = [s for s in streams if s in line.busy_s][:MANY_STREAMS]
    busy = ", ".join(f"{s} busy {line.busy_s[s] / line.end_s:.0%}" for s in told) if line.end_s else ""
    alt = f"Timeline of one step of {format_s(line.end_s)}: {busy}."
    return Picture(
        figure=figure,
        title="One step in time",
        alt=alt,
        caption=f"{busy[:1].upper()}{busy[1:]} of the step. {note}".rstrip(),
    )


def breakdown(reports: Named) -> Picture:
    """Stacked bars: the disjoint terms of the step time, a bar a report."""
    go = graph_objects()
    shown = list(reports)[:MAX_BARS]
    scale, unit = _time_unit(max(r.iteration_time_s for _, r in shown))
    figure = go.Figure()
    for name in dict.fromkeys(n for _, r in shown for n, _ in terms(r)):
        values = [dict(terms(r)).get(name, 0.0) for _, r in shown]
        shares = [v / r.iteration_time_s for v, (_, r) in zip(values, shown, strict=True)]
        figure.add_bar(
            name=name.replace("_", " "),
            orientation="h",
            y=_labels(shown),
            x=[v * scale for v in values],
            hovertext=[
                f"{name.replace('_', ' ')}<br>{format_s(v)}, {s:.1%}" for v, s in zip(values, shares, strict=True)
            ],
            hoverinfo="text",
            marker_color=_color(name),
        )
    _dress(figure, height=_height(len(shown)), x=f"step time, {unit}", barmode="stack")
    figure.update_yaxes(autorange="reversed", showticklabels=len(shown) > 1)
    alt = "; ".join(f"{n}: " + ", ".join(f"{t} {format_s(v)}" for t, v in terms(r)) for n, r in shown[:6])
    return Picture(
        figure=figure,
        title="Where the time goes",
        alt=f"Stacked bars of the step time. {alt}.",
        caption=_cut(len(reports)),
    )


def memory(reports: Named) -> Picture:
    """Stacked bars of the device memory by item, with a mark at the capacity that a job can use."""
    go = graph_objects()
    shown = list(reports)[:MAX_BARS]
    figure = go.Figure()
    names = dict.fromkeys(n for _, r in shown for n, v in r.memory.items_bytes.items() if v)
    for index, name in enumerate(names):
        values = [r.memory.items_bytes.get(name, 0.0) for _, r in shown]
        title = name.removesuffix("_bytes").replace("_", " ")
        figure.add_bar(
            name=title,
            orientation="h",
            y=_labels(shown),
            x=[v / GIB for v in values],
            hovertext=[f"{title}<br>{format_bytes(v)}" for v in values],
            hoverinfo="text",
            marker_color=PALETTE[index % len(PALETTE)],
        )
    figure.add_scatter(
        name="capacity",
        mode="markers",
        y=_labels(shown),
        x=[r.memory.room_bytes / GIB for _, r in shown],
        hovertext=[f"capacity<br>{format_bytes(r.memory.room_bytes)}" for _, r in shown],
        hoverinfo="text",
        marker={"symbol": "line-ns", "size": 34, "line": {"width": 4, "color": "#D62728"}},
    )
    _dress(figure, height=_height(len(shown)), x="memory per GPU, GiB", barmode="stack")
    figure.update_yaxes(autorange="reversed", showticklabels=len(shown) > 1)
    alt = "; ".join(f"{n}: fits {fits_line(r)}" for n, r in shown[:6])
    caption = "; ".join(f"Fits: {fits_line(r)}" for _, r in shown) if len(shown) == 1 else _cut(len(reports))
    return Picture(
        figure=figure, title="Memory per GPU", alt=f"Stacked bars of memory against capacity. {alt}.", caption=caption
    )


def throughput(reports: Named) -> Picture:
    """Bars of samples a second, a bar a report."""
    go = graph_objects()
    shown = list(reports)[:MAX_BARS]
    values = [r.samples_per_s for _, r in shown]
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        y=_labels(shown),
        x=values,
        hovertext=[f"{v:,.4g} samples/s" for v in values],
        hoverinfo="text",
        marker_color=PALETTE[0],
    )
    _dress(figure, height=_height(len(shown)) - 30, x="samples/s, whole job", barmode="stack")
    figure.update_yaxes(autorange="reversed")
    alt = "; ".join(f"{n}: {v:,.4g} samples/s" for (n, _), v in list(zip(shown, values, strict=True))[:8])
    return Picture(figure=figure, title="Throughput", alt=f"Bars of throughput. {alt}.", caption=_cut(len(reports)))


def parity(points: Sequence[Mapping[str, Any]], *, bands: Sequence[float] = (0.1, 0.25)) -> Picture:
    """Predicted over measured on logarithmic axes, a colour a source, with the diagonal and bands of relative error.

    points: {id, source, metric, measured, predicted}. Values at or below zero have no logarithm and are left out.
    """
    go = graph_objects()
    kept = [p for p in points if p["measured"] > 0 and p["predicted"] > 0]
    figure = go.Figure()
    values = [float(p[k]) for p in kept for k in ("measured", "predicted")] or [1.0]
    low, high = min(values) / 1.3, max(values) * 1.3
    for band in sorted(bands, reverse=True):
        figure.add_scatter(
            name=f"±{band:.0%}",
            mode="lines",
            x=[low, high, high, low],
            y=[low * (1 + band), high * (1 + band), high * (1 - band), low * (1 - band)],
            fill="toself",
            fillcolor="rgba(127,127,127,0.16)",
            line={"width": 0},
            hoverinfo="skip",
        )
    figure.add_scatter(
        name="equal",
        mode="lines",
        x=[low, high],
        y=[low, high],
        line={"width": 1, "color": "#8C8C8C"},
        hoverinfo="skip",
    )
    for index, source in enumerate(dict.fromkeys(str(p.get("source") or "unnamed") for p in kept)):
        mine = [p for p in kept if str(p.get("source") or "unnamed") == source]
        figure.add_scatter(
            name=source if len(source) <= 34 else source[:33] + "…",
            mode="markers",
            x=[p["measured"] for p in mine],
            y=[p["predicted"] for p in mine],
            hovertext=[_point(p) for p in mine],
            hoverinfo="text",
            marker={
                "size": 8,
                "opacity": 0.85,
                "color": PALETTE[index % len(PALETTE)],
                "symbol": index // len(PALETTE) * 2,
            },
        )
    _dress(figure, height=560, x="measured", barmode="stack")
    # Digits between the powers of ten are unreadable once there are several decades.
    ticks = {"dtick": 1} if high / low > 100 else {}
    figure.update_xaxes(type="log", range=[math.log10(low), math.log10(high)], **ticks)
    figure.update_yaxes(
        type="log", range=[math.log10(low), math.log10(high)], title="predicted", showgrid=True, **ticks
    )
    inside = sum(abs(p["predicted"] / p["measured"] - 1) <= bands[0] for p in kept)
    alt = f"Predicted over measured for {len(kept)} rows; {inside} lie within ±{bands[0]:.0%}."
    return Picture(figure=figure, title="Predicted and measured", alt=alt, caption=alt)


def modules(name: str, found: Mapping[str, float]) -> Picture:
    """A treemap: the area of a module is its share of the parameters."""
    go = graph_objects()
    total = math.fsum(found.values()) or 1.0
    keys = list(found)
    figure = go.Figure()
    figure.add_treemap(
        labels=[name, *(k.replace("_", " ") for k in keys)],
        ids=["", *keys],
        parents=[None, *[""] * len(keys)],
        values=[total, *(found[k] for k in keys)],
        branchvalues="total",
        text=["", *(f"{found[k]:,.0f}<br>{found[k] / total:.1%}" for k in keys)],
        textinfo="label+text",
        hovertext=[
            f"{total:,.0f} parameters",
            *(f"{k}<br>{found[k]:,.0f} parameters, {found[k] / total:.2%}" for k in keys),
        ],
        hoverinfo="text",
        marker={"colors": ["rgba(127,127,127,0.15)", *(PALETTE[i % len(PALETTE)] for i in range(len(keys)))]},
    )
    figure.update_layout(
        height=460, margin={"l": 4, "r": 4, "t": 8, "b": 8}, paper_bgcolor="rgba(0,0,0,0)", template="none"
    )
    alt = f"Treemap of {total:,.0f} parameters: " + ", ".join(
        f"{k} {v / total:.1%}" for k, v in sorted(found.items(), key=lambda kv: -kv[1])[:8]
    )
    return Picture(figure=figure, title="Parameters by module", alt=alt)


def _dress(figure: Any, *, height: int, x: str, barmode: str) -> None:
    figure.update_layout(
        template="none",
        height=height,
        barmode=barmode,
        bargap=0.25,
        margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0, "traceorder": "normal"},
        hoverlabel={"bgcolor": "#ffffff"},
    )
    figure.update_xaxes(title=x, automargin=True, showgrid=True, rangemode="tozero", nticks=8)
    figure.update_yaxes(automargin=True, showgrid=False, ticklabelstandoff=6)


def _time_unit(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e9, "ns"


def _hover(span: Span) -> str:
    lines = [f"<b>{span.name}</b>", f"{format_s(span.end_s - span.start_s)} from {format_s(span.start_s)}"]
    for key, value in span.args:
        size = key in ("bytes", "nbytes") or key.endswith("_bytes")
        text = value if isinstance(value, str) else format_bytes(value) if size else format(value, ".6g")
        lines.append(f"{key.replace('_', ' ')}: {text}")
    return "<br>".join(lines)


def _point(p: Mapping[str, Any]) -> str:
    error = p["predicted"] / p["measured"] - 1
    return f"{p['id']}<br>{p['metric']}<br>measured {p['measured']:.4g}, predicted {p['predicted']:.4g} ({error:+.1%})"


def _labels(reports: Named) -> list[str]:
    return ["<br>".join(textwrap.wrap(name, 20, break_on_hyphens=False)) for name, _ in reports]


def _height(bars: int) -> int:
    return 190 + 52 * bars


def _color(kind: str) -> str:
    return COLORS.get(kind) or PALETTE[sum(map(ord, kind)) % len(PALETTE)]


def _cut(total: int) -> str:
    return f"The first {MAX_BARS} of {total} cases; the table has all." if total > MAX_BARS else ""
