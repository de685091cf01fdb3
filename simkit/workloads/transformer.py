"""Any transformer, derived from its tensors: one matrix product per weight, the attention core, and what moves bytes.

Per token and layer an eager framework touches, beside the products, (elements read + written, width h unless said):

    norm 2 (backward 5)      residual 3 (3)      dropout 2 + 1 byte of mask (2 + 1)    activation 2·f (3·f)
    gated product 3·f (5·f)  copies of q, k, v and of the context 2 each (2 each)      bias gradients 1 each (backward)

and per attention score with the math kernel: scale 2, mask 2, softmax 2, dropout 2 + 1 byte (backward: dropout 2 + 1,
softmax 3, scale 2). A compiler leaves one read and one write per fused chain. Saved bytes follow Korthikanti et al.
(arXiv 2205.05198, section 4.1): 34 s·b·h + 5 a·s²·b for a 16-bit GPT layer with dropout, which a test recounts.
Matrix products: forward 2·t·n·k FLOP, backward the same twice; attention: see `_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from simkit.program import BS, BSS, ZERO, Node, Program, Recorder
from simkit.roofline import Array
from simkit.spec.model import Model, Tensor, TransformerSpec
from simkit.workloads import Numerics, _attention, _ends, _mlp
from simkit.workloads._pieces import Writer

ATTENTION_MODULES = ("attention", "cross_attention")


def build(model: Model, numerics: Numerics) -> Program:
    """The Program of a transformer; sequence length s counts tokens per sample (patches + 1 for a ViT)."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    recorder = Recorder()
    writer = Writer(spec, numerics)
    tables, last = _split([t for t in model.tensors if t.layer < 0])
    recorder.add(_ends.embedding(writer, tables))
    for nodes, rename in _blocks(model.tensors, writer):
        recorder.add(nodes, rename, block=BS * (spec.hidden * writer.e))
    recorder.add(_ends.head(writer, last, tables))
    found = recorder.program(
        [t.name for t in model.tensors], logits=_ends.logits_bytes(writer), model_flops=_model_flops(model, writer)
    )
    return replace(found, selective=numerics.selective)


def _split(outside: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors before the blocks (tables, patch convolution, the norm that follows them) and after them."""
    first_head = next((i for i, t in enumerate(outside) if t.module == "head"), len(outside))
    tables = [i for i, t in enumerate(outside) if t.module in ("embedding", "conv")]
    before = set(tables)
    # A norm with the tables' prefix is the embedding norm (BERT, BLOOM); any other is the final norm.
    for i in range(max(tables, default=-1) + 1, first_head):
        norm = outside[i].module == "norm" and "embed" in outside[i].name.lower()
        if norm or outside[i].module == "conv" or (outside[i].name.endswith("bias") and i - 1 in before):
            before.add(i)
    return [t for i, t in enumerate(outside) if i in before], [t for i, t in enumerate(outside) if i not in before]


def _blocks(tensors: Iterable[Tensor], writer: Writer) -> Iterable[tuple[list[Node], dict[str, tuple[str, ...]]]]:
    """Per layer its nodes (shared between layers of equal shape) and the names behind the keys."""
    layers: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layer >= 0:
            layers.setdefault(tensor.layer, []).append(tensor)
    built: dict[tuple[object, ...], list[Node]] = {}
    for index in sorted(layers):
        group = layers[index]
        causal, window = _causal(writer.spec, index), _window(writer, index)
        signature = (causal, window, *((t.module, t.shape, t.role, t.repeat) for t in group))
        if signature not in built:
            built[signature] = _block(writer, group, causal=causal, window=window)
        yield built[signature], {str(i): (t.name,) for i, t in enumerate(group)}


def _causal(spec: TransformerSpec, index: int) -> bool:
    """Whether the self-attention of block `index` looks back only."""
    if spec.kind == "encoder-decoder":
        return index >= spec.layers
    return spec.kind == "decoder" and spec.causal


def _window(writer: Writer, index: int) -> int | None:
    """Keys a query of block `index` sees, where that is fewer than the sequence."""
    return writer.spec.attention_window(index) if writer.numerics.windowed and index < writer.spec.layers else None


def _block(writer: Writer, group: Sequence[Tensor], *, causal: bool, window: int | None) -> list[Node]:
    spec = writer.spec
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(group):
        parts.setdefault(tensor.module, []).append((index, tensor))
    all_norms = parts.get("norm", [])
    norms = _norm_pairs([p for p in all_norms if p[1].shape[0] == spec.hidden])
    inner = [str(i) for i, t in all_norms if t.shape[0] != spec.hidden]
    inner += [str(i) for i, _ in parts.get("attention.sinks", [])]
    nodes: list[Node] = []
    for position, (module, body) in enumerate(_branches(writer, parts, len(norms), causal=causal, window=window)):
        norm = [writer.norm(f"norm{position}", norms[position])] if position < len(norms) else []
        if position == 0 and inner:
            norm.append(writer.norm("qk_norm", tuple(inner), float(spec.heads * spec.head_dim)))
        tail = writer.residual(module)
        nodes += [*body, *tail, *norm] if spec.post_norm else [*norm, *body, *tail]
        written = position + 1
    nodes += [writer.norm(f"norm{i}", norms[i]) for i in range(written, len(norms))]
    stray = tuple(str(i) for m in ("embedding", "mtp_projection", "head") for i, _ in parts.get(m, []))
    if stray:
        nodes.append(writer.pointwise("position_bias", "attention", BSS * spec.heads, 0.0, 0.0, trains=stray))
    return nodes


def _branches(
    writer: Writer, parts: dict[str, list[tuple[int, Tensor]]], norms: int, *, causal: bool, window: int | None
) -> list[tuple[str, list[Node]]]:
    """Self-attention, cross-attention and MLP, each without its norm and residual."""
    branches: list[tuple[str, list[Node]]] = []
    for module in ATTENTION_MODULES:
        if f"{module}.qkv" in parts:
            own = module == "attention"
            body = writer.linears(parts[f"{module}.qkv"], divides="n")
            body += _attention.core(writer, module, causal=causal and own, window=window if own else None)
            branches.append((module, [*body, *writer.linears(parts.get(f"{module}.out", []), divides="k")]))
    # Parallel branches under one norm read the same tensor.
    shared = writer.spec.parallel_residual and norms == 1
    return [*branches, ("mlp", _mlp.mlp(writer, parts, input_kept=shared))]


def _norm_pairs(norms: Sequence[tuple[int, Tensor]]) -> list[tuple[str, ...]]:
    """Keys of a norm's weight and, where it follows, its bias."""
    pairs: list[tuple[str, ...]] = []
    for index, tensor in norms:
        if tensor.name.endswith("bias") and pairs and len(pairs[-1]) == 1:
            pairs[-1] += (str(index),)
        else:
            pairs.append((str(index),))
    return pairs


def _model_flops(model: Model, writer: Writer) -> Array:
    """Forward FLOPs as `simkit.count` counts them: 2 per weight and token that meets it, and in attention 2·a·(d + d_v)
    per pair of query and key, min(s, window) keys a query, never halved for a causal mask (PaLM, arXiv 2204.02311,
    appendix B). A look-up is no product; a tied head is one."""
    spec = writer.spec
    total = ZERO.copy()
    cores: dict[tuple[int, str], None] = {}
    for t in model.tensors:
        if t.module.endswith("attention.qkv"):
            cores[t.layer, t.module] = None
        if t.role == "embedding" or len(t.shape) < 2:
            continue
        if t.role == "expert":
            total = total + BS * (2.0 * math.prod(t.shape) * min(spec.top_k, t.repeat))
        else:
            tokens = _ends.positions(writer, t) if t.module in ("head", "conv") else BS
            total = total + tokens * (2.0 * t.numel)
    if spec.tied and spec.vocab and spec.has_vocab_head:
        total = total + BS * (_ends.share(writer) * 2.0 * spec.vocab * spec.hidden)
    per_pair = 2.0 * spec.heads * (spec.head_dim + spec.value_dim)
    for layer, module in cores:
        window = _window(writer, layer) if module == "attention.qkv" else None
        total = total + (BSS if window is None else BS * float(window)) * per_pair
    return total
