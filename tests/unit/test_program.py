"""What a workload writes down, and what a Program makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from simkit.program import BS, BSS, ONE, ZERO, B, Node, Recorder, basis, matmul, ops, stream

K = ONE * 8.0


def linear(name: str, *trains: str, saved: float = 0.0) -> Node:
    forward = matmul(name, "mlp", m=BS, n=K, k=K, flops=BS * 128.0, nbytes=BS * 4.0, saved=BS * saved)
    backward = matmul(f"{name}.wgrad", "mlp", m=K, n=K, k=BS, flops=BS * 128.0, nbytes=BS * 4.0, trains=trains)
    return Node((forward,), (backward,))


def test_monomials_and_broadcasting() -> None:
    assert basis(2, 3).tolist() == [1.0, 2.0, 3.0, 6.0, 18.0]
    assert basis(np.array([1, 2]), 3).shape == (2, 5)
    assert basis(np.array([[1], [2]]), np.array([3, 4, 5])).shape == (2, 3, 5)


def test_columns_at_a_batch_are_the_polynomials_there() -> None:
    found = ops([matmul("a", "mlp", m=BS, n=K, k=K, flops=BS * 128.0, nbytes=BSS * 2.0, saved=B)], [0, 0])
    columns, saved = found.at(basis(2, 3))
    assert columns.flops.tolist() == [2.0 * 6 * 8 * 8]
    assert columns.nbytes.tolist() == [36.0]
    assert saved.tolist() == [2.0]
    assert found.counts.tolist() == [2.0]


def test_equal_operators_share_a_row_and_keep_their_order() -> None:
    a, b = stream("x", "norm", BS), stream("y", "norm", B)
    again = stream("z", "norm", BS)
    found = ops([a, b, again], [2, 1, 0])
    assert len(found) == 2
    assert found.order.tolist() == [0, 1, 0]
    assert found.counts.tolist() == [2.0, 1.0]
    assert len(ops([a, stream("x", "mlp", BS)], [0, 1])) == 2


def test_gradients_are_ready_in_reverse_and_a_tied_tensor_last() -> None:
    recorder = Recorder()
    recorder.add([linear("embed", "table"), linear("first", "w1", "b1"), linear("head", "table", "w2")])
    found = recorder.program(["table", "w1", "b1", "w2"])
    assert found.ready.tolist() == [0, 1, 1, 2]
    # Of equal positions the later registration first, as back-propagation reaches them.
    assert found.tensor_index.tolist() == [3, 2, 1, 0]


def test_a_tensor_that_nothing_trains_is_a_fault() -> None:
    recorder = Recorder()
    recorder.add([linear("first", "w1")])
    with pytest.raises(ValueError, match="orphan"):
        recorder.program(["w1", "orphan"])


def blocked() -> tuple[Recorder, list[str]]:
    """Three blocks of one linear that keeps 10 b·s bytes and one score operator that keeps 4 b·s², then a head."""
    recorder = Recorder()
    score = Node((stream("softmax", "attention", BSS * 8.0, saved=BSS * 4.0),), (stream("softmax.grad", "a", BSS),))
    body = linear("w", "0", saved=10.0)
    for i in range(3):
        recorder.add([body, score], {"0": (f"w{i}",)}, block=BS * 2.0)
    recorder.add([linear("head", "head", saved=7.0)])
    return recorder, ["w0", "w1", "w2", "head"]


def test_recomputation_keeps_block_inputs_and_one_block() -> None:
    recorder, names = blocked()
    found = recorder.program(names)
    at = basis(1, 5)
    none = 3 * (10 * 5 + 4 * 25) + 7 * 5
    assert found.kept_bytes(at) == none
    # Selective: the scores of one block only, the one that is being replayed.
    assert found.kept_bytes(at, "selective") == none - 2 * 4 * 25
    # Full: three inputs of 2·5 bytes, one whole block, the head.
    assert found.kept_bytes(at, "full") == 3 * 10 + (50 + 100) + 35


def test_replayed_rows() -> None:
    recorder, names = blocked()
    found = recorder.program(names)
    assert found.replayed("none").sum() == 0
    assert found.replayed("full").sum() == 6
    selective = found.replayed("selective").sum(axis=0)
    assert [found.forward.names[i] for i in np.flatnonzero(selective)] == ["softmax"]
    # Backward runs head, block 2, block 1, block 0, each of two operators.
    assert found.blocks.starts.tolist() == [5, 3, 1]


def test_without_blocks_nothing_is_replayed() -> None:
    recorder = Recorder()
    recorder.add([linear("w", "w", saved=3.0)])
    found = recorder.program(["w"])
    assert found.kept_bytes(basis(2, 2), "full") == found.kept_bytes(basis(2, 2)) == 12.0
    assert found.replayed("full").shape == (0, 1)


def test_model_flops_default_to_the_forward_products() -> None:
    recorder = Recorder()
    recorder.add([linear("a", "w"), linear("b", "w")])
    assert (recorder.program(["w"]).model_flops == 2 * 128.0 * BS).all()
    assert (recorder.program(["w"], model_flops=ZERO).model_flops == 0).all()
