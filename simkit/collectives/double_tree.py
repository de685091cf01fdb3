"""Two complementary binary trees, each carrying half of the message in a pipeline of small chunks.

    all_reduce   2 floor(log2 n) alpha + min(n-1, 2) S/B

Tree 1 numbers the ranks as a heap (children of i are 2i and 2i+1, i from 1), tree 2 is its mirror image, so that a rank
which is inner in one tree is a leaf in the other: no rank sends or receives more than S in the reduction and S in the
broadcast, whatever n (two ranks: S/2 each way). NCCL prices trees with the same 2 log2(n) alpha and 2 S/B.
Sources: P. Sanders, J. Speck, J. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35, 2009; S. Jeaugey, "Massively scale your deep learning training with NCCL 2.4", NVIDIA blog, 2019.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from simkit.collectives._common import Num, Round, check, log2_floor, pairs

OPS: frozenset[str] = frozenset({"all_reduce"})


def steps(op: str, ranks: Num) -> Num:
    """Latency steps one after another: up and down again. Raises InputError for an op outside OPS."""
    check(op, OPS, "double-tree")
    return 2 * log2_floor(ranks)


def wire_bytes(op: str, *, ranks: Num, nbytes: Num) -> Num:
    """Bytes the busiest rank moves in one direction, reduction and broadcast together."""
    check(op, OPS, "double-tree")
    return np.minimum(ranks - 1, 2) * nbytes


def seconds(op: str, *, ranks: Num, nbytes: Num, alpha_s: Num, Bps: Num) -> Num:
    """steps * alpha + wire / Bps, in s."""
    return steps(op, ranks) * alpha_s + wire_bytes(op, ranks=ranks, nbytes=nbytes) / Bps


def rounds(op: str, *, ranks: int, nbytes: float) -> Iterable[Round]:
    """One pipelined round up both trees, one down."""
    check(op, OPS, "double-tree")
    height = int(log2_floor(ranks))
    if height:
        child = [i - 1 for i in range(2, ranks + 1)]
        parent = [i // 2 - 1 for i in range(2, ranks + 1)]
        child += [ranks - 1 - r for r in child]
        parent += [ranks - 1 - r for r in parent]
        yield pairs(child, parent, nbytes / 2, hops=height)
        yield pairs(parent, child, nbytes / 2, hops=height)
