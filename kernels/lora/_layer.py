"""The LoRA layer."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from simkit.errors import InputError

OPTIONS = ("dropout", "rslora", "adapter_dtype")
"""What `replace` takes besides the rank and alpha."""
DEFAULT_SCALE = 2.0
"""Scale where no alpha is given: that of the LoRA-FA authors' runs, and of PEFT's example for it (r 16, alpha 32)."""


class LoRALinear(nn.Module):
    """y = W x + b + s B A dropout(x), with W and b frozen; A (r, in) and B (out, r) are trained.

    s = alpha / r, or alpha / sqrt(r) with `rslora` (Kalajdzievski, arXiv 2312.03732); without alpha s = 2. A starts as
    Kaiming uniform, B at zero, so that the layer starts as `linear`. adapter_dtype: of A and B, default that of W.
    The weight and bias of `linear` are taken over, not copied.
    x of shape (…, in), y of shape (…, out) in the dtype of W.
    Raises InputError for a rank below 1, an alpha that is not above 0, or a dropout outside of [0, 1).
    Source: E. Hu et al., "LoRA", arXiv 2106.09685; initial values as in PEFT.
    """

    method = "lora"
    trains_a = True

    def __init__(
        self,
        linear: nn.Linear,
        rank: int,
        alpha: float | None = None,
        *,
        dropout: float = 0.0,
        rslora: bool = False,
        adapter_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise InputError("is below 1", key="rank", value=rank)
        if alpha is not None and not alpha > 0.0:
            raise InputError("is not above 0", key="alpha", value=alpha)
        if not 0.0 <= dropout < 1.0:
            raise InputError("is not in [0, 1)", key="dropout", value=dropout)
        root = math.sqrt(rank) if rslora else float(rank)
        self.rank, self.rslora, self.dropout = rank, bool(rslora), float(dropout)
        self.alpha = DEFAULT_SCALE * root if alpha is None else float(alpha)
        self.scale = self.alpha / root
        self.base = linear.requires_grad_(False)
        weight, dtype = linear.weight, adapter_dtype or linear.weight.dtype
        a = torch.empty(rank, linear.in_features, dtype=dtype, device=weight.device)
        b = torch.zeros(linear.out_features, rank, dtype=dtype, device=weight.device)
        if not weight.is_meta:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        self.lora_A = nn.Parameter(a, requires_grad=self.trains_a)
        self.lora_B = nn.Parameter(b)

    @property
    def in_features(self) -> int:
        """Inputs of the layer."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Outputs of the layer."""
        return self.base.out_features

    @property
    def weight(self) -> torch.Tensor:
        """The frozen W (out, in), without the adapter."""
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The frozen b."""
        return self.base.bias

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """A dropout(x)."""
        return functional.linear(functional.dropout(x, self.dropout, self.training and self.dropout > 0.0), self.lora_A)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer; the product with B is added to W x as part of one GEMM where dtypes are alike."""
        y = self.base(x)
        z = self.project(x.to(self.lora_A.dtype))
        if y.dtype != z.dtype or z.dtype != self.lora_B.dtype:
            return y + (functional.linear(z, self.lora_B) * self.scale).to(y.dtype)
        flat = torch.addmm(y.reshape(-1, y.shape[-1]), z.reshape(-1, z.shape[-1]), self.lora_B.t(), alpha=self.scale)
        return flat.view(y.shape)

    @torch.no_grad()
    def delta(self) -> torch.Tensor:
        """s B A, what the adapter adds to W, in fp32 or better."""
        dtype = torch.promote_types(self.lora_B.dtype, torch.float32)
        return self.scale * (self.lora_B.to(dtype) @ self.lora_A.to(dtype))

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """A new ``nn.Linear`` with weight W + s B A."""
        out = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = (self.weight.to(self.delta().dtype) + self.delta()).to(self.weight.dtype)
        out.weight = nn.Parameter(weight)
        if self.bias is not None:
            out.bias = nn.Parameter(self.bias.detach().clone())
        return out

    def extra_repr(self) -> str:
        """What the settings are."""
        return f"rank={self.rank}, alpha={self.alpha:g}, scale={self.scale:g}, dropout={self.dropout:g}"

    @classmethod
    def of(cls, linear: nn.Linear, *, rank: int, alpha: float | None, **options: Any) -> Self:
        """The layer in place of `linear`, in its mode."""
        layer = cls(linear, rank, alpha, **options)
        return layer.train(linear.training)


def replace(linear: nn.Linear, *, name: str, rank: int, alpha: float | None = None, **options: Any) -> nn.Module:
    """The LoRA layer in place of `linear` (the contract of `simkit.kernels.conversion`)."""
    return LoRALinear.of(linear, rank=rank, alpha=alpha, **options)


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """{path: layer} of the LoRA and LoRA-FA layers of a model."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
