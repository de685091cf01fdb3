"""Where a micro-batch goes, part by part: per layer, per module (qkv, attention, projection, MLP, norm) and operator.

Seconds of one micro-batch through the whole network, as the ranks of one replica pass it from stage to stage: the
compute of a rank's share under tensor, context and expert parallelism, forward and backward, and the network's busy
seconds by kind of message, hidden or not. What happens once a step (the exchange of gradients) is marked so in `per`.
After the module-wise tables of "Dissecting the runtime performance of LLMs" (arXiv 2311.03687).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from simkit.evaluate import Evaluation
from simkit.program import Ops, Program
from simkit.roofline import KINDS, Array

ONCE_A_STEP = frozenset({"gradient exchange"})
_ENDINGS = (".dgrad", ".wgrad", ".bias_grad", ".grad_cast", ".cast", ".grad", ".dq", ".dk", ".dp", ".dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A layer, a module, an operator or a kind of message. kind: what it does (`simkit.roofline.KINDS`, ``mixed``,
    ``communication``); count: how often it runs forward; share: of the compute of all parts (of the busy network for
    messages); per: ``micro-batch`` or ``step``."""

    name: str
    kind: str
    forward_s: float
    backward_s: float
    share: float
    count: float
    per: str = "micro-batch"

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def layers(found: Evaluation) -> list[Part]:
    """What stands before the blocks, the blocks (equal ones together), and what stands after them, in that order."""
    program, tf, tb = found.program, np.asarray(found.compute.forward_s), np.asarray(found.compute.backward_s)
    blocks = program.blocks
    f, g = blocks.counts @ tf, blocks.backward_counts @ tb
    rows = [("before the blocks", float(blocks.before[0] @ tf), float(blocks.before[1] @ tb), 1.0)]
    for name, members in _alike(program):
        rows.append((name, float(f[members].sum()), float(g[members].sum()), float(len(members))))
    rows.append(("after the blocks", float(blocks.after[0] @ tf), float(blocks.after[1] @ tb), 1.0))
    total = sum(a + b for _, a, b, _ in rows)
    parts = [
        Part(name=n, kind="mixed", forward_s=a, backward_s=b, share=(a + b) / total if total else 0.0, count=c)
        for n, a, b, c in rows
    ]
    return [*(p for p in parts if p.seconds > 0.0), *messages(found)]


def modules(found: Evaluation) -> list[Part]:
    """The modules of a network in order of their seconds, then its messages."""
    return [*_parts(found, by_module=True), *messages(found)]


def operators(found: Evaluation) -> list[Part]:
    """The operators of a network in order of their seconds, a gradient with its operator, then its messages."""
    return [*_parts(found, by_module=False), *messages(found)]


def messages(found: Evaluation) -> list[Part]:
    """Seconds that the network is busy, by kind of message."""
    sent: Mapping[str, tuple[float, float]] = found.messages
    if not sent and found.exchange.comm_s:
        sent = {"gradient exchange": (0.0, float(found.exchange.comm_s))}
    total = sum(a + b for a, b in sent.values())
    return [
        Part(
            name=name, kind="communication", forward_s=a, backward_s=b, share=(a + b) / total if total else 0.0,
            count=1.0, per="step" if name in ONCE_A_STEP else "micro-batch",
        )
        for name, (a, b) in sent.items()
    ]  # fmt: skip


def _alike(program: Program) -> Iterable[tuple[str, list[int]]]:
    """(name, indices) of blocks that run the same rows."""
    kinds: dict[tuple[bytes, bytes], list[int]] = {}
    blocks = program.blocks
    for index, (there, back) in enumerate(zip(blocks.counts, blocks.backward_counts, strict=True)):
        kinds.setdefault((there.tobytes(), back.tobytes()), []).append(index)
    for members in kinds.values():
        first, last = members[0], members[-1]
        dense = len(members) == last - first + 1
        span = f"{first}" if first == last else f"{first} to {last}" if dense else f"{first}, {members[1]} … {last}"
        yield f"block{'s' if len(members) > 1 else ''} {span}", members


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
    return sorted(parts, key=lambda p: -p.seconds)


def _sums(ops: Ops, seconds: Array, by_module: bool) -> dict[str, tuple[float, float, str]]:
    """{name: (seconds, executions, kind)} over the rows of one direction; a cast is no execution of its operator."""
    each = np.asarray(seconds)
    out: dict[str, tuple[float, float, str]] = {}
    for name, row, runs in ops.written:
        operator, module, kind = _operator(name), ops.modules[row], KINDS[ops.kind[row]]
        key = module if by_module else f"{module}: {operator}"
        before, count, known = out.get(key, (0.0, 0.0, kind))
        counted = runs if by_module or operator == name else 0.0
        out[key] = (before + runs * float(each[row]), count + counted, kind if known == kind else "mixed")
    return out


def _operator(name: str) -> str:
    """``query.wgrad`` and ``query.dgrad`` belong to ``query``."""
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name
