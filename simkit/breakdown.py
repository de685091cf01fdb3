"""Where compute goes, part by part: per module (qkv, attention, projection, MLP, norm, …) and per operator.

Seconds are those of one micro-batch on one device (of the rank's share under model parallelism), forward and backward, as
in "Dissecting the runtime performance of LLMs" (arXiv 2311.03687): bytes and FLOPs beside them say what bounds each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simkit.evaluate import Evaluation
from simkit.program import Ops
from simkit.roofline import KINDS, Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A module or an operator: seconds forward and backward, its share of both, and how often it runs forward."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    share: float
    count: float


def modules(found: Evaluation) -> list[Part]:
    """The modules of a network in order of their seconds."""
    return _parts(found, by_module=True)


def operators(found: Evaluation) -> list[Part]:
    """The operators of a network in order of their seconds; a gradient counts with its operator."""
    return _parts(found, by_module=False)


def _parts(found: Evaluation, *, by_module: bool) -> list[Part]:
    forward = _sums(found.program.forward, found.compute.forward_s, by_module)
    backward = _sums(found.program.backward, found.compute.backward_s, by_module)
    total = sum(s for s, _, _ in forward.values()) + sum(s for s, _, _ in backward.values())
    nothing = (0.0, 0.0, "")
    parts = []
    for name in dict.fromkeys((*forward, *backward)):
        f, count, kind = forward.get(name, nothing)
        b, _, other = backward.get(name, nothing)
        share = (f + b) / total if total else 0.0
        parts.append(Part(name=name, kind=kind or other, forward_s=f, backward_s=b, share=share, count=count))
    return sorted(parts, key=lambda p: -(p.forward_s + p.backward_s))


def _sums(ops: Ops, seconds: Array, by_module: bool) -> dict[str, tuple[float, float, str]]:
    """{name: (seconds, executions, kind)} over the rows of one direction."""
    busy = np.asarray(seconds) * ops.counts
    out: dict[str, tuple[float, float, str]] = {}
    for row, (name, module) in enumerate(zip(ops.names, ops.modules, strict=True)):
        key = module if by_module else f"{module}: {_operator(name)}"
        before, count, kind = out.get(key, (0.0, 0.0, KINDS[ops.kind[row]]))
        if KINDS[ops.kind[row]] != kind:
            kind = "mixed"
        out[key] = (before + float(busy[row]), count + float(ops.counts[row]), kind)
    return out


def _operator(name: str) -> str:
    """``query.wgrad`` and ``query.dgrad`` belong to ``query``."""
    for ending in (".dgrad", ".wgrad", ".bias_grad", ".grad_cast", ".cast", ".grad", ".dq", ".dk", ".dp", ".dv"):
        name = name.removesuffix(ending)
    return name
