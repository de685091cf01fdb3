"""What hides messages of tensor parallelism, and what one fused softmax asks of its input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from simkit.collectives._law import law
from simkit.evaluate import Evaluation, evaluate, plain_softmax
from simkit.roofline import ATTENTION, GEMM, MEMORY
from simkit.spec import load
from simkit.spec import stack as stacks
from simkit.spec.resolve import resolve
from simkit.spec.scenario import Scenario
from simkit.sweep_columns import Links
from simkit.sweep_points import Structure
from simkit.train_blocks import exposed

JOB = {"model": "vtrain-gpt-24l-1024h-16a", "cluster": "1x8xa100", "tp": 8, "seq_len": 1024, "precision": "fp16",
       "attention": "math", "recompute": "full", "grad_accum": 4, "micro_batch": 2, "optimizer": "adamw",
       "stack": "megatron-deepspeed"}  # fmt: skip


def run(**fields: Any) -> Evaluation:
    return evaluate(resolve(Scenario.of(JOB | fields)))


@pytest.mark.parametrize(
    ("sent", "beside", "chunks", "rho", "left"),
    [
        (3.0, 5.0, 0, 0.0, 0.0),
        (3.0, 2.0, 0, 0.0, 1.0),
        (3.0, 5.0, 0, 0.5, 1.5),
        (4.0, 9.0, 4, 0.0, 1.0),
        (4.0, 2.0, 4, 0.5, 3.0),
        (4.0, 0.0, 4, 0.5, 4.0),
    ],
)
def test_what_is_left_of_messages_beside_products(
    sent: float, beside: float, chunks: int, rho: float, left: float
) -> None:
    """By hand: the first of n chunks waits in full, the rest for what the products do not cover, and slow-down."""
    assert exposed(sent, beside, chunks, rho) == pytest.approx(left)
    assert exposed(np.array([sent, sent]), np.array([beside, beside]), chunks, rho) == pytest.approx([left, left])


def test_megatron_hides_the_all_reduce_of_input_gradients_behind_weight_gradients() -> None:
    """No forward message changes; of the backward ones at most the column-parallel products' two of four."""
    fields = {"model": "gpt3-175b", "cluster": "8x8xa100", "pp": 8, "micro_batch": 1, "seq_len": 2048}
    plain, aside = run(**fields), run(**fields, stack="megatron")
    f, b = plain.messages["tensor parallelism"]
    g, c = aside.messages["tensor parallelism"]
    assert g == pytest.approx(f)
    assert 0.5 * b < c < b


def test_asynchronous_tensor_parallelism_hides_all_but_the_first_chunk_at_best() -> None:
    fields = {"model": "llama-2-70b", "cluster": "1x8xh100", "sp": 8, "precision": "bf16", "stack": "torchtitan",
              "attention": "flash", "recompute": "none", "micro_batch": 1}  # fmt: skip
    for seq_len in (2048, 8192):
        left = [
            run(**fields, seq_len=seq_len, tp_overlap=overlap).breakdown["tp_comm_s"]
            for overlap in ("none", "backward", "chunks")
        ]
        assert left[0] > left[1] > left[2] >= left[0] / 8 * (1 - 1e-9)


@pytest.mark.parametrize(("micro", "plain"), [(1, True), (2, False), (3, True), (4, False)])
def test_fused_softmax_takes_matrices_in_fours(micro: int, plain: bool) -> None:
    """16 heads over 8 ranks: two matrices a sample; Megatron-LM, fused_softmax.py, is_kernel_available."""
    found = resolve(Scenario.of(JOB | {"micro_batch": micro}))
    assert bool(plain_softmax(found.model, found.plan, found.stack, micro)) is plain
    softmax = run(micro_batch=micro).program.forward
    rows = [k for n, k in zip(softmax.names, softmax.kernels, strict=True) if n == "softmax"]
    assert rows == [5.0 if plain else 1.0]


def test_fused_softmax_asks_nothing_of_other_stacks_or_of_flash_attention() -> None:
    for fields in ({"stack": "pytorch"}, {"attention": "flash"}):
        found = resolve(Scenario.of(JOB | fields | {"micro_batch": 1}))
        assert not plain_softmax(found.model, found.plan, found.stack, np.array([1, 2, 3])).any()


def test_selective_recomputation_of_torchtitan_replays_every_second_product() -> None:
    """Of q, k, v, o, gate, up and down the second, fourth and sixth, and all that is neither product nor attention."""
    fields = {"model": "llama-3.1-8b", "cluster": "1x8xh100", "tp": 1, "zero": 3, "precision": "bf16",
              "attention": "flash", "recompute": "selective"}  # fmt: skip
    for stack, expected in (("torchtitan", {"k_proj": 1.0, "o_proj": 1.0, "up_proj": 1.0}), ("pytorch-fsdp", {})):
        work = run(**fields, stack=stack).program
        replays, kinds = work.replayed("selective")[0], work.forward.kind
        products = {n: c for n, c, k in zip(work.forward.names, replays, kinds, strict=True) if k == GEMM and c}
        assert products == expected
        streams = (kinds == MEMORY) & (work.blocks.counts[0] > 0)
        assert np.array_equal(replays[streams], work.blocks.counts[0][streams] * bool(expected))
        assert not replays[kinds == ATTENTION].any()


def test_structures_of_a_sweep_tell_apart_micro_batches_that_fuse_and_that_do_not() -> None:
    structure = Structure(Scenario.of(JOB))
    micro, accum, link = np.array([2, 1, 3, 4, 5]), np.full(5, 4), np.zeros(5, dtype=np.int64)
    columns = structure.answers(micro, accum, link, Links(tables={}))
    alone = [run(micro_batch=int(m)).end_s for m in micro]
    assert columns["iteration_time_s"] == pytest.approx(alone, rel=1e-12)


def test_edr_gives_what_its_profile_states() -> None:
    """0.65 of 12.5 GB/s, where an unmeasured RDMA fabric gives 0.85."""
    for name, share in (("ib-edr", 0.65), ("ib-hdr", 0.85)):
        link = load.link(name)
        assert float(law(link, "send_recv", "v100-sxm2-32gb").rate_Bps(2)) == pytest.approx(share * link.Bps)


def test_stacks_inherit_what_was_fitted_for_what_they_are_made_of() -> None:
    titan, parent = stacks.stack("torchtitan"), stacks.stack("pytorch-fsdp")
    assert titan.parents == ("pytorch-fsdp", "pytorch")
    assert titan.calibration["eager"] is not None
    assert dict(titan.calibration["eager"].values) == dict(parent.calibration["eager"].values)


def test_megatron_adds_up_gradients_of_bf16_in_fp32() -> None:
    for precision, dtype in (("bf16", "fp32"), ("fp16", "fp16")):
        assert resolve(Scenario.of(JOB | {"stack": "megatron", "precision": precision})).plan.reduce_dtype == dtype


def test_zero_2_scatters_after_every_micro_batch_and_zero_1_once() -> None:
    """PCIe: what hides behind one backward pass is not what sticks out of sixteen."""
    fields = {"model": "llama-2-7b", "cluster": "1x8x3090", "tp": 1, "precision": "bf16", "attention": "flash",
              "stack": "deepspeed", "recompute": "full", "micro_batch": 1, "seq_len": 512}  # fmt: skip
    left = [[run(**fields, zero=zero, grad_accum=m).breakdown["exposed_comm_s"] for m in (1, 16)] for zero in (1, 2)]
    assert left[0][1] == pytest.approx(left[0][0])
    assert left[1][1] > 4.0 * left[1][0]
    assert left[1][0] == pytest.approx(left[0][0], rel=0.5)


def test_owners_broadcast_tensor_by_tensor() -> None:
    """InternEvo: an all-reduce and one broadcast an owner; with more ranks the latency of a chain grows for each."""
    fields = {"model": "llama-2-7b", "tp": 1, "precision": "bf16", "attention": "flash", "recompute": "none",
              "inter": "100gbe-rdma", "nics_per_node": 4, "zero": 1, "stack": "internevo"}  # fmt: skip
    small, large = (run(**fields, cluster=f"{nodes}x8xa100").exchange.latency_s for nodes in (4, 64))
    assert large > 4.0 * small
