"""What must be computed and kept, with no device and no seconds in it.

Every quantity of an operator is a polynomial in the micro-batch b and the sequence length s over the monomials of
`BASIS`; a row stores its coefficients. A Program is therefore built once per model and numerics, and its columns at any
batch, or at a million of them, are one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit.roofline import ATTENTION, GEMM, MEMORY, Array, Columns

BASIS = ("1", "b", "s", "b·s", "b·s²")
SCORES = 4
"""Where `BASIS` holds the monomial of attention scores."""
NBYTES, SAVED = 4, 5
"""Where `Ops.coefficients` holds bytes moved and bytes saved."""
RECOMPUTE = ("none", "selective", "full")
ONE, B, S, BS, BSS = np.eye(len(BASIS))
ZERO = np.zeros(len(BASIS))


def basis(b: Any, s: Any) -> Array:
    """The monomials at micro-batch b and length s, stacked on the last axis: shape (..., 5)."""
    if not isinstance(b, np.ndarray) and not isinstance(s, np.ndarray):
        return np.array([1.0, b, s, b * s, b * s * s])
    b, s = np.asarray(b, dtype=float), np.asarray(s, dtype=float)
    bs = b * s
    shape = bs.shape
    return np.stack([np.ones(shape), np.broadcast_to(b, shape), np.broadcast_to(s, shape), bs, bs * s], axis=-1)


DIVIDES = ("", "m", "n", "k", "batch", "bytes", "sequence")
"""How a rank's share of an operator is made. ``""``: every rank does all of it. ``m n k batch``: that dimension of the
product over the tensor-parallel ranks (outputs of a column-parallel weight, inner dimension of a row-parallel one,
heads).
``bytes``: the bytes of a stream over the tensor-parallel ranks (it works on a sharded width). ``sequence``: the bytes
over the
sequence-parallel ranks, whole without sequence parallelism (norms, residuals, dropout). What a product keeps for the
backward pass is its input: sharded over tensor-parallel ranks for ``k``, ``batch``, ``bytes``, over sequence-parallel
ones else. Terms with b or s are divided over context-parallel ranks; routed experts over expert-parallel ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator while a workload is being written down; the vectors are coefficients over `BASIS`.

    saved: bytes kept from the forward pass for the backward pass. trains: the tensors whose gradients this operator
    completes, as keys that `Recorder.add` turns into tensor names. divides: what a parallel rank holds of it, see
    `DIVIDES`.
    """

    name: str
    module: str
    kind: int
    batch: Array
    m: Array
    n: Array
    k: Array
    nbytes: Array
    saved: Array
    kernels: float = 1.0
    trains: tuple[str, ...] = ()
    flops: Array = field(default_factory=lambda: ZERO)
    divides: str = ""


def matmul(
    name: str,
    module: str,
    *,
    m: Array,
    n: Array,
    k: Array,
    flops: Array,
    nbytes: Array,
    batch: Array = ONE,
    kind: int = GEMM,
    saved: Array = ZERO,
    kernels: float = 1.0,
    trains: tuple[str, ...] = (),
    divides: str = "",
) -> Op:
    """out[m,n] = in[m,k] w[k,n], `batch` copies; flops = 2·batch·m·n·k, given as a polynomial of its own because a
    product of polynomials may leave the basis while the count does not."""
    return Op(
        name=name,
        module=module,
        kind=kind,
        batch=batch,
        m=m,
        n=n,
        k=k,
        nbytes=nbytes,
        saved=saved,
        kernels=kernels,
        trains=trains,
        flops=flops,
        divides=divides,
    )


def stream(
    name: str,
    module: str,
    nbytes: Array,
    *,
    saved: Array = ZERO,
    kernels: float = 1.0,
    trains: tuple[str, ...] = (),
    divides: str = "",
) -> Op:
    """An operator that only moves bytes: element-wise work, norms, reductions, look-ups, copies."""
    return Op(
        name=name,
        module=module,
        kind=MEMORY,
        batch=ZERO,
        m=ZERO,
        n=ZERO,
        k=ZERO,
        nbytes=nbytes,
        saved=saved,
        kernels=kernels,
        trains=trains,
        divides=divides,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ops:
    """Unique operators as coefficient matrices of shape (5, rows); `order` lists rows in the order of execution."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    kind: NDArray[np.int8]
    divides: NDArray[np.int8]
    """Codes of `DIVIDES`."""
    coefficients: Array
    """Shape (6, 5, rows): batch, m, n, k, nbytes, saved."""
    kernels: Array
    order: NDArray[np.int64]
    counts: Array
    """How often each unique row is executed: bincount of `order`."""
    launches: float
    """Kernels of one pass."""
    written: tuple[tuple[str, int, float], ...] = ()
    """(name, row, executions) of every operator as it was written: equal ones share a row under the first's name."""

    def at(self, monomials: Array) -> tuple[Columns, Array]:
        """Columns and saved bytes at the given monomials of shape (..., 5)."""
        batch, m, n, k, nbytes, saved = monomials @ self.coefficients
        return Columns(kind=self.kind, batch=batch, m=m, n=n, k=k, nbytes=nbytes, kernels=self.kernels), saved

    def __len__(self) -> int:
        return len(self.names)


def ops(written: list[Op], order: Iterable[int]) -> Ops:
    """The struct of arrays of some operators and the order in which they run; equal operators share a row."""
    vectors = [[o.batch, o.m, o.n, o.k, o.nbytes, o.saved] for o in written]
    table = np.array(vectors).reshape(len(written), 6, len(BASIS))
    rows: dict[tuple[object, ...], int] = {}
    row_of: list[int] = []
    first: list[int] = []
    for i, o in enumerate(written):
        row = rows.setdefault((o.kind, o.module, o.kernels, o.divides, table[i].tobytes()), len(rows))
        if row == len(first):
            first.append(i)
        row_of.append(row)
    listed = list(order)
    sequence = np.array([row_of[i] for i in listed], dtype=np.int64)
    kernels = np.array([written[i].kernels for i in first], dtype=float)
    counts = np.bincount(sequence, minlength=len(rows)).astype(float)
    runs = np.bincount(np.array(listed, dtype=np.int64), minlength=len(written))
    return Ops(
        names=tuple(written[i].name for i in first),
        modules=tuple(written[i].module for i in first),
        kind=np.array([written[i].kind for i in first], dtype=np.int8),
        divides=np.array([DIVIDES.index(written[i].divides) for i in first], dtype=np.int8),
        coefficients=np.ascontiguousarray(table[first].transpose(1, 2, 0)),
        kernels=kernels,
        order=sequence,
        counts=counts,
        launches=float(kernels @ counts),
        written=tuple((o.name, row, float(n)) for o, row, n in zip(written, row_of, runs, strict=True) if n),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The repeated blocks of a network, in forward order: what activation recomputation replays.

    counts: shape (blocks, forward rows), how often a block runs each row; backward_counts: the same for backward rows.
    alternate: shape of counts, how often a block runs each row as the second, fourth, … of its matrix products.
    starts: position in `backward.order` before which a block is replayed. inputs: shape (blocks, 5), bytes of what
    enters a block. before, after: how often the forward (backward) rows run before the first and after the last block.
    """

    counts: Array
    backward_counts: Array
    alternate: Array
    before: tuple[Array, Array]
    after: tuple[Array, Array]
    starts: NDArray[np.int64]
    inputs: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kinds:
    """Blocks that run the same rows equally often are of one kind; the last axis of what is priced by block is the
    kind. first: a block of each kind; of: the kind of each block; many: blocks of each kind."""

    first: NDArray[np.int64]
    of: NDArray[np.int64]
    many: Array

    def held(self, held: Iterable[int]) -> Array:
        """Blocks of each kind on each stage, shape (stages, kinds), where stages hold so many blocks in order."""
        stage = np.repeat(np.arange(len(tuple(held))), tuple(held))
        found = np.zeros((len(tuple(held)), len(self.first)))
        np.add.at(found, (stage, self.of), 1.0)
        return found


@lru_cache(maxsize=256)
def kinds(program: Program) -> Kinds:
    """The kinds of a program's blocks, in the order of their first appearance."""
    both = np.concatenate([program.blocks.counts, program.blocks.backward_counts], axis=1)
    _, first, of, many = np.unique(both, axis=0, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    return Kinds(first=first[order], of=np.argsort(order)[of.ravel()], many=many[order].astype(float))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """One micro-batch of training on one device.

    ready: for each gradient, in the order in which back-propagation finishes them, the position in `backward.order`
    after which it is complete; tensor_index: its index in `Model.tensors`. logits: bytes that the vocabulary head
    materialises beside the saved activations, coefficients over BASIS.
    """

    forward: Ops
    backward: Ops
    ready: NDArray[np.int64]
    tensor_index: NDArray[np.int64]
    logits: Array
    model_flops: Array
    """FLOPs of one forward pass of matrix products, coefficients over BASIS, no recomputation (the M of MFU)."""
    blocks: Blocks
    notes: tuple[str, ...] = ()
    node_ends: tuple[tuple[int, int], ...] = ()
    """For each node in forward order: the position in `forward.order` after its last operator, and how many backward
    operators stand at or before it, counted from the end of `backward.order`."""
    selective: str = "scores"
    """What selective recomputation replays, see `replayed`."""

    @property
    def blocks_with_experts(self) -> Array:
        """1 for each block that routes tokens to experts, else 0."""
        experts = np.array([m == "experts" for m in self.forward.modules], dtype=bool)
        return np.asarray(self.blocks.counts[:, experts].sum(axis=1) > 0, dtype=float)

    def replayed(self, recompute: str) -> Array:
        """How often back-propagation runs each forward row of each block again, shape (blocks, forward rows).

        ``full``: the whole block. ``selective``: the operators that touch attention scores, whose bytes grow with b·s²
        (Korthikanti et al., arXiv 2205.05198, section 5); with flash attention there are none. Where `selective` is
        ``products``: everything but attention and the first, third, … matrix product of a block (torchtitan, selective
        activation checkpointing by operator).
        """
        if recompute == "full":
            return self.blocks.counts
        if recompute == "selective" and self.selective == "products":
            counts = np.where(self.forward.kind == GEMM, self.blocks.alternate, self.blocks.counts)
            return np.where(self.forward.kind == ATTENTION, 0.0, counts)
        if recompute == "selective":
            return np.where(self.forward.coefficients[NBYTES][SCORES] > 0.0, self.blocks.counts, 0.0)
        return np.zeros_like(self.blocks.counts)

    def kept_bytes(self, monomials: Array, recompute: str = "none") -> float:
        """Bytes of activations held when back-propagation starts, at monomials of shape (5,).

        What is replayed is not kept, but for the one block that is being replayed; ``full`` keeps the blocks' inputs.
        """
        saved = monomials @ self.forward.coefficients[SAVED]
        total = float(saved @ self.forward.counts)
        if recompute == "none":
            return total
        dropped = self.replayed(recompute) @ saved
        if not dropped.any():
            return total
        kept = total - float(dropped.sum()) + float(dropped.max())
        if recompute == "full":
            kept += float((self.blocks.inputs @ monomials).sum())
        return min(kept, total)


@dataclass(frozen=True, slots=True)
class Node:
    """A forward operator and the operators that its gradient takes, in their order."""

    forward: tuple[Op, ...]
    backward: tuple[Op, ...] = ()


class Recorder:
    """Writes a Program down: nodes in forward order; the backward pass is the nodes in reverse.

    A repeated block is given once, with one renaming of its tensors per repetition, so that its operators stay unique
    rows. A tensor used twice (a tied embedding) is complete after its last use in the backward pass.
    """

    def __init__(self) -> None:
        self._unique: tuple[list[Op], list[Op]] = ([], [])
        self._row: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._forward: list[int] = []
        self._backward: list[tuple[int, tuple[str, ...]]] = []
        self._blocks: list[tuple[int, int, int, int, Array]] = []
        self._ends: list[tuple[int, int]] = []

    def _index(self, op: Op, side: int) -> int:
        rows = self._row[side]
        if id(op) not in rows:
            rows[id(op)] = len(self._unique[side])
            self._unique[side].append(op)
        return rows[id(op)]

    def add(
        self, nodes: Iterable[Node], rename: dict[str, tuple[str, ...]] | None = None, *, block: Array | None = None
    ) -> None:
        """Appends nodes; `rename` maps the keys in `Op.trains` to tensor names (identity where absent). block: the
        nodes are one repeated block, and these are the bytes of its input."""
        names = rename or {}
        begin, behind = len(self._forward), len(self._backward)
        for node in nodes:
            self._forward += [self._index(op, 0) for op in node.forward]
            # Stored reversed: `program` turns the whole list round once.
            for op in reversed(node.backward):
                trained = tuple(n for key in op.trains for n in names.get(key, (key,)))
                self._backward.append((self._index(op, 1), trained))
            self._ends.append((len(self._forward), len(self._backward)))
        if block is not None:
            self._blocks.append((begin, len(self._forward), behind, len(self._backward), block))

    def program(
        self,
        tensor_names: Iterable[str],
        *,
        logits: Array = ZERO,
        model_flops: Array | None = None,
        notes: tuple[str, ...] = (),
    ) -> Program:
        """The Program. Raises ValueError when a tensor is trained by no operator: its gradient would never be ready."""
        sequence = self._backward[::-1]
        done: dict[str, int] = {}
        for position, (_, trained) in enumerate(sequence):
            for name in trained:
                done[name] = position
        index = {name: i for i, name in enumerate(tensor_names)}
        missing = [name for name in index if name not in done]
        if missing:
            raise ValueError(f"no operator completes the gradient of {missing[:3]}")
        ready = sorted((position, -index[name]) for name, position in done.items() if name in index)
        forward = ops(self._unique[0], self._forward)
        backward = ops(self._unique[1], [row for row, _ in sequence])
        if model_flops is None:
            model_flops = np.sum([self._unique[0][i].flops for i in self._forward], axis=0)
        return Program(
            forward=forward,
            backward=backward,
            ready=np.array([position for position, _ in ready], dtype=np.int64),
            tensor_index=np.array([-negative for _, negative in ready], dtype=np.int64),
            logits=logits,
            model_flops=model_flops,
            blocks=self._found(forward, backward),
            notes=notes,
            node_ends=tuple(self._ends),
        )

    def _found(self, forward: Ops, backward: Ops) -> Blocks:
        last = len(self._backward)

        def count(ops: Ops, begin: int, end: int) -> Array:
            return np.bincount(ops.order[begin:end], minlength=len(ops)).astype(float)

        # The backward list is written front to back and stored turned round.
        spans = [(begin, end, last - stop, last - start) for begin, end, start, stop, _ in self._blocks]
        def second(begin: int, end: int) -> Array:
            rows = forward.order[begin:end]
            products = rows[forward.kind[rows] == GEMM]
            return np.bincount(products[1::2], minlength=len(forward)).astype(float)

        first, final = (spans[0], spans[-1]) if spans else ((0, 0, last, last), (0, 0, last, last))
        return Blocks(
            counts=np.array([count(forward, a, b) for a, b, _, _ in spans]).reshape(len(spans), len(forward)),
            backward_counts=np.array([count(backward, c, d) for _, _, c, d in spans]).reshape(
                len(spans), len(backward)
            ),
            alternate=np.array([second(a, b) for a, b, _, _ in spans]).reshape(len(spans), len(forward)),
            before=(count(forward, 0, first[0]), count(backward, first[3], last)),
            after=(count(forward, final[1], len(self._forward)), count(backward, 0, final[2])),
            starts=np.array([c for _, _, c, _ in spans], dtype=np.int64),
            inputs=np.array([entering for *_, entering in self._blocks]).reshape(len(spans), len(BASIS)),
        )
