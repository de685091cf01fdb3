"""What every file of simkit/collectives must obey; a new one is picked up by its name."""

import numpy as np
import pytest

from simkit import plugins
from simkit.collectives._common import ALL_OPS, bound_bytes

PACKAGE = "simkit.collectives"
CASES = [(name, op) for name in plugins.names(PACKAGE) for op in sorted(plugins.get(PACKAGE, name).OPS)]
RANKS = (2, 3, 4, 5, 7, 8, 16, 33, 100)
LINK = {"alpha_s": 1e-5, "Bps": 1e9}


def cost(name, op, **kw):
    return plugins.get(PACKAGE, name).seconds(op, **{**LINK, **kw})


def test_there_are_algorithms_and_only_known_ops():
    assert {"ring", "tree", "double-tree", "halving-doubling", "hierarchical", "direct"} <= set(plugins.names(PACKAGE))
    assert {op for _, op in CASES} == set(ALL_OPS)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_free_at_one_rank(name, op):
    module = plugins.get(PACKAGE, name)
    assert cost(name, op, ranks=1, nbytes=1e6) == 0
    assert module.steps(op, 1) == 0
    assert module.wire_bytes(op, ranks=1, nbytes=1e6) == 0
    assert list(module.rounds(op, ranks=1, nbytes=1e6)) == []


@pytest.mark.parametrize(("name", "op"), CASES)
def test_never_below_the_bandwidth_bound(name, op):
    for ranks in RANKS:
        bound = bound_bytes(op, ranks=ranks, nbytes=1e6)
        assert cost(name, op, ranks=ranks, nbytes=1e6, alpha_s=0.0) >= bound / 1e9 * (1 - 1e-12)
        assert plugins.get(PACKAGE, name).wire_bytes(op, ranks=ranks, nbytes=1e6) >= bound * (1 - 1e-12)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_never_below_the_latency_bound(name, op):
    if op in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for ranks in RANKS:
            # A rank cannot hear of all others before one message has arrived.
            assert cost(name, op, ranks=ranks, nbytes=0.0) >= LINK["alpha_s"]


@pytest.mark.parametrize(("name", "op"), CASES)
def test_monotone_in_bytes_rate_and_latency(name, op):
    sizes = np.geomspace(1, 1e9, 7)
    for ranks in RANKS:
        assert np.all(np.diff(cost(name, op, ranks=ranks, nbytes=sizes)) > 0)
        base = cost(name, op, ranks=ranks, nbytes=1e6)
        assert cost(name, op, ranks=ranks, nbytes=1e6, Bps=2e9) < base
        assert cost(name, op, ranks=ranks, nbytes=1e6, alpha_s=2e-5) > base


@pytest.mark.parametrize(("name", "op"), CASES)
def test_arrays_equal_scalars(name, op):
    ranks = np.array([1, *RANKS])
    sizes = np.linspace(1e3, 1e6, len(ranks))
    together = cost(name, op, ranks=ranks, nbytes=sizes)
    one_by_one = [cost(name, op, ranks=int(n), nbytes=float(s)) for n, s in zip(ranks, sizes, strict=True)]
    assert together == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_rounds_are_deterministic_and_within_the_group(name, op):
    module = plugins.get(PACKAGE, name)
    for ranks in (2, 5, 8):
        first, again = (list(module.rounds(op, ranks=ranks, nbytes=1e6)) for _ in range(2))
        assert len(first) == len(again) > 0
        for a, b in zip(first, again, strict=True):
            assert np.array_equal(a.src, b.src)
            assert np.array_equal(a.dst, b.dst)
            assert (a.nbytes, a.repeat, a.hops) == (b.nbytes, b.repeat, b.hops)
            assert a.src.min() >= 0
            assert max(a.src.max(), a.dst.max()) < ranks
            assert not np.any(a.src == a.dst)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_rounds_move_enough_for_the_operation(name, op):
    """Every rank must receive what it lacks: (n-1)/n S at least for the symmetric ops, whatever the schedule."""
    for ranks in (2, 3, 8):
        sent, received = np.zeros(ranks), np.zeros(ranks)
        for one in plugins.get(PACKAGE, name).rounds(op, ranks=ranks, nbytes=1.0):
            np.add.at(sent, one.src, one.nbytes * one.repeat)
            np.add.at(received, one.dst, one.nbytes * one.repeat)
        if op in ("all_gather", "reduce_scatter", "all_to_all"):
            assert min(sent.min(), received.min()) >= (ranks - 1) / ranks - 1e-12
        elif op == "all_reduce":
            assert received.sum() >= 2 * (ranks - 1) - 1e-9
        elif op == "broadcast":
            assert received[1:].min() >= 1 - 1e-12
        elif op == "reduce":
            assert sent[1:].min() >= 1 - 1e-12
