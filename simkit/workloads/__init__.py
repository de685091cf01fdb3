"""From a network to what must be computed: one file per kind of network, named by `Model.workload`.

Each file has ``build(model, numerics) -> Program``; `program` finds it and keeps what it built.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from simkit import plugins
from simkit.program import Program
from simkit.spec.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What a workload must know of the numerics. element_bytes: of activations and of the operands of a product;
    cast_bytes: bytes moved per parameter and pass because master weights have another dtype (0 = none); attention:
    ``math`` or ``flash``; compiled: point-wise chains run as one kernel; head_share: share of the positions a masked-LM
    head is computed for; windowed: sequences are longer than the sliding window of a network that has one; fused:
    point-wise operators that run inside a neighbour's kernel and move nothing of their own; plain_softmax: the masked
    softmax of attention scores runs kernel by kernel in fp32; selective: what selective recomputation replays, see
    `Program.replayed`."""

    element_bytes: float = 4.0
    cast_bytes: float = 0.0
    attention: str = "math"
    compiled: bool = False
    head_share: float = 1.0
    windowed: bool = False
    fused: frozenset[str] = frozenset()
    plain_softmax: bool = False
    selective: str = "scores"


@lru_cache(maxsize=512)
def program(model: Model, numerics: Numerics) -> Program:
    """The Program of one micro-batch. Raises InputError for a workload nobody wrote."""
    built: Program = plugins.get(__name__, model.workload).build(model, numerics)
    return built
