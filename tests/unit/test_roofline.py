"""Seconds of an operator, worked by hand from three numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simkit import units
from simkit.roofline import (
    ATTENTION,
    ATTENTION_GRAD,
    BLOCK,
    CONV,
    GEMM,
    MEMORY,
    Columns,
    Law,
    attention_seconds,
    concat,
    matmul_seconds,
    seconds,
)

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
    # 256x128x1000: 2·(256·128 + 16·384)·1000 = 7.7824e7 FLOP-equivalents at 1e12 a second.
    assert product(1, 256, 128, 1000, FREE_MEMORY) == pytest.approx(7.7824e-5, rel=1e-12)


def test_operands_weigh_less_on_a_slower_processor() -> None:
    # 512 FLOP per clock are a quarter of 2048, whose root is a half: 2·(256·128 + 8·384)·1000.
    law = replace(FREE_MEMORY, flop_per_clock=512.0)
    assert product(1, 256, 128, 1000, law) == pytest.approx(7.168e-5, rel=1e-12)


def test_plain_arithmetic_takes_small_tiles_and_whole_operands() -> None:
    # One 128x128 tile at 128 FLOP per clock: 2·(128·128 + 16·256)·1000.
    law = replace(FREE_MEMORY, flop_per_clock=128.0)
    assert product(1, 128, 128, 1000, law) == pytest.approx(4.096e-5, rel=1e-12)


def test_wide_tiles_from_hopper_on() -> None:
    # One 256x256 tile, 2·(256·256 + 16·512)·1000, which a narrower processor must cut in two.
    law = replace(FREE_MEMORY, flop_per_clock=4096.0)
    assert product(1, 256, 256, 1000, law) == pytest.approx(1.47456e-4, rel=1e-12)
    assert product(1, 256, 256, 1000, FREE_MEMORY) == pytest.approx(2 * 7.7824e-5, rel=1e-12)


def test_the_cheapest_tile_wins_the_wave() -> None:
    # Five 128x64 outputs on four processors, k = k0 = 1000. 128x64 tiles: w = 1.25, w' = 1.25 + 0.6·0.75 = 1.7, cost
    # 1.7·2·(8192 + 16·192)·(1000 + 1414) = 9.245e7; 64x64: ten tiles, w = 2.5, w' = 2.8, cost
    # 2.8·2·(4096 + 16·128)·(1000 + 2000) = 1.032e8; the other tiles waste more.
    law = replace(FREE_MEMORY, sm_count=4.0, depth=1000.0)
    expected = 4 * 1.7 * 2 * (8192 + 16 * 192) * (1000 + 1000 * 2**0.5) / 1e12
    assert product(5, 128, 64, 1000, law) == pytest.approx(expected, rel=1e-12)


def test_a_long_product_is_cut_to_fill_the_device() -> None:
    # One 256x128 tile of 1e6 on two processors: cut in two it takes one whole wave of half the length, plus 2 us and
    # 2·8 bytes an element of the result; whole it takes w' = 0.5 + 0.6·0.5 = 0.8 waves of the full length.
    law = replace(LAW, sm_count=2.0)
    half = 2 * 2 * (256 * 128 + 16 * 384) * 5e5 / 1e12
    assert product(1, 256, 128, 1e6, law) == pytest.approx(half + 2 * 8 * 256 * 128 / 1e12 + 2e-6, rel=1e-12)


def test_fused_attention_by_hand() -> None:
    # 3 heads of 256 queries on four processors: 6 blocks, w = 1.5, w' = 1.5 + 0.6·0.5 = 1.8; 512 keys and s0 = 128;
    # k = 2·64 halved by the mask; at half of 1e12 FLOP/s.
    law = replace(LAW, sm_count=4.0, attention_ceiling=0.5, attention_depth=128.0)
    one = np.ones(1)
    t = attention_seconds(3 * one, 256 * one, 512 * one, 64 * one, law)
    assert t[0] == pytest.approx(2 * 3 * 256 * (512 + 128) * 64 * (1.8 / 1.5) / 5e11, rel=1e-12)


def test_the_gradient_of_attention_runs_at_four_fifths_of_the_rate() -> None:
    sides = {"batch": 8.0, "m": 1024.0, "n": 1024.0}
    forward = seconds(column(ATTENTION, **sides, k=128.0), FREE_MEMORY)[0][0]
    backward = seconds(column(ATTENTION_GRAD, **sides, k=2.5 * 128.0), FREE_MEMORY)[0][0]
    assert backward == pytest.approx(forward * 2.5 / 0.8, rel=1e-12)


def test_products_stream_at_a_rate_of_their_own() -> None:
    law = replace(LAW, stream=1.25)
    assert seconds(column(GEMM, nbytes=1e9), law)[0][0] == pytest.approx(0.8e-3, rel=1e-12)
    assert seconds(column(MEMORY, nbytes=1e9), law)[0][0] == pytest.approx(1e-3, rel=1e-12)


@pytest.mark.parametrize("flop_per_clock", [128.0, 1024.0, 8192.0])
@pytest.mark.parametrize("grown", range(4))
def test_more_work_is_never_faster(flop_per_clock: float, grown: int) -> None:
    """No side of a product or of attention may grow and the time fall: tiles only ever add steps upwards."""
    law = replace(LAW, sm_count=108.0, depth=200.0, ceiling=0.9, peak_flops=3e14, flop_per_clock=flop_per_clock)
    rng = np.random.default_rng(3)
    sides = rng.integers(1, 5000, (4, 400)).astype(float)
    sides[0] = rng.integers(1, 20, 400)
    more = sides.copy()
    more[grown] += rng.integers(1, 300, 400)
    for law_of in (matmul_seconds, attention_seconds):
        assert np.all(law_of(*more, law) >= law_of(*sides, law) * (1 - 1e-12))


def test_long_columns_equal_short_ones() -> None:
    """Above `BLOCK` rows the choices are tried one by one."""
    law = replace(LAW, sm_count=132.0, depth=150.0, flop_per_clock=4096.0)
    sides = np.random.default_rng(4).integers(1, 9000, (4, 2, BLOCK)).astype(float)
    whole = matmul_seconds(*sides, law)
    parts = [matmul_seconds(*sides[:, i, : BLOCK // 2], law) for i in range(2)]
    assert np.array_equal(whole[:, : BLOCK // 2], np.stack(parts))


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
    overhead = 1.0 + 16.0 * (256 + 128) / (256 * 128)  # of a 256x128 tile, in whole waves
    for intensity, bound in ((ridge * 1.01 / overhead, True), (ridge * 0.99 / overhead, False)):
        row = column(GEMM, batch=1.0, m=4096.0, n=4096.0, k=4096.0, nbytes=flops / intensity)
        assert bool(seconds(row, law)[1][0]) is bound


def test_a_convolution_costs_its_factor_times_the_product() -> None:
    law = replace(FREE_MEMORY, conv=1.7)
    sides = {"batch": 1.0, "m": 1000.0, "n": 256.0, "k": 576.0}
    conv, gemm = (seconds(column(kind, **sides), law)[0][0] for kind in (CONV, GEMM))
    assert conv == pytest.approx(1.7 * gemm, rel=1e-12)


@pytest.mark.parametrize("kind", [MEMORY, GEMM, CONV, ATTENTION, ATTENTION_GRAD])
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
