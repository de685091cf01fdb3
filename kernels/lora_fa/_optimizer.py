"""AdamW that sees the corrected gradients of LoRA-FA."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from simkit.errors import InputError
from simkit.kernels.lora_fa._layer import LoRAFALinear


class LoRAFAAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` over the trainable parameters of `model`, B of LoRA-FA layers with corrected gradients.

    params: as in AdamW, to train others or in groups; default all of `model` that ask for gradients. The other
    arguments are those of AdamW; eps is 1e-6 as in the authors' code. ``p.grad`` keeps what autograd gave: clipping and
    scaling see that, and a second step without ``zero_grad`` is not corrected twice.
    Raises InputError for a model without LoRA-FA layers.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Iterable[Any] | None = None,
        lr: float = 1e-3,
        *,
        eps: float = 1e-6,
        **adamw: Any,
    ) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, LoRAFALinear)]
        if not self._layers:
            raise InputError(
                "has no LoRA-FA layer", key="model", hint="convert(model, 'lora-fa'), or use torch.optim.AdamW"
            )
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        super().__init__(chosen, lr=lr, eps=eps, **adamw)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with corrected gradients; a closure is evaluated first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ours = {id(p) for group in self.param_groups for p in group["params"]}
        raw: list[tuple[nn.Parameter, torch.Tensor]] = []
        try:
            for layer in self._layers:
                b = layer.lora_B
                if b.grad is not None and id(b) in ours:
                    raw.append((b, b.grad))
                    b.grad = layer.corrected(b.grad)
            super().step()
        finally:
            for b, gradient in raw:
                b.grad = gradient
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # What Optimizer hands to copy and pickle leaves attributes of subclasses out.
        return {**super().__getstate__(), "_layers": self._layers}
