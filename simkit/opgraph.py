"""The job as a directed acyclic graph of operators, and the places where a chain of peers may cut it.

A node is a forward operator with what belongs to it: its casts, and the operators of its gradient. An edge carries a
tensor to every node that reads it. Cutting the graph after node i sends each tensor once that was made at or before i
and is read behind it; its gradient comes back over the same cut:

    crossing(i) = sum of bytes(j) over j <= i with last reader > i

A *unit* is what stands between two positions crossed by a single tensor (or, in a network with a shared encoder
output, by the fewest): peers hold whole units, so that a cut costs one activation a micro-batch.

What reads what is derived from the workload: consecutive products of a module read the same tensor (q, k, v; gate, up),
the operator behind them all of them; a residual addition also reads what entered its branch; a block reads what the
block before it left; cross-attention reads the encoder's last output. Operators of a traced network are a chain: what
a trace does not record (a skip connection) is not seen.
Sources: the OP-DAG of FusionLLM (arXiv 2410.12707, section 3) with one node an operator; Narayanan et al. (arXiv
2104.04473) for the boundary tensor of a transformer block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simkit.program import SAVED, Program, basis
from simkit.roofline import ATTENTION, CONV, GEMM, Array
from simkit.spec.model import Model, TracedSpec, TransformerSpec

Ints = NDArray[np.int64]
JOINS = ("residual", "add")
"""Operators that add the output of a branch to what entered it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Nodes in the order of execution. inputs[i]: the nodes whose tensors node i reads, all before i. block[i]: the
    repeated block it belongs to, -1 before the first and as many as there are behind the last. forward, backward:
    (nodes, rows) how often a node runs each row of `Program.forward` and `backward`. elements: of the tensors whose
    gradients the node completes; matrices: those of them that are multiplied with, a tied head included."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    block: Ints
    forward: Array
    backward: Array
    elements: Array
    matrices: Array
    tied: float
    """Elements of the table that the head shares with the embedding; 0 where nothing is shared."""

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(from, to) of every edge."""
        return tuple((j, i) for i, ins in enumerate(self.inputs) for j in ins)

    def last_reader(self) -> Ints:
        """The last node that reads each node's tensor; the node itself where nobody does."""
        last = np.arange(len(self.inputs))
        for i, ins in enumerate(self.inputs):
            for j in ins:
                last[j] = max(last[j], i)
        return last


@lru_cache(maxsize=64)
def graph(program: Program, model: Model) -> Graph:
    """The operators of a Program as a graph."""
    ends = np.array(program.node_ends, dtype=np.int64).reshape(-1, 2)
    count, f, b = len(ends), program.forward, program.backward
    begins = np.vstack([[0, 0], ends[:-1]]) if count else ends
    total = len(b.order)
    forward, backward = np.zeros((count, len(f))), np.zeros((count, len(b)))
    position = np.zeros(total, dtype=np.int64)
    names, modules = [], []
    for i, ((f0, b0), (f1, b1)) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        np.add.at(forward[i], f.order[f0:f1], 1.0)
        np.add.at(backward[i], b.order[total - b1 : total - b0], 1.0)
        position[total - b1 : total - b0] = i
        # The cast before a product carries its name; the last operator of a node is the one meant.
        row = f.order[f1 - 1] if f1 > f0 else 0
        names.append(f.names[row] if f1 > f0 else "gradient")
        modules.append(f.modules[row] if f1 > f0 else "")
    elements, matrices = np.zeros(count), np.zeros(count)
    for at, index in zip(program.ready.tolist(), program.tensor_index.tolist(), strict=True):
        tensor = model.tensors[index]
        elements[position[at]] += tensor.numel
        if len(tensor.shape) > 1 and tensor.role != "embedding":
            matrices[position[at]] += tensor.numel
    spec = model.spec
    tied = 0.0
    if isinstance(spec, TransformerSpec) and spec.tied and spec.has_vocab_head:
        tied = float(spec.vocab * spec.hidden)
    block = _blocks(program, ends)
    inputs = _inputs(program, model, names, modules, block, [_kind(program, e) for e in ends])
    return Graph(
        names=tuple(names), modules=tuple(modules), inputs=inputs, block=block, forward=forward, backward=backward,
        elements=elements, matrices=matrices, tied=tied,
    )  # fmt: skip


def _kind(program: Program, end: Ints) -> int:
    return int(program.forward.kind[program.forward.order[end[0] - 1]]) if end[0] else -1


def _blocks(program: Program, ends: Ints) -> Ints:
    """The block of each node, by the operators that stand before it."""
    counts = program.blocks.counts.sum(axis=1)
    edges = np.concatenate([[0.0], np.cumsum(counts)]) + program.blocks.before[0].sum()
    if not len(counts):
        return np.full(len(ends), -1)
    return np.searchsorted(edges, ends[:, 0] - 0.5, side="right") - 1


def _inputs(
    program: Program, model: Model, names: list[str], modules: list[str], block: Ints, kinds: list[int]
) -> tuple[tuple[int, ...], ...]:
    spec = model.spec
    parallel = isinstance(spec, TransformerSpec) and spec.parallel_residual
    split = spec.layers if isinstance(spec, TransformerSpec) and spec.decoder_layers else -1
    traced = isinstance(spec, TracedSpec)
    products = (GEMM, CONV)
    out: list[tuple[int, ...]] = []
    joint = entered = 0
    encoder = -1
    siblings: list[int] = []
    for i, name in enumerate(names):
        if i and block[i] != block[i - 1]:
            entered = joint = i - 1
            if block[i] == split:
                encoder = i - 1
        if i == 0:
            out.append(())
            continue
        same = kinds[i] in products and kinds[i - 1] in products and modules[i] == modules[i - 1]
        if traced:
            out.append((i - 1,))
        elif same and modules[i] in ("attention.qkv", "cross_attention.qkv", "mlp") and out[i - 1]:
            # q, k and v; gate and up: products of a module one behind the other read the same tensor.
            siblings = siblings or [i - 1]
            siblings.append(i)
            out.append(out[i - 1])
        else:
            ins = tuple(siblings) if siblings else (i - 1,)
            siblings = []
            if name.split(".")[-1] in JOINS or modules[i] == "add":
                ins = tuple(dict.fromkeys((*ins, entered if parallel else joint)))
                joint = i
            if modules[i] == "norm" and isinstance(spec, TransformerSpec) and spec.post_norm:
                joint = i
            out.append(ins)
        if encoder >= 0 and modules[i] == "cross_attention.qkv" and block[i] >= split:
            out[i] = tuple(dict.fromkeys((*out[i], encoder)))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """What peers hold whole: a run of nodes with one tensor in and one out. Arrays over units unless said.

    first: index of its first node. forward_rows, backward_rows: (units, rows) executions. elements, matrices: as in
    `Graph`; head_table: elements of a table that another unit owns (a tied head). kept_bytes: activations of one
    micro-batch held for the backward pass. crossing_bytes: (units - 1,) what a cut behind the unit sends forward.
    """

    names: tuple[str, ...]
    first: Ints
    forward_rows: Array
    backward_rows: Array
    elements: Array
    matrices: Array
    head_table: Array
    kept_bytes: Array
    crossing_bytes: Array
    boundary_bytes: Array
    """Bytes of what enters a unit: what is kept of it where it is recomputed."""

    def __len__(self) -> int:
        return len(self.names)


def tensor_bytes(program: Program, model: Model, found: Graph, b: float, s: float, element_bytes: float) -> Array:
    """Bytes of what each node makes, at micro-batch b and length s.

    A product's is batch·m·n elements; a block's last node makes what enters the next block (`Blocks.inputs`); anything
    else makes a tensor of the size of what it reads.
    """
    monomials = basis(b, s)
    f = program.forward
    batch, m, n, *_ = (monomials @ f.coefficients)[:3]
    ends = [e for e, _ in program.node_ends]
    out = np.zeros(len(found.names))
    entering = program.blocks.inputs @ monomials
    blocks = len(entering)
    ops = model.spec.ops if isinstance(model.spec, TracedSpec) else ()
    for i in range(len(out)):
        row = int(f.order[ends[i] - 1]) if ends[i] else 0
        block, after = int(found.block[i]), int(found.block[i + 1]) if i + 1 < len(out) else blocks
        if ops and i < len(ops):
            out[i] = ops[i].write_elements * b * element_bytes
        elif after != block and 0 <= after < blocks:
            out[i] = entering[after]
        elif after != block and blocks:
            out[i] = entering[-1] if isinstance(model.spec, TransformerSpec) else out[i - 1]
        elif found.names[i].split(".")[-1] in JOINS and 0 <= block < blocks and isinstance(model.spec, TransformerSpec):
            out[i] = entering[block]
        elif int(f.kind[row]) in (GEMM, CONV):
            out[i] = batch[row] * m[row] * n[row] * element_bytes
        elif int(f.kind[row]) == ATTENTION:
            out[i] = max(out[j] for j in found.inputs[i])
        else:
            out[i] = max((out[j] for j in found.inputs[i]), default=float(entering[0]) if blocks else 0.0)
    return out


def crossing(found: Graph, sizes: Array) -> tuple[Array, Ints]:
    """(bytes, tensors) that cross the cut behind each node but the last, as running sums over births and deaths."""
    last = found.last_reader()
    count = len(sizes)
    change, number = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    for j in range(count):
        if last[j] > j:
            change[j] += sizes[j]
            change[last[j]] -= sizes[j]
            number[j] += 1
            number[last[j]] -= 1
    return np.cumsum(change)[: count - 1], np.cumsum(number)[: count - 1]


def units(program: Program, model: Model, *, micro_batch: float, seq_len: float, element_bytes: float) -> Units:
    """The units of a network at one micro-batch. A cut may stand wherever the fewest tensors cross: one, and in the
    decoder of an encoder-decoder network the encoder's output beside it."""
    found = graph(program, model)
    sizes = tensor_bytes(program, model, found, micro_batch, seq_len, element_bytes)
    nbytes, tensors = crossing(found, sizes)
    spec = model.spec
    split = spec.layers if isinstance(spec, TransformerSpec) and spec.decoder_layers else None
    allowed = np.ones(len(nbytes), dtype=np.int64)
    if split is not None:
        allowed[(found.block[1:] > split) & (found.block[:-1] >= split)] = 2
    good = (tensors <= allowed) & (nbytes > 0.0)
    if isinstance(spec, TransformerSpec):
        # Tables are added up, heads all read the last hidden state: neither is a chain of its own.
        inside = (found.block[:-1] >= 0) & (found.block[:-1] < len(program.blocks.counts))
        good &= inside | (found.block[1:] == 0) & (found.block[:-1] < 0)
    cut = _worthwhile(program, found, np.flatnonzero(good))
    first = np.concatenate([[0], cut + 1]).astype(np.int64)
    saved = basis(micro_batch, seq_len) @ program.forward.coefficients[SAVED]
    forward = np.add.reduceat(found.forward, first, axis=0)
    elements, matrices = (np.add.reduceat(x, first) for x in (found.elements, found.matrices))
    table = np.zeros(len(first))
    if found.tied:
        table[-1] = found.tied
    entering = np.concatenate([[0.0], nbytes[cut]])
    return Units(
        names=tuple(_title(found, a, b) for a, b in zip(first, [*first[1:], len(sizes)], strict=True)),
        first=first,
        forward_rows=forward,
        backward_rows=np.add.reduceat(found.backward, first, axis=0),
        elements=elements,
        matrices=matrices,
        head_table=table,
        kept_bytes=forward @ saved,
        crossing_bytes=nbytes[cut],
        boundary_bytes=entering,
    )


def _worthwhile(program: Program, found: Graph, cut: Ints) -> Ints:
    """Of cuts with no product or table between them the last, and none without one on either side: a norm or an
    activation alone is no unit."""
    kinds = [_kind(program, np.array(e)) for e in program.node_ends]
    heavy = (found.elements > 0.0) | np.isin(kinds, (GEMM, CONV))
    heavy &= np.array([m not in ("norm", "bn") for m in found.modules])
    before = np.cumsum(heavy)
    kept: list[int] = []
    for at in cut.tolist():
        if before[at] == before[-1] or not before[at]:
            continue
        if kept and before[kept[-1]] == before[at]:
            kept.pop()
        kept.append(at)
    return np.array(kept, dtype=np.int64)


def _title(found: Graph, begin: int, end: int) -> str:
    """The block, if any, and the module with the most parameters."""
    weights: dict[str, float] = {}
    for i in range(begin, end):
        key = found.modules[i].partition(".")[0]
        if key not in ("", "norm", "bn", "relu"):
            weights[key] = weights.get(key, 0.0) + found.elements[i]
    main = max(weights, key=lambda m: weights[m], default=found.names[begin])
    outside = found.block[begin] < 0 or main in ("head", "embedding")
    return main if outside else f"{found.block[begin]}.{main}"


__all__ = ["Graph", "Units", "crossing", "graph", "tensor_bytes", "units"]
