"""LoRA: a frozen linear layer plus a trainable product of two thin matrices; the measure of what autograd keeps.

model = convert(model, method="lora", rank=16, alpha=32, dropout=0.05, rslora=True)
save_peft(model, "folder"); model = load_peft(base_model, "folder", method="lora-fa")
"""

from simkit.kernels.lora._layer import DEFAULT_SCALE, OPTIONS, LoRALinear, lora_layers, replace
from simkit.kernels.lora._peft import load_peft, save_peft
from simkit.kernels.lora._saved import AdaptedInput, SavedBytes, saved_bytes

__all__ = [
    "DEFAULT_SCALE",
    "OPTIONS",
    "AdaptedInput",
    "LoRALinear",
    "SavedBytes",
    "load_peft",
    "lora_layers",
    "replace",
    "save_peft",
    "saved_bytes",
]
