"""What a network is: its trainable tensors in registration order, and the facts its workload is built from.

A `Model` knows nothing of batches, devices or seconds. `workload` names the file of `simkit/workloads/` that turns it
into a Program; `spec` holds the facts that this workload needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

POOLED_HEADS = ("pooler", "seq_relationship", "classifier", "score")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A trainable parameter: dotted name, shape as torch registers it (first dimension = outputs).

    module: the part it belongs to, used for break-downs: ``embedding attention.qkv attention.out attention.sinks
    cross_attention.qkv cross_attention.out mlp router experts shared_expert norm conv head``, ``linear`` in traced
    networks. `layer`: index of the repeated block, -1 outside. `role`: ``dense``, ``expert`` (routed experts) or
    ``embedding`` (looked up, no matmul). `repeat`: this many equal tensors stand one after the other (the routed
    experts of a layer), so that a 1,000-expert model stays a short list.
    """

    name: str
    shape: tuple[int, ...]
    module: str
    layer: int = -1
    role: str = "dense"
    repeat: int = 1

    @property
    def numel(self) -> int:
        """Elements of one such tensor times `repeat`."""
        return math.prod(self.shape) * self.repeat

    @property
    def pooled(self) -> bool:
        """Whether the layer sees one vector a sequence: pooler, next-sentence and classification heads."""
        return self.module == "head" and any(part in self.name for part in POOLED_HEADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSpec:
    """A transformer stack (decoder, encoder, encoder-decoder or ViT), field by field.

    `head_dim` is explicit (it need not be hidden/heads). `ffn`: width of the dense MLP; `moe_ffn`: of one routed
    expert; `shared_ffn`: total width of the always-active experts. Sliding-window layers: `window` keys in every layer
    whose index is not a multiple of `window_period` minus one (gemma-3: period 6, the sixth is global); period 1 with a
    window = every layer is local. MLA where `kv_lora_rank` is set. `kind`: ``decoder encoder encoder-decoder vit``.
    """

    kind: str = "decoder"
    model_type: str = ""
    layers: int
    decoder_layers: int = 0
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    ffn: int
    gated_mlp: bool = False
    activation: str = "gelu"
    vocab: int = 0
    tied: bool = True
    norm: str = "layernorm"
    norm_bias: bool = True
    norms_per_layer: int = 2
    final_norm: bool = True
    embedding_norm: bool = False
    positional: str = "rope"
    max_positions: int = 0
    position_rows: int = 0
    token_types: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    parallel_residual: bool = False
    post_norm: bool = False
    causal: bool = True
    window: int | None = None
    window_period: int = 1
    relative_buckets: int = 0
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    first_k_dense: int = 0
    moe_period: int = 1
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    heads_list: tuple[str, ...] = ()
    """Task heads on top: ``lm``, ``mlm``, ``nsp``, ``pooler``, ``classifier``."""
    classes: int = 0
    image_size: int = 0
    patch: int = 0
    channels: int = 3
    mtp_layers: int = 0
    """Multi-token-prediction blocks: named in `Model.extra_params`, never among the tensors."""

    @property
    def mla(self) -> bool:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""
        return self.kv_lora_rank is not None

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def blocks(self) -> int:
        """All repeated blocks, encoder and decoder together."""
        return self.layers + self.decoder_layers

    @property
    def has_vocab_head(self) -> bool:
        """Whether hidden states are multiplied with a (hidden x vocab) matrix, tied or not."""
        return "lm" in self.heads_list or "mlm" in self.heads_list

    def moe_layer(self, index: int) -> bool:
        """Whether block `index` routes its tokens to experts."""
        return self.experts > 0 and index >= self.first_k_dense and (index + 1) % self.moe_period == 0

    def attention_window(self, index: int) -> int | None:
        """Keys that block `index` may look back on; None = all of them."""
        if self.window is None or (self.window_period > 1 and (index + 1) % self.window_period == 0):
            return None
        return self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer:
    """One operator of a convolutional network at its reference image size.

    op: ``conv linear bn relu add maxpool avgpool``. c_in, c_out, kernel, stride, groups as in torch; h_in, h_out (w_in,
    w_out): side of the feature map before and after. tensors: names of its parameters, in registration order.
    """

    op: str
    name: str
    c_in: int
    c_out: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    h_in: int = 1
    h_out: int = 1
    w_in: int = 1
    w_out: int = 1
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """A convolutional network as its operators in the order of execution, at `image_size`."""

    layers: tuple[ConvLayer, ...]
    image_size: int
    channels: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOp:
    """One operator of the forward pass seen while tracing an `nn.Module` on the meta device.

    kind: a key of `simkit.roofline.KINDS` (``memory gemm conv attention``). batch, m, n, k: of the matrix product with
    one sample, 2·batch·m·n·k FLOPs; `scales` names that of them which grows with the batch, empty = none.
    read_elements, write_elements: four-byte elements moved per sample; fixed_elements: moved once whatever the batch,
    parameters included. tensors: the parameters it uses.
    """

    kind: str
    name: str
    batch: float = 0.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    read_elements: float = 0.0
    write_elements: float = 0.0
    fixed_elements: float = 0.0
    scales: str = "m"
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedSpec:
    """A network known only by its trace, normalised to one sample; batch is therefore 1."""

    ops: tuple[TracedOp, ...]
    batch: int = 1
    buffer_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOp:
    """A part of a network that was measured: seconds per sample, and the tensors whose gradients its backward pass
    completes."""

    name: str
    forward_s: float
    backward_s: float
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSpec:
    """A network known by measured seconds (`simkit.spec.profiled`), in the order of the forward pass."""

    ops: tuple[ProfiledOp, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A network: name, facts and trainable tensors in registration order.

    params counts each trainable element once (a tied head is not counted again). params_active: those that one token
    touches (top-k of the routed experts). buffers: {name: bytes} of stored non-parameters (masks, inverse frequencies,
    quantisation scales), never part of params. Identity is the object: a resolved model is shared, not copied.
    """

    name: str
    workload: str
    spec: TransformerSpec | ConvSpec | TracedSpec | ProfiledSpec
    tensors: tuple[Tensor, ...]
    params_active: int | None = None
    buffers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    extra_params: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Parameters named apart: multi-token-prediction blocks, vision towers kept out of the text count."""
    input_kind: str = "tokens"
    default_seq_len: int | None = None
    source: str = ""
    notes: tuple[str, ...] = ()
    dtype: str = ""
    """Data type of the published checkpoint; empty where it is not known."""

    @property
    def params(self) -> int:
        return _params(self)


@lru_cache(maxsize=1024)
def _params(model: Model) -> int:
    return sum(t.numel for t in model.tensors)
