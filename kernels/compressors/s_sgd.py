"""S-SGD: gradients are summed as they are, g <- (1/W) sum_w g_w, in one all-reduce per bucket.

What DDP does without a hook, with counts. Source: S. Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.
"""

from __future__ import annotations

from typing import Any

from simkit.kernels.compressors._core import Bucket, State


class Method(State):
    """Sends N bytes a step, in the dtype of the gradients."""

    def exchange(self, bucket: Bucket) -> Any:
        """The mean of uncompressed gradients."""
        return self.plain(bucket)
