"""The MLP of a block: dense, or a router with routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping

from simkit.program import BS, Node
from simkit.spec.model import Tensor
from simkit.workloads._pieces import Group, Writer


def mlp(writer: Writer, parts: Mapping[str, Group], *, input_kept: bool = False) -> list[Node]:
    """Dense MLP, or router + routed experts + shared expert. input_kept: another branch keeps the same input."""
    spec = writer.spec
    nodes: list[Node] = []
    kept = frozenset({spec.hidden}) if input_kept else frozenset()
    widths = {"mlp": spec.ffn, "experts": spec.moe_ffn * max(spec.top_k, 1), "shared_expert": spec.shared_ffn}
    for module in ("router", "mlp", "experts", "shared_expert"):
        group = parts.get(module, ())
        if not group:
            continue
        if module == "router":
            stray = tuple(str(i) for i, t in group if len(t.shape) == 1)
            nodes += writer.linears(group, kept=kept)
            scores = BS * float(spec.experts)
            nodes.append(writer.pointwise("routing", module, scores, 4.0, 4.0, trains=stray, kernels=4.0))
            kept = frozenset({spec.hidden})
            continue
        # Routed experts read a copy of the tokens, one for each expert that a token goes to.
        nodes += _activated(writer, module, group, float(widths[module]), frozenset() if module == "experts" else kept)
    return nodes


def _activated(writer: Writer, module: str, group: Group, width: float, kept: frozenset[int]) -> list[Node]:
    """up (and gate), activation, down; the activation keeps its input and the product its two factors."""
    layers: list[list[tuple[int, Tensor]]] = []
    for item in group:
        if len(item[1].shape) > 1:
            layers.append([item])
        else:
            layers[-1].append(item)
    # The way down runs last, wherever it is registered (between the two others in Mixtral).
    narrowing = [i for i, layer in enumerate(layers) if layer[0][1].shape[0] < layer[0][1].shape[-1]]
    down = layers.pop(narrowing[-1] if len(narrowing) == 1 else -1)
    ups = writer.linears([item for layer in layers for item in layer], divides="n", kept=kept)
    e = writer.e
    between = [writer.pointwise("activation", module, BS * width, 2.0, 3.0, saved=BS * (width * e), divides="bytes")]
    if writer.spec.gated_mlp:
        between.append(
            writer.pointwise("gate", module, BS * width, 3.0, 5.0, saved=BS * (2.0 * width * e), divides="bytes")
        )
    return [*ups, *between, *writer.linears(down, divides="k")]
