"""Seconds of an operator, worked by hand from three numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simkit import units
from simkit.roofline import ATTENTION, CONV, GEMM, MEMORY, Columns, Law, concat, matmul_seconds, seconds

LAW = Law(peak_flops=1e12, ceiling=1.0, depth=0.0, sm_count=1.0, memory_Bps=1e12)
FREE_MEMORY = replace(LAW, memory_Bps=1e30)


def column(kind: int, *, batch: float = 0.0, m: float = 0.0, n: float = 0.0, k: float = 0.0, nbytes: float = 0.0,
           kernels: float = 0.0) -> Columns:
    def one(x: float) -> np.ndarray:
        return np.array([x])

    return Columns(kind=np.array([kind], dtype=np.int8), batch=one(batch), m=one(m), n=one(n), k=one(k),
                   nbytes=one(nbytes), kernels=one(kernels))


def product(batch: float, m: float, n: float, k: float, law: Law) -> float:
    return float(matmul_seconds(np.array([batch]), np.array([m]), np.array([n]), np.array([k]), law)[0])


def test_one_tile_on_one_processor() -> None:
    # 128x128x1000: 2·(128·128 + 16·256)·1000 = 4.096e7 FLOP-equivalents at 1e12 a second.
    assert product(1, 128, 128, 1000, FREE_MEMORY) == pytest.approx(4.096e-5, rel=1e-12)


def test_the_cheapest_tile_wins_the_wave() -> None:
    # Five 128x128 outputs on four processors, k = k0 = 1000. 128x128 tiles: w = 1.25, w' = 1.25 + 0.6·0.75 = 1.7, cost
    # 1.7·40960; 64x64: w = 5 whole waves, 5·2·(4096 + 16·128) = 61440; the other tiles and every split cost more.
    law = replace(FREE_MEMORY, sm_count=4.0, depth=1000.0)
    assert product(5, 128, 128, 1000, law) == pytest.approx(4 * 61440 * 2000 / 1e12, rel=1e-12)


def test_streams_move_bytes_and_launch_kernels() -> None:
    # 1e9 bytes, twice over (eager), at 1e12 B/s, and three launches of 10 us.
    law = replace(LAW, elementwise=2.0, kernel_s=1e-5)
    t, math_bound = seconds(column(MEMORY, nbytes=1e9, kernels=3.0), law)
    assert t[0] == pytest.approx(2e-3 + 3e-5, rel=1e-12)
    assert not math_bound[0]
    slow, _ = seconds(column(MEMORY, nbytes=1e9, kernels=3.0), replace(law, sustained=0.5))
    assert slow[0] == pytest.approx(4e-3 + 3e-5, rel=1e-12)


def test_ridge_point_is_peak_over_bandwidth_in_si() -> None:
    """BR-71: 1600 GB/s are 1.6e12 B/s, so a 312 TFLOP/s device turns at 195 FLOP a byte."""
    peak, rate = units.parse("312 TFLOP/s", "flops"), units.parse("1600 GB/s", "Bps")
    ridge = peak / rate
    assert ridge == pytest.approx(195.0)
    law = Law(peak_flops=peak, ceiling=1.0, depth=0.0, sm_count=1.0, memory_Bps=rate)
    flops = 2.0 * 4096.0**3
    overhead = 1.0 + 16.0 * (256 + 128) / (256 * 128)
    for intensity, bound in ((ridge * 1.01 / overhead, True), (ridge * 0.99 / overhead, False)):
        row = column(GEMM, batch=1.0, m=4096.0, n=4096.0, k=4096.0, nbytes=flops / intensity)
        assert bool(seconds(row, law)[1][0]) is bound


def test_a_convolution_costs_its_factor_times_the_product() -> None:
    law = replace(FREE_MEMORY, conv=1.7)
    sides = {"batch": 1.0, "m": 1000.0, "n": 256.0, "k": 576.0}
    conv, gemm = (seconds(column(kind, **sides), law)[0][0] for kind in (CONV, GEMM))
    assert conv == pytest.approx(1.7 * gemm, rel=1e-12)


@pytest.mark.parametrize("kind", [MEMORY, GEMM, CONV, ATTENTION])
@pytest.mark.parametrize(("field", "factor"), [("peak_flops", 1.5), ("memory_Bps", 1.5), ("sustained", 1.2)])
def test_a_better_device_is_never_slower(kind: int, field: str, factor: float) -> None:
    law = replace(LAW, sm_count=80.0, depth=150.0, ceiling=0.8, kernel_s=4e-6, memory_Bps=5e11)
    better = replace(law, **{field: getattr(law, field) * factor})
    rng = np.random.default_rng(1)
    for _ in range(50):
        sides = dict(zip(("batch", "m", "n", "k"), rng.integers(1, 3000, 4).astype(float), strict=True))
        row = column(kind, **({} if kind == MEMORY else sides), nbytes=float(rng.integers(1, 10**9)), kernels=1.0)
        assert seconds(row, better)[0][0] <= seconds(row, law)[0][0] * (1 + 1e-12)


def test_products_never_beat_the_peak_nor_their_bytes() -> None:
    law = replace(LAW, sm_count=46.0, depth=100.0)
    rng = np.random.default_rng(2)
    sides = rng.integers(1, 4096, (4, 200)).astype(float)
    nbytes = rng.integers(1, 10**9, 200).astype(float)
    rows = Columns(kind=np.full(200, GEMM, dtype=np.int8), batch=sides[0], m=sides[1], n=sides[2], k=sides[3],
                   nbytes=nbytes, kernels=np.zeros(200))
    t, _ = seconds(rows, law)
    assert np.all(t >= rows.flops / law.peak_flops)
    assert np.all(t >= nbytes / law.memory_Bps)


def test_columns_concatenate_and_broadcast_over_sweep_points() -> None:
    both = concat([column(MEMORY, nbytes=1e6), column(GEMM, batch=1.0, m=64.0, n=64.0, k=64.0, nbytes=1.0)])
    assert len(both) == 2
    twice = {c: np.tile(getattr(both, c), (2, 1)) for c in ("batch", "m", "n", "k", "nbytes", "kernels")}
    twice["batch"][1, 1] = 2.0
    points = Columns(kind=both.kind, **twice)
    t, _ = seconds(points, LAW)
    assert t.shape == (2, 2)
    assert t[0] == pytest.approx(seconds(both, LAW)[0])
    assert t[1, 1] > t[0, 1]
