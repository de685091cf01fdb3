"""ACP-SGD: alternately compressed Power-SGD, one factor and one all-reduce per bucket and step.

For each matrix M (rows x cols) of the gradient, E the error, W ranks; P-steps and Q-steps alternate:

    P-step: Q <- orth(Q);  P <- (M + E) Q;    E <- E + M - P Q^T;  P <- (1/W) sum_w P_w
    Q-step: P <- orth(P);  Q <- (M + E)^T P;  E <- E + M - P Q^T;  Q <- (1/W) sum_w Q_w
    then M' = P Q^T

The error is that of a rank's own factor, before the sum. Tensors of one dimension ride along uncompressed. Nothing but
the update waits for the all-reduce, so it overlaps with the rest of back-propagation.
Sources: L. Zhang et al., "Evaluation and optimization of gradient compression for distributed deep learning", ICDCS
2023, arXiv 2306.08881.
"""

from __future__ import annotations

from typing import Any

import torch

from simkit.kernels.compressors._core import Bucket
from simkit.kernels.compressors._lowrank import LowRank, orthonormal


class Method(LowRank):
    """Sends 4 rows·r bytes of a matrix in a P-step, 4 cols·r in a Q-step; keeps an error of the gradient's size."""

    def exchange(self, bucket: Bucket) -> Any:
        """Compress, reduce, rebuild."""
        layout = self.layout(bucket)
        p_step = (self.step - self.settings.warmup_steps) % 2 == 1
        with self.timed():
            for batch in layout.batches:
                batch.add(bucket.views, self.settings.error_feedback)
                if p_step:
                    batch.Q.copy_(orthonormal(batch.Q))
                    torch.bmm(batch.total, batch.Q, out=batch.P)
                else:
                    batch.P.copy_(orthonormal(batch.P))
                    torch.bmm(batch.total.mT, batch.P, out=batch.Q)
                if self.settings.error_feedback:
                    batch.total.baddbmm_(batch.P, batch.Q.mT, alpha=-1.0)
            factors = [b.P if p_step else b.Q for b in layout.batches]
            flat = self.message(factors, bucket, layout.rest)

        def decode(done: Any) -> torch.Tensor:
            done.value()
            with self.timed():
                self.unpack(flat, factors, bucket, layout.rest)
                for batch in layout.batches:
                    batch.write(bucket.views, torch.bmm(batch.P, batch.Q.mT))
            return bucket.buffer

        return self.reduce(flat).then(decode)
