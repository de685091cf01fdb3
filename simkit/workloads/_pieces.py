"""The pieces every transformer is written in: products with their weights, point-wise chains, norms, residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simkit.program import BS, ONE, ZERO, Node, matmul, stream
from simkit.roofline import Array
from simkit.spec.model import Tensor, TransformerSpec
from simkit.workloads import Numerics

DROPOUT_FAMILIES = frozenset({"bert", "roberta", "distilbert", "gpt2", "gpt3", "opt", "t5"})
"""Families whose published configuration trains with dropout 0.1; later decoders train without."""
FP32_BYTES = 4.0
_BACKWARD_DIVIDES = {"n": ("k", "m"), "k": ("n", "n"), "": ("", "")}
"""Which dimension of the data gradient dx[t,k] and of the weight gradient dW[n,k] is divided, by the forward one."""
Group = Sequence[tuple[int, Tensor]]
"""Tensors of one part of a block with their positions in the block, which are the keys of `Op.trains`."""


class Writer:
    """Writes nodes of one network under given numerics."""

    def __init__(self, spec: TransformerSpec, numerics: Numerics) -> None:
        self.spec, self.numerics = spec, numerics
        self.e = numerics.element_bytes
        self.dropout = spec.model_type in DROPOUT_FAMILIES

    def linear(
        self,
        name: str,
        module: str,
        n: int,
        k: int,
        *,
        trains: tuple[str, ...],
        tokens: Array = BS,
        batch: float = 1.0,
        bias: bool = False,
        saved: Array = ZERO,
        inputs_need_gradient: bool = True,
        divides: str = "",
    ) -> Node:
        """y[t,n] = x[t,k] W[n,k]^T + b, `batch` copies of t/batch rows each (routed experts).

        divides: ``n`` = column-parallel, ``k`` = row-parallel, empty = the weight is replicated.
        """
        data, weight = _BACKWARD_DIVIDES[divides]
        held = "bytes" if divides else ""
        e, cast = self.e, self.numerics.cast_bytes
        weights = ONE * (batch * n * k)
        nbytes = e * (tokens * (n + k) + weights)
        flops = tokens * (2.0 * n * k)
        m, copies, rows, inner = tokens / batch, ONE * batch, ONE * n, ONE * k
        forward = [
            matmul(
                name, module, batch=copies, m=m, n=rows, k=inner, flops=flops, nbytes=nbytes, saved=saved,
                divides=divides,
            )
        ]
        backward = []
        if inputs_need_gradient:
            backward.append(
                matmul(
                    f"{name}.dgrad", module, batch=copies, m=m, n=inner, k=rows, flops=flops, nbytes=nbytes,
                    divides=data,
                )
            )
        if bias:
            backward.append(stream(
                f"{name}.bias_grad", module, e * (tokens * n), divides="bytes" if divides == "n" else "sequence"
            ))
        backward.append(matmul(
            f"{name}.wgrad", module, batch=copies, m=rows, n=inner, k=m, flops=flops, nbytes=nbytes,
            trains=() if cast else trains, divides=weight,
        ))
        if cast:
            forward.insert(0, stream(f"{name}.cast", module, weights * cast, divides=held))
            backward.append(stream(f"{name}.grad_cast", module, weights * cast, trains=trains, divides=held))
        return Node(tuple(forward), tuple(backward))

    def linears(self, group: Group, *, divides: str = "", kept: frozenset[int] = frozenset()) -> list[Node]:
        """One node per weight of `group`; a bias that follows its weight is trained with it. divides: as in `linear`;
        the low-rank projections of MLA are replicated.

        Weights of equal inner width read the same tensor, kept once; kept: widths whose tensor is kept already.
        """
        nodes: list[Node] = []
        held = set(kept)
        for position, (index, tensor) in enumerate(group):
            if len(tensor.shape) < 2:
                continue
            follower = group[position + 1] if position + 1 < len(group) else None
            keys: tuple[str, ...] = (str(index),)
            if follower is not None and len(follower[1].shape) == 1:
                keys += (str(follower[0]),)
            n, k = tensor.shape[0], math.prod(tensor.shape[1:])
            expert = tensor.role == "expert"
            tokens = BS * self.spec.top_k if expert else BS
            nodes.append(self.linear(
                _short(tensor.name), tensor.module, n, k, trains=keys, tokens=tokens,
                batch=float(tensor.repeat) if expert else 1.0, bias=len(keys) > 1,
                saved=ZERO if k in held else tokens * (k * self.e),
                divides="" if "_a_proj" in tensor.name else divides,
            ))
            held.add(k)
        return nodes

    def pointwise(
        self,
        name: str,
        module: str,
        width: Array,
        forward: float,
        backward: float,
        *,
        extra: float = 0.0,
        saved: Array = ZERO,
        trains: tuple[str, ...] = (),
        kernels: float = 1.0,
        divides: str = "sequence",
    ) -> Node:
        """A chain that touches `forward` (`backward`) elements per unit of width, plus `extra` bytes of masks."""
        if self.numerics.compiled:
            forward, backward, kernels = min(forward, 2.0), min(backward, 3.0), 1.0
        if name in self.numerics.fused:
            forward, backward, kernels = 0.0, 0.0, 0.0
        there, back = width * (self.e * forward + extra), width * (self.e * backward + extra)
        return Node(
            (stream(name, module, there, saved=saved, kernels=kernels, divides=divides),),
            (stream(f"{name}.grad", module, back, trains=trains, kernels=kernels, divides=divides),),
        )

    def norm(self, name: str, keys: tuple[str, ...], width: float = 0.0) -> Node:
        """LayerNorm is one kernel and keeps its input. Eager RMSNorm runs as square, mean, rsqrt and two products in
        fp32, and keeps the fp32 input of the first product and the input of the second (LlamaRMSNorm of transformers).
        """
        h = width or self.spec.hidden
        if self.spec.norm == "layernorm" or "rmsnorm" in self.numerics.fused:
            return self.pointwise(name, "norm", BS * h, 2.0, 5.0, saved=BS * (h * self.e), trains=keys)
        held = self.e if self.numerics.compiled else self.e + FP32_BYTES
        return self.pointwise(name, "norm", BS * h, 8.0, 12.0, saved=BS * (h * held), trains=keys, kernels=5.0)

    def residual(self, module: str) -> list[Node]:
        """Dropout where the family trains with it, then the addition."""
        h, nodes = self.spec.hidden, []
        if self.dropout:
            nodes.append(self.pointwise("dropout", module, BS * h, 2.0, 2.0, extra=1.0, saved=BS * h))
        return [*nodes, self.pointwise("residual", module, BS * h, 3.0, 3.0)]


def _short(name: str) -> str:
    """``encoder.layer.3.attention.query.weight`` -> ``query``."""
    return name.split(".")[-2] if "." in name else name
