"""Is every point of a sweep what predict says of that scenario, whatever the grid?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simkit.errors import InputError, RefusedError
from simkit.grids import axes
from simkit.predict import predict, predict_scenario
from simkit.spec.scenario import Scenario
from simkit.sweep import SHARDED_TERMS, TERMS, Sweep, sweep

SAME = 1e-12
METHODS = ["s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"]
FIXED = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["resnet-50", "bert-base", "gpt2"]),
        "cluster": st.sampled_from(["2x1x3080", "4x2x2080ti", "1x4xa100", "1x1xh100", "2x1x3080+2x1x4090", "2x8xh100"]),
    },
    optional={
        "precision": st.sampled_from(["fp32", "fp16", "bf16"]),
        "overlap": st.sampled_from(["none", "wfbp"]),
        "fusion": st.sampled_from(["none", "bucket", "all", "optimal"]),
        "recompute": st.sampled_from(["none", "full", "selective"]),
        "calibration": st.booleans(),
        "algorithm": st.sampled_from(["auto", "ring", "double-tree", "hierarchical", "tree"]),
        "nics_per_node": st.integers(1, 4),
        "stack": st.sampled_from(["pytorch", "horovod", "megatron", "deepspeed"]),
        "samples": st.integers(1000, 100_000),
        "memory_reserve_gib": st.sampled_from([0.0, 6.0]),
    },
)
AXES = st.fixed_dictionaries(
    {},
    optional={
        "inter": st.sampled_from(
            ["1Gb/s@5us:100Gb/s@50us:7", "100Mb/s@2ms:1Gb/s@1ms:*2", "1gbe,100gbe-rdma", "9Gb/s@3us"]
        ),
        "intra": st.sampled_from(["50Gb/s@3us:600Gb/s@1us:3:log", "pcie3x16,nvlink3"]),
        "micro_batch": st.sampled_from(["1,2,3", "1:512:*8", "4"]),
        "grad_accum": st.sampled_from(["1,2", "1:9:3"]),
        "global_batch": st.sampled_from(["64", "48,96"]),
        "method": st.lists(st.sampled_from(METHODS), min_size=1, max_size=2, unique=True),
        "rank": st.sampled_from(["1,8", "4"]),
        "bucket_mb": st.sampled_from(["1,25", "0,1000"]),
        "seq_len": st.sampled_from(["32,64", "128"]),
        "optimizer": st.sampled_from(["sgd,adamw"]),
        "tp": st.sampled_from(["1,2,3"]),
        "zero": st.sampled_from(["0,3", "1,2"]),
        "pp": st.sampled_from(["1,2"]),
    },
).filter(bool)


def compare(asked: Sweep, found: dict[str, np.ndarray], at: int) -> None:
    """Point `at` of the columns against the report of the same scenario."""
    try:
        report = predict_scenario(asked.scenario_at(at), beside=False)
    except (InputError, RefusedError) as refusal:
        reason = str(refusal)
        report = None
    if report is None:
        told = found["refused"][at]
        # Of two reasons the one found first is told, and a grid settles what its points share before their batches.
        assert told if any(axis.name == "global_batch" for axis in asked.axes) else told == reason
        assert np.isnan(found["iteration_time_s"][at])
        return
    assert found["refused"][at] == ""
    step = report.iteration_time_s
    for name in ("iteration_time_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu"):
        want = getattr(report, name)
        assert found[name][at] == pytest.approx(np.nan if want is None else want, rel=SAME, nan_ok=True), name
    for name, want in report.breakdown.items():
        assert abs(found[name][at] - want) <= SAME * step, name
    told = sum(found[n][at] for n in (*TERMS, *SHARDED_TERMS) if n in found and not np.isnan(found[n][at]))
    assert told == pytest.approx(step, rel=1e-9)
    for name in ("cost_usd_per_hour", "usd_per_step", "power_w", "energy_j_per_step", "duration_s", "energy_j"):
        if name in report.cost and name in found:
            assert found[name][at] == pytest.approx(report.cost[name], rel=SAME), name
    for name in ("micro_batch", "grad_accum", "global_batch", "method"):
        assert found[name][at] == report.scenario[name], name
    assert found["fits"][at] == report.fits
    assert found["why_not"][at] == report.memory.why_not
    assert found["peak_memory_gib"][at] == pytest.approx(report.memory.device_bytes / 2**30, rel=SAME)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(fixed=FIXED, grid=AXES, block=st.sampled_from([3, 50, 65_536]), data=st.data())
def test_every_point_is_what_predict_says(fixed: dict[str, Any], grid: dict[str, Any], block: int, data: Any) -> None:
    fixed = {k: v for k, v in fixed.items() if k not in grid}
    asked = Sweep(Scenario.of(fixed), axes(grid), block=block)
    order = data.draw(st.permutations(list(asked.axes)))
    asked = Sweep(Scenario.of(fixed), order, block=block)
    if asked.points > 64:
        return
    parts = list(asked.blocks())
    assert all(len(part["refused"]) <= block for part in parts)
    found = {name: np.concatenate([part[name] for part in parts]) for name in asked.columns}
    picked = data.draw(st.lists(st.integers(0, asked.points - 1), min_size=1, max_size=4, unique=True))
    for at in picked:
        compare(asked, found, at)


SHARDED = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["llama-2-7b", "gpt2", "mixtral-8x7b", "gemma-2-9b", "deepseek-v2-lite", "bert-base"]),
        "cluster": st.sampled_from(["2x8xa100", "4x8xh100", "1x8x4090", "2x4xv100", "1x8xa100+1x8xh100"]),
        "seq_len": st.sampled_from([256, 512]),
    },
    optional={
        "stack": st.sampled_from(["pytorch", "megatron", "deepspeed", "torchtitan", "llmq", "composer"]),
        "precision": st.sampled_from(["bf16", "fp16", "fp32"]),
        "sp": st.just(2),
        "cp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2]),
        "vpp": st.sampled_from([1, 2]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zb"]),
        "offload": st.sampled_from(["none", "optimizer", "params"]),
        "shard_group": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "full", "selective"]),
        "overlap": st.sampled_from(["none", "wfbp"]),
        "fusion": st.sampled_from(["bucket", "all"]),
        "algorithm": st.sampled_from(["auto", "ring", "hierarchical"]),
        "calibration": st.booleans(),
        "tokens": st.sampled_from([1e9]),
        "micro_batch": st.sampled_from([1, 2]),
        "grad_accum": st.sampled_from([2, 4]),
        "p2p": st.booleans(),
    },
)
SHARDED_AXES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from(["2,1", "2,4", "2", "4,3"]),
        "inter": st.sampled_from(["1Gb/s@5us:800Gb/s@50us:7:log", "100Gb/s@5us,10Gb/s@30us,1Gb/s@1ms", "100gbe-rdma"]),
    },
    optional={
        "pp": st.sampled_from(["2,1", "4,1", "2", "3"]),
        "zero": st.sampled_from(["1,0", "3,0", "2"]),
        "intra": st.sampled_from(["50Gb/s@3us:600GB/s@1us:3:log", "pcie4x16,nvlink3"]),
        "micro_batch": st.sampled_from(["1,2,3", "1:512:*8", "4"]),
        "grad_accum": st.sampled_from(["1,2,4,8", "1:9:3", "64,4"]),
        "global_batch": st.sampled_from(["64", "48,96,100", "16:512:32"]),
        "vpp": st.sampled_from(["1,2"]),
        "recompute": st.sampled_from(["none,full"]),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(fixed=SHARDED, grid=SHARDED_AXES, block=st.sampled_from([5, 65_536]), data=st.data())
def test_every_sharded_point_is_what_predict_says(
    fixed: dict[str, Any], grid: dict[str, Any], block: int, data: Any
) -> None:
    fixed = {k: v for k, v in fixed.items() if k not in grid}
    asked = Sweep(Scenario.of(fixed), data.draw(st.permutations(list(axes(grid)))), block=block)
    if asked.points > 1000:
        return
    parts = list(asked.blocks())
    found = {name: np.concatenate([part[name] for part in parts]) for name in asked.columns}
    for at in data.draw(st.lists(st.integers(0, asked.points - 1), min_size=1, max_size=5, unique=True)):
        compare(asked, found, at)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("overlap", ["none", "wfbp"])
def test_methods(method: str, overlap: str) -> None:
    grid = {"inter": "1Gb/s@5us:100Gb/s@5us:5:log", "micro_batch": "1,8", "grad_accum": "1,3"}
    fixed = {
        "model": "bert-base",
        "cluster": "4x2x2080ti",
        "precision": "fp32",
        "seq_len": 64,
        "method": method,
        "overlap": overlap,
    }
    asked = Sweep(Scenario.of(fixed), axes(grid))
    found = sweep(**fixed, grid=grid)
    for at in range(asked.points):
        compare(asked, found, at)


def test_blocks_do_not_change_answers() -> None:
    fixed = {"model": "resnet-50", "cluster": "8x4x2080ti", "method": "acp-sgd"}
    grid = {"micro_batch": "1,4,16", "rank": "1,4", "inter": "1Gb/s@5us:100Gb/s@5us:11"}
    whole = sweep(**fixed, grid=grid)
    for size in (1, 7, 64):
        parts = list(Sweep(Scenario.of(fixed), axes(grid), block=size).blocks())
        for name, values in whole.items():
            joined = np.concatenate([part[name] for part in parts])
            if values.dtype == float:
                np.testing.assert_allclose(joined, values, rtol=SAME, atol=1e-15)
            else:
                assert joined.tolist() == values.tolist()


def test_the_method_is_chosen_point_by_point() -> None:
    # Compression pays where the network is slow, not where it is faster than the compressing kernels.
    found = sweep(
        model="bert-large", cluster="8x1xh100", micro_batch=8, seq_len=64, grid={"inter": "1Gb/s@5us,3200Gb/s@1us"}
    )
    assert found["method"].tolist() == ["acp-sgd", "s-sgd"]


def test_the_last_axis_varies_fastest() -> None:
    found = sweep(model="resnet-50", cluster="1x1x3080", grid={"grad_accum": [1, 2], "micro_batch": [4, 8, 16]})
    assert found["grad_accum"].tolist() == [1, 1, 1, 2, 2, 2]
    assert found["micro_batch"].tolist() == [4, 8, 16, 4, 8, 16]
    assert found["global_batch"].tolist() == [4, 8, 16, 8, 16, 32]


def test_points_without_an_answer_keep_their_place_and_reason() -> None:
    found = sweep(model="gpt2", cluster="1x8xa100", grid={"tp": [1, 3, 2], "micro_batch": [1, 100_000]})
    assert [bool(r) for r in found["refused"]] == [False, False, True, True, False, False]
    assert "does not divide" in found["refused"][2]
    assert found["fits"].tolist() == [True, False, False, False, True, False]
    assert found["why_not"][1].startswith("needs")
    assert found["iteration_time_s"][1] > found["iteration_time_s"][0]


def test_counts_beyond_64_bits_are_refused_not_wrapped() -> None:
    huge = 10**12
    found = sweep(model="resnet-50", cluster="1x1x3080", grid={"micro_batch": [1, huge], "grad_accum": [1, huge]})
    assert found["global_batch"].tolist()[:3] == [1, huge, huge]
    assert [bool(r) for r in found["refused"]] == [False, False, False, True]


def test_a_mixed_cluster_waits_for_the_whole_step_of_its_slowest_device() -> None:
    """A V100 computes longer than an A10G here, and is done sooner with the compression and the optimizer."""
    job: dict[str, Any] = {
        "model": "resnet-18", "inter": "1gbe", "method": "acp-sgd", "rank": 1, "precision": "fp32", "overlap": "none",
        "fusion": "none", "grad_accum": 1, "intra": "pcie3x16", "p2p": False,
    }  # fmt: skip
    cards, sizes = ("v100-pcie-16gb", "a10g"), [1, 2, 8, 64]

    def asked(cluster: str) -> list[float]:
        return [predict(cluster=cluster, micro_batch=size, **job).iteration_time_s for size in sizes]

    mixed = "+".join(f"1x1x{card}" for card in cards)
    swept = sweep(grid={"micro_batch": sizes}, cluster=mixed, **job)["iteration_time_s"]
    assert swept.tolist() == pytest.approx(asked(mixed), rel=SAME)
    slowest = [max(pair) for pair in zip(*(asked(f"2x1x{card}") for card in cards), strict=True)]
    assert asked(mixed) == pytest.approx(slowest, rel=1e-9)
