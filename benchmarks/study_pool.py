"""How many spare peers a pool needs: goodput by the size of the backup pool, under several laws of churn.

50 RTX 3080s train GPT-3 2.7B as 5 pipelines of 10 stages for a day, each behind the line `wan-1gbps`; nobody is spare
but the pool. Every row is the mean of independent replications with its 95 % interval; all pools meet the same lives of
peers. Writes FOLDER/backup_pool.csv, and with --png (extra `plot`, playwright, Chromium) FOLDER/backup_pool.png.

Run: python benchmarks/study_pool.py validation/studies [--png] [--replications 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from simkit.churn._common import churn
from simkit.spec.files import write_text
from simkit.spec.scenario import Scenario
from simkit.swarm import LEVEL, replicate, summary
from simkit.swarm_job import Job, job

SCENARIO: dict[str, Any] = {"cluster": "50x3080", "inter": "wan-1gbps", "model": "gpt3-2.7b", "dp": 5, "pp": 10}
CHURN = ("exponential:2h", "exponential:4h", "exponential:8h", "weibull:4h,shape=0.6")
POOLS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
WANTED = 0.9
HEADS = ("law of churn", "mean", "whole interval", "cheapest a sample")


def rows(work: Job, law: str, replications: int) -> list[dict[str, Any]]:
    """One row for each pool."""
    found = []
    for pool in POOLS:
        config = replace(work.config, churn=churn(law), backup_pool=pool, record=False)
        answer = summary(replicate(config, replications=replications), work)
        low, high = answer["interval_95"]["goodput"]
        rate = answer["useful_samples_per_s"]
        found.append(
            {"churn": law, "backup_pool": pool, "replications": replications, "goodput": answer["goodput"],
             "goodput_low_95": low, "goodput_high_95": high, "useful_samples_per_s": rate,
             "lost_work_fraction": answer["lost_work_fraction"], "recoveries": answer["recoveries"],
             "usd_per_million_samples": answer["cost_usd_per_hour"] / 3600.0 / rate * 1e6}
        )  # fmt: skip
    return found


def verdicts(found: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """For each law: the smallest pool whose mean, and whose whole interval, keep what is wanted; the cheapest pool."""
    said = []
    for law in CHURN:
        mine = [row for row in found if row["churn"] == law]
        kept = [next((str(row["backup_pool"]) for row in mine if row[key] >= WANTED), "no pool tried")
                for key in ("goodput", "goodput_low_95")]  # fmt: skip
        cheap = min(mine, key=lambda row: row["usd_per_million_samples"])
        said.append((law, *kept, str(cheap["backup_pool"])))
    return said


def as_csv(found: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(found[0])
    for row in found:
        table.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row.values()])
    return out.getvalue()


def page(found: list[dict[str, Any]]) -> str:
    """Goodput by pool, a line for each law, its interval as bars."""
    from simkit.plot_figures import PALETTE, _dress
    from simkit.plot_page import Picture, Sheet, graph_objects, page

    figure = graph_objects().Figure()
    for i, law in enumerate(CHURN):
        mine = [row for row in found if row["churn"] == law]
        figure.add_scatter(
            x=[row["backup_pool"] for row in mine], y=[row["goodput"] for row in mine], name=law, mode="lines+markers",
            error_y={"type": "data", "symmetric": False, "thickness": 1,
                     "array": [row["goodput_high_95"] - row["goodput"] for row in mine],
                     "arrayminus": [row["goodput"] - row["goodput_low_95"] for row in mine]},
            line={"color": PALETTE[(0, 2, 4, 8)[i]], "width": 2},
        )  # fmt: skip
    figure.add_hline(y=WANTED, line_dash="dot", line_color="#8C8C8C")
    _dress(figure, height=460, x="spare peers beyond 50", barmode="overlay")
    figure.update_yaxes(title="goodput", tickformat=".0%", showgrid=True)
    said = "; ".join(f"{law}: {WANTED:.0%} from {mean}" for law, mean, _, _ in verdicts(found))
    table = Sheet(title=f"Spare peers for a goodput of {WANTED:.0%}", heads=HEADS, rows=verdicts(found))
    return page("Goodput by the size of the backup pool",
                [Picture(figure=figure, title="50 RTX 3080, 5 pipelines of 10 stages, gpt3-2.7b, one day", alt=said,
                         caption=f"Bars: {LEVEL:.0%} interval of the mean. Dotted: {WANTED:.0%}.")],
                [table])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", help="where backup_pool.csv goes")
    parser.add_argument("--png", action="store_true", help="also the picture (needs plotly, playwright and Chromium)")
    parser.add_argument("--replications", type=int, default=20, help="independent days of each row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.replications < 2:
        parser.error("--replications: an interval needs 2 or more")
    work = job(Scenario.of({**SCENARIO, "seed": args.seed}), churn=churn(CHURN[0]), horizon_s=86400.0)
    found = [row for law in CHURN for row in rows(work, law, args.replications)]
    print(write_text(Path(args.folder) / "backup_pool.csv", as_csv(found)))
    for line in (HEADS, *verdicts(found)):
        print("{:24s}{:>16s}{:>16s}{:>20s}".format(*line))
    if args.png:
        from simkit.plot_map import write_png

        write_png(page(found), str(Path(args.folder) / "backup_pool.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
