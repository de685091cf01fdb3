"""The page of a swarm: throughput and useful work over time, peers, where the time goes, pool size against goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simkit.plot_figures import PALETTE, _dress
from simkit.plot_page import Picture, Sheet, graph_objects, page


def swarm_page(answer: Mapping[str, Any], *, title: str, lines: Sequence[tuple[str, str]]) -> str:
    """The whole page as text. Raises InputError where plotly is not installed."""
    pictures = [_work(answer), _peers(answer), _states(answer)]
    tables = [Sheet(title="Answer", heads=("", ""), rows=list(lines), words=True)]
    study = answer.get("backup_pool_for_goodput")
    if study:
        pictures.insert(0, _pools(study))
    tables.append(Sheet(title="Assumed", heads=("assumption",), rows=[(a,) for a in answer["assumptions"]], words=True))
    return page(title, pictures, tables[1:], notes=answer["warnings"], lead=tables[:1])


def _hours(answer: Mapping[str, Any]) -> list[float]:
    return [row["t_s"] / 3600.0 for row in answer["throughput_timeline"]]


def _lines(answer: Mapping[str, Any], names: Mapping[str, str], y: str) -> Any:
    go = graph_objects()
    figure = go.Figure()
    for i, (key, name) in enumerate(names.items()):
        figure.add_scatter(x=_hours(answer), y=[row[key] for row in answer["throughput_timeline"]], name=name,
                           mode="lines", line={"color": PALETTE[i * 2], "width": 2, "shape": "hv"})  # fmt: skip
    _dress(figure, height=340, x="hours", barmode="overlay")
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


def _work(answer: Mapping[str, Any]) -> Picture:
    figure = _lines(answer, {"samples_per_s": "done", "useful_samples_per_s": "useful"}, "samples/s")
    ideal = answer["ideal_samples_per_s"]
    figure.add_hline(y=ideal, line_dash="dot", line_color="#8C8C8C")
    alt = f"Samples per second over time; useful on average {answer['useful_samples_per_s']:.4g}, dotted {ideal:.4g}."
    return Picture(figure=figure, title="Work over time", alt=alt,
                   caption=f"{alt} Dotted: everybody there, nobody leaves.")  # fmt: skip


def _peers(answer: Mapping[str, Any]) -> Picture:
    figure = _lines(answer, {"online": "there", "spares": "spare", "running": "running pipelines"}, "peers")
    last = answer["throughput_timeline"][-1]
    alt = f"Peers over time: {last['online']:.4g} there at the end, {last['spares']:.4g} of them spare."
    return Picture(figure=figure, title="Peers over time", alt=alt)


def _states(answer: Mapping[str, Any]) -> Picture:
    go = graph_objects()
    states = {k: v for k, v in answer["time_by_state"].items() if v > 0.0}
    figure = go.Figure()
    for i, (state, share) in enumerate(sorted(states.items(), key=lambda kv: -kv[1])):
        figure.add_bar(name=state, orientation="h", y=["pipelines"], x=[share], marker={"color": PALETTE[i % 12]})
    _dress(figure, height=190, x="share of the time", barmode="stack")
    said = ", ".join(f"{state} {share:.1%}" for state, share in states.items())
    return Picture(figure=figure, title="What pipelines do", alt=f"Share of the time by state: {said}.")


def _pools(study: Mapping[str, Any]) -> Picture:
    go = graph_objects()
    tried = study["tried"]
    figure = go.Figure()
    bars: dict[str, Any] = {}
    if all("interval_95" in row for row in tried):
        bars = {"type": "data", "array": [row["interval_95"][1] - row["goodput"] for row in tried]}
    figure.add_scatter(x=[row["backup_pool"] for row in tried], y=[row["goodput"] for row in tried], name="goodput",
                       mode="lines+markers", error_y=bars or None, line={"color": PALETTE[0]})  # fmt: skip
    figure.add_hline(y=study["goodput_above"], line_dash="dot", line_color="#8C8C8C")
    _dress(figure, height=320, x="spare peers", barmode="overlay")
    figure.update_yaxes(title="goodput", rangemode="tozero")
    said = ", ".join(f"{row['goodput']:.1%} with {row['backup_pool']}" for row in tried)
    return Picture(figure=figure, title="Goodput by backup pool", alt=f"Goodput: {said}.")
