"""Program and exchange in seconds: which constants apply to a device, a dtype and a stack, and on what evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simkit import roofline
from simkit.program import Ops, Program, basis
from simkit.roofline import Array, Columns, Law
from simkit.spec.hardware import Device, Fit
from simkit.spec.plan import DTYPE_BYTES, Plan
from simkit.spec.priors import (
    DEFAULT_KERNEL_S,
    attention_prior,
    flop_per_clock,
    gemm_prior,
    memory_prior,
    prior,
    sustained_pool,
)
from simkit.spec.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Multipliers of inputs, for sensitivities and what-if questions; 1 leaves an input as it is."""

    flops: float = 1.0
    memory_Bps: float = 1.0
    network_Bps: float = 1.0
    network_latency: float = 1.0
    kernel_s: float = 1.0
    host_s: float = 1.0


UNSCALED = Scales()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """A Law and the evidence behind each of its constants, with what the stack adds per step."""

    law: Law
    evidence: Mapping[str, str]
    host_s: float
    warnings: tuple[str, ...]


def peak(device: Device, dtype: str, *, fp16_accumulate: bool = False) -> tuple[float, str]:
    """(dense FLOP/s, warning) of a dtype; a dtype the device lacks runs at the fp32 rate."""
    if dtype == "fp16" and fp16_accumulate and device.peak_flops_fp16_accumulate:
        return device.peak_flops_fp16_accumulate, ""
    if dtype in device.peak_flops:
        return device.peak_flops[dtype], ""
    fallback = "fp32" if "fp32" in device.peak_flops else max(device.peak_flops, key=lambda k: device.peak_flops[k])
    return device.peak_flops[fallback], f"{device.title} has no {dtype} rate; priced at its {fallback} rate"


@lru_cache(maxsize=1024)
def pricing(
    device: Device,
    dtype: str,
    stack: Stack,
    *,
    fp16_accumulate: bool = False,
    calibration: bool = True,
    eight_bit_attention: bool = False,
) -> Pricing:
    """The constants for one device, dtype and stack, from the profile's calibration or from the priors.

    Training in 8 bits multiplies its weights in them and leaves attention in bf16, unless eight_bit_attention.
    """
    flops, warning = peak(device, dtype, fp16_accumulate=fp16_accumulate)
    evidence = {"peak": "datasheet"}
    fits = device.calibration if calibration else {}
    gemm = fits.get(f"gemm.{dtype}") or (fits.get(_SIBLING.get(dtype, "")) if dtype in device.peak_flops else None)
    if gemm is not None:
        ceiling, depth = gemm["ceiling"], gemm["depth"]
        evidence["ceiling"] = gemm.evidence
    else:
        ceiling, depth, _ = gemm_prior(device, dtype if dtype in device.peak_flops else "fp32", flops)
        evidence["ceiling"] = "assumed"
    memory = fits.get("memory")
    fraction = memory["fraction"] if memory is not None else memory_prior(device)
    evidence["memory"] = memory.evidence if memory is not None else "assumed"
    stream = gemm.get("stream", fraction) / fraction if gemm is not None else 1.0
    around = "bf16" if dtype in ("fp8", "int8") and not eight_bit_attention else dtype
    fused = fits.get(f"attention.{around}") or fits.get(f"attention.{_SIBLING.get(around, '')[5:]}")
    if fused is not None:
        attention_ceiling, attention_depth = fused["ceiling"], fused["depth"]
    else:
        attention_ceiling, attention_depth = attention_prior(device, ceiling)
    attention_ceiling = _attention_ceiling(attention_ceiling, device, stack)
    if around != dtype:
        attention_ceiling *= peak(device, around)[0] / flops
    evidence["attention"] = fused.evidence if fused is not None else "assumed"
    kernel = fits.get("kernel")
    kernel_s = kernel["seconds"] if kernel is not None else prior("kernel", "seconds", DEFAULT_KERNEL_S)
    evidence["kernel"] = kernel.evidence if kernel is not None else "assumed"
    sustained = fits.get("sustained")
    eager = stack.calibration.get("eager") if calibration else None
    kernels = stack.calibration.get("attention") if calibration else None
    arithmetic = "fp32" if dtype == "fp32" or dtype not in device.peak_flops else "tensor"
    library = stack.calibration.get("conv") if calibration else None
    conv = library.get(arithmetic, 1.0) if library is not None else 1.0
    conv = _first(fits.get("conv"), arithmetic, conv)
    factor = sustained["factor"] if sustained is not None else _sustained_prior(device, gemm)
    evidence["sustained"] = sustained.evidence if sustained is not None else "assumed"
    evidence["stack"] = eager.evidence if eager is not None else "assumed"
    law = Law(
        peak_flops=flops,
        ceiling=ceiling,
        depth=depth,
        sm_count=float(device.sm_count or max(1, round(flops / 1e12))),
        memory_Bps=device.memory_Bps * fraction,
        flop_per_clock=flop_per_clock(device, flops) or roofline.OPERAND_FLOP_PER_CLOCK,
        stream=stream,
        # A stack's attention kernels need not be those of the operator tables.
        attention_ceiling=attention_ceiling / (kernels["time"] if kernels is not None else 1.0),
        attention_depth=attention_depth,
        conv=conv,
        elementwise=_first(fits.get("eager"), "elementwise", _first(eager, "elementwise", 1.0)),
        kernel_s=kernel_s,
        sustained=factor,
        element_bytes=DTYPE_BYTES[dtype],
        compress=tuple((n[len(COMPRESS) :], fit["factor"]) for n, fit in fits.items() if n.startswith(COMPRESS)),
    )
    host_s = eager.get("step_s", 0.0) if eager is not None else 0.0
    return Pricing(law=law, evidence=MappingProxyType(evidence), host_s=host_s, warnings=(warning,) if warning else ())


COMPRESS = "compress."
"""How the fit of a compressor's measured work is called in a device's profile: ``compress.topk-sgd``."""


def _first(own: Fit | None, key: str, otherwise: float) -> float:
    """A constant measured on the device itself stands before what a stack does on the devices of the tables."""
    return otherwise if own is None else own.get(key, otherwise)


def _sustained_prior(device: Device, gemm: Fit | None) -> float:
    """The clock under load of a device without runs: that of its kind, unless its ceiling is from runs already."""
    pool = sustained_pool(device)
    if pool is None or (gemm is not None and gemm.evidence == "end-to-end"):
        return 1.0
    return prior(pool, "factor", 1.0)


_SIBLING = {"fp16": "gemm.bf16", "bf16": "gemm.fp16", "tf32": "gemm.bf16", "int8": "gemm.fp8"}
"""A tensor-core dtype without a fit of its own takes the ceiling of one that shares its data path."""


FLASH_2_ON_HOPPER = 0.35
"""Share of the dense peak FlashAttention-2 reaches on an H100, whose wgmma and TMA it does not use (J. Shah et al.,
"FlashAttention-3", arXiv 2407.08608, section 1)."""


def _attention_ceiling(ceiling: float, device: Device, stack: Stack) -> float:
    """The ceiling of fused attention with the kernels that a stack ships. `sdpa`: PyTorch's own operator, which is
    FlashAttention-2 up to Hopper (2.5.1 took cuDNN's back again) and cuDNN's kernel on Blackwell."""
    old = {"flash-2": ("hopper", "blackwell"), "sdpa": ("hopper",)}.get(stack.attention_kernels, ())
    return min(ceiling, FLASH_2_ON_HOPPER) if device.architecture in old else ceiling


def scaled(law: Law, scales: Scales) -> Law:
    """The law with its inputs multiplied."""
    if scales is UNSCALED:
        return law
    return replace(
        law,
        peak_flops=law.peak_flops * scales.flops,
        memory_Bps=law.memory_Bps * scales.memory_Bps,
        kernel_s=law.kernel_s * scales.kernel_s,
        split_s=law.split_s * scales.kernel_s,
    )


Num = Any
STEEPNESS = 6.0
"""How sharply device and host trade places as the slower one: assumed (any p above 4 scores alike)."""


def hosted(gpu_s: Any, host_s: Any) -> Any:
    """GPU work and the launches of the host beside it: a steep norm, so that the larger decides."""
    return (gpu_s**STEEPNESS + host_s**STEEPNESS) ** (1.0 / STEEPNESS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compute:
    """Seconds of each unique operator of one micro-batch; *_math: arithmetic rather than memory bounds it. Sums are
    numbers, or arrays over points."""

    forward_s: Array
    backward_s: Array
    forward_math: NDArray[np.bool_]
    backward_math: NDArray[np.bool_]
    saved_bytes: Num
    logits_bytes: Num
    model_flops: Num
    forward_total_s: Num
    backward_total_s: Num
    math_share: Num

    def total(self, ops: Ops, *, backward: bool) -> Num:
        return self.backward_total_s if backward else self.forward_total_s


@lru_cache(maxsize=256)
def _both(program: Program) -> tuple[Any, Array, Array, int]:
    """Forward and backward rows as one table, so that pricing is one call."""
    f, b = program.forward, program.backward
    return (
        np.concatenate([f.kind, b.kind]),
        np.concatenate([f.coefficients, b.coefficients], axis=2),
        np.concatenate([f.kernels, b.kernels]),
        len(f),
    )


@lru_cache(maxsize=4096)
def compute(program: Program, *, micro_batch: float, seq_len: float, law: Law) -> Compute:
    """Prices one micro-batch of a Program under a Law; the same question is answered from memory."""
    return computed(program, basis(micro_batch, seq_len), law)


def computed(program: Program, monomials: Array, law: Law) -> Compute:
    """The same at monomials of shape (..., 5); every field of the result then has these leading axes."""
    kind, coefficients, kernels, split = _both(program)
    batch, m, n, k, nbytes, saved = monomials @ coefficients
    columns = Columns(kind=kind, batch=batch, m=m, n=n, k=k, nbytes=nbytes, kernels=kernels)
    t, math = roofline.seconds(columns, law)
    counts = np.concatenate([program.forward.counts, program.backward.counts])
    busy = t * counts
    forward_total, total = plain(busy[..., :split].sum(axis=-1)), plain(busy.sum(axis=-1))
    bound = plain((busy * math).sum(axis=-1))
    return Compute(
        forward_total_s=forward_total,
        backward_total_s=total - forward_total,
        math_share=bound / np.maximum(total, 1e-300) if busy.ndim > 1 else bound / total if total else 0.0,
        forward_s=t[..., :split],
        backward_s=t[..., split:],
        forward_math=math[..., :split],
        backward_math=math[..., split:],
        saved_bytes=saved[..., :split] @ program.forward.counts,
        logits_bytes=monomials @ program.logits,
        model_flops=monomials @ program.model_flops,
    )


def plain(value: Any) -> Any:
    """A number of its own as a float, arrays as they are."""
    return float(value) if np.ndim(value) == 0 else value


def optimizer_seconds(params: float, tensors: int, plan: Plan, stack: Stack, law: Law) -> float:
    """params · bytes/parameter at the streaming rate, plus the launches of a per-tensor loop."""
    moved = params * stack.optimizer_bytes[plan.optimizer]
    return moved / (law.memory_Bps * law.sustained) + tensors * stack.optimizer_kernels[plan.optimizer] * law.kernel_s
