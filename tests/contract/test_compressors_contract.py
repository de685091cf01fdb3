"""What every gradient compressor must obey; a new file in the folder is tested without editing this one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simkit.collectives._common import ALL_OPS
from simkit.plugins import get, names
from simkit.spec.plan import Plan
from simkit.timeline import PLACEMENTS

KEYS = names("simkit.compressors")
SHAPES = ((512, 256, 3, 3), (512,), (1000, 512), (1000,), (2, 16), (1, 1), (64, 3, 7, 7), (7,))
NUMEL = np.array([float(np.prod(s)) for s in SHAPES])
PLAN = Plan(rank=4, density=0.001)


def stages(module):
    """(stage, phase) of all device work of a chain, in order."""
    return [("encode", None), *(("between", p) for p in range(1, module.PHASES)), ("decode", None)]


def each(module):
    for variant in range(module.variants(PLAN)):
        for stage, phase in stages(module):
            yield variant, stage, phase


@pytest.mark.parametrize("key", KEYS)
def test_constants_belong_to_the_vocabulary(key: str) -> None:
    module = get("simkit.compressors", key)
    assert len(module.OP) == module.PHASES >= 1
    assert set(module.OP) <= set(ALL_OPS)
    assert module.PLACEMENT in PLACEMENTS
    assert module.BUCKETS in names("simkit.fusion")
    assert isinstance(module.BLOCKING, bool)
    assert isinstance(module.ERROR_FEEDBACK, bool)
    # An all-reduce adds what is on the wire; a method whose messages cannot be added must gather.
    assert module.REDUCES is (set(module.OP) == {"all_reduce"})
    assert "Source" in module.__doc__


@pytest.mark.parametrize("key", KEYS)
def test_wire_bytes_cover_every_tensor_and_never_pass_the_gradient(key: str) -> None:
    module = get("simkit.compressors", key)
    for variant in range(module.variants(PLAN)):
        phases = [
            module.wire_bytes(SHAPES, plan=PLAN, phase=p, variant=variant) for p in range(module.PHASES)
        ]
        assert all(p.shape == NUMEL.shape and (p >= 0).all() for p in phases)
        total = np.sum(phases, axis=0)
        assert (total > 0).all(), "a gradient that is never sent"
        assert total.sum() <= 4.0 * NUMEL.sum()
    sizes, threshold = module.fusing(SHAPES, plan=PLAN, variant=0)
    assert sizes.shape == NUMEL.shape
    assert threshold > 0


@pytest.mark.parametrize("key", KEYS)
def test_the_bytes_of_a_tensor_do_not_depend_on_its_neighbours(key: str) -> None:
    module = get("simkit.compressors", key)
    for phase in range(module.PHASES):
        together = module.wire_bytes(SHAPES, plan=PLAN, phase=phase)
        alone = [float(module.wire_bytes((s,), plan=PLAN, phase=phase)[0]) for s in SHAPES]
        assert together.tolist() == alone
        assert module.wire_bytes(list(SHAPES), plan=PLAN, phase=phase).tolist() == alone


@pytest.mark.parametrize("key", KEYS)
def test_work_is_finite_positive_and_points_at_tensors(key: str) -> None:
    module = get("simkit.compressors", key)
    for variant, stage, phase in each(module):
        work = module.work(SHAPES, plan=PLAN, stage=stage, variant=variant, ranks=8, phase=phase)
        c = work.columns
        assert len(work.tensor) == len(c)
        assert ((work.tensor >= 0) & (work.tensor < len(SHAPES))).all()
        for field in ("batch", "m", "n", "k", "nbytes", "kernels"):
            values = getattr(c, field)
            assert np.isfinite(values).all()
            assert (values >= 0).all()
        assert (c.nbytes > 0).all()
        per_tensor = work.per_tensor(np.ones(len(c)))
        assert per_tensor.shape == NUMEL.shape
        assert per_tensor.sum() == len(c)


@pytest.mark.parametrize("key", KEYS)
def test_work_touches_at_least_what_is_sent(key: str) -> None:
    """A compressor reads the gradient to encode it, whatever it sends; only s-sgd without fusion sends it in place."""
    module = get("simkit.compressors", key)
    for variant in range(module.variants(PLAN)):
        encode = module.work(SHAPES, plan=PLAN, stage="encode", variant=variant, ranks=8)
        assert (encode.per_tensor(encode.columns.nbytes) >= 4.0 * NUMEL).all()


@pytest.mark.parametrize("key", KEYS)
def test_an_empty_model_has_no_bytes_no_work_no_memory(key: str) -> None:
    module = get("simkit.compressors", key)
    assert module.wire_bytes((), plan=PLAN, phase=0).shape == (0,)
    for variant, stage, phase in each(module):
        work = module.work((), plan=PLAN, stage=stage, variant=variant, ranks=8, phase=phase)
        assert len(work.columns) == 0
        assert work.per_tensor(np.zeros(0)).shape == (0,)
    assert sum(module.memory_bytes((), plan=PLAN, ranks=8).values()) == 0.0


@pytest.mark.parametrize("key", KEYS)
def test_memory_never_shrinks_with_ranks_and_feedback_is_kept(key: str) -> None:
    module = get("simkit.compressors", key)
    few = module.memory_bytes(SHAPES, plan=PLAN, ranks=2)
    many = module.memory_bytes(SHAPES, plan=PLAN, ranks=64)
    assert few.keys() == many.keys()
    assert all(many[name] >= few[name] >= 0.0 for name in few)
    assert ("error_feedback" in few) == module.ERROR_FEEDBACK
    gathers = "all_gather" in module.OP
    assert (sum(many.values()) > sum(few.values())) == gathers


@pytest.mark.parametrize("key", KEYS)
def test_fusing_everything_needs_no_less_memory_than_buckets(key: str) -> None:
    module = get("simkit.compressors", key)
    totals = [
        sum(module.memory_bytes(SHAPES, plan=replace(PLAN, fusion=f, bucket_bytes=1e5), ranks=8).values())
        for f in ("none", "bucket", "all")
    ]
    assert totals == sorted(totals)
