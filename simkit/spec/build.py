"""Assembles a Model from the facts of a transformer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from simkit.spec.model import Model, TransformerSpec
from simkit.spec.tensors import active_params, block_scales, mtp_tensors, position_rows, tensors

FP32_BYTES = 4.0
LONGEST_DEFAULT = 4096
"""A context window is no usual training length: the default sequence stops here."""
ENCODER_DEFAULT = 128
"""Nine tenths of BERT's pre-training steps (arXiv 1810.04805, appendix A.2)."""


def build(
    spec: TransformerSpec, *, name: str, source: str = "", extra: Mapping[str, int] | None = None,
    buffers: Mapping[str, float] | None = None, notes: tuple[str, ...] = (), dtype: str = "", fp8_block: int = 0,
    seq_len: int | None = None,
) -> Model:
    """A Model from its spec: tensors, active parameters, multi-token prediction and FP8 scales named apart."""
    items = tensors(spec, seq_len=seq_len)
    named = dict(extra or {})
    stored = dict(buffers or {})
    mtp = mtp_tensors(spec)
    if mtp:
        named["mtp"] = sum(t.numel for t in mtp)
    if fp8_block:
        stored["fp8_block_scales"] = block_scales([*items, *mtp], fp8_block) * FP32_BYTES
    vit = spec.kind == "vit"
    return Model(
        name=name, workload="transformer", spec=spec, tensors=items,
        params_active=active_params(spec, items) if spec.experts else None,
        buffers=MappingProxyType(stored), extra_params=MappingProxyType(named),
        input_kind="images" if vit else "tokens", default_seq_len=_default_seq_len(spec, seq_len),
        source=source, notes=notes, dtype=dtype,
    )


def _default_seq_len(spec: TransformerSpec, seq_len: int | None) -> int | None:
    if spec.kind == "vit":
        return spec.position_rows or (spec.image_size // spec.patch) ** 2 + 1
    if spec.kind == "encoder":
        return ENCODER_DEFAULT
    return min(spec.max_positions or position_rows(spec, seq_len) or LONGEST_DEFAULT, LONGEST_DEFAULT)
