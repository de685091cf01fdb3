"""Pipeline parallelism: which blocks a stage holds.

L blocks over p stages: floor(L/p) each, the remainder one each to the stages in the middle, which carry neither the
embedding nor the head (Megatron-LM asks for a divisor of L; DeepSpeed balances parameters, which comes to the same).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=1024)
def layers_per_stage(layers: int, stages: int) -> NDArray[np.int64]:
    """Blocks of each stage; their sum is `layers`.

    >>> layers_per_stage(10, 4).tolist()
    [2, 3, 3, 2]
    """
    held = np.full(stages, layers // stages, dtype=np.int64)
    extra = layers - int(held.sum())
    order = np.argsort(np.abs(np.arange(stages) - (stages - 1) / 2), kind="stable")
    held[order[:extra]] += 1
    held.flags.writeable = False
    return held


def stage_of_blocks(layers: int, stages: int) -> NDArray[np.int64]:
    """The stage of each block, in order."""
    return np.repeat(np.arange(stages), layers_per_stage(layers, stages))
