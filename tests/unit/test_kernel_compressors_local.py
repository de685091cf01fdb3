"""Gradient compressors over ranks inside one process: convergence, buckets that change, running means of signs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from simkit.kernels.compressors import FlatBucket, LocalGroup, exchange, fuse, make_hook  # noqa: E402

RANKS = 3
SHAPES = ((12, 10), (12,), (12, 10), (9, 4, 3), (6,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_collectives_inside_one_process() -> None:
    groups = LocalGroup.ranks(3)
    tensors = [torch.tensor([float(r), 1.0]) for r in range(3)]
    sums = [g.all_reduce(t) for g, t in zip(groups, tensors, strict=True)]
    assert all(s.done() for s in sums)
    assert [t.tolist() for t in tensors] == [[3.0, 3.0]] * 3
    # Messages meet by their number, whichever rank is ahead.
    first = groups[0].all_gather(torch.tensor([1]))
    second = groups[0].all_reduce(torch.tensor([5.0]))
    assert not first[0].done()
    rest = [groups[r].all_gather(torch.tensor([10 * r])) for r in (2, 1)]
    assert all(out.flatten().tolist() == [1, 10, 20] for _, out in (first, *rest))
    assert not second.done()


def gradient(step: int, rank: int, slot: int) -> Any:
    return torch.randn(SHAPES[slot], generator=torch.Generator().manual_seed(100 * step + 10 * rank + slot))


@pytest.mark.parametrize("method", ["sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"])
def test_what_is_kept_belongs_to_a_parameter_and_survives_new_buckets(method: str) -> None:
    """DDP rebuilds its buckets after the first step: other members, another order."""
    outcomes = []
    for later in ([[0, 1], [2, 3, 4]], [[4], [2, 0], [1, 3]]):
        params = [torch.zeros(s) for s in SHAPES]
        groups = LocalGroup.ranks(RANKS)
        states = [make_hook(method, g, rank=2, density=0.1, min_rate=0.5, momentum=0.5)[0] for g in groups]
        seen = []
        for step in range(5):
            slots = [[0, 1], [2, 3, 4]] if step < 1 else later
            buckets = [
                [FlatBucket(i, i == len(slots) - 1, [params[s] for s in members]) for i, members in enumerate(slots)]
                for _ in range(RANKS)
            ]
            for rank in range(RANKS):
                for bucket, members in zip(buckets[rank], slots, strict=True):
                    for view, s in zip(bucket.gradients(), members, strict=True):
                        view.copy_(gradient(step, rank, s))
            exchange(states, buckets)
            out: dict[int, Any] = {}
            for bucket, members in zip(buckets[0], slots, strict=True):
                out |= {s: view.clone() for view, s in zip(bucket.gradients(), members, strict=True)}
            seen.append([out[s] for s in range(len(SHAPES))])
        outcomes.append(seen)
    for a, b in zip(*outcomes, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_momentum_votes_by_the_running_mean() -> None:
    groups = LocalGroup.ranks(RANKS)
    param = torch.zeros(50)
    states = [make_hook("sign-sgd", g, momentum=0.9)[0] for g in groups]
    means = [torch.zeros(50) for _ in range(RANKS)]
    for step in range(6):
        buckets = [[FlatBucket(0, True, [param])] for _ in range(RANKS)]
        for rank in range(RANKS):
            g = torch.randn(50, generator=torch.Generator().manual_seed(10 * step + rank))
            means[rank] = 0.9 * means[rank] + 0.1 * g
            buckets[rank][0].gradients()[0].copy_(g)
        exchange(states, buckets)
        expected = torch.sign(torch.stack([m.sign() for m in means]).sum(0))
        assert torch.equal(buckets[0][0].gradients()[0], expected)


def trained(method: str, seed: int, steps: int, lr: float, **settings: Any) -> float:
    """Loss on fresh data of a small net that learns another one, under noise, by three ranks."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4))
    for p in teacher.parameters():
        p.requires_grad_(False)
    torch.manual_seed(seed + 1)
    net = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4))
    params = list(net.parameters())
    states = [make_hook(method, g, seed=seed, **settings)[0] for g in LocalGroup.ranks(RANKS)]
    buckets = [fuse(params, 4096) for _ in range(RANKS)]
    assert len(buckets[0]) >= 3
    optimizer = torch.optim.SGD(params, lr=lr, momentum=0.0 if method == "sign-sgd" else 0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for rank in range(RANKS):
            x = torch.randn(16, 12, generator=generator)
            noise = 0.3 * torch.randn(16, 4, generator=generator)
            optimizer.zero_grad()
            (net(x) - teacher(x) - noise).square().mean().backward()
            for bucket in buckets[rank]:
                bucket.load()
        exchange(states, buckets)
        for bucket in buckets[0]:
            bucket.store()
        optimizer.step()
        schedule.step()
    x = torch.randn(2000, 12, generator=generator)
    with torch.no_grad():
        return float((net(x) - teacher(x)).square().mean() / teacher(x).var())


CASES: dict[str, dict[str, Any]] = {
    "sign-sgd": {"lr": 0.002, "momentum": 0.9},
    "topk-sgd": {"lr": 0.05, "density": 0.1},
    "power-sgd": {"lr": 0.05, "rank": 2},
    "acp-sgd": {"lr": 0.05, "rank": 2},
}


def test_compressed_training_ends_where_plain_training_does() -> None:
    """Within three standard deviations of S-SGD over seeds, where S-SGD itself is not after half as many steps."""
    steps = 200
    plain = [trained("s-sgd", s, steps, 0.05) for s in range(3)]
    limit = statistics.mean(plain) + 3 * statistics.stdev(plain)
    assert statistics.mean(trained("s-sgd", s, steps // 2, 0.05) for s in range(3)) > limit
    losses = {m: statistics.mean(trained(m, s, steps, **c) for s in range(2)) for m, c in CASES.items()}
    assert {m: v for m, v in losses.items() if v > limit} == {}, (plain, losses)


def test_without_error_feedback_training_ends_elsewhere() -> None:
    """So the error that is kept has its use."""
    kept, lost = (trained("acp-sgd", 0, 200, 0.05, rank=1, error_feedback=f) for f in (True, False))
    assert lost > 1.5 * kept
