"""One self-contained HTML page: figures with plotly.js inlined, tables, light and dark, 375 to 1440 px wide."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from simkit.errors import InputError
from simkit.render_tables import html_table

INK_LIGHT, INK_DARK = "#1b1f24", "#e6e9ee"
GRID_LIGHT, GRID_DARK = "#d5dae1", "#3d444e"

_STYLE = f"""
:root {{ color-scheme: light dark; --ink: {INK_LIGHT}; --paper: #ffffff; --line: {GRID_LIGHT}; --warn: #9a3412; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: {INK_DARK}; --paper: #14171c; --line: {GRID_DARK}; --warn: #fdba74; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; }}
figure {{ margin: 0; min-width: 0; }}
figcaption {{ font-size: .875rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9375rem; }}
caption {{ text-align: left; font-weight: 600; padding: .25rem 0; }}
th, td {{ text-align: right; vertical-align: top; padding: .3rem .75rem .3rem 0;
  border-bottom: 1px solid var(--line); }}
th, td {{ overflow-wrap: normal; }}
td {{ white-space: nowrap; }}
th:first-child {{ text-align: left; font-weight: 500; }}
.tables {{ display: flex; flex-wrap: wrap; gap: 0 3rem; }}
section {{ min-width: 0; max-width: 100%; }}
.words td, .words th {{ text-align: left; white-space: normal; }}
thead th {{ font-weight: 600; }}
.warn {{ color: var(--warn); }}
footer {{ margin-top: 2rem; font-size: .8125rem; }}
"""

_SCRIPT = f"""
(function () {{
  var dark = window.matchMedia('(prefers-color-scheme: dark)');
  function paint() {{
    var ink = dark.matches ? '{INK_DARK}' : '{INK_LIGHT}', grid = dark.matches ? '{GRID_DARK}' : '{GRID_LIGHT}';
    document.querySelectorAll('.plotly-graph-div').forEach(function (el) {{
      var change = {{'font.color': ink, 'hoverlabel.font.color': '{INK_LIGHT}'}};
      ['xaxis', 'yaxis'].forEach(function (axis) {{
        if (el.layout && el.layout[axis]) {{
          ['gridcolor', 'linecolor', 'zerolinecolor'].forEach(function (k) {{ change[axis + '.' + k] = grid; }});
        }}
      }});
      Plotly.relayout(el, change);
    }});
  }}
  dark.addEventListener('change', paint);
  paint();
}})();
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A plotly figure with its heading, what it shows in words (for who cannot see it), and a caption."""

    figure: Any
    title: str
    alt: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table of the page. words: the cells are text, aligned left."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: bool = False


def graph_objects() -> ModuleType:
    """plotly.graph_objects. Raises InputError naming the extra to install where it is absent."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise InputError(
            "needs plotly, which is not installed", key="--html", hint="pip install 'simkit-perf[plot]'"
        ) from None
    module: ModuleType = go
    return module


def page(
    title: str,
    figures: Iterable[Picture],
    tables: Iterable[Sheet] = (),
    *,
    intro: str = "",
    notes: Sequence[str] = (),
    lead: Iterable[Sheet] = (),
) -> str:
    """The whole page as text. It asks the network for nothing, and the same input gives the same bytes.

    title, headings, alternative texts and tables make it readable without the figures. notes: warnings, printed first;
    lead: tables that stand before the figures.
    Raises InputError where plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    parts = [f"<h1>{html.escape(title)}</h1>"]
    if intro:
        parts.append(f"<p>{html.escape(intro)}</p>")
    parts += [f"<p class='warn'>Warning: {html.escape(note)}</p>" for note in notes]
    parts += [_sheet(sheet) for sheet in lead if sheet.rows]
    parts += [_picture(index, picture) for index, picture in enumerate(figures)]
    parts += ["<div class='tables'>", *(_sheet(sheet) for sheet in tables if sheet.rows), "</div>"]
    from simkit import __version__

    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            "<link rel='icon' href='data:,'>",
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
            f"<script>{get_plotlyjs()}</script></head>",
            f"<body><main>{''.join(parts)}</main><footer>simkit {__version__}</footer>",
            f"<script>{_SCRIPT}</script></body></html>",
            "",
        ]
    )


def _picture(index: int, picture: Picture) -> str:
    import plotly.io

    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}
    drawing = plotly.io.to_html(
        picture.figure,
        config=config,
        include_plotlyjs=False,
        full_html=False,
        div_id=f"figure-{index}",
        default_width="100%",
        default_height=f"{picture.figure.layout.height}px",
    )
    caption = f"<figcaption>{html.escape(picture.caption)}</figcaption>" if picture.caption else ""
    image = f"<div role='img' aria-label='{html.escape(picture.alt, quote=True)}'>{drawing}</div>"
    return f"<h2>{html.escape(picture.title)}</h2><figure>{image}{caption}</figure>"


def _sheet(sheet: Sheet) -> str:
    title = html.escape(sheet.title, quote=True)
    table = html_table("", sheet.heads, sheet.rows)
    # A wide table scrolls by itself, also by keyboard, so that the page never does.
    region = f"<div class='scroll{' words' if sheet.words else ''}' tabindex='0' role='region' aria-label='{title}'>"
    return f"<section><h2>{title}</h2>{region}{table}</div></section>"
