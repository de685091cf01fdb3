"""Real torch operators: what simkit models, to import and to measure. Needs the extra `kernels` (torch, safetensors).

    from simkit.kernels import convert, SALRLinear
    model = convert(model, method="salr", sparsity=0.5, rank=16)

A name of `EXPORTS` is imported when it is asked for, so that ``import simkit.kernels`` alone loads no torch. A new
operator is a folder with a line here. The contract between `convert` and a folder that offers a method stands in
`simkit.kernels.conversion`.
"""

from __future__ import annotations

import importlib
from typing import Any

EXPORTS: dict[str, str] = {
    "CompressedOptimizer": "compressors",
    "LoRAFAAdamW": "lora_fa",
    "LoRAFALinear": "lora_fa",
    "LoRALinear": "lora",
    "convert": "conversion",
    "load_peft": "lora",
    "make_hook": "compressors",
    "merge": "conversion",
    "save_peft": "lora",
    "SALRLinear": "salr",
    "add_peft": "salr",
    "residual_steps": "salr",
}
"""{name: module below `simkit.kernels` that holds it}."""

__all__ = sorted(EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{EXPORTS[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"simkit.kernels.{name} needs torch: pip install 'simkit-perf[kernels]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})
