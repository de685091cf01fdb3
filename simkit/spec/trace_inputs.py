"""What to feed a module that is traced: its declared inputs, or guesses that its first layer suggests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

IMAGE_SIZES = (224, 32, 28)
TOKENS = 128
INPUT_NAMES = ("example_inputs", "simkit_input")

Inputs = Callable[[int], Any]
"""From a batch size to the arguments of the forward pass."""


def candidates(torch: Any, module: Any) -> Iterator[tuple[str, Inputs]]:
    """(label, how to make a batch) of each input worth trying, the likeliest first; declared inputs alone if any."""
    for name in INPUT_NAMES:
        given = getattr(module, name, None)
        if given is not None:
            yield _label(torch, given, name), _declared(torch, given)
            return
    layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    first = layers[0] if layers else None
    tokens = (f"tokens of shape (batch, {TOKENS})", lambda b: torch.zeros((b, TOKENS), dtype=torch.long, device="meta"))

    def floats(kind: str, *shape: int) -> tuple[str, Inputs]:
        label = f"{kind} of shape (batch, {', '.join(map(str, shape))})"
        return label, lambda b: torch.empty((b, *shape), device="meta")

    if isinstance(first, torch.nn.Embedding):
        yield tokens
    if isinstance(first, torch.nn.RNNBase):
        yield floats("sequences", TOKENS, first.input_size)
    channels = next((m.in_channels for m in layers if isinstance(m, torch.nn.Conv2d)), 3)
    width = next((m.in_features for m in layers if isinstance(m, torch.nn.Linear)), None)
    width = getattr(next((m for m in layers if isinstance(m, torch.nn.MultiheadAttention)), None), "embed_dim", width)
    images = [floats("images", channels, size, size) for size in IMAGE_SIZES]
    vectors = [] if width is None else [floats("vectors", width), floats("sequences", TOKENS, width)]
    if isinstance(first, torch.nn.MultiheadAttention):
        vectors.reverse()
    vectors_first = isinstance(first, (torch.nn.Linear, torch.nn.MultiheadAttention))
    yield from (*vectors, *images) if vectors_first else (*images, *vectors)
    yield tokens


def _declared(torch: Any, given: Any) -> Inputs:
    """Inputs as the module declares them; those of an attribute have the batch as their first dimension."""

    def resize(value: Any, batch: int) -> Any:
        if isinstance(value, torch.Tensor):
            shape = (batch, *value.shape[1:]) if value.dim() else ()
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, dict):
            return {k: resize(v, batch) for k, v in value.items()}
        return type(value)(resize(v, batch) for v in value) if isinstance(value, (tuple, list)) else value

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, dict):
            return {k: move(v) for k, v in value.items()}
        return type(value)(move(v) for v in value) if isinstance(value, (tuple, list)) else value

    if callable(given):
        return lambda batch: move(given(batch))
    return lambda batch: resize(given, batch)


def _label(torch: Any, given: Any, name: str) -> str:
    """``tokens``, ``images`` or ``inputs``, judged by the first tensor."""
    try:
        value = given(1) if callable(given) else given
    except Exception:
        return f"inputs from {name}"
    while isinstance(value, (tuple, list, dict)) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    if not isinstance(value, torch.Tensor):
        return f"inputs from {name}"
    if not value.is_floating_point() and value.dim() == 2:
        return f"tokens from {name}"
    return f"images from {name}" if value.dim() == 4 else f"inputs from {name}"
