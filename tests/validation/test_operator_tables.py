"""How far measured kernels are predicted; the bounds may only tighten."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from simkit.errors import RefusedError
from simkit.operators import predict_operator
from simkit.spec import load

pytestmark = pytest.mark.data
FOLDER = os.environ.get("SIMKIT_DATA", "")
WIDE = 256.0
"""Rows of a product from which on it is one of training; below it is one of decoding."""

# Mean absolute error of the products of a fit, each laboratory at its own ceiling, from WIDE rows on.
PRODUCTS = {
    ("a100-sxm4-80gb", "bf16"): 0.068,
    ("a100-pcie-80gb", "bf16"): 0.035,
    ("a40", "fp16"): 0.075,
    ("h100-sxm5-80gb", "bf16"): 0.09,
    ("h200-sxm-141gb", "bf16"): 0.065,
    ("b200-sxm-180gb", "bf16"): 0.105,
    ("l40s", "bf16"): 0.10,
    ("rtx-pro-6000-blackwell-se", "bf16"): 0.055,
    ("rtx4090", "bf16"): 0.055,
    ("rtx5080", "bf16"): 0.045,
    ("v100-pcie-32gb", "fp32"): 0.065,
}
ATTENTION = {
    "a100-sxm4-80gb": 0.05,
    "h100-sxm5-80gb": 0.055,
    "h200-sxm-141gb": 0.06,
    "b200-sxm-180gb": 0.10,
    "l40s": 0.135,
    "rtx-pro-6000-blackwell-se": 0.085,
}
# Median absolute error of whole tables as `simkit validate` scores them, one profile per device.
TABLES = {
    ("kernel_aiconfigurator_gemm", "gemm"): 0.10,
    ("kernel_vidur_mlp", "gemm"): 0.07,
    ("kernel_neusight_ops", "gemm"): 0.07,
    ("kernel_slidesparse_gemm", "gemm"): 0.04,
    ("kernel_aiconfigurator_attention", "attention_prefill"): 0.09,
    ("kernel_aiconfigurator_attention", "attention_decode"): 0.06,
    ("kernel_hw_microbench", "memory"): 0.04,
}


@pytest.mark.parametrize(("device", "dtype"), PRODUCTS)
def test_residual_of_products(device: str, dtype: str) -> None:
    fit = load.device(device).calibration[f"gemm.{dtype}"]
    assert fit.mape is not None
    assert fit.mape <= PRODUCTS[device, dtype]


@pytest.mark.parametrize("device", ATTENTION)
def test_residual_of_attention(device: str) -> None:
    fit = load.device(device).calibration["attention.bf16"]
    assert fit.mape is not None
    assert fit.mape <= ATTENTION[device]
    assert fit["ceiling"] < load.device(device).calibration["gemm.bf16"]["ceiling"]


@lru_cache(maxsize=16)
def errors(name: str) -> dict[str, np.ndarray]:
    """{operator: predicted/measured - 1} of a table; wide and skinny products apart."""
    if not FOLDER:
        pytest.skip("SIMKIT_DATA does not name the folder of operator tables")
    path = Path(FOLDER) / f"{name}.csv"
    if not path.is_file():
        pytest.skip(f"{name} is not in SIMKIT_DATA")
    found: dict[str, list[float]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            op = row.get("op") or "gemm"
            if row["metric"] != "time_s":
                continue
            try:
                predicted = predict_operator(row)[0]
            except RefusedError:
                assert op == "sparse_gemm" or row.get("sparsity", "none") not in ("", "none") or op == "host_copy", row
                continue
            if op == "gemm":
                op = "gemm" if float(row["m"]) >= WIDE else "skinny"
            found[op].append(predicted / float(row["value"]) - 1.0)
    return {op: np.array(values) for op, values in found.items()}


@pytest.mark.parametrize(("table", "op"), TABLES)
def test_median_error_of_tables(table: str, op: str) -> None:
    assert np.median(np.abs(errors(table)[op])) <= TABLES[table, op]
