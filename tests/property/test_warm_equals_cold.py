"""Does an answer depend on what was asked before? Caches must never leak from one question into another."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simkit.predict import predict

JOBS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["resnet-50", "bert-base", "gpt2"]),
        "cluster": st.sampled_from(["1x1x3080", "2x1x3080", "8x4x2080ti", "1x8xh100", "2x1x3080+2x1x4090"]),
        "precision": st.sampled_from(["fp32", "fp16"]),
        "micro_batch": st.integers(1, 8),
        "grad_accum": st.integers(1, 3),
        "method": st.sampled_from(["s-sgd", "sign-sgd", "topk-sgd", "power-sgd", "acp-sgd"]),
        "overlap": st.sampled_from(["none", "wfbp"]),
        "fusion": st.sampled_from(["none", "bucket", "all", "optimal"]),
    },
    optional={
        "inter": st.sampled_from(["1gbe", "10gbe", "25Gb/s@30us"]),
        "rank": st.integers(1, 8),
        "bucket_mb": st.sampled_from([1, 25, 100]),
        "seq_len": st.sampled_from([64, 128]),
        "optimizer": st.sampled_from(["sgd", "adamw"]),
        "recompute": st.sampled_from(["none", "full"]),
        "calibration": st.booleans(),
    },
)


def forget() -> int:
    """Empties every cache of the package, as a new process has them; how many there were."""
    caches = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "simkit"
        for value in vars(module).values()
        if hasattr(value, "cache_clear")
    }
    for cache in caches.values():
        cache.cache_clear()
    return len(caches)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    return predict(**job).to_dict()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs=st.lists(JOBS, min_size=2, max_size=3))
def test_an_answer_does_not_depend_on_those_before(jobs: list[dict[str, Any]]) -> None:
    warm = [answer(job) for job in jobs]
    again = [answer(job) for job in reversed(jobs)][::-1]
    assert again == warm
    for job, before in zip(jobs, warm, strict=True):
        assert forget() > 10
        assert answer(job) == before
