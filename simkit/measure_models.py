"""Small networks to measure: named ``simkit.measure_models:transformer`` and so on wherever a model is asked for.

Each is an `nn.Module` with ``example_inputs(batch)`` and ``training_loss(*inputs)``, which takes what `example_inputs`
returns (or real data of that shape). They are made by functions, so that torch is imported when one is asked for.
"""

from __future__ import annotations

import math
from typing import Any

VOCAB, LENGTH, WIDTH, LAYERS = 512, 64, 256, 4
IMAGE, CLASSES = 32, 10


def transformer() -> Any:
    """A causal language model of 4 pre-norm layers of width 256: 3.44 million parameters, 64 tokens of 512 words."""
    return _transformer(WIDTH, LAYERS)


def wide_transformer() -> Any:
    """The same of 2 layers of width 512: 6.87 million parameters."""
    return _transformer(512, 2)


def _transformer(width: int, layers: int) -> Any:
    import torch
    from torch import nn

    class Transformer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, width)
            self.positions = nn.Parameter(torch.zeros(LENGTH, width))
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, VOCAB)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.layers(self.embed(tokens) + self.positions, mask=self.mask, is_causal=True))

        def training_loss(self, tokens: Any) -> Any:
            """Cross-entropy of every next token."""
            logits = self(tokens)[:, :-1]
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        def example_inputs(self, batch: int) -> Any:
            return torch.zeros(batch, LENGTH, dtype=torch.long)

    return Transformer()


def convnet() -> Any:
    """Six convolutions and two linear layers on images of 32 x 32: 1.34 million parameters."""
    import torch
    from torch import nn

    class ConvNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            widths = [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
            parts: list[Any] = []
            for index, (fan_in, fan_out) in enumerate(widths):
                parts += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU()]
                if index % 2:
                    parts.append(nn.MaxPool2d(2))
            self.features = nn.Sequential(*parts)
            self.classifier = nn.Sequential(
                nn.Flatten(), nn.Linear(128 * 16, 512), nn.ReLU(), nn.Linear(512, CLASSES)
            )

        def forward(self, images: Any) -> Any:
            return self.classifier(self.features(images))

        def training_loss(self, images: Any, labels: Any = None) -> Any:
            """Cross-entropy of the classes; class 0 where no labels are given."""
            if labels is None:
                labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
            return nn.functional.cross_entropy(self(images), labels)

        def example_inputs(self, batch: int) -> Any:
            return torch.zeros(batch, 3, IMAGE, IMAGE)

    return ConvNet()


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""A decoder of the Llama family, 17 million parameters, as its ``config.json``."""


def llama(config: dict[str, Any], device: str, dtype: Any) -> Any:
    """A decoder with a key-value cache, random weights: ``step(tokens, cache, at) -> logits of the last token``."""
    import torch
    from torch import nn

    functional = nn.functional
    h, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    d, inner = h // heads, config["intermediate_size"]

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(h, eps=1e-5), nn.RMSNorm(h, eps=1e-5)
            self.q, self.o = nn.Linear(h, heads * d, bias=False), nn.Linear(heads * d, h, bias=False)
            self.k, self.v = (nn.Linear(h, groups * d, bias=False) for _ in range(2))
            self.gate, self.up = (nn.Linear(h, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, h, bias=False)

        def forward(self, x: Any, cache: Any, at: int, turn: Any) -> Any:
            batch, length, _ = x.shape
            y = self.norm1(x)
            q = _rotated(torch, self.q(y).view(batch, length, heads, d), turn).transpose(1, 2)
            k = _rotated(torch, self.k(y).view(batch, length, groups, d), turn).transpose(1, 2)
            cache[0][:, :, at : at + length] = k
            cache[1][:, :, at : at + length] = self.v(y).view(batch, length, groups, d).transpose(1, 2)
            keys, values = (c[:, :, : at + length].repeat_interleave(heads // groups, 1) for c in cache)
            seen = functional.scaled_dot_product_attention(q, keys, values, is_causal=length > 1)
            x = x + self.o(seen.transpose(1, 2).reshape(batch, length, heads * d))
            y = self.norm2(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Llama(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(config["vocab_size"], h)
            self.blocks = nn.ModuleList(Block() for _ in range(config["num_hidden_layers"]))
            self.norm, self.head = nn.RMSNorm(h, eps=1e-5), nn.Linear(h, config["vocab_size"], bias=False)
            places = torch.arange(config["max_position_embeddings"])[:, None]
            angles = places * torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
            self.register_buffer("angles", angles, persistent=False)

        def cache(self, batch: int, length: int) -> Any:
            shape = (batch, groups, length, d)
            made = {"device": self.head.weight.device, "dtype": self.head.weight.dtype}
            return [[torch.zeros(shape, **made) for _ in range(2)] for _ in self.blocks]

        @torch.inference_mode()  # type: ignore[untyped-decorator]
        def step(self, tokens: Any, cache: Any, at: int) -> Any:
            x = self.embed(tokens)
            turn = self.angles[at : at + tokens.shape[1]]
            for block, own in zip(self.blocks, cache, strict=True):
                x = block(x, own, at, turn)
            return self.head(self.norm(x[:, -1:]))

    return Llama().to(device=device, dtype=dtype).eval()


def _rotated(torch: Any, x: Any, angles: Any) -> Any:
    """Rotary positions: pairs of halves turned by the angle of their place."""
    cos, sin = angles.cos()[None, :, None].to(x.dtype), angles.sin()[None, :, None].to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
