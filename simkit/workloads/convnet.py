"""A convolutional network: each convolution as an implicit matrix product, everything else by the bytes it moves.

conv forward   out[b·h·w, c_out]      = patches[b·h·w, c_in·k²] W^T          2·b·h·w·c_out·c_in·k²/groups FLOP
     dgrad     dx[b·h_in·w_in, c_in]  = …                                    the same FLOP (none for the first layer)
     wgrad     dW[c_out, c_in·k²]     with inner dimension b·h·w             the same FLOP

Elements read + written per activation by an eager framework: batch norm in training 3 forward (statistics, then normalise) and 5
backward; ReLU in place 2 and 3; residual add 3 and, where its gradient meets another, 3; pooling its input and output
once each way. Saved: the input of each convolution, the input of each batch norm, the mask-bearing output of each ReLU
(which is the input of the next convolution, and is counted there).
"""

from __future__ import annotations

from simkit.program import BS, ONE, ZERO, B, Node, Program, Recorder, matmul, stream
from simkit.roofline import CONV, GEMM
from simkit.spec.model import ConvLayer, ConvSpec, Model
from simkit.workloads import Numerics

__all__ = ["BS", "build"]


def build(model: Model, numerics: Numerics) -> Program:
    """The Program of a ConvSpec at its image size; only the batch scales it."""
    spec = model.spec
    assert isinstance(spec, ConvSpec)
    recorder = Recorder()
    for position, layer in enumerate(spec.layers):
        recorder.add([_node(layer, numerics, first=position == 0)])
    last = spec.layers[-1].c_out
    loss = Node((stream("cross_entropy", "head", B * (last * 24.0), kernels=3.0),), (stream("cross_entropy.grad", "head", B * (last * 16.0)),))
    recorder.add([loss])
    return recorder.program([t.name for t in model.tensors], logits=B * (last * 8.0))


def _node(layer: ConvLayer, numerics: Numerics, *, first: bool) -> Node:
    e = numerics.element_bytes
    before = B * float(layer.c_in * layer.h_in * layer.w_in)
    after = B * float(layer.c_out * layer.h_out * layer.w_out)
    if layer.op in ("conv", "linear"):
        return _product(layer, numerics, first=first)
    touches = {
        "bn": (3.0 * after, 5.0 * after, after),
        "relu": (2.0 * after, 3.0 * after, ZERO),
        "add": (3.0 * after, 3.0 * after, ZERO),
        "dropout": (2.25 * after, 2.25 * after, 0.25 * after),
        "maxpool": (before + after, before + 2.0 * after, after * 2.0),
        "avgpool": (before + after, before + after, ZERO),
    }
    forward, backward, saved = touches[layer.op]
    return Node(
        (stream(layer.name, layer.op, e * forward, saved=e * saved),),
        (stream(f"{layer.name}.grad", layer.op, e * backward, trains=layer.tensors),),
    )


def _product(layer: ConvLayer, numerics: Numerics, *, first: bool) -> Node:
    e, cast = numerics.element_bytes, numerics.cast_bytes
    kind = CONV if layer.op == "conv" else GEMM
    depth = float(layer.c_in // layer.groups * layer.kernel**2)
    n = float(layer.c_out // layer.groups)
    groups = ONE * float(layer.groups)
    m_out, m_in = B * float(layer.h_out * layer.w_out), B * float(layer.h_in * layer.w_in)
    inputs, outputs = B * float(layer.c_in * layer.h_in * layer.w_in), B * float(layer.c_out * layer.h_out * layer.w_out)
    weights = ONE * float(layer.c_out * depth)
    flops = m_out * (2.0 * layer.c_out * depth)
    nbytes = e * (inputs + outputs + weights)
    name, module = layer.name, "conv" if kind == CONV else "head"
    forward = [matmul(name, module, kind=kind, batch=groups, m=m_out, n=ONE * n, k=ONE * depth, flops=flops, nbytes=nbytes, saved=e * inputs)]
    backward = []
    if not first:
        # A strided convolution spreads the same products over stride² as many positions.
        spread = float(layer.stride**2)
        backward.append(matmul(f"{name}.dgrad", module, kind=kind, batch=groups, m=m_in, n=ONE * (depth / layer.kernel**2), k=ONE * (n * layer.kernel**2 / spread), flops=flops, nbytes=nbytes))
    if layer.op == "linear":
        backward.append(stream(f"{name}.bias_grad", module, e * outputs))
    trains = layer.tensors
    backward.append(matmul(f"{name}.wgrad", module, kind=kind, batch=groups, m=ONE * n, n=ONE * depth, k=m_out, flops=flops, nbytes=nbytes, trains=() if cast else trains))
    if cast:
        forward.insert(0, stream(f"{name}.cast", module, weights * cast))
        backward.append(stream(f"{name}.grad_cast", module, weights * cast, trains=trains))
    return Node(tuple(forward), tuple(backward))
