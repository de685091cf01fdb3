"""How gradients are exchanged: one file per method, its name the key without the -sgd ending spelled out (``acp-sgd``).

Every module offers, over the trainable tensors in the order given (shapes: a sequence of tuples):

``PHASES``       collectives of a bucket that depend on one another
``OP``           one collective per phase, ``all_reduce`` or ``all_gather``
``PLACEMENT``    ``inline`` or ``hook``, where the kernels run under wait-free back-propagation (`simkit.timeline.Step`)
``BLOCKING``     whether the host waits inside a chain (`simkit.timeline.Step.blocking`)
``REDUCES``      whether partial sums of compressed gradients can be added, so that an all-reduce serves
``ERROR_FEEDBACK``  whether the compression error is kept and added to the next gradient
``BUCKETS``      the file of `simkit.fusion` that fusion ``bucket`` means for this method
``variants(plan)``  how many kinds of step alternate; the mean over them is the mean step
``wire_bytes(shapes, *, plan, phase, variant)``  bytes each rank contributes for each tensor. For an all-reduce that is
    the size of the message; for an all-gather the collective's `nbytes` is ranks x the contribution, the total that
    each rank ends with, as in nccl-tests
``work(shapes, *, plan, stage, variant, ranks, phase)``  device work of stage ``encode``, ``between`` (what follows the
    collective of phase - 1 and prepares that of `phase`) or ``decode``, as `Work`
``fusing(shapes, *, plan, variant)``  (bytes of each tensor, threshold in bytes) by which tensors are fused
``memory_bytes(shapes, *, plan, ranks)``  extra device memory by name
"""
