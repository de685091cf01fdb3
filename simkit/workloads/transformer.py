"""Any transformer, derived from its tensors: one matrix product per weight, the attention core, and what moves bytes.

Per token and layer an eager framework touches, beside the products, (elements read + written, width h unless said):

    norm 2 (backward 5)      residual 3 (3)           dropout 2 + 1 byte of mask (2 + 1)    activation 2·f (3·f)
    gated product 3·f (5·f)  copies of q, k, v and of the context 2 each (2 each)           bias gradients 1 each (backward)

and per attention score with the math kernel: scale 2, mask 2, softmax 2, dropout 2 + 1 byte (backward: dropout 2 + 1 byte,
softmax 3, scale 2). A compiler leaves one read and one write per fused chain. Saved bytes follow Korthikanti et al.
(arXiv 2205.05198, section 4.1): 34 s·b·h + 5 a·s²·b for a 16-bit GPT layer with dropout, which a test recounts.
Matrix products: forward 2·t·n·k FLOP, backward the same twice. Attention: 4·a·s²·d forward (halved only inside the causal
flash kernel), backward twice with the math kernel, 2.5 times with flash (it recomputes the scores; arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterable

from simkit.program import BS, BSS, ONE, ZERO, B, Node, Op, Program, Recorder, S, matmul, stream
from simkit.roofline import ATTENTION, Array
from simkit.spec.model import Model, Tensor, TransformerSpec
from simkit.workloads import Numerics

DROPOUT_FAMILIES = frozenset({"bert", "roberta", "distilbert", "gpt2", "gpt3", "opt", "t5"})
"""Families whose published configuration trains with dropout 0.1; later decoders train without."""


def build(model: Model, numerics: Numerics) -> Program:
    """The Program of a transformer; sequence length s counts tokens per sample (patches + 1 for a ViT)."""
    spec = model.spec
    assert isinstance(spec, TransformerSpec)
    recorder = Recorder()
    writer = _Writer(spec, numerics)
    outside = [t for t in model.tensors if t.layer < 0]
    embedding, head = _split(outside)
    recorder.add(writer.embedding(embedding))
    for nodes, rename in _blocks(model.tensors, writer):
        recorder.add(nodes, rename)
    recorder.add(writer.head(head, embedding))
    program = recorder.program([t.name for t in model.tensors], logits=writer.logits, model_flops=writer.model_flops(model))
    return program


def _split(outside: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors before the blocks (tables, patch convolution, the norm that follows them) and after them."""
    first_head = next((i for i, t in enumerate(outside) if t.module == "head"), len(outside))
    tables = [i for i, t in enumerate(outside) if t.module in ("embedding", "conv")]
    last_table = max(tables, default=-1)
    # A norm with the tables' prefix is the embedding norm (BERT, BLOOM); any other is the final norm.
    before = set(tables)
    for i in range(last_table + 1, first_head):
        if outside[i].module == "norm" and "embed" in outside[i].name.lower():
            before.add(i)
        elif outside[i].module == "conv" or (outside[i].name.endswith("bias") and i - 1 in before):
            before.add(i)
    return [t for i, t in enumerate(outside) if i in before], [t for i, t in enumerate(outside) if i not in before]


def _blocks(tensors: Iterable[Tensor], writer: _Writer) -> Iterable[tuple[list[Node], dict[str, tuple[str, ...]]]]:
    """Per layer its nodes (shared between layers of equal shape) and the names behind the keys."""
    layers: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layer >= 0:
            layers.setdefault(tensor.layer, []).append(tensor)
    built: dict[tuple[object, ...], list[Node]] = {}
    for index in sorted(layers):
        group = layers[index]
        signature = tuple((t.module, t.shape, t.role, t.repeat) for t in group)
        if signature not in built:
            built[signature] = writer.block(group)
        yield built[signature], {str(i): (t.name,) for i, t in enumerate(group)}


class _Writer:
    """Writes nodes of one network under given numerics; keys in `Op.trains` are positions in the group of tensors."""

    def __init__(self, spec: TransformerSpec, numerics: Numerics) -> None:
        self.spec, self.numerics = spec, numerics
        self.e = numerics.element_bytes
        self.dropout = spec.model_type in DROPOUT_FAMILIES
        share = numerics.head_share if "mlm" in spec.heads_list else 1.0
        # Logits are kept in fp32 for the loss beside the product's own result, and their gradient is as large.
        self.logits = BS * (share * spec.vocab * (self.e + 8.0)) if spec.vocab and self._has_vocab_head() else ZERO

    def _has_vocab_head(self) -> bool:
        return self.spec.kind != "vit" and not (self.spec.kind == "encoder" and "mlm" not in self.spec.heads_list)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def linear(self, name: str, module: str, n: int, k: int, *, trains: tuple[str, ...], tokens: Array = BS, batch: float = 1.0, bias: bool = False, saved: Array = ZERO, inputs_need_gradient: bool = True) -> Node:
        """y[t,n] = x[t,k] W[n,k]^T + b, `batch` copies of t/batch rows each (routed experts)."""
        e = self.e
        weights = ONE * (batch * n * k)
        nbytes = e * (tokens * (n + k) + weights)
        flops = tokens * (2.0 * n * k)
        m, copies = tokens / batch, ONE * batch
        forward = [matmul(name, module, batch=copies, m=m, n=ONE * n, k=ONE * k, flops=flops, nbytes=nbytes, saved=saved)]
        cast = self.numerics.cast_bytes
        backward = []
        if cast:
            forward.insert(0, stream(f"{name}.cast", module, weights * cast))
        if inputs_need_gradient:
            backward.append(matmul(f"{name}.dgrad", module, batch=copies, m=m, n=ONE * k, k=ONE * n, flops=flops, nbytes=nbytes))
        if bias:
            backward.append(stream(f"{name}.bias_grad", module, e * (tokens * n)))
        backward.append(matmul(f"{name}.wgrad", module, batch=copies, m=ONE * n, n=ONE * k, k=m, flops=flops, nbytes=nbytes, trains=() if cast else trains))
        if cast:
            backward.append(stream(f"{name}.grad_cast", module, weights * cast, trains=trains))
        return Node(tuple(forward), tuple(backward))

    def pointwise(self, name: str, module: str, width: Array, forward: float, backward: float, *, extra: float = 0.0, saved: Array = ZERO, trains: tuple[str, ...] = (), kernels: float = 1.0) -> Node:
        """A chain that touches `forward` (`backward`) elements per unit of width, plus `extra` bytes of masks."""
        if self.numerics.compiled:
            forward, backward, kernels = min(forward, 2.0), min(backward, 3.0), 1.0
        return Node(
            (stream(name, module, width * (self.e * forward + extra), saved=saved, kernels=kernels),),
            (stream(f"{name}.grad", module, width * (self.e * backward + extra), trains=trains, kernels=kernels),),
        )

    def norm(self, name: str, keys: tuple[str, ...], width: float = 0.0) -> Node:
        h = width or self.spec.hidden
        # Eager RMSNorm runs as square, mean, rsqrt, two products in fp32; LayerNorm is one kernel.
        touches, kernels = (2.0, 1.0) if self.spec.norm == "layernorm" else (8.0, 5.0)
        return self.pointwise(name, "norm", BS * h, touches, 5.0 if kernels == 1.0 else 12.0, saved=BS * (h * self.e), trains=keys, kernels=kernels)

    def residual(self, module: str) -> list[Node]:
        h, nodes = self.spec.hidden, []
        if self.dropout:
            nodes.append(self.pointwise("dropout", module, BS * h, 2.0, 2.0, extra=1.0, saved=BS * h))
        nodes.append(self.pointwise("residual", module, BS * h, 3.0, 3.0))
        return nodes

    # -- attention ------------------------------------------------------------------------------------------------

    def attention_core(self, module: str = "attention") -> list[Node]:
        spec, e = self.spec, self.e
        q_width, k_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        v_dim = spec.v_head_dim or spec.head_dim
        v_width, out_width = spec.kv_heads * v_dim, spec.heads * v_dim
        operands = BS * (e * (q_width + k_width + v_width))
        nodes: list[Node] = []
        if spec.positional == "rope":
            nodes.append(self.pointwise("rotary", module, BS * (q_width + k_width), 6.0, 6.0, kernels=6.0))
        if self.numerics.attention == "flash":
            return [*nodes, self._flash(module, operands, BS * (e * out_width), spec.head_dim + v_dim)]
        copies = BS * (q_width + k_width + v_width)
        nodes.append(self.pointwise("split_heads", module, copies, 2.0, 2.0, saved=operands, kernels=3.0))
        nodes += self._math(module, v_dim)
        nodes.append(self.pointwise("merge_heads", module, BS * out_width, 2.0, 2.0))
        return nodes

    def _flash(self, module: str, operands: Array, result: Array, depth: float) -> Node:
        spec = self.spec
        halved = 0.5 if spec.causal else 1.0
        width = halved * depth

        def kernel(name: str, factor: float, nbytes: Array, saved: Array) -> Op:
            return matmul(name, module, kind=ATTENTION, batch=B * spec.heads, m=S, n=S, k=ONE * (width * factor), flops=BSS * (2.0 * spec.heads * width * factor), nbytes=nbytes, saved=saved)

        return Node(
            (kernel("flash", 1.0, operands + result, operands + result),),
            (kernel("flash.grad", 2.5, 2.0 * (operands + result), ZERO),),
        )

    def _math(self, module: str, v_dim: int) -> list[Node]:
        spec, e = self.spec, self.e
        scores = BSS * spec.heads
        copies = B * spec.heads

        def product(name: str, depth: int, *, inner: bool, saved: Array = ZERO) -> Op:
            """scores = q k^T (n = s) or context = p v (inner dimension s)."""
            m, n, k = (S, ONE * depth, S) if inner else (S, S, ONE * depth)
            width = (spec.heads + spec.kv_heads) * depth
            return matmul(name, module, batch=copies, m=m, n=n, k=k, flops=scores * (2.0 * depth), nbytes=e * (scores + BS * width), saved=saved)

        d = spec.head_dim
        qk = Node((product("qk", d, inner=False),), (product("qk.dq", d, inner=True), product("qk.dk", d, inner=True)))
        pv = Node((product("pv", v_dim, inner=True, saved=ZERO),), (product("pv.dp", v_dim, inner=False), product("pv.dv", v_dim, inner=True)))
        nodes = [
            qk,
            self.pointwise("scale", module, scores, 2.0, 2.0),
            self.pointwise("mask", module, scores, 2.0, 0.0),
            self.pointwise("softmax", module, scores, 2.0, 3.0, saved=scores * e),
        ]
        if self.dropout:
            nodes.append(self.pointwise("score_dropout", module, scores, 2.0, 2.0, extra=1.0, saved=scores * (e + 1.0)))
        return [*nodes, pv]

    # -- blocks ---------------------------------------------------------------------------------------------------

    def linears(self, group: list[tuple[int, Tensor]], *, shared_input: bool = False) -> list[Node]:
        """One node per weight of `group`; a bias that follows its weight is trained with it."""
        nodes: list[Node] = []
        for position, (index, tensor) in enumerate(group):
            if len(tensor.shape) < 2:
                continue
            follower = group[position + 1] if position + 1 < len(group) else None
            bias = follower is not None and len(follower[1].shape) == 1
            keys = (str(index), str(follower[0])) if bias and follower is not None else (str(index),)
            n, k = tensor.shape[0], 1
            for size in tensor.shape[1:]:
                k *= size
            tokens, batch = BS, 1.0
            if tensor.role == "expert":
                batch = float(tensor.repeat)
                tokens = BS * self.spec.top_k
            saved = ZERO if shared_input and nodes else tokens * (k * self.e)
            nodes.append(self.linear(tensor.name.split(".")[-2] if "." in tensor.name else tensor.name, tensor.module, n, k, trains=keys, tokens=tokens, batch=batch, bias=bias, saved=saved))
        return nodes

    def block(self, group: list[Tensor]) -> list[Node]:
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(group):
            parts.setdefault(tensor.module, []).append((index, tensor))
        norms = [tuple(str(i) for i, _ in pair) for pair in _norm_pairs([p for p in parts.get("norm", []) if p[1].shape[0] == self.spec.hidden])]
        inner_norms = [str(i) for i, t in parts.get("norm", []) if t.shape[0] != self.spec.hidden]
        nodes: list[Node] = []
        branches: list[tuple[str, list[Node]]] = []
        for module in ("attention", "cross_attention"):
            if f"{module}.qkv" in parts:
                body = self.linears(parts[f"{module}.qkv"], shared_input=self.spec.kv_lora_rank is None)
                body += self.attention_core(module)
                branches.append((module, [*body, *self.linears(parts.get(f"{module}.out", []))]))
        branches.append(("mlp", self.mlp(parts)))
        extra = tuple(inner_norms) + tuple(str(i) for i, _ in parts.get("attention.sinks", []))
        leftovers = [str(i) for m in ("embedding", "mtp_projection", "head") for i, _ in parts.get(m, [])]
        for position, (module, body) in enumerate(branches):
            norm = [self.norm(f"norm{position}", norms[position])] if position < len(norms) else []
            if position == 0 and extra:
                width = float(self.spec.heads * self.spec.head_dim)
                norm.append(self.norm("qk_norm", extra, width))
            tail = self.residual(module)
            nodes += [*body, *tail, *norm] if self.spec.post_norm else [*norm, *body, *tail]
        for position in range(len(branches), len(norms)):
            nodes.append(self.norm(f"norm{position}", norms[position]))
        if leftovers:
            nodes.append(self.pointwise("position_bias", "attention", BSS * self.spec.heads, 0.0, 0.0, trains=tuple(leftovers)))
        return nodes

    def mlp(self, parts: dict[str, list[tuple[int, Tensor]]]) -> list[Node]:
        """Dense MLP, or router + routed experts + shared expert."""
        nodes: list[Node] = []
        for module in ("router", "mlp", "experts", "shared_expert"):
            group = parts.get(module, [])
            if not group:
                continue
            weights = self.linears(group, shared_input=False)
            if module == "router":
                stray = tuple(str(i) for i, t in group if len(t.shape) == 1)
                nodes += weights
                nodes.append(self.pointwise("routing", module, BS * float(self.spec.experts), 4.0, 4.0, trains=stray, kernels=4.0))
                continue
            width = {"mlp": self.spec.ffn, "experts": self.spec.moe_ffn * max(self.spec.top_k, 1), "shared_expert": self.spec.shared_ffn}[module]
            nodes += self._activated(module, weights, float(width))
        return nodes

    def _activated(self, module: str, weights: list[Node], width: float) -> list[Node]:
        """up (and gate), activation, down; the activation keeps its input and the product its two factors."""
        act = self.pointwise("activation", module, BS * width, 2.0, 3.0, saved=BS * (width * self.e))
        if not self.spec.gated_mlp:
            return [*weights[:-1], act, weights[-1]]
        gate = self.pointwise("gate", module, BS * width, 3.0, 5.0, saved=BS * (2.0 * width * self.e))
        return [*weights[:-1], act, gate, weights[-1]]

    # -- ends -----------------------------------------------------------------------------------------------------

    def embedding(self, tables: list[Tensor]) -> list[Node]:
        spec, nodes = self.spec, []
        h = spec.hidden
        lookups = [t for t in tables if t.module == "embedding"]
        for tensor in lookups:
            # The gradient of a table is dense: it is zeroed and scattered into.
            nodes.append(Node(
                (stream(tensor.name, "embedding", BS * (2.0 * h * self.e)),),
                (stream(f"{tensor.name}.grad", "embedding", BS * (2.0 * h * self.e) + ONE * (4.0 * tensor.numel), trains=(tensor.name,)),),
            ))
        patch = [t for t in tables if t.module == "conv"]
        if patch:
            keys = tuple(t.name for t in patch)
            k = patch[0].numel / patch[0].shape[0]
            nodes.append(self.linear("patches", "conv", patch[0].shape[0], int(k), trains=keys, saved=BS * (k * self.e), inputs_need_gradient=False))
        if len(lookups) > 1:
            nodes.append(self.pointwise("sum", "embedding", BS * h, 3.0 * (len(lookups) - 1), 0.0))
        norm = tuple(t.name for t in tables if t.module == "norm")
        if norm:
            nodes.append(self.norm("embedding_norm", norm))
        if self.dropout:
            nodes.append(self.pointwise("dropout", "embedding", BS * h, 2.0, 2.0, extra=1.0, saved=BS * h))
        return nodes

    def head(self, tensors: list[Tensor], tables: list[Tensor]) -> list[Node]:
        """Final norm, task heads, vocabulary head and loss; pooled heads see one token per sample."""
        spec, nodes = self.spec, []
        share = self.numerics.head_share if "mlm" in spec.heads_list else 1.0
        norms = tuple(t.name for t in tensors if t.module == "norm")
        if norms:
            nodes.append(self.norm("final_norm", norms))
        vocab_keys: list[str] = [t.name for t in tensors if t.module == "head" and t.shape[0] == spec.vocab]
        for position, tensor in enumerate(tensors):
            if tensor.module != "head" or len(tensor.shape) < 2 or tensor.shape[0] == spec.vocab:
                continue
            follower = tensors[position + 1] if position + 1 < len(tensors) else None
            keys = (tensor.name,) + ((follower.name,) if follower is not None and len(follower.shape) == 1 and follower.module == "head" else ())
            pooled = spec.kind == "vit" or any(p in tensor.name for p in ("pooler", "seq_relationship", "classifier", "score"))
            tokens = B if pooled else BS * share
            nodes.append(self.linear(tensor.name, "head", tensor.shape[0], tensor.shape[1], trains=keys, tokens=tokens, bias=len(keys) > 1, saved=tokens * (tensor.shape[1] * self.e)))
        if self._has_vocab_head() and spec.vocab:
            nodes += self._vocabulary(vocab_keys, tables, share)
        return nodes

    def _vocabulary(self, keys: list[str], tables: list[Tensor], share: float) -> list[Node]:
        spec = self.spec
        tied = [t.name for t in tables if t.module == "embedding"][:1] if spec.tied else []
        tokens = BS * share
        product = self.linear("vocabulary", "head", spec.vocab, spec.hidden, trains=tuple(tied + keys), tokens=tokens, bias=spec.head_bias, saved=tokens * (spec.hidden * self.e))
        # log-softmax and its gradient in fp32: cast, max, sum, subtract (24 bytes a logit), then 16 bytes backward.
        fused = 0.5 if self.numerics.compiled else 1.0
        logits = tokens * spec.vocab
        loss = Node(
            (stream("cross_entropy", "head", logits * ((self.e + 20.0) * fused), kernels=3.0),),
            (stream("cross_entropy.grad", "head", logits * ((self.e + 12.0) * fused), kernels=2.0),),
        )
        return [product, loss]

    def model_flops(self, model: Model) -> Array:
        """Forward FLOPs: 2 per weight and token that meets it, and 4·a·s²·d per layer of attention, never halved; the
        convention of PaLM (arXiv 2204.02311, appendix B). A look-up is no product; a tied head is one."""
        spec = self.spec
        share = self.numerics.head_share if "mlm" in spec.heads_list else 1.0
        total = ZERO.copy()
        for t in model.tensors:
            if t.role == "embedding" or len(t.shape) < 2:
                continue
            per_token = 2.0 * t.numel * (spec.top_k / t.repeat if t.role == "expert" else 1.0)
            if t.module == "head":
                pooled = any(p in t.name for p in ("pooler", "seq_relationship", "classifier", "score")) or spec.kind == "vit"
                total = total + (B if pooled else BS * share) * per_token
            else:
                total = total + BS * per_token
        if spec.tied and spec.vocab and self._has_vocab_head():
            total = total + BS * (share * 2.0 * spec.vocab * spec.hidden)
        cores = len({(t.layer, t.module) for t in model.tensors if t.module.endswith("attention.qkv")})
        depth = spec.head_dim + (spec.v_head_dim or spec.head_dim)
        return total + BSS * (2.0 * cores * spec.heads * depth)


def _norm_pairs(norms: list[tuple[int, Tensor]]) -> list[list[tuple[int, Tensor]]]:
    """A norm's weight and, where it follows, its bias."""
    pairs: list[list[tuple[int, Tensor]]] = []
    for item in norms:
        if item[1].name.endswith("bias") and pairs and len(pairs[-1]) == 1:
            pairs[-1].append(item)
        else:
            pairs.append([item])
    return pairs
