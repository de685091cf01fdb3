"""The attention core: scores, softmax and context, by separate kernels (``math``) or one fused kernel (``flash``).

math   scores = q k^T (2 s² d per head), scale, mask, softmax, dropout, context = p v (2 s² d_v); backward twice as much
flash  the same products over the unmasked part alone: s²/2 with a causal mask, s·w with a window of w keys, s·w - w²/2
       with both; backward 2.5 times, since the scores are computed again (arXiv 2307.08691)
"""

from __future__ import annotations

from simkit.program import BS, BSS, ONE, ZERO, B, Node, Op, S, matmul
from simkit.roofline import ATTENTION, ATTENTION_GRAD, Array
from simkit.workloads._pieces import FP32_BYTES, Writer

FLASH_BACKWARD = 2.5


def core(writer: Writer, module: str, *, causal: bool, window: int | None) -> list[Node]:
    """Everything between the projections of q, k, v and that of the context."""
    spec, e = writer.spec, writer.e
    q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    v_width, out_width = spec.kv_heads * spec.value_dim, spec.heads * spec.value_dim
    copies = BS * (q_width + k_width + v_width)
    nodes: list[Node] = []
    if spec.positional == "rope":
        nodes.append(
            writer.pointwise("rotary", module, BS * (q_width + k_width), 6.0, 6.0, kernels=6.0, divides="bytes")
        )
    if writer.numerics.attention == "flash":
        return [*nodes, _flash(writer, module, e * copies, e * (BS * out_width), causal=causal, window=window)]
    return [
        *nodes,
        writer.pointwise("split_heads", module, copies, 2.0, 2.0, saved=e * copies, kernels=3.0, divides="bytes"),
        *_math(writer, module),
        writer.pointwise("merge_heads", module, BS * out_width, 2.0, 2.0, divides="bytes"),
    ]


def _flash(writer: Writer, module: str, operands: Array, result: Array, *, causal: bool, window: int | None) -> Node:
    """Keeps q, k, v and one fp32 log-sum-exp a row; the result is kept as the input of the next projection."""
    spec = writer.spec
    m, n, width = S, S, float(spec.head_dim + spec.value_dim)
    pairs = BSS
    if window is not None and writer.numerics.windowed:
        m, n = S - ONE * (window / 2.0 if causal else 0.0), ONE * float(window)
        pairs = BS * float(window) - B * (window**2 / 2.0 if causal else 0.0)
    elif causal:
        width *= 0.5

    def kernel(name: str, kind: int, factor: float, nbytes: Array, saved: Array = ZERO) -> Op:
        return matmul(
            name,
            module,
            kind=kind,
            batch=B * spec.heads,
            m=m,
            n=n,
            k=ONE * (width * factor),
            flops=pairs * (2.0 * spec.heads * width * factor),
            nbytes=nbytes,
            saved=saved,
            divides="batch",
        )

    moved = operands + result
    forward = kernel("flash", ATTENTION, 1.0, moved, operands + BS * (FP32_BYTES * spec.heads))
    return Node((forward,), (kernel("flash.grad", ATTENTION_GRAD, FLASH_BACKWARD, 2.0 * moved),))


PLAIN_SOFTMAX = (36.0, 40.0)
"""Bytes a score, forward and backward, of a masked softmax in fp32 that no kernel fuses: cast up 2 + 4, scale 4 + 4,
mask 4 + 4, softmax 4 + 4, cast down 4 + 2; backward cast 2 + 4, softmax 8 + 4, mask 4 + 4, scale 4 + 4, cast 4 + 2.
Counted on `FusedScaleMaskSoftmax.forward_torch_softmax` of Megatron-LM (megatron/model/fused_softmax.py)."""


def _softmax(writer: Writer, module: str, scores: Array) -> Node:
    """The softmax of the scores; kept are the probabilities, besides their fp32 form where nothing fuses it."""
    if not writer.numerics.plain_softmax:
        return writer.pointwise("softmax", module, scores, 2.0, 3.0, saved=scores * writer.e, divides="bytes")
    there, back = (nbytes / writer.e for nbytes in PLAIN_SOFTMAX)
    saved = scores * (writer.e + FP32_BYTES)
    return writer.pointwise("softmax", module, scores, there, back, saved=saved, kernels=5.0, divides="bytes")


def _math(writer: Writer, module: str) -> list[Node]:
    spec, e = writer.spec, writer.e
    scores, copies = BSS * spec.heads, B * spec.heads

    def product(name: str, depth: int, *, inner: bool) -> Op:
        """scores = q k^T (n = s) or context = p v (inner dimension s)."""
        m, n, k = (S, ONE * depth, S) if inner else (S, S, ONE * depth)
        nbytes = e * (scores + BS * ((spec.heads + spec.kv_heads) * depth))
        return matmul(
            name, module, batch=copies, m=m, n=n, k=k, flops=scores * (2.0 * depth), nbytes=nbytes, divides="batch"
        )

    d, v = spec.head_dim, spec.value_dim
    nodes = [
        Node((product("qk", d, inner=False),), (product("qk.dq", d, inner=True), product("qk.dk", d, inner=True))),
        writer.pointwise("scale", module, scores, 2.0, 2.0, divides="bytes"),
        writer.pointwise("mask", module, scores, 2.0, 0.0, divides="bytes"),
        _softmax(writer, module, scores),
    ]
    if writer.dropout:
        nodes.append(
            writer.pointwise(
                "score_dropout", module, scores, 2.0, 2.0, extra=1.0, saved=scores * (e + 1.0), divides="bytes"
            )
        )
    context = Node((product("pv", v, inner=True),), (product("pv.dp", v, inner=False), product("pv.dv", v, inner=True)))
    return [*nodes, context]
