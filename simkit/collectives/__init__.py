"""Closed forms and round lists of collective operations: one file per algorithm, the file's name is its key.

Every module offers ``OPS``, ``seconds``, ``steps``, ``wire_bytes`` and ``rounds`` (see ``_common.py``). `nbytes`
follows the nccl-tests convention: the buffer for all_reduce, broadcast, reduce and send_recv, the *gathered* (whole)
size for all_gather and reduce_scatter, and what one rank holds in total for all_to_all.
"""

from __future__ import annotations
