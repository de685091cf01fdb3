"""The whole memory of a GPU as degrees grow, not its states alone: what never needs more, and where that is not true.

More ZeRO never needs more, anywhere: a stage divides what the one before kept whole; what ZeRO-3 gathers (two blocks
and the ends) is less than the weights that it divides, where there are ranks to divide them over and the model has
more blocks than it holds at once.

More tensor parallelism (with sequence parallelism) never needs more of what the allocator sees below ZeRO-3. Two
things grow, and neither is seen there:
- every group of ranks has a communicator, 200 MiB of the driver's (`memory.COMMUNICATOR_BYTES`), which on small models
  outweighs what is divided;
- under ZeRO-3 the states are divided by all ranks already, and norms, biases and position tables, which no tensor
  parallelism divides, are then sharded over fewer data ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit import predict
from simkit.memory import COMMUNICATOR_BYTES, Memory
from simkit.spec.models import model
from simkit.spec.stack import stack_names

JOBS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["gpt2-medium", "opt-1.3b", "llama-2-7b", "llama-3-8b", "mixtral-8x7b", "bert-large"]),
        "cluster": st.sampled_from(["2x8xa100", "2x8xh100", "4x8x4090"]),
        "stack": st.sampled_from(stack_names()),
        "micro_batch": st.sampled_from([1, 2, 8]),
        "seq_len": st.sampled_from([128, 512]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "precision": st.sampled_from(["fp32", "fp16", "bf16"]),
        "optimizer": st.sampled_from(["adamw", "sgd-momentum", "sgd"]),
        "pp": st.sampled_from([1, 2]),
    }
)


def weigh(job: dict[str, Any], **degrees: int) -> Memory:
    return predict(**job, **degrees, grad_accum=4, method="s-sgd").memory


@settings(max_examples=60, deadline=None)
@given(job=JOBS, tp=st.sampled_from([1, 2, 4, 8]))
def test_more_zero_never_needs_more(job: dict[str, Any], tp: int) -> None:
    stages = (0, 1) if job["pp"] > 1 else (0, 1, 2, 3)
    found = [weigh(job, zero=zero, tp=tp, sp=tp) for zero in stages]
    for less, more in pairwise(found):
        assert more.device_bytes <= less.device_bytes * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(job=JOBS, zero=st.integers(0, 3), sp=st.booleans())
def test_more_tensor_parallelism_never_needs_more_but_for_what_it_cannot_divide(
    job: dict[str, Any], zero: int, sp: bool
) -> None:
    zero = min(zero, 1) if job["pp"] > 1 else zero
    found = [weigh(job, zero=zero, tp=tp, sp=tp if sp else 1) for tp in (1, 2, 4, 8)]
    slack = whole_bytes(job["model"]) if zero == 3 else 0.0
    for less, more in pairwise(found):
        assert more.reserved_bytes <= (less.reserved_bytes + slack) * (1 + 1e-9)
        assert more.device_bytes <= less.device_bytes + slack + COMMUNICATOR_BYTES


def whole_bytes(name: str) -> float:
    """18 bytes an element, and 5 % of fragmentation, of all that tensor parallelism keeps whole."""
    net = model(name)
    vocab = getattr(net.spec, "vocab", 0)
    whole = sum(t.numel for t in net.tensors if len(t.shape) == 1 or (t.role == "embedding" and t.shape[0] != vocab))
    return 1.05 * 18.0 * whole


def test_where_more_tensor_parallelism_does_need_more() -> None:
    """A small model under ZeRO-3: one more communicator outweighs what is divided."""
    job = {"model": "bert-large", "cluster": "1x8xa100", "micro_batch": 1, "seq_len": 128, "recompute": "full"}
    one, two = weigh(job, zero=3), weigh(job, zero=3, tp=2, sp=2)
    assert one.device_bytes < two.device_bytes <= one.device_bytes + COMMUNICATOR_BYTES


@pytest.mark.parametrize("stack", ["megatron", "deepspeed", "pytorch"])
def test_zero_3_over_one_rank_gathers_nothing(stack: str) -> None:
    job = {"model": "llama-2-7b", "cluster": "1x8xa100", "stack": stack, "micro_batch": 1, "seq_len": 512}
    assert weigh(job, zero=3, tp=8, sp=8).items_bytes.get("gathered", 0.0) == 0.0
    assert weigh(job, zero=3, tp=4, sp=4).items_bytes["gathered"] > 0.0
