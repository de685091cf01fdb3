"""The LoRA-FA layer and its corrected gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from simkit.kernels.lora import OPTIONS as OPTIONS
from simkit.kernels.lora import LoRALinear


class LoRAFALinear(LoRALinear):
    """y = W x + b + s B A dropout(x), with W, b and A frozen; only B (out, r) is trained.

    For each token of d_in inputs autograd keeps r values, A dropout(x), and never x. Dropout costs nothing more: its
    mask is drawn again in the backward pass from a seed.

    With G = dL/dW the gradient of the full layer, autograd gives g_B = s G A^T. `corrected` turns it into

        dB = g_B (A A^T)^-1 / s^2

    the solution of min ||s dB A - G||_F: a step along dB moves W by the projection of G on the row space of A. A never
    changes, so A A^T = L L^T is factored once, in fp64, and its inverse kept (r x r). If A lacks full row rank
    (r > d_in) the pseudo-inverse takes its place, which gives the solution of least norm.
    Arguments and errors are those of `LoRALinear`.
    Source: L. Zhang et al., "LoRA-FA", arXiv 2308.03303; peft/optimizers/lorafa.py, which inverts anew every step.
    """

    method = "lora-fa"
    trains_a = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gram: tuple[tuple[Any, ...], torch.Tensor] | None = None

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """A dropout(x), of which nothing of the size of x is kept."""
        if not (self.training and self.dropout):
            return functional.linear(x, self.lora_A)
        if torch.compiler.is_compiling():
            return functional.linear(functional.dropout(x, self.dropout), self.lora_A)
        # From the global generator: torch.manual_seed fixes it, and recomputed segments draw the same one again.
        seed = int(torch.randint(2**62, (), dtype=torch.int64))
        projected: torch.Tensor = _DropoutProject.apply(x, self.lora_A, self.dropout, seed)
        return projected

    @torch.no_grad()
    def gram_inverse(self) -> torch.Tensor:
        """(A A^T)^+ / s^2, fp64, r x r; computed when A is new, and kept."""
        a = self.lora_A
        key = (a._version, a.data_ptr(), a.device, self.scale)
        if self._gram is None or self._gram[0] != key:
            wide = a.double()
            product = wide @ wide.T
            factor, failed = torch.linalg.cholesky_ex(product)
            smallest, largest = factor.diagonal().aminmax()
            if int(failed) or float(smallest) < 1e-7 * float(largest):
                inverse = torch.linalg.pinv(product, hermitian=True)
            else:
                inverse = torch.cholesky_inverse(factor)
            self._gram = key, inverse / self.scale**2
        return self._gram[1]

    @torch.no_grad()
    def corrected(self, gradient: torch.Tensor) -> torch.Tensor:
        """dB (out, r) from the gradient g_B (out, r) of autograd, in the dtype of g_B; computed in fp32 or better."""
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        return (gradient.to(dtype) @ self.gram_inverse().to(dtype)).to(gradient.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # The key of the cached inverse is an address of this process.
        return {**self.__dict__, "_gram": None}


class _DropoutProject(torch.autograd.Function):
    """z = dropout(x) A^T, the mask a function of the seed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, rate: float, seed: int) -> torch.Tensor:
        ctx.save_for_backward(a)
        ctx.rate, ctx.seed, ctx.shape = rate, seed, x.shape
        return functional.linear(x * _mask(x.shape, rate, seed, x), a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (a,) = ctx.saved_tensors
        gx = g @ a
        return gx.mul_(_mask(ctx.shape, ctx.rate, ctx.seed, gx)), None, None, None


def _mask(shape: torch.Size, rate: float, seed: int, like: torch.Tensor) -> torch.Tensor:
    """1/(1 - rate) with probability 1 - rate, else 0."""
    generator = torch.Generator(like.device).manual_seed(seed)
    mask = torch.empty(shape, dtype=like.dtype, device=like.device)
    return mask.bernoulli_(1.0 - rate, generator=generator).div_(1.0 - rate)


def replace(linear: nn.Linear, *, name: str, rank: int, alpha: float | None = None, **options: Any) -> nn.Module:
    """The LoRA-FA layer in place of `linear` (the contract of `simkit.kernels.conversion`)."""
    return LoRAFALinear.of(linear, rank=rank, alpha=alpha, **options)
