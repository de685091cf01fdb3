"""The page of a sweep: its metric over one axis as lines, over two as a heat map, with the best points below.

Of more axes the first two with several values are drawn, at the best that the others allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simkit.grids import Axis
from simkit.plot_page import Picture, Sheet, graph_objects, page
from simkit.sweep_files import LESS, place, short

if TYPE_CHECKING:
    from simkit.sweep import Sweep
    from simkit.sweep_files import Best

SHOWN = ("iteration_time_s", "peak_memory_gib", "usd_per_step")
MAX_SIDE = 400
"""Values of one axis that are drawn; more are thinned out evenly."""


def sweep_page(asked: Sweep, best: Best, surface: Surface) -> str:
    """The page of a sweep whose blocks `best` and `surface` have seen."""
    metric = best.metric
    names = tuple(axis.name for axis in asked.axes)
    figures = [n for n in dict.fromkeys((metric, *SHOWN)) if n not in names]
    table = [
        (*(place(axis, row) for axis in asked.axes), *(short(row.get(name)) for name in figures)) for row in best.rows
    ]
    sheet = Sheet(title=f"Best by {metric}", heads=(*names, *figures), rows=table)
    refused = best.points - best.answered
    intro = (
        f"{best.points:,} points: {best.fitting:,} fit into memory, {best.answered - best.fitting:,} do not, "
        f"{refused:,} were refused."
    )
    return page(f"{metric} over {' and '.join(names)}", [_picture(asked, surface)], [], intro=intro, lead=[sheet])


class Surface:
    """The best value of a metric at every drawn position of one or two axes, gathered block by block."""

    def __init__(self, asked: Sweep, metric: str) -> None:
        self.metric, self._shape = metric, asked.shape
        wide = [i for i, axis in enumerate(asked.axes) if len(axis) > 1] or [0]
        self.drawn = tuple(wide[:2])
        self.axes = tuple(asked.axes[i] for i in self.drawn)
        self.kept = tuple(_thinned(len(axis)) for axis in self.axes)
        self.values = np.full(tuple(len(k) for k in self.kept), np.nan)
        self._first = 0

    def add(self, block: Mapping[str, NDArray[Any]]) -> None:
        """Takes the next block of the sweep; points that do not fit are left blank."""
        value = np.where(block["fits"], block[self.metric].astype(float), np.nan)
        flat = np.arange(self._first, self._first + len(value))
        self._first += len(value)
        index = np.unravel_index(flat, self._shape)
        at, good = [], ~np.isnan(value)
        for i, kept in zip(self.drawn, self.kept, strict=True):
            place = np.minimum(np.searchsorted(kept, index[i]), len(kept) - 1)
            good &= kept[place] == index[i]
            at.append(place)
        where = tuple(place[good] for place in at)
        best = np.minimum if self.metric in LESS else np.maximum
        start = np.inf if self.metric in LESS else -np.inf
        found = np.full(self.values.shape, start)
        best.at(found, where, value[good])
        seen = np.isfinite(found)
        self.values[seen] = np.where(np.isnan(self.values[seen]), found[seen], best(self.values[seen], found[seen]))


def _thinned(count: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, min(count, MAX_SIDE)).round().astype(np.int64))


def _picture(asked: Sweep, surface: Surface) -> Picture:
    go = graph_objects()
    figure = go.Figure()
    first = surface.axes[0]
    x, x_title = _ticks(first, surface.kept[0])
    if len(surface.axes) == 1:
        figure.add_scatter(x=x, y=surface.values.tolist(), mode="lines+markers", marker_size=4)
        figure.update_yaxes(title=surface.metric, automargin=True)
        kind = "Line"
    else:
        y, y_title = _ticks(surface.axes[1], surface.kept[1])
        z = [[None if v != v else v for v in line] for line in surface.values.T.tolist()]
        figure.add_heatmap(x=x, y=y, z=z, colorscale="Viridis", colorbar={"title": surface.metric})
        figure.update_yaxes(title=y_title, automargin=True, type=_scale(y))
        kind = "Heat map"
    figure.update_xaxes(title=x_title, automargin=True, type=_scale(x))
    figure.update_layout(
        template="none", height=420, margin={"l": 8, "r": 12, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 13},
    )  # fmt: skip
    others = [axis.name for axis in asked.axes if axis not in surface.axes and len(axis) > 1]
    caption = f"At the best of {', '.join(others)}." if others else ""
    named = " and ".join(axis.name for axis in surface.axes)
    blank = " Blank: refused, or does not fit into memory." if np.isnan(surface.values).any() else ""
    return Picture(
        figure=figure,
        title=f"{surface.metric} over {named}",
        alt=f"{kind} of {surface.metric} over {named}; the best points are in the table.",
        caption=caption + blank,
    )


def _ticks(axis: Axis, kept: NDArray[np.int64]) -> tuple[list[Any], str]:
    """Where the values of an axis stand, and its title: links by their rate, names by themselves."""
    if axis.Bps is not None:
        return (axis.Bps[kept] * 8e-9).tolist(), f"{axis.name}, Gb/s"
    values = axis.values[kept].tolist()
    return ([str(v) for v in values] if axis.values.dtype == object else values), axis.name


def _scale(values: Sequence[Any]) -> str:
    if any(isinstance(v, str) for v in values):
        return "category"
    spread = max(values) / min(values) if min(values) > 0 else 1.0
    return "log" if spread > 20 else "linear"


__all__ = ["Surface", "sweep_page"]
