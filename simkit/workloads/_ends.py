"""What stands before and after the blocks: look-ups and patches, the last norm, task heads, vocabulary head and loss.

The loss of an eager framework runs in fp32: cast, max, sum, subtract (e + 20 bytes a logit), then e + 12 backward. It
holds at once the logits (e), their log-softmax, the gradient of the loss and that of the log-softmax (4 each): e + 12
bytes. A compiler keeps the logits, their gradient and one fp32 copy: 2 e + 4. For Gemma-2 2B in bf16, 8,192 tokens of
256,000 classes, e + 12 makes 27.3 GiB; arXiv 2411.09009 measures 28 GB for the head, its weight's gradient included.
"""

from __future__ import annotations

from collections.abc import Sequence

from simkit.program import BS, ONE, ZERO, B, Node, stream
from simkit.roofline import Array
from simkit.spec.model import Tensor
from simkit.workloads._pieces import FP32_BYTES, Writer


def positions(writer: Writer, tensor: Tensor) -> Array:
    """How many vectors of a batch a weight outside the blocks meets: every token, every patch, or one a sequence."""
    spec = writer.spec
    if tensor.module == "conv":
        # The class token is no patch.
        return BS - B
    if tensor.pooled or spec.kind == "vit":
        return B
    return BS * share(writer)


def share(writer: Writer) -> float:
    """Share of the positions the vocabulary head sees."""
    return writer.numerics.head_share if "mlm" in writer.spec.heads_list else 1.0


def logits_bytes(writer: Writer) -> Array:
    """Bytes that the vocabulary head materialises, coefficients over BASIS."""
    spec, e = writer.spec, writer.e
    if not (spec.vocab and spec.has_vocab_head):
        return ZERO
    per_logit = 2.0 * e + FP32_BYTES if writer.numerics.compiled else e + 3.0 * FP32_BYTES
    return BS * (share(writer) * spec.vocab * per_logit)


def embedding(writer: Writer, tables: Sequence[Tensor]) -> list[Node]:
    """Look-ups, the patch convolution, their sum, norm and dropout."""
    spec, e = writer.spec, writer.e
    h, nodes = spec.hidden, []
    lookups = [t for t in tables if t.module == "embedding"]
    for tensor in lookups:
        # The gradient of a table is dense: it is zeroed and scattered into.
        dense = BS * (2.0 * h * e) + ONE * (FP32_BYTES * tensor.numel)
        nodes.append(Node(
            (stream(tensor.name, "embedding", BS * (2.0 * h * e), divides="sequence"),),
            (stream(f"{tensor.name}.grad", "embedding", dense, trains=(tensor.name,), divides="bytes"),),
        ))
    patch = [t for t in tables if t.module == "conv"]
    if patch:
        n, k = patch[0].shape[0], patch[0].numel // patch[0].shape[0]
        tokens = positions(writer, patch[0])
        nodes.append(writer.linear(
            "patches", "conv", n, k, trains=tuple(t.name for t in patch), tokens=tokens,
            saved=tokens * (k * e), inputs_need_gradient=False,
        ))
    if len(lookups) > 1:
        nodes.append(writer.pointwise("sum", "embedding", BS * h, 3.0 * (len(lookups) - 1), 0.0))
    norm = tuple(t.name for t in tables if t.module == "norm")
    if norm:
        nodes.append(writer.norm("embedding_norm", norm))
    if writer.dropout:
        nodes.append(writer.pointwise("dropout", "embedding", BS * h, 2.0, 2.0, extra=1.0, saved=BS * h))
    return nodes


def head(writer: Writer, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> list[Node]:
    """Final norm, task heads, vocabulary head and loss; pooled heads see one token per sample."""
    spec, nodes = writer.spec, []
    norms = tuple(t.name for t in tensors if t.module == "norm")
    if norms:
        nodes.append(writer.norm("final_norm", norms))
    for position, tensor in enumerate(tensors):
        if tensor.module != "head" or len(tensor.shape) < 2 or tensor.shape[0] == spec.vocab:
            continue
        follower = tensors[position + 1] if position + 1 < len(tensors) else None
        biased = follower is not None and len(follower.shape) == 1 and follower.module == "head"
        keys: tuple[str, ...] = (tensor.name,)
        if biased and follower is not None:
            keys += (follower.name,)
        n, k = tensor.shape
        tokens = positions(writer, tensor)
        nodes.append(writer.linear(
            tensor.name, "head", n, k, trains=keys, tokens=tokens, bias=biased, saved=tokens * (k * writer.e)
        ))
    if spec.has_vocab_head and spec.vocab:
        own = tuple(t.name for t in tensors if t.module == "head" and t.shape[0] == spec.vocab)
        tied = tuple(t.name for t in tables if t.module == "embedding")[:1] if spec.tied else ()
        nodes += _vocabulary(writer, tied + own)
    return nodes


def _vocabulary(writer: Writer, trains: tuple[str, ...]) -> list[Node]:
    spec, e = writer.spec, writer.e
    tokens = BS * share(writer)
    product = writer.linear(
        "vocabulary", "head", spec.vocab, spec.hidden, trains=trains, tokens=tokens, bias=spec.head_bias,
        saved=tokens * (spec.hidden * e), divides="n",
    )
    logits = tokens * (spec.vocab * (0.5 if writer.numerics.compiled else 1.0))
    loss = Node(
        (stream("cross_entropy", "head", logits * (e + 20.0), kernels=3.0, divides="bytes"),),
        (stream("cross_entropy.grad", "head", logits * (e + 12.0), kernels=2.0, divides="bytes"),),
    )
    return [product, loss]
