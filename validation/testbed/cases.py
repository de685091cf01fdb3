"""The emulated cases: three networks of known seconds, methods, buckets, ranks, and the rates they run at."""

from __future__ import annotations

from typing import Any

RATES_MBPS = (100, 300, 1000)
TRAIN_RATES_MBPS = (100, 1000)
RANKS = (2, 3, 4)
MIB = 2**20


def _layers(shapes: list[tuple[int, int]], backward_s: list[float]) -> list[dict[str, Any]]:
    return [{"shape": list(s), "backward_s": b} for s, b in zip(shapes, backward_s, strict=True)]


NETWORKS: dict[str, tuple[float, list[dict[str, Any]]]] = {
    # 10 x 1.376 MB, the size of a small transformer
    "even": (0.1, _layers([(512, 672)] * 10, [0.02] * 10)),
    # 10 x 0.25 MB
    "small": (0.1, _layers([(256, 244)] * 10, [0.02] * 10)),
    # 4, 0.1, 0.1, 2, 1, 3 MB
    "uneven": (
        0.05,
        _layers([(1000, 1000), (160, 160), (160, 160), (800, 625), (500, 500), (1000, 750)], [0.03] * 6),
    ),
    # slow first, as in a network whose large layers are at its end
    "skewed": (
        0.08,
        _layers([(2000, 600), (600, 600), (300, 600), (300, 300), (100, 300)], [0.01, 0.02, 0.04, 0.05, 0.06]),
    ),
}
METHODS: tuple[tuple[str, str, float | None, dict[str, Any]], ...] = (
    # (network, method, bucket_bytes, settings): 0 = a message per tensor, None = one for all
    ("even", "s-sgd", 0, {}),
    ("even", "s-sgd", 4 * MIB, {}),
    ("even", "s-sgd", None, {}),
    ("small", "s-sgd", 0, {}),
    ("small", "s-sgd", None, {}),
    ("uneven", "s-sgd", 0, {}),
    ("uneven", "s-sgd", 4 * MIB, {}),
    ("skewed", "s-sgd", 0, {}),
    ("skewed", "s-sgd", 4 * MIB, {}),
    ("even", "sign-sgd", 4 * MIB, {}),
    ("uneven", "sign-sgd", 0, {}),
    ("even", "topk-sgd", 4 * MIB, {"density": 0.05}),
    ("uneven", "topk-sgd", None, {"density": 0.1}),
    ("even", "power-sgd", 4 * MIB, {"rank": 32}),
    ("skewed", "power-sgd", None, {"rank": 32}),
    ("even", "acp-sgd", 0, {"rank": 32}),
    ("skewed", "acp-sgd", None, {"rank": 32}),
)
FEW = (0, 1, 5, 11, 13)
"""Of METHODS, those that also run with fewer ranks."""


def cases(ranks: int) -> list[dict[str, Any]]:
    """The cases that run with that many ranks."""
    found = []
    for index, (network, method, bucket, settings) in enumerate(METHODS):
        if ranks != max(RANKS) and index not in FEW:
            continue
        forward_s, layers = NETWORKS[network]
        size = "all" if bucket is None else "tensor" if bucket == 0 else f"{bucket / MIB:g}MiB"
        name = f"{network}/{method}/{size}"
        found.append(
            {"name": name, "method": method, "forward_s": forward_s, "layers": layers, "bucket_bytes": bucket}
            | settings
        )
    return found


TRAINED = {
    # model: (batch of a rank, cap of the buckets where there are several)
    "simkit.measure_models:transformer": (8, 4 * MIB),
    "simkit.measure_models:convnet": (16, MIB),
}
TRAIN_METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("s-sgd", {}),
    ("sign-sgd", {}),
    ("topk-sgd", {"density": 0.01}),
    ("power-sgd", {"rank": 4}),
    ("acp-sgd", {"rank": 4}),
)


def train_cases(model: str) -> list[dict[str, Any]]:
    """Every method, in one bucket and in several."""
    batch, cap = TRAINED[model]
    name = model.rpartition(":")[2]
    return [
        {
            "name": f"{name}/{method}/{'one' if bucket is None else 'several'}",
            "model": model,
            "batch": batch,
            "method": method,
            "bucket_bytes": bucket,
        }
        | settings
        for bucket in (cap, None)
        for method, settings in TRAIN_METHODS
    ]
