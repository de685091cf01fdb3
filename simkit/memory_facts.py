"""What a training stack keeps on the device beyond, or instead of, what an eager framework keeps.

Facts about software, each from its documentation or code (`sources`); `overhead_bytes` alone is fitted, on measured
peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from simkit.units import GIB, MIB

OPTIMIZER_STATES = {"adamw": 2.0, "adam": 2.0, "lamb": 2.0, "sgd-momentum": 1.0, "sgd": 0.0, "none": 0.0}
WORKSPACE_BYTES = 128 * MIB
"""cuBLAS (32 MiB a handle on Hopper, 8 elsewhere) and cuDNN scratch: assumed."""

FRAGMENTATION = 0.05
"""Reserved over allocated less one: assumed, typical of a warm caching allocator with static shapes."""


LOSS = {"eager": (1.0, 12.0), "in-place": (1.0, 4.0), "fused": (2.0, 0.0), "fused-in-place": (1.0, 0.0)}
"""What cross-entropy holds a logit: elements of the arithmetic's dtype, and fp32 bytes beside them. ``eager`` casts,
keeps the log-softmax and two gradients; ``in-place`` overwrites one fp32 copy; ``fused`` kernels keep the logits and
write the gradient beside or over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """How a stack stores states and activations.

    model_weights: weights and their gradients live in the dtype of the arithmetic and the optimizer keeps the master
    copy (else: one set of master weights, cast where used). accumulates_fp32: bf16 gradients are accumulated in fp32.
    gradient_copies: 16-bit gradients are copied to the master dtype for the step. vocab_multiple: rows of the
    vocabulary are padded to this times tp (0 = not). loss: a key of `LOSS`. sixteen_bit: master weights and moments
    are bf16 unless fp32 arithmetic is asked for. separate_inputs: under tensor parallelism every column-parallel
    product keeps a copy of its input, and q, k, v (gate and up) are products of their own. query_copy: queries of
    grouped attention are copied out of the fused projection. fused_gate: activation and gate are one operator that
    keeps its inputs alone. selective: what selective recomputation keeps, ``scores`` = all but attention scores,
    ``products`` = of a block its input, the results of attention and of every second matrix product. overhead_bytes:
    taken beside what is itemised; fitted, end to end.
    """

    model_weights: bool = False
    accumulates_fp32: bool = False
    gradient_copies: bool = False
    vocab_multiple: int = 0
    loss: str = "eager"
    sixteen_bit: bool = False
    separate_inputs: bool = False
    query_copy: bool = False
    fused_gate: bool = False
    selective: str = "scores"
    fragmentation: float = FRAGMENTATION
    overhead_bytes: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)


_MEGATRON = {
    "model_weights": "Megatron-core documentation, distributed optimizer: 16-bit weights, 18 or 20 bytes a parameter",
    "accumulates_fp32": "Megatron-LM arguments.py: bf16 turns accumulate_allreduce_grads_in_fp32 on",
    "gradient_copies": "Megatron-core documentation, distributed optimizer: 4 + 16/d bytes with fp16 gradients",
    "vocab_multiple": "Megatron-LM make_vocab_size_divisible_by: 128 x tp",
    "loss": "Megatron-core vocab_parallel_cross_entropy works in place on the fp32 logits",
    "query_copy": "Megatron-core SelfAttention.get_query_key_value_tensors reshapes split queries",
    "fused_gate": "Megatron-core fused_bias_swiglu keeps its input",
}


_MEGATRON_FACTS = MemoryFacts(
    model_weights=True,
    accumulates_fp32=True,
    gradient_copies=True,
    vocab_multiple=128,
    loss="in-place",
    query_copy=True,
    fused_gate=True,
    sources=MappingProxyType(_MEGATRON),
)
_ZERO = MappingProxyType({"model_weights": "ZeRO, arXiv 1910.02054, section 3: 2 + 2 + 12 bytes a parameter"})
_DEFAULT = MemoryFacts()
FACTS: Mapping[str, MemoryFacts] = MappingProxyType(
    {
        "megatron": _MEGATRON_FACTS,
        "nemo": _MEGATRON_FACTS,
        # Its pipeline engine and its BF16 optimizer; the GPT model of the fork predates grouped queries and gates.
        "megatron-deepspeed": replace(_MEGATRON_FACTS, query_copy=False, fused_gate=False, gradient_copies=False),
        "deepspeed": MemoryFacts(model_weights=True, sources=_ZERO),
        "internevo": MemoryFacts(
            model_weights=True,
            loss="fused-in-place",
            sources=MappingProxyType(
                {**_ZERO, "loss": "InternEvo FlashGPTLMLoss: flash-attn's loss, inplace_backward"}
            ),
        ),
        "composer": MemoryFacts(
            loss="fused", sources=MappingProxyType({"loss": "llm-foundry: loss_fn fused_crossentropy, not in place"})
        ),
        "llmq": MemoryFacts(
            model_weights=True,
            sixteen_bit=True,
            loss="fused-in-place",
            fused_gate=True,
            fragmentation=0.0,
            sources=MappingProxyType(
                {
                    "sixteen_bit": "llmq README: model-dtype, opt-m-dtype and opt-v-dtype bf16 in its recipes",
                    "loss": "llm.c and llmq: the gradient of the logits overwrites them",
                    "fragmentation": "llmq README, allocator state: everything is placed once at the start",
                }
            ),
        ),
        "torchtitan": MemoryFacts(
            selective="products",
            sources=MappingProxyType(
                {"selective": "torchtitan parallelize_llama.py, selective activation checkpointing, option op"}
            ),
        ),
        "paddle": MemoryFacts(
            model_weights=True,
            separate_inputs=True,
            fragmentation=0.0,
            overhead_bytes=6.0 * GIB,
            sources=MappingProxyType(
                {
                    "model_weights": "PaddlePaddle amp.decorate, level O2: fp16 weights and gradients, fp32 masters",
                    "separate_inputs": "PaddlePaddle c_identity_op.h copies its input; q, k, v, gate and up apart",
                    "overhead_bytes": "fitted: median residual of the 20 rows of pretrain_flagperf",
                }
            ),
        ),
    }
)


def memory_facts(stack: str) -> MemoryFacts:
    """The facts of a stack; eager PyTorch where it has none of its own."""
    return FACTS.get(stack, _DEFAULT)
