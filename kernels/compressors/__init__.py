"""Gradient compressors that run: DistributedDataParallel communication hooks, and a wrapper for a plain optimizer.

    from simkit.kernels.compressors import make_hook
    state, hook = make_hook("acp-sgd", rank=4)
    ddp.register_comm_hook(state, hook)

One file per method, its name the key: ``s-sgd sign-sgd topk-sgd power-sgd acp-sgd``, as in `simkit.compressors`, whose
`wire_bytes` count what these send. Any backend serves (gloo, NCCL). State is kept by parameter, since DDP rebuilds its
buckets after the first step. Every collective is issued by the thread of back-propagation at a point that depends on
the order of the buckets alone, so that all ranks issue the same ones in the same order whatever the timing.
"""

from simkit.kernels.compressors._core import Settings, State, make_hook, methods
from simkit.kernels.compressors._group import LocalGroup
from simkit.kernels.compressors._optimizer import CompressedOptimizer, FlatBucket, exchange, fuse

__all__ = [
    "CompressedOptimizer",
    "FlatBucket",
    "LocalGroup",
    "Settings",
    "State",
    "exchange",
    "fuse",
    "make_hook",
    "methods",
]
