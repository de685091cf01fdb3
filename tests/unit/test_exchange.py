"""From a program and a plan to the step that is scheduled."""

from __future__ import annotations

import numpy as np
import pytest

from simkit import predict
from simkit.evaluate import Evaluation, evaluate
from simkit.exchange import ordered_shapes, scaled_cost
from simkit.price import Scales
from simkit.spec.resolve import resolve
from simkit.spec.scenario import Scenario
from simkit.units import MIB

FIELDS = {"model": "resnet-50", "cluster": "8x4x2080ti", "inter": "10gbe", "precision": "fp32", "micro_batch": 32,
          "grad_accum": 1, "method": "s-sgd"}


def run(scales: Scales | None = None, **fields: object) -> Evaluation:
    return evaluate(resolve(Scenario.of(FIELDS | fields)), scales=scales or Scales())


def test_one_rank_has_no_exchange() -> None:
    found = run(cluster="1x1x2080ti")
    step = found.exchange.steps[0]
    assert len(step.ready) == step.comm_s.size == step.encode_s.size == 0
    assert found.exchange.wire_bytes == 0
    assert found.exchange.collectives == ()


def test_s_sgd_sends_every_gradient_once() -> None:
    """25,557,032 parameters of 4 bytes; reduced in 16 bits half of that."""
    assert run().exchange.wire_bytes == 4 * 25557032
    assert run(reduce_dtype="bf16").exchange.wire_bytes == 2 * 25557032


@pytest.mark.parametrize(("model", "rank", "power", "acp"), [
    ("resnet-50", 4, 66.5, 116.6), ("resnet-152", 4, 52.9, 93.3),
])
def test_compression_ratios_of_the_paper(model: str, rank: int, power: float, acp: float) -> None:
    """N / (P + Q + vectors) and N over the mean of both kinds of step (arXiv 2306.08881, recomputed per tensor)."""
    plain = run(model=model).exchange.wire_bytes
    for method, ratio in (("power-sgd", power), ("acp-sgd", acp)):
        found = run(model=model, method=method, rank=rank).exchange
        assert plain / found.wire_bytes == pytest.approx(ratio, rel=0.005)


def test_fusion_decides_the_number_of_messages() -> None:
    tensors = 161
    assert run(fusion="none").exchange.buckets == tensors
    assert run(fusion="all").exchange.buckets == 1
    # 97.5 MiB of gradients in buffers of 25 MiB.
    assert 4 <= run(fusion="bucket").exchange.buckets <= 6
    # DDP caps its first bucket at 1 MiB whatever the threshold (reducer.cpp).
    assert run(fusion="bucket", bucket_mb=1e6).exchange.buckets == 2
    for fusion in ("none", "all", "bucket", "optimal"):
        step = run(fusion=fusion).exchange.steps[0]
        assert step.bucket_bytes.sum() == pytest.approx(4 * 25557032)
        assert np.all(np.diff(step.ready) >= 0)


def test_a_bucket_closes_with_the_tensor_that_fills_it() -> None:
    step = run(bucket_mb=10).exchange.steps[0]
    largest = 4 * 2048 * 512 * 9
    assert step.bucket_bytes.max() < 10 * MIB + largest


def test_acp_sgd_alternates_two_kinds_of_step() -> None:
    found = run(method="acp-sgd", rank=4)
    assert len(found.exchange.steps) == len(found.timelines) == 2
    assert found.end_s == pytest.approx(np.mean([t.end_s for t in found.timelines]))
    assert len(run(method="power-sgd", rank=4).exchange.steps) == 1


def test_power_sgd_waits_for_three_collectives() -> None:
    """BR-53: P, then Q, and before them the vectors that are not compressed (powerSGD_hook.py); where latency is all
    that counts, three messages a buffer instead of one."""
    fields = {"cluster": "8x1x2080ti", "inter": "100Gb/s@500ms", "fusion": "all", "overlap": "none"}
    power, plain = (run(**fields, method=m, rank=4) for m in ("power-sgd", "s-sgd"))
    assert (power.exchange.steps[0].comm_s > 0).sum() == 3
    ratio = power.breakdown["exposed_comm_s"] / plain.breakdown["exposed_comm_s"]
    assert ratio == pytest.approx(3.0, rel=0.05)


def test_shapes_come_in_the_order_of_readiness() -> None:
    found = run()
    resolved = resolve(Scenario.of(FIELDS))
    shapes = ordered_shapes(found.program, resolved.model)
    # The classifier is complete first, the stem last.
    assert set(shapes[:2]) == {(1000, 2048), (1000,)}
    assert shapes[-1] == (64, 3, 7, 7)


def test_scaled_cost_keeps_latency_and_bandwidth_apart() -> None:
    def cost(nbytes: float) -> float:
        return 3e-5 + nbytes / 1e9

    changed = scaled_cost(cost, Scales(network_Bps=2.0, network_latency=10.0))
    assert changed(1e6) == pytest.approx(3e-4 + 5e-4)
    assert changed(0.0) == pytest.approx(3e-4)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_replay_stretches_each_blocks_backward_pass(recompute: str) -> None:
    fields = {"model": "gpt2", "cluster": "1x1xa100", "precision": "bf16", "attention": "math", "seq_len": 512}
    none, again = run(**fields), run(**fields, recompute=recompute)
    added = again.exchange.steps[0].backward_s - none.exchange.steps[0].backward_s
    starts = none.program.blocks.starts
    replayed = none.program.replayed(recompute)[0]
    assert np.flatnonzero(added > 1e-15).tolist() == sorted(starts.tolist())
    # The host launches the replay too: never faster than the device alone, and hardly slower on this many tokens.
    device = float(replayed @ none.compute.forward_s)
    assert np.all(added[starts] >= device * (1 - 1e-9))
    assert added[starts] == pytest.approx(np.full(12, device), rel=0.02)


def test_recomputation_of_accumulated_steps_is_counted_in_each() -> None:
    fields = {"model": "gpt2", "cluster": "1x1xa100", "recompute": "full", "seq_len": 512}
    one, four = run(**fields), run(**fields | {"grad_accum": 4})
    compute = one.breakdown["forward_s"] + one.breakdown["backward_s"]
    assert four.breakdown["forward_s"] + four.breakdown["backward_s"] == pytest.approx(4 * compute)


def test_eight_equal_experts_travel_as_one_tall_matrix() -> None:
    report = predict(model="mixtral-8x7b", cluster="2x8xh100", micro_batch=1, grad_accum=1, method="s-sgd", seq_len=128)
    assert report.facts["wire_bytes_per_rank"] == 4 * 46702792704
