"""The page of a map: the ratio as a heat map with the line where it is 1, the crossings as tables; and a picture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simkit.decentral_map import Map
from simkit.errors import InputError
from simkit.plot_page import Picture, Sheet, graph_objects, page
from simkit.units import format_bits, format_s

LEAST, MOST = 0.05, 20.0
"""Ratios beyond these take the end of the colours."""


def map_page(found: Map, title: str, assumed: Sequence[str] = ()) -> str:
    """The whole page as text. assumed: lines of what was not given."""
    by_count = [(n, "never" if x is None else format_bits(x))
                for n, x in zip(found.counts, found.bandwidth_crossings(), strict=True)]  # fmt: skip
    rows = zip(found.bandwidth_Bps, found.count_crossings(), found.latency_crossings(), strict=True)
    by_rate = [(format_bits(b), "never" if n is None else f"{n:.0f}", "" if x is None else format_s(x))
               for b, n, x in rows]  # fmt: skip
    crossings = [
        Sheet(title="Equal from this bandwidth", heads=("micro-batches", "bandwidth"), rows=by_count),
        Sheet(title="Equal from so many micro-batches, up to this latency",
              heads=("bandwidth", "micro-batches", "latency"), rows=by_rate),
    ]  # fmt: skip
    if assumed:
        crossings.append(Sheet(title="Assumed (not given)", heads=("assumption",), rows=[(n,) for n in assumed],
                               words=True))  # fmt: skip
    intro = (f"Throughput of the peers over {found.reference_rate:.4g} samples/s of the reference; all lines alike in "
             f"both directions, {format_s(found.latency_s)} between two peers. The best number of pipelines, depth, "
             "micro-batch and recomputation at every point. Blank: nothing fits.")
    return page(title, [_heat(found)], crossings, intro=intro)


def _heat(found: Map) -> Picture:
    go = graph_objects()
    figure = go.Figure()
    x = (found.bandwidth_Bps * 8e-6).tolist()
    y = list(found.counts)
    ratio = np.where(found.ratio > 0.0, found.ratio, np.nan)
    z = np.log10(np.clip(ratio, LEAST, MOST)).T
    text = [[_told(found, i, k) for i in range(len(x))] for k in range(len(y))]
    marks = [0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 20.0]
    bar = {"title": "ratio", "tickvals": [float(np.log10(m)) for m in marks], "ticktext": [f"{m:g}" for m in marks]}
    figure.add_heatmap(
        x=x, y=y, z=[[None if v != v else v for v in row] for row in z.tolist()], colorscale="RdBu", zmid=0.0,
        zmin=np.log10(LEAST), zmax=np.log10(MOST), hovertext=text, hoverinfo="text",
        colorbar=bar,
    )  # fmt: skip
    line = [(b, n) for n, b in zip(found.counts, found.bandwidth_crossings(), strict=True) if b is not None]
    if line:
        figure.add_scatter(x=[b * 8e-6 for b, _ in line], y=[n for _, n in line], mode="lines+markers", name="equal",
                           line={"color": "#111111", "width": 2}, hoverinfo="skip")
    figure.update_xaxes(title="bandwidth of every line, Mb/s", type="log", automargin=True)
    figure.update_yaxes(title="micro-batches of a pipeline and step", type="log", automargin=True)
    figure.update_layout(
        template="none", height=480, margin={"l": 8, "r": 12, "t": 8, "b": 8}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", font={"size": 13}, showlegend=False,
    )  # fmt: skip
    best = float(np.nanmax(ratio)) if np.isfinite(ratio).any() else 0.0
    return Picture(figure=figure, title="Throughput over that of the reference",
                   alt=f"Heat map over bandwidth and micro-batches, {best:.2f} at best; black line: equal.",
                   caption="Blue: the peers are faster. Red: the reference is. Black line: they are equal.")


def _told(found: Map, i: int, k: int) -> str:
    if not found.rate[i, k] > 0.0:
        return "nothing fits"
    return (f"{format_bits(found.bandwidth_Bps[i])}, {found.counts[k]} micro-batches of {found.micro_batch[i, k]}, "
            f"recompute {found.recompute[i, k]}<br>"
            f"{found.ratio[i, k]:.3g} times the reference<br>{found.pipelines[i, k]} pipelines of {found.depth[i, k]}")


def write_png(text: str, path: str) -> None:
    """A picture of a page, by Chromium. SIMKIT_CHROMIUM names the program where it is not on the path.

    Raises InputError where playwright or Chromium is missing, or the file cannot be written.
    """
    hint = "pip install playwright, and install Chromium or set SIMKIT_CHROMIUM to its path"
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        raise InputError("needs playwright, which is not installed", key="--png", hint=hint) from None
    names = ("chromium", "chromium-browser", "google-chrome")
    program = os.environ.get("SIMKIT_CHROMIUM") or next((p for p in map(shutil.which, names) if p), None)
    if not Path(path).resolve().parent.is_dir():
        raise InputError("is in a folder that does not exist", key="--png", value=path, hint="make the folder first")
    try:
        with sync_playwright() as driver:
            options: dict[str, Any] = {"args": ["--no-sandbox"]}
            if program:
                options["executable_path"] = program
            browser = driver.chromium.launch(**options)
            tab = browser.new_page(viewport={"width": 1100, "height": 900})
            tab.set_content(text)
            tab.wait_for_selector(".js-plotly-plot .main-svg")
            tab.screenshot(path=path, full_page=True, type="png")
            browser.close()
    except Error as error:
        raise InputError(f"could not be drawn: {str(error).splitlines()[0][:120]}", key="--png", hint=hint) from None
