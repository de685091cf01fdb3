"""Pipeline schedules: one file per schedule, the file's name is its key (`1f1b` is the field's name for
one_f_one_b.py).

Every module offers

    order(stage, *, stages, micro_batches, virtual=1)  -> [(kind, micro_batch, chunk), ...]   the exact order of issue
    seconds(forward_s, backward_s, *, micro_batches, virtual=1, p2p_s=0.0, weight_s=None, overlap_p2p=False) -> Pipeline

kind: ``F``, ``B``; where the schedule splits the backward pass, B is the gradient of the input and ``W`` that of the
weights. forward_s, backward_s: seconds of one micro-batch of a whole stage, last axis = stage, leading axes = sweep
points; a stage divides evenly into its `virtual` chunks. What follows from an order in time, event by event, is in
`simkit.des.pipeline`.

Messages (p2p_s each) go to the next stage with activations and to the previous one with gradients. By default the
receiving stage is busy while they arrive: a stage in the middle then gives f + b + 2·p2p to a micro-batch, as under
Megatron-LM's blocking batched send and receive, where the exchange with one neighbour serves both directions at once.
With overlap_p2p a message is a delay between two stages and occupies neither.
"""

from __future__ import annotations

from types import ModuleType

from simkit import plugins

ALIASES = {"1f1b": "one-f-one-b"}
"""Names in use that cannot be the name of a Python file."""


def names() -> tuple[str, ...]:
    """The keys of the vocabulary, sorted."""
    files = {file: key for key, file in ALIASES.items()}
    return tuple(sorted(files.get(name, name) for name in plugins.names(__name__)))


def get(key: str) -> ModuleType:
    """The schedule of that name. Raises InputError, naming the nearest key, when there is none."""
    return plugins.get(__name__, ALIASES.get(key, key))
