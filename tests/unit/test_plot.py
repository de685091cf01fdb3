"""The figures hold the numbers of the report, and the pages are self-contained and can be read without the figures."""

from __future__ import annotations

import re
import sys

import fake_report as fake
import numpy as np
import pytest

from simkit.errors import InputError
from simkit.timeline import Timeline

pytest.importorskip("plotly", reason="the extra `plot` is not installed")

from simkit import plot, plot_figures
from simkit.compare import Case, Comparison


@pytest.fixture
def line() -> Timeline:
    return Timeline(
        end_s=1.0, breakdown={}, busy_s={"compute": 0.7, "comm": 0.6}, comm_end_s=np.zeros(1), spans=fake.SPANS
    )


def test_the_timeline_draws_every_span_at_its_place(line: Timeline) -> None:
    bars = plot_figures.timeline(line).figure.data
    drawn = {(y, round(b, 9), round(x, 9)) for bar in bars for y, b, x in zip(bar.y, bar.base, bar.x, strict=True)}
    assert drawn == {(s.stream, s.start_s, round(s.end_s - s.start_s, 9)) for s in fake.SPANS}
    comm = next(bar for bar in bars if bar.name == "comm")
    assert "95.37 MiB" in comm.hovertext[0]  # 1e8 / 2**20


def test_the_breakdown_sums_to_the_step() -> None:
    picture = plot_figures.breakdown([("a", fake.report()), ("b", fake.h100())])
    assert sum(bar.x[0] for bar in picture.figure.data) == pytest.approx(1.0)
    assert "exposed_comm 300 ms" in picture.alt


def test_memory_stands_against_capacity() -> None:
    picture = plot_figures.memory([("a", fake.report())])
    capacity = next(trace for trace in picture.figure.data if trace.name == "capacity")
    # 9.5 GiB for the job and 0.5 of context, which is one of the bars.
    assert capacity.x[0] == 10.0
    assert sum(trace.x[0] for trace in picture.figure.data if trace.name != "capacity") == pytest.approx(7.5)


def test_parity_keeps_ids_and_counts_what_lies_inside() -> None:
    points = [
        {"id": f"r{i}", "source": "lab", "metric": "samples_per_s", "measured": m, "predicted": p}
        for i, (m, p) in enumerate([(100.0, 105.0), (100.0, 140.0), (10.0, 0.0)])
    ]
    picture = plot_figures.parity(points)
    assert "2 rows; 1 lie within ±10%" in picture.alt
    dots = next(trace for trace in picture.figure.data if trace.mode == "markers")
    assert dots.hovertext[1].startswith("r1<br>samples_per_s")
    assert "+40.0%" in dots.hovertext[1]


def test_pages_are_self_contained_and_deterministic(line: Timeline) -> None:
    report = fake.report(timeline=line, beside=(fake.h100(),))
    page = plot.report_page(report)
    assert page == plot.report_page(report)
    assert page.count('class="plotly-graph-div"') == 3
    head = page[: page.index("<script>")] + page[page.rindex("</script></head>") :]
    assert not re.search(r"(?:src|href)=['\"](?!data:)", head)
    assert "<h1>bert-large" in page
    assert page.count("role='img' aria-label='") == 3


def test_texts_are_escaped() -> None:
    report = fake.report(assumptions=("<b>bold</b>",), scenario={"model": "<script>alert(1)</script>"})
    page = plot.report_page(report)
    assert "<b>bold" not in page
    assert "<script>alert(1)" not in page


def test_every_page_has_its_tables() -> None:
    cases = tuple(Case(label=n, values={}, report=r) for n, r in (("x", fake.report()), ("y", fake.h100())))
    assert "0.75×" in plot.comparison_page(Comparison(cases=cases, varied=("cluster",)))
    assert "4,000" in plot.count_page("m", {"params": 5000, "by_module": {"mlp": 4000, "norm": 1000}})
    result = {"rows": 2, "predicted": 1, "refused": [{"id": "r9", "reason": "no such model"}], "mape": 0.125}
    points = [{"id": "r0", "source": "s", "metric": "mfu", "measured": 0.4, "predicted": 0.45}]
    page = plot.validation_page(result, points)
    assert "12.5%" in page
    assert "no such model" in page


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(InputError, match=r"pip install 'simkit-perf\[plot\]'"):
        plot.count_page("m", {"params": 1, "by_module": {"mlp": 1}})
