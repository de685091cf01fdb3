"""Sign-SGD with majority vote.

    s_w = sign(g_w);   g <- sign(sum_w s_w)

One bit per element, packed into words of 32. Votes cannot be added while packed, so every rank gathers all of them:
one all-gather of N/32 bytes from each rank, (W-1) alpha + (W-1) N/32 beta (N: bytes of the fp32 gradient); the price
grows with W where that of an all-reduce does not. No error feedback.

Device work follows the published reference, which is built from whole-tensor passes: sign, pad, cast and pack to
encode (28 bytes an element); to decode, all W packed votes are expanded to int32 at once, mapped to -1 and 1,
transposed and summed (40 bytes an element and a vote), and the winning signs packed and expanded again. Those expanded
votes, two copies at a time, are what makes a large tensor run out of memory at 32 ranks.
Sources: J. Bernstein et al., "signSGD with majority vote is communication efficient and fault tolerant", ICLR 2019;
its code PermiJW/signSGD-with-Majority-Vote, class compressor (packing, majority_vote, unpacking).
"""

from __future__ import annotations

import numpy as np

from simkit.compressors._common import (
    FP32_BYTES,
    INT32_BYTES,
    Array,
    Rows,
    Shapes,
    Work,
    bucket_copy,
    extents,
    message_elements,
    no_stage,
    per_message,
    plain_fusing,
)
from simkit.spec.plan import Plan

PHASES = 1
OP = ("all_gather",)
PLACEMENT = "inline"
BLOCKING = False
REDUCES = False
ERROR_FEEDBACK = False
BUCKETS = "bucket"

ENCODE_PASSES = 7.0
"""4-byte passes over the tensor: sign (read, write), pad (2), cast (2), pack (read); the packed words come on top."""
VOTE_PASSES = 10.0
"""4-byte passes per vote: fill (1), expand (2), subtract (2), negate (2), transpose (2), sum (1)."""
RESULT_PASSES = 17.0
"""4-byte passes per element once the votes are summed: the int64 sums (2), their signs (4), pack (2), then expand
again: fill (1), expand (2), subtract (2), negate (2), to fp32 (2)."""
LIVE_VOTES = 2.0


def variants(plan: Plan) -> int:
    """Every step is the same."""
    return 1


def _packed(shapes: Shapes) -> Array:
    return INT32_BYTES * np.ceil(extents(shapes).numel / 32.0)


def wire_bytes(shapes: Shapes, *, plan: Plan, phase: int = 0, variant: int = 0) -> Array:
    """Bytes of the packed signs that each rank contributes; the all-gather's nbytes is ranks times this."""
    return _packed(shapes)


def work(
    shapes: Shapes, *, plan: Plan, stage: str, variant: int = 0, ranks: int = 1, phase: int | None = None
) -> Work:
    """Passes over memory: encode sees its own gradient once, decode the votes of all ranks."""
    shape = extents(shapes)
    index, rows = np.arange(len(shape.numel)), Rows(len(shape.numel))
    launches = per_message(plan)
    packed = _packed(shapes)
    if stage == "encode":
        bucket_copy(rows, shape, plan, FP32_BYTES)
        rows.memory(index, ENCODE_PASSES * FP32_BYTES * shape.numel + packed, 4.0 * launches)
    elif stage == "decode":
        passes = VOTE_PASSES * ranks + RESULT_PASSES
        rows.memory(index, passes * INT32_BYTES * shape.numel + 3.0 * ranks * packed, 14.0 * launches)
        bucket_copy(rows, shape, plan, FP32_BYTES)
    else:
        raise no_stage(stage, phase)
    return rows.build()


def fusing(shapes: Shapes, *, plan: Plan, variant: int = 0) -> tuple[Array, float]:
    """Uncompressed bytes, the bucket size of the plan."""
    return plain_fusing(shapes, plan)


def memory_bytes(shapes: Shapes, *, plan: Plan, ranks: int) -> dict[str, float]:
    """Packed signs, those gathered from all ranks, and the expanded votes of the largest message, two copies."""
    packed = float(_packed(shapes).sum())
    fused = 0.0 if plan.fusion == "none" else FP32_BYTES * float(extents(shapes).numel.sum())
    return {
        "buckets": fused,
        "payload": packed,
        "gather": ranks * packed,
        "votes": LIVE_VOTES * INT32_BYTES * ranks * message_elements(shapes, plan),
    }
