"""A traced `nn.Module`: its recorded forward pass, and the backward pass automatic differentiation derives from it.

product with a weight   forward 2·m·n·k FLOPs, input gradient the same, weight gradient the same
product of activations  forward, and one product of equal size for the gradient of each operand
fused attention         forward, and 2.5 times as many FLOPs backward, since the scores are computed again
                        (arXiv 2205.14135, appendix B)
everything else         moves its bytes: forward reads and writes, backward reads what forward read and, for each
                        element written, one gradient in and one out

The loss of a traced network is unknown and left out. Saved for the backward pass: the inputs of products, norms and
max pools, the operands and the result of attention, the outputs of curved functions; ReLU keeps what the next operator
keeps anyway. A product that reads another size than was just written reads an earlier tensor (a shortcut, the second
branch of a gated MLP); where a product has kept one of that size it is the same one.
"""

from __future__ import annotations

from simkit.program import ONE, ZERO, B, Node, Op, Program, Recorder, matmul, stream
from simkit.roofline import ATTENTION, ATTENTION_GRAD, CONV, GEMM, Array
from simkit.spec.model import Model, TracedOp, TracedSpec
from simkit.workloads import Numerics

PRODUCTS = {"gemm": GEMM, "conv": CONV, "attention": ATTENTION}
CURVED = frozenset({
    "softmax", "safe_softmax", "log_softmax", "gelu", "silu", "tanh", "sigmoid", "elu", "mish", "softplus", "exp",
    "log", "pow", "sqrt", "rsqrt", "sin", "cos", "mul", "div",
})
ATTENTION_BACKWARD = 2.5
FP32_BYTES = 4.0


def build(model: Model, numerics: Numerics) -> Program:
    """The Program of a TracedSpec: only the batch scales it; its sequence length is that of the trace."""
    spec = model.spec
    assert isinstance(spec, TracedSpec)
    shapes = {t.name: t.numel for t in model.tensors}
    recorder = Recorder()
    first = next((i for i, op in enumerate(spec.ops) if op.kind in PRODUCTS and op.tensors), -1)
    kept: set[float] = set()
    written = 0.0
    for position, op in enumerate(spec.ops):
        weights = float(sum(shapes[name] for name in op.tensors))
        again = bool(op.tensors) and op.read_elements != written and op.read_elements in kept
        recorder.add([_node(op, weights, numerics, first=position == first, again=again)])
        written = op.write_elements
        if op.kind in PRODUCTS:
            kept.add(op.read_elements)
    return recorder.program([t.name for t in model.tensors])


def _node(op: TracedOp, weights: float, numerics: Numerics, *, first: bool, again: bool) -> Node:
    if op.kind == "attention":
        return _attention(op, numerics)
    if op.kind in PRODUCTS:
        return _product(op, weights, numerics, first=first, again=again)
    return _moves(op, weights, numerics)


def _nbytes(op: TracedOp, element_bytes: float) -> Array:
    return element_bytes * (B * (op.read_elements + op.write_elements) + ONE * op.fixed_elements)


def _sides(op: TracedOp) -> tuple[Array, Array, Array, Array, Array]:
    """batch, m, n, k and FLOPs as polynomials of the batch."""
    sides = {"batch": op.batch, "m": op.m, "n": op.n, "k": op.k}
    batch, m, n, k = ((B if name == op.scales else ONE) * size for name, size in sides.items())
    flops = (B if op.scales else ONE) * (2.0 * op.batch * op.m * op.n * op.k)
    return batch, m, n, k, flops


def _product(op: TracedOp, weights: float, numerics: Numerics, *, first: bool, again: bool) -> Node:
    e, cast = numerics.element_bytes, numerics.cast_bytes if op.tensors else 0.0
    batch, m, n, k, flops = _sides(op)
    nbytes, kind = _nbytes(op, e), PRODUCTS[op.kind]

    def product(
        suffix: str, rows: Array, columns: Array, inner: Array, *, saved: Array = ZERO, trains: tuple[str, ...] = ()
    ) -> Op:
        return matmul(
            op.name + suffix, op.kind, kind=kind, batch=batch, m=rows, n=columns, k=inner, flops=flops, nbytes=nbytes,
            saved=saved, trains=trains,
        )

    forward = [product("", m, n, k, saved=ZERO if again else e * op.read_elements * B)]
    backward = [] if first else [product(".dgrad", m, k, n)]
    backward.append(product(".wgrad", n, k, m, trains=() if cast else op.tensors))
    if cast:
        forward.insert(0, stream(f"{op.name}.cast", op.kind, ONE * (weights * cast)))
        backward.append(stream(f"{op.name}.grad_cast", op.kind, ONE * (weights * cast), trains=op.tensors))
    return Node(tuple(forward), tuple(backward))


def _attention(op: TracedOp, numerics: Numerics) -> Node:
    e = numerics.element_bytes
    batch, m, n, k, flops = _sides(op)
    nbytes = _nbytes(op, e)
    forward = matmul(
        op.name, "attention", kind=ATTENTION, batch=batch, m=m, n=n, k=k, flops=flops, nbytes=nbytes, saved=nbytes,
    )
    backward = matmul(
        f"{op.name}.grad", "attention", kind=ATTENTION_GRAD, batch=batch, m=m, n=n, k=k * ATTENTION_BACKWARD,
        flops=flops * ATTENTION_BACKWARD, nbytes=2.0 * nbytes,
    )
    return Node((forward,), (backward,))


def _moves(op: TracedOp, weights: float, numerics: Numerics) -> Node:
    """A look-up's gradient is dense: the table is zeroed and scattered into."""
    e = numerics.element_bytes
    name = op.name.rpartition(".")[2]
    backward = e * (B * (op.read_elements + 2.0 * op.write_elements) + ONE * op.fixed_elements)
    if name.startswith("embedding"):
        backward = backward + ONE * (FP32_BYTES * weights)
    saved = ZERO
    if op.tensors and not name.startswith("embedding"):
        saved = e * op.read_elements * B
    elif name.startswith("max_pool"):
        # Of three four-byte elements written two are the eight-byte index of the maximum, which is kept.
        saved = (e * op.read_elements + FP32_BYTES * op.write_elements * 2.0 / 3.0) * B
    elif name.strip("_") in CURVED:
        saved = e * op.write_elements * B
    return Node(
        (stream(op.name, op.kind, _nbytes(op, e), saved=saved),),
        (stream(f"{op.name}.grad", op.kind, backward, trains=op.tensors),),
    )
