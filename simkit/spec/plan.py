"""What is chosen: the method, the degrees, the numerics and the batch. All defaults are already filled in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "nf4": 0.5, "int4": 0.5}
"""Bytes of one element in memory; tf32 is an arithmetic mode of fp32 storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A fully resolved plan of one training step.

    method: gradient exchange (a file of `simkit.compressors`, without the -sgd ending where it has one).
    overlap: ``none`` or ``wfbp``. fusion: ``none bucket all optimal``. bucket_bytes: uncompressed gradient bytes.
    dp counts all data ranks, sharded ones included; ep divides dp; sp = tp where Megatron's sequence parallelism is
    on; vpp:
    model chunks a pipeline rank holds; shard_group: ranks over which ZeRO shards (dp unless the sharding is hybrid).
    grad_accum micro-batches of micro_batch samples per data rank make one step; one exchange per step.
    """

    task: str = "pretrain"
    method: str = "s-sgd"
    rank: int = 4
    density: float = 0.001
    bucket_bytes: float = 25 * 2.0**20
    overlap: str = "wfbp"
    fusion: str = "bucket"
    stack: str = "pytorch"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: int = 1
    vpp: int = 1
    zero: int = 0
    shard_group: int = 1
    schedule: str = "1f1b"
    tp_overlap: str = "none"
    offload: str = "none"
    precision: str = "fp32"
    master_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    attention: str = "math"
    recompute: str = "none"
    compile: bool = False
    micro_batch: int = 1
    grad_accum: int = 1
    seq_len: int = 0
    image_size: int = 224
    optimizer: str = "sgd-momentum"
    algorithm: str = "auto"
    fp16_accumulate: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.grad_accum * self.dp


_OF_ONE = tuple(f.name for f in fields(Plan) if f.name != "grad_accum")
_of_one = attrgetter(*_OF_ONE)


def once(plan: Plan) -> Plan:
    """The plan with one micro-batch a step: one object for all plans that differ in their number alone, so that they
    share what is worked out for it."""
    return _once(_of_one(plan))


@lru_cache(maxsize=4096)
def _once(values: tuple[Any, ...]) -> Plan:
    return Plan(**dict(zip(_OF_ONE, values, strict=True)), grad_accum=1)
