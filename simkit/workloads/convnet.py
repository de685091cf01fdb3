"""A convolutional network: each convolution as an implicit matrix product, everything else by the bytes it moves.

conv forward   out[b·h·w, c_out]      = patches[b·h·w, c_in·k²] W^T          2·b·h·w·c_out·c_in·k²/groups FLOP
     dgrad     dx[b·h_in·w_in, c_in]  = …                                    the same FLOP (none for the first layer)
     wgrad     dW[c_out, c_in·k²]     with inner dimension b·h·w             the same FLOP

Elements read + written per activation by an eager framework: batch norm in training 3 forward (statistics, then
normalise) and 5 backward; ReLU in place 2 and 3; residual add 3 and, where its gradient meets another, 3; pooling its
input and output once each way. Saved: the input of each convolution, of each batch norm and of each max pool with the
eight-byte indices of its maxima; the mask-bearing output of a ReLU is the input of what follows, and is counted there.
"""

from __future__ import annotations

from simkit.program import ONE, ZERO, B, Node, Program, Recorder, matmul, stream
from simkit.roofline import CONV, GEMM, Array
from simkit.spec.model import ConvLayer, ConvSpec, Model
from simkit.workloads import Numerics

INDEX_BYTES = 8.0


def build(model: Model, numerics: Numerics) -> Program:
    """The Program of a ConvSpec at its image size; only the batch scales it.

    Blocks for recomputation: what stands between one tensor of a new `Tensor.layer` and the next.
    """
    spec = model.spec
    assert isinstance(spec, ConvSpec)
    recorder = Recorder()
    block_of = {t.name: t.layer for t in model.tensors}
    nodes: list[Node] = []
    current, entering = -1, ZERO
    before: ConvLayer | None = None
    for layer in spec.layers:
        index = block_of[layer.tensors[0]] if layer.tensors else (current if layer.op != "avgpool" else -1)
        if index != current:
            recorder.add(nodes, block=entering if current >= 0 else None)
            nodes, current, entering = [], index, numerics.element_bytes * _before(layer)
        nodes.append(_node(layer, numerics, before))
        before = layer
    recorder.add(nodes, block=entering if current >= 0 else None)
    last = B * float(spec.layers[-1].c_out)
    loss = stream("cross_entropy", "head", 24.0 * last, kernels=3.0)
    recorder.add([Node((loss,), (stream("cross_entropy.grad", "head", 16.0 * last),))])
    return recorder.program([t.name for t in model.tensors], logits=8.0 * last)


def _before(layer: ConvLayer) -> Array:
    return B * float(layer.c_in * layer.h_in * layer.w_in)


def _after(layer: ConvLayer) -> Array:
    return B * float(layer.c_out * layer.h_out * layer.w_out)


def _node(layer: ConvLayer, numerics: Numerics, previous: ConvLayer | None) -> Node:
    """Bytes read and written, forward and backward, and bytes saved, of what is no product."""
    if layer.op in ("conv", "linear"):
        return _product(layer, numerics, previous)
    e, before, after = numerics.element_bytes, _before(layer), _after(layer)
    touches: dict[str, tuple[Array, Array, Array]] = {
        "bn": (3.0 * e * after, 5.0 * e * after, e * after),
        "relu": (2.0 * e * after, 3.0 * e * after, ZERO),
        "add": (3.0 * e * after, 3.0 * e * after, ZERO),
        "dropout": ((2.0 * e + 1.0) * after, (2.0 * e + 1.0) * after, after),
        "maxpool": (
            e * (before + after) + INDEX_BYTES * after,
            e * (before + after) + INDEX_BYTES * after,
            e * before + INDEX_BYTES * after,
        ),
        "avgpool": (e * (before + after), e * (before + after), ZERO),
    }
    forward, backward, saved = touches[layer.op]
    return Node(
        (stream(layer.name, layer.op, forward, saved=saved),),
        (stream(f"{layer.name}.grad", layer.op, backward, trains=layer.tensors),),
    )


def _product(layer: ConvLayer, numerics: Numerics, previous: ConvLayer | None) -> Node:
    e, cast = numerics.element_bytes, numerics.cast_bytes
    kind = CONV if layer.op == "conv" else GEMM
    name, module = layer.name, "conv" if kind == CONV else "head"
    area, groups = float(layer.kernel**2), ONE * float(layer.groups)
    depth, n = float(layer.c_in // layer.groups) * area, float(layer.c_out // layer.groups)
    m_out, m_in = B * float(layer.h_out * layer.w_out), B * float(layer.h_in * layer.w_in)
    weights = ONE * (layer.c_out * depth)
    flops = m_out * (2.0 * layer.c_out * depth)
    nbytes = e * (_before(layer) + _after(layer) + weights)
    # A projection of the shortcut reads what the first convolution of its block has kept.
    shortcut = kind == CONV and previous is not None and (previous.c_out, previous.h_out) != (layer.c_in, layer.h_in)
    forward = [matmul(
        name, module, kind=kind, batch=groups, m=m_out, n=ONE * n, k=ONE * depth, flops=flops, nbytes=nbytes,
        saved=ZERO if shortcut else e * _before(layer),
    )]
    backward = []
    if previous is not None:
        # A strided convolution spreads the same products over stride² as many positions.
        inner = ONE * (n * area / layer.stride**2)
        backward.append(matmul(
            f"{name}.dgrad", module, kind=kind, batch=groups, m=m_in, n=ONE * (depth / area), k=inner, flops=flops,
            nbytes=nbytes,
        ))
    if layer.op == "linear":
        backward.append(stream(f"{name}.bias_grad", module, e * _after(layer)))
    backward.append(matmul(
        f"{name}.wgrad", module, kind=kind, batch=groups, m=ONE * n, n=ONE * depth, k=m_out, flops=flops, nbytes=nbytes,
        trains=() if cast else layer.tensors,
    ))
    if cast:
        forward.insert(0, stream(f"{name}.cast", module, weights * cast))
        backward.append(stream(f"{name}.grad_cast", module, weights * cast, trains=layer.tensors))
    return Node(tuple(forward), tuple(backward))
