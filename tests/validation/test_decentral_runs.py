"""Published runs over peers. Inputs and results are theirs; nothing in the package was fitted on these rows.

Petals: the table of its README (commit 158621677bac), BLOOM-176B in 8 bits on three A100-80GB with shaped links.
INTELLECT-1 (arXiv 2412.01152; https://www.primeintellect.ai/blog/intellect-1-release): 14 nodes of 8 H100, 100 inner
steps, int8: 83 % of the time computes across continents, 96 % within the United States. Links: up to 4 Gb/s across the
United States (README of github.com/PrimeIntellect-ai/prime); about 500 Mb/s between continents is recalled, not read
again.
"""

from __future__ import annotations

import pytest

import simkit

PETALS = [
    (128, "1Gb/s@2.5ms", 1.71), (2048, "1Gb/s@2.5ms", 1.54), (128, "100Mb/s@2.5ms", 1.66),
    (2048, "100Mb/s@2.5ms", 1.49), (128, "100Mb/s@50ms", 1.23), (2048, "100Mb/s@50ms", 1.11),
]  # fmt: skip


@pytest.mark.parametrize(("context", "inter", "steps_per_s"), PETALS)
def test_petals(context: int, inter: str, steps_per_s: float) -> None:
    found = simkit.predict(method="decentralized", task="inference", model="bloom-176b", cluster="3x1xa100-sxm4-80gb",
                           inter=inter, quant="int8", precision="bf16", batch=1, prompt_len=context)  # fmt: skip
    assert found.fits
    assert len(found.extras["per_stage"]) == 3
    assert found.extras["tpot_s"] == pytest.approx(1.0 / steps_per_s, rel=0.25)


@pytest.mark.parametrize(("inter", "busy"), [("4Gb/s@30ms", 0.96), ("500Mb/s@75ms", 0.83)])
def test_intellect_1(inter: str, busy: float) -> None:
    """Batch, recomputation, compilation: configs/10B/H100_intellect1.toml and src/zeroband/config.py (torch_compile is
    true) of github.com/PrimeIntellect-ai/prime: 128 sequences of 8,192 a node and step, one at a time."""
    found = simkit.predict(
        method="local-sgd", model="intellect-1-10b", cluster="14x8xh100", inter=inter, nics_per_node=1, zero=3,
        stack="pytorch-fsdp", seq_len=8192, micro_batch=1, global_batch=14 * 128, recompute="full", inner_steps=100,
        outer_dtype="int8", compile=True,
    )  # fmt: skip
    assert found.fits
    assert found.extras["traffic_cut"] == 400.0
    assert found.extras["utilisation"]["mean"] == pytest.approx(busy, abs=0.05)
    # 38 minutes between averages.
    assert found.extras["round"]["inner_s"] * 100 == pytest.approx(38 * 60, rel=0.15)
