"""LoRA-FA: LoRA whose A stays as it was drawn, so that the input of the layer need not be kept for the backward pass.

    model = convert(model, method="lora-fa", rank=16)
    optimizer = LoRAFAAdamW(model, lr=7e-5)
"""

from simkit.kernels.lora_fa._layer import OPTIONS, LoRAFALinear, replace
from simkit.kernels.lora_fa._optimizer import LoRAFAAdamW

__all__ = ["OPTIONS", "LoRAFAAdamW", "LoRAFALinear", "replace"]
