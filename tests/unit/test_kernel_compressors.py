"""Gradient compressors that run, by four gloo ranks under DDP, against the papers' equations worked out in the test.

No reference repeats the code: bases are read off the result itself (that of Power-SGD has the columns of P, that of
ACP-SGD the rows of Q), and the equations then fix the values, the errors and the next bases.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ddp_ranks  # noqa: E402
from ddp_ranks import EXACT, RANKS, SHAPES, STEPS, gradients  # noqa: E402

from simkit import plugins  # noqa: E402
from simkit.errors import InputError  # noqa: E402
from simkit.kernels.compressors import make_hook, methods  # noqa: E402
from simkit.kernels.compressors import sign_sgd as sign_kernel  # noqa: E402
from simkit.kernels.compressors import topk_sgd as topk_kernel  # noqa: E402
from simkit.spec.plan import Plan  # noqa: E402

LONG = 1000 if os.environ.get("SIMKIT_SLOW") == "1" else 40
Tensors = list[Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote; ranks that hang are ended after their time."""
    folder = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.start_processes(
        ddp_ranks.main, args=(str(folder), LONG), nprocs=RANKS, join=False, start_method="spawn"
    )
    end = time.monotonic() + 400 + 0.5 * LONG  # of minutes on a busy machine; a hang has no end
    try:
        while not context.join(timeout=1):  # which answers at each rank that ends
            assert time.monotonic() < end, "ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(RANKS)]


def case(method: str, **settings: Any) -> int:
    return EXACT.index((method, settings))


def mean(tensors: Tensors) -> Any:
    return torch.stack([t.double() for t in tensors]).mean(0)


def given(step: int, slot: int) -> Tensors:
    return [gradients(r, step)[slot].double() for r in range(RANKS)]


@pytest.mark.parametrize("form", ["hook", "wrapped"])
@pytest.mark.parametrize("number", range(len(EXACT)), ids=[f"{m}-{i}" for i, (m, _) in enumerate(EXACT)])
def test_every_rank_ends_with_the_same_gradient(runs: list[dict[str, Any]], form: str, number: int) -> None:
    for step in range(STEPS):
        for slot in range(len(SHAPES)):
            first = runs[0][form][number]["grads"][step][slot]
            assert all(torch.equal(first, run[form][number]["grads"][step][slot]) for run in runs[1:])


@pytest.mark.parametrize("form", ["hook", "wrapped"])
def test_s_sgd_is_the_mean(runs: list[dict[str, Any]], form: str) -> None:
    for step, grads in enumerate(runs[0][form][case("s-sgd")]["grads"]):
        for slot, grad in enumerate(grads):
            torch.testing.assert_close(grad.double(), mean(given(step, slot)), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["hook", "wrapped"])
def test_sign_is_the_vote(runs: list[dict[str, Any]], form: str) -> None:
    for step, grads in enumerate(runs[0][form][case("sign-sgd")]["grads"]):
        for slot, grad in enumerate(grads):
            votes = torch.stack([torch.sign(g) for g in given(step, slot)])
            nonzero = (votes != 0).all(0)
            assert torch.equal(grad.double()[nonzero], torch.sign(votes.sum(0))[nonzero])
        assert not grads[2][5:9].any(), "what is zero on every rank is voted up and down alike"


@pytest.mark.parametrize("form", ["hook", "wrapped"])
@pytest.mark.parametrize("feedback", [True, False])
def test_topk_sends_the_largest_and_keeps_the_rest(runs: list[dict[str, Any]], form: str, feedback: bool) -> None:
    more = {} if feedback else {"error_feedback": False, "selection": "exact"}
    errors: dict[tuple[int, int], Any] = {}
    for step, grads in enumerate(runs[0][form][case("topk-sgd", density=0.05, **more)]["grads"]):
        for slot, grad in enumerate(grads):
            sent = []
            for rank, g in enumerate(given(step, slot)):
                total = g.float() + (errors.get((rank, slot), 0.0) if feedback else 0.0)
                k = max(1, math.ceil(0.05 * total.numel()))
                order = total.abs().flatten().argsort(descending=True, stable=True)[:k]
                part = torch.zeros_like(total).flatten()
                part[order] = total.flatten()[order]
                sent.append(part.view_as(total))
                errors[rank, slot] = total - sent[-1]
            torch.testing.assert_close(grad.double(), mean(sent), atol=1e-6, rtol=1e-5)


def basis(matrix: Any, r: int) -> Any:
    """Orthonormal basis of the r columns that a matrix of rank r has."""
    u, s, _ = torch.linalg.svd(matrix.double(), full_matrices=False)
    assert s[r - 1] > 1e-4 * s[0]
    assert s[r:].sum() < 1e-4 * s[0], "more than rank r"
    return u[:, :r]


def projector(columns: Any) -> Any:
    q, _ = torch.linalg.qr(columns)
    return q @ q.T


MATRICES = [i for i, s in enumerate(SHAPES) if len(s) > 1]
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.mark.parametrize("form", ["hook", "wrapped"])
@pytest.mark.parametrize("slot", MATRICES)
def test_power_is_one_power_iteration_from_the_last_q(runs: list[dict[str, Any]], form: str, slot: int) -> None:
    rows, cols = SHAPES[slot][0], math.prod(SHAPES[slot][1:])
    steps = [g[slot].double().view(rows, cols) for g in runs[0][form][case("power-sgd", rank=2)]["grads"]]
    if rows * cols <= (rows + cols) * 2 * 2:
        for step, grad in enumerate(steps):
            torch.testing.assert_close(grad, mean(given(step, slot)).view(rows, cols), **CLOSE)
        return
    error, last_q = torch.zeros(rows, cols, dtype=torch.float64), None
    for step, grad in enumerate(steps):
        # The mean over ranks of gradient + error: each rank's error is its own, and only their mean enters.
        total = mean(given(step, slot)).view(rows, cols) + error
        u = basis(grad, 2)
        torch.testing.assert_close(grad, u @ u.T @ total, **CLOSE)
        if last_q is not None:
            torch.testing.assert_close(u @ u.T, projector(total @ last_q), atol=1e-3, rtol=1e-3)
        last_q, error = total.T @ u, total - grad


@pytest.mark.parametrize("form", ["hook", "wrapped"])
@pytest.mark.parametrize("slot", MATRICES)
def test_acp_alternates_and_keeps_the_error_of_its_own_factor(
    runs: list[dict[str, Any]], form: str, slot: int
) -> None:
    rows, cols = SHAPES[slot][0], math.prod(SHAPES[slot][1:])
    steps = [g[slot].double().view(rows, cols) for g in runs[0][form][case("acp-sgd", rank=2)]["grads"]]
    error = torch.zeros(rows, cols, dtype=torch.float64)
    last = None
    for step, grad in enumerate(steps):
        total = mean(given(step, slot)).view(rows, cols) + error
        u = basis(grad, 2) if step % 2 else basis(grad.T, 2)
        if last is not None:
            # The factor summed in the last step, orthonormalised, is the base of this one.
            torch.testing.assert_close(u @ u.T, last, atol=1e-3, rtol=1e-3)
        expected = u @ u.T @ total if step % 2 else total @ u @ u.T
        torch.testing.assert_close(grad, expected, **CLOSE)
        error = total - expected
        other = basis(grad.T, 2) if step % 2 else basis(grad, 2)
        last = other @ other.T


@pytest.mark.parametrize("form", ["hook", "wrapped"])
def test_full_rank_loses_nothing(runs: list[dict[str, Any]], form: str) -> None:
    for step, grads in enumerate(runs[0][form][case("power-sgd", rank=64, min_rate=0.0)]["grads"]):
        for slot, grad in enumerate(grads):
            torch.testing.assert_close(grad.double(), mean(given(step, slot)), atol=5e-5, rtol=1e-4)
    # A P-step of ACP-SGD is exact where Q is square, that is where there are no more columns than the rank.
    grads = runs[0][form][case("acp-sgd", rank=64)]["grads"][0]
    square = [s for s in MATRICES if math.prod(SHAPES[s][1:]) <= SHAPES[s][0]]
    assert len(square) >= 3
    for slot in square:
        torch.testing.assert_close(grads[slot].double(), mean(given(0, slot)), atol=5e-5, rtol=1e-4)


def test_warm_up_sends_plain_gradients_and_starts_with_a_p_step(runs: list[dict[str, Any]]) -> None:
    warm, cold = (runs[0]["hook"][case("acp-sgd", rank=2, **w)] for w in ({"warmup_steps": 2}, {}))
    for step in range(2):
        for slot, grad in enumerate(warm["grads"][step]):
            torch.testing.assert_close(grad.double(), mean(given(step, slot)), atol=1e-6, rtol=1e-5)
    assert warm["bytes"][:2] == [4 * sum(math.prod(s) for s in SHAPES)] * 2
    assert warm["bytes"][2:] == cold["bytes"][:-2]


@pytest.mark.parametrize("form", ["hook", "wrapped"])
@pytest.mark.parametrize("number", range(len(EXACT)), ids=[f"{m}-{i}" for i, (m, _) in enumerate(EXACT)])
def test_bytes_on_the_wire_are_those_of_the_model(runs: list[dict[str, Any]], form: str, number: int) -> None:
    method, settings = EXACT[number]
    if "warmup_steps" in settings or "min_rate" in settings:
        pytest.skip("settings that the model does not have")
    model = plugins.get("simkit.compressors", method)
    plan = Plan(method=method, rank=settings.get("rank", 4), density=settings.get("density", 0.01))
    for step in range(STEPS):
        variant = step % model.variants(plan)
        phases = [model.wire_bytes(SHAPES, plan=plan, phase=p, variant=variant).sum() for p in range(model.PHASES)]
        for run in runs:
            assert run[form][number]["bytes"][step] == sum(phases)


def test_several_buckets_and_their_messages(runs: list[dict[str, Any]]) -> None:
    buckets = runs[0]["hook"][case("s-sgd")]["messages"][-1]
    assert buckets >= 3
    for method, settings in EXACT:
        messages = runs[0]["hook"][case(method, **settings)]["messages"][-1]
        # Power-SGD: the Q of a bucket without matrices is no message.
        assert buckets < messages <= 2 * buckets if method == "power-sgd" else messages == buckets


def test_time_is_counted(runs: list[dict[str, Any]]) -> None:
    for number in range(len(EXACT)):
        assert all(0 < wall < 5 and 0 < cpu < 5 for wall, cpu in runs[0]["hook"][number]["seconds"])


@pytest.mark.parametrize("method", ["s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"])
def test_many_steps_over_several_buckets_end_alike_on_all_ranks(runs: list[dict[str, Any]], method: str) -> None:
    results = [run["long"][method] for run in runs]
    assert all(torch.equal(results[0]["params"], r["params"]) for r in results[1:])
    assert all(len(r["losses"]) == LONG for r in results)
    assert results[0]["messages"] >= 3
    assert torch.isfinite(results[0]["params"]).all()


# --- in one process ---------------------------------------------------------------------------------------------------


def test_bits_are_packed_lowest_first_and_counted() -> None:
    votes = torch.randint(0, 2, (7, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    packed = torch.stack([sign_kernel.pack(v) for v in votes])
    byte = sum(int(votes[0, i]) << i for i in range(8))
    assert packed.shape == (7, 12)
    assert int(packed[0, 0]) == byte
    assert torch.equal(sign_kernel.count(packed), votes.sum(0).to(torch.uint8))
    full = torch.ones(255, 8, dtype=torch.uint8)
    assert sign_kernel.count(torch.stack([sign_kernel.pack(v) for v in full])).tolist() == [255] * 8


@pytest.mark.parametrize("numel", [1, 5, 1024, 5000, 200_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_a_sampled_threshold_keeps_the_same_elements_as_a_full_selection(numel: int, density: float) -> None:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator).pow(3).abs()  # heavy tails, no ties
    k = topk_kernel.kept(numel, density)
    assert k == max(1, math.ceil(density * numel))
    found = topk_kernel.sampled(x, k, generator)
    assert sorted(found.tolist()) == sorted(x.argsort(descending=True)[:k].tolist())


def test_ties_and_zeros_still_give_k_places() -> None:
    generator = torch.Generator().manual_seed(0)
    for x in (torch.zeros(10_000), torch.ones(10_000), torch.cat([torch.zeros(9_990), torch.ones(10)])):
        found = topk_kernel.sampled(x, 100, generator)
        assert len(set(found.tolist())) == 100
        assert x[found].sum() == min(100, int(x.sum()))


def test_bad_settings_are_named() -> None:
    assert set(methods()) == {"s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"}
    for key, value in (("rank", 0), ("density", 0.0), ("density", 1.5), ("warmup_steps", -1), ("selection", "best")):
        with pytest.raises(InputError, match=key):
            make_hook("acp-sgd", **{key: value})
    with pytest.raises(InputError, match="acp-sgd"):
        make_hook("acp-sdg")
