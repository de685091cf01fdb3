"""Power-SGD: one power iteration a step, P and then Q summed over the ranks.

For each matrix M (rows x cols) of the gradient, E the error kept from the step before, W ranks:

    M <- M + E;  Q <- orth(Q);  P <- (1/W) sum_w M_w Q
    P <- orth(P);  Q <- (1/W) sum_w M_w^T P
    M' = P Q^T;  E <- M - M'

Q starts from the one of the step before (warm start). Tensors of one dimension, and matrices that factors would not
make smaller by more than `min_rate`, travel with P, uncompressed.

The second all-reduce depends on the first. Issued from the callback of the first, as PyTorch's hook does, its place
among the collectives of other buckets depends on timing: under gloo, where callbacks run in the backend's threads,
ranks then pair different messages and hang. Here the order is fixed: P of bucket i is sent when the bucket is ready; Q
of bucket i right after P of bucket i + 1 (in the last bucket, right after its own P), by the same thread. So P overlaps
with the back-propagation of the next bucket, Q with that of those after it.

On a GPU waiting does not hold the host: the whole chain is queued at once on a stream of its own.
Sources: T. Vogels et al., "PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from simkit.kernels.compressors._core import Bucket, Settings
from simkit.kernels.compressors._group import new_future
from simkit.kernels.compressors._lowrank import Layout, LowRank, orthonormal


class Chain:
    """A bucket between its two all-reduces."""

    def __init__(self, bucket: Bucket, layout: Layout, flat: torch.Tensor, first: Any) -> None:
        self.bucket, self.layout, self.flat, self.first = bucket, layout, flat, first
        self.result = new_future(bucket.buffer.device)


class Method(LowRank):
    """Sends 4 r (rows + cols) bytes of a matrix; keeps an error of the size of the gradient."""

    waits = True

    def __init__(self, process_group: Any, settings: Settings) -> None:
        super().__init__(process_group, settings)
        self._open: list[Chain] = []
        self._streams: dict[torch.device, Any] = {}

    def factored(self, rows: int, cols: int, r: int) -> bool:
        """Matrices that become smaller by more than min_rate."""
        return r > 0 and (rows + cols) * r * self.settings.min_rate < rows * cols

    def exchange(self, bucket: Bucket) -> Any:
        """Send P of this bucket, then Q of the one before; of the last bucket both."""
        on_gpu = bucket.buffer.is_cuda
        with self._beside(bucket.buffer):
            chain = self._send_p(bucket)
            self._open.append(chain)
            while self._open and (bucket.last or on_gpu or len(self._open) > 1):
                self._send_q(self._open.pop(0))
        return chain.result

    @contextmanager
    def _beside(self, buffer: torch.Tensor) -> Iterator[None]:
        """On a GPU, the work inside runs on a stream of its own after what is queued so far."""
        if not buffer.is_cuda:
            yield
            return
        stream = self._streams.setdefault(buffer.device, torch.cuda.Stream(buffer.device))
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(stream):
            yield

    def _send_p(self, bucket: Bucket) -> Chain:
        layout = self.layout(bucket)
        with self.timed():
            for batch in layout.batches:
                batch.add(bucket.views, self.settings.error_feedback)
                batch.Q.copy_(orthonormal(batch.Q))
                torch.bmm(batch.total, batch.Q, out=batch.P)
            flat = self.message([b.P for b in layout.batches], bucket, layout.rest)
        return Chain(bucket, layout, flat, self.reduce(flat))

    def _send_q(self, chain: Chain) -> None:
        chain.first.wait()
        layout, bucket = chain.layout, chain.bucket
        with self.timed():
            self.unpack(chain.flat, [b.P for b in layout.batches], bucket, layout.rest)
            for batch in layout.batches:
                batch.P.copy_(orthonormal(batch.P))
                torch.bmm(batch.total.mT, batch.P, out=batch.Q)
            flat = self.message([b.Q for b in layout.batches], bucket, ())
        second = self.reduce(flat)
        if bucket.buffer.is_cuda:
            second.wait()
            self._decode(chain, flat)
            chain.result.set_result(bucket.buffer)
            return

        def decode(done: Any) -> None:
            try:
                done.value()
                self._decode(chain, flat)
            except Exception as error:
                chain.result.set_exception(error)
            else:
                chain.result.set_result(bucket.buffer)

        second.add_done_callback(decode)

    def _decode(self, chain: Chain, flat: torch.Tensor) -> None:
        with self.timed():
            self.unpack(flat, [b.Q for b in chain.layout.batches], chain.bucket, ())
            for batch in chain.layout.batches:
                mean = torch.bmm(batch.P, batch.Q.mT)
                batch.write(chain.bucket.views, mean)
                if self.settings.error_feedback:
                    batch.total.sub_(mean)
