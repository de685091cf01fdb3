"""What one rank holds under tensor, sequence, context and expert parallelism, by hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.parallel import tensor
from simkit.parallel.pipeline import layers_per_stage, stage_of_blocks
from simkit.program import DIVIDES, Program
from simkit.roofline import MEMORY
from simkit.spec.models import model, padded_vocab
from simkit.train_params import elements, of_rank
from simkit.workloads import Numerics, program

H, L, FFN, VOCAB = 4096, 32, 11008, 32000
"""Llama-2-7B (arXiv 2307.09288): hidden, layers, width of the gated MLP, vocabulary."""


def numerics(attention: str = "flash") -> Numerics:
    return Numerics(element_bytes=2.0, cast_bytes=0.0, attention=attention, compiled=False, head_share=1.0)


def work(name: str = "llama-2-7b", attention: str = "flash") -> Program:
    return program(model(name), numerics(attention))


def flops(found: Program, side: str, **degrees: int) -> np.ndarray:
    """FLOPs of one rank, row by row times executions."""
    rows = getattr(found, side)
    columns, _ = tensor.share(rows, tensor.monomials(2, 1024, degrees.get("cp", 1)), tensor.Degrees(**degrees))
    return np.asarray(columns.flops * rows.counts)


def nbytes(found: Program, **degrees: int) -> np.ndarray:
    columns, _ = tensor.share(found.forward, tensor.monomials(2, 1024, degrees.get("cp", 1)), tensor.Degrees(**degrees))
    return np.asarray(columns.nbytes * found.forward.counts)


def test_flops_of_a_llama_by_hand() -> None:
    """Forward: 2·t·(4h² + 3hf) per block and 2·t·h·V; causal flash attention 2·b·s²·h (half of 4·b·s²·h)."""
    t, s, b = 2048, 1024, 2
    by_hand = L * (2 * t * (4 * H * H + 3 * H * FFN) + 2 * b * s * s * H) + 2 * t * H * VOCAB
    assert flops(work(), "forward").sum() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("side", ["forward", "backward"])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("attention", ["math", "flash"])
def test_tensor_parallel_ranks_do_the_whole_work_together(side: str, tp: int, attention: str) -> None:
    found = work(attention=attention)
    whole, rank = flops(found, side), flops(found, side, tp=tp, sp=tp)
    np.testing.assert_allclose(rank * tp, whole, rtol=1e-12)


def test_replicated_rows_are_whole_on_every_rank() -> None:
    """The router of a mixture is on every rank; everything else of it is divided."""
    found = work("mixtral-8x7b")
    router = np.array([m == "router" for m in found.forward.modules])
    whole, rank = flops(found, "forward"), flops(found, "forward", tp=4)
    np.testing.assert_allclose(rank[router], whole[router])
    np.testing.assert_allclose(4 * rank[~router], whole[~router])
    assert whole[router].sum() == pytest.approx(L * 2 * 2048 * 4096 * 8)


def test_degree_one_is_the_unsharded_program() -> None:
    found = work("mixtral-8x7b", "math")
    at = tensor.monomials(3, 512)
    for rows in (found.forward, found.backward):
        ours, kept = tensor.share(rows, at, tensor.Degrees())
        theirs, saved = rows.at(at)
        for column in ("batch", "m", "n", "k", "nbytes"):
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
        np.testing.assert_array_equal(kept, saved)


def test_norms_are_not_divided_by_tensor_parallelism_but_by_sequence_parallelism() -> None:
    """BR-09: two norms a layer and the last, whole on every rank under tp; under sp each has its tokens."""
    found = work()
    norms = np.array([m == "norm" for m in found.forward.modules])
    whole = nbytes(found)[norms].sum()
    assert found.forward.counts[norms].sum() == 2 * L + 1
    assert nbytes(found, tp=8)[norms].sum() == whole
    assert nbytes(found, tp=8, sp=8)[norms].sum() == pytest.approx(whole / 8)


def test_sequence_parallelism_changes_sequence_rows_alone() -> None:
    found = work(attention="math")
    sequence = found.forward.divides == DIVIDES.index("sequence")
    plain, split = nbytes(found, tp=4), nbytes(found, tp=4, sp=4)
    np.testing.assert_allclose(split[sequence], plain[sequence] / 4)
    np.testing.assert_array_equal(split[~sequence], plain[~sequence])
    np.testing.assert_array_equal(flops(found, "forward", tp=4), flops(found, "forward", tp=4, sp=4))


def test_expert_parallelism_cuts_the_weights_of_experts_and_nothing_else() -> None:
    """BR-28: with 8 experts over 8 ranks a rank multiplies the same tokens with one expert instead of eight."""
    found = work("mixtral-8x7b")
    routed = np.array([m == "experts" for m in found.forward.modules]) & (found.forward.kind != MEMORY)
    one, eight = nbytes(found), nbytes(found, ep=8)
    np.testing.assert_array_equal(one[~routed], eight[~routed])
    np.testing.assert_allclose(flops(found, "forward", ep=8), flops(found, "forward"), rtol=1e-12)
    weights = L * 8 * 3 * 4096 * 14336 * 2.0
    assert (one - eight)[routed].sum() == pytest.approx(weights * 7 / 8, rel=1e-9)


def test_parameters_of_a_mixture_by_expert_parallelism() -> None:
    """BR-28: routed experts are divided by ep, norms, router, attention and ends are not."""
    mixtral = model("mixtral-8x7b")
    experts = L * 8 * 3 * 4096 * 14336
    one, eight = (of_rank(mixtral, tp=1, ep=ep, held=(L,)).stage_max for ep in (1, 8))
    assert one == mixtral.params == 46702792704
    assert one - eight == pytest.approx(experts * 7 / 8)


@pytest.mark.parametrize("attention", ["math", "flash"])
@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_divides_tokens(cp: int, attention: str) -> None:
    """A rank holds s/cp queries and meets all keys: 1/cp of every product."""
    found = work(attention=attention)
    whole, rank = flops(found, "forward"), flops(found, "forward", cp=cp)
    np.testing.assert_allclose(rank * cp, whole, rtol=1e-12)


def test_a_dense_block_has_two_messages_of_b_s_h_elements() -> None:
    """Shoeybi et al.: one all-reduce after attention and one after the MLP, forward; as many backward."""
    found = tensor.messages(work(), H, 2.0)
    assert found.per_block.tolist() == [2.0] * L
    assert found.width == 2 * H
    assert found.routed.tolist() == [0.0] * L
    assert tensor.messages(work("mixtral-8x7b"), H, 2.0).routed.tolist() == [1.0] * L


def test_parameters_of_a_rank_of_llama_2_7b() -> None:
    """tp 2, pp 2: 16 blocks of (4h² + 3hf)/2 + 2h each, and half a table on either end with the last norm whole."""
    block = (4 * H * H + 3 * H * FFN) / 2 + 2 * H
    found = of_rank(model("llama-2-7b"), tp=2, ep=1, held=(16, 16))
    assert found.block == block
    assert found.before == VOCAB * H / 2
    assert found.stage_max == pytest.approx(16 * block + VOCAB * H / 2 + H / 2)
    assert found.experts == 0.0


def test_norms_are_on_every_rank() -> None:
    """BR-09."""
    counted = elements(model("llama-2-7b"))
    assert counted["replicated"] == 2 * L * H
    one, eight = (of_rank(model("llama-2-7b"), tp=t, ep=1, held=(L,)).block for t in (1, 8))
    assert one - 8 * eight == -7 * 2 * H


def test_uneven_stages() -> None:
    """BR-29: the fullest stage counts, not the mean; the stages at the ends carry table and head."""
    assert layers_per_stage(10, 4).tolist() == [2, 3, 3, 2]
    assert layers_per_stage(8, 4).tolist() == [2, 2, 2, 2]
    assert stage_of_blocks(5, 2).tolist() in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    found = of_rank(model("llama-2-7b"), tp=1, ep=1, held=(7, 9, 9, 7))
    block = 4 * H * H + 3 * H * FFN + 2 * H
    assert found.stage_max == 9 * block
    ends = of_rank(model("llama-2-7b"), tp=1, ep=1, held=(8, 8, 8, 8))
    assert ends.stage_max == 8 * block + VOCAB * H + H


@pytest.mark.parametrize(
    ("vocab", "multiple", "tp", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (30522, 8, 1, 30528), (151669, 128, 4, 152064),
     (151552, 128, 6, 152064), (32000, 128, 2, 32000)],
)  # fmt: skip
def test_padding_of_the_vocabulary(vocab: int, multiple: int, tp: int, padded: int) -> None:
    """BR-15: ceil(V / (multiple·tp))·multiple·tp; table and head grow, nothing else does."""
    base = padded_vocab(model("gpt2"), 1, 1)
    assert base is model("gpt2")
    from dataclasses import replace

    spec = replace(base.spec, vocab=vocab)
    tensors = tuple(replace(t, shape=(vocab, t.shape[1])) if t.shape[0] == 50257 else t for t in base.tensors)
    given = replace(base, spec=spec, tensors=tensors)
    found = padded_vocab(given, tp, multiple)
    assert found.spec.vocab == padded
    assert found.params - given.params == (padded - vocab) * 768
    assert (found is given) == (padded == vocab)
    if padded != vocab:
        assert found.notes[-1] == f"vocabulary {vocab} padded to {padded}"
