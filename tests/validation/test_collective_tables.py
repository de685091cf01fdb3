"""How far measured collectives are predicted; the bounds may only tighten."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from simkit.collectives import ring
from simkit.network import predict_row
from simkit.spec.cluster import cluster

pytestmark = pytest.mark.data
FOLDER = os.environ.get("SIMKIT_DATA", "")

# Mean and median absolute error a table may show. The means of the vidur table carry runs that its own publisher's
# neighbouring rows contradict by a factor of two; its medians do not.
BOUNDS = {
    "collective_misc.csv": (0.06, 0.05),
    "collective_nccl_logs.csv": (0.11, 0.07),
    "kernel_aiconfigurator_comm.csv": (0.08, 0.05),
    "kernel_vidur_network.csv": (0.20, 0.08),
    "kernel_consumer_comm.csv": (0.10, 0.06),
}


def rows(name):
    if not FOLDER:
        pytest.skip("SIMKIT_DATA does not name the folder of operator tables")
    path = Path(FOLDER) / name
    if not path.is_file():
        pytest.skip(f"{name} is not in SIMKIT_DATA")
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["op"] in ring.OPS and row["value"]]


def error(row, *, calibration=True):
    ranks = int(row["ranks"])
    per_node = int(row.get("gpus_per_node") or ranks)
    nics = row.get("nics_per_node")
    shape, _ = cluster(
        f"{-(-ranks // per_node)}x{per_node}x{row['device']}",
        intra=row["intra"],
        inter=row.get("inter") or None,
        nics_per_node=int(nics) if nics else None,
        calibration=calibration,
    )
    value, metric = predict_row(row, shape)
    measured = float(row["value"])
    return value / measured - 1 if metric == "time_s" else measured / value - 1


@pytest.mark.parametrize("name", BOUNDS)
def test_error_of_each_table(name):
    errors = np.abs([error(row) for row in rows(name)])
    mean, median = BOUNDS[name]
    assert errors.mean() <= mean
    assert np.median(errors) <= median


@pytest.mark.parametrize("name", BOUNDS)
def test_calibration_earns_its_place(name):
    measured = rows(name)
    blind = np.abs([error(row, calibration=False) for row in measured]).mean()
    assert np.abs([error(row) for row in measured]).mean() < blind


def test_a_fit_on_half_of_the_sizes_predicts_the_other_half():
    """Not a memory of the rows: constants from every other row of each device and operation, scored on the rest."""
    pytest.importorskip("scipy")
    from dataclasses import replace

    from simkit.calibrate_links import fit_links
    from simkit.spec import load

    table = [r for r in rows("kernel_aiconfigurator_comm.csv") if r["engine"] == "nccl"]
    table.sort(key=lambda r: (r["device"], r["op"], int(r["ranks"]), float(r["bytes"])))
    fits = fit_links({"half.csv": table[::2]})
    errors = []
    for row in table[1::2]:
        shape, _ = cluster(f"1x{row['ranks']}x{row['device']}", intra=row["intra"], calibration=False)
        link = load.link(row["intra"], calibration=False)
        fitted = replace(shape, intra=replace(link, calibration=fits[link.name]))
        errors.append(predict_row(row, fitted)[0] / float(row["value"]) - 1)
    assert np.abs(errors).mean() <= 0.12
    assert np.median(np.abs(errors)) <= 0.06
