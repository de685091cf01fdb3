"""Order in time: from priced work to spans on streams, in closed form.

A `Step` is everything that decides the order of one data-parallel iteration, in seconds, with no cluster and no model
left in it. `schedule` arranges it by array formulas; `simkit.des.iteration.simulate` arranges the same `Step` by
events; without jitter they agree to 1e-9.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration of data-parallel training, priced.

    forward_s: the forward pass of the last micro-batch; accumulation_s: the micro-batches before it (no exchange).
    backward_s[j]: backward segment j in the order of execution. Bucket i (in the order in which it becomes ready) may
    start after segment ready[i]. Its chain is: encode_s[i] on the device, comm_s[0][i] on the network, then for
    each further phase p: between_s[p-1][i] on the device and comm_s[p][i] on the network, at last decode_s[i] on the device.
    optimizer_s follows the last decode. host_s: what the host adds per step and nothing hides.

    overlap: ``none`` runs backward, then the chains one after the other; ``wfbp`` runs chains during backward.
    placement (wfbp only): ``inline`` = encode runs on the compute stream at the moment the bucket is ready and decode after the
    last collective (barrier); ``hook`` = each chain runs as soon as it can, its kernels competing for the device with
    back-propagation, decode included (PyTorch's DDP communication hook).
    """

    forward_s: float
    backward_s: Array
    ready: NDArray[np.int64]
    encode_s: Array
    comm_s: Array
    between_s: Array
    decode_s: Array
    optimizer_s: float = 0.0
    accumulation_s: float = 0.0
    host_s: float = 0.0
    overlap: str = "wfbp"
    placement: str = "inline"
    bucket_bytes: Array = field(default_factory=lambda: np.zeros(0))
    segment_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that occupied a stream from start_s to end_s. stream: ``compute``, ``comm`` or ``host``."""

    name: str
    stream: str
    start_s: float
    end_s: float
    kind: str
    args: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When everything ended. `breakdown`: disjoint terms of the critical path that sum to `end_s`:
    forward_s, backward_s (accumulation included in both), compression_s, exposed_comm_s, optimizer_s, host_s.
    busy_s: {stream: seconds in use}. spans: only when asked for."""

    end_s: float
    breakdown: dict[str, float]
    busy_s: dict[str, float]
    comm_end_s: Array
    spans: tuple[Span, ...] = ()
