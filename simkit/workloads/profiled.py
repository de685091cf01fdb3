"""A network whose parts were measured (`simkit.spec.profiled`): each takes its seconds, forward and backward.

Seconds grow in proportion to the micro-batch. What is kept for the backward pass was not measured and is left out.
"""

from __future__ import annotations

from simkit.program import ONE, ZERO, B, Node, Op, Program, Recorder
from simkit.roofline import TIMED
from simkit.spec.model import Model, ProfiledOp, ProfiledSpec
from simkit.workloads import Numerics


def build(model: Model, numerics: Numerics) -> Program:
    """The Program of a ProfiledSpec; numerics are those of the measured run and change nothing."""
    spec = model.spec
    assert isinstance(spec, ProfiledSpec)
    recorder = Recorder()
    recorder.add([Node((_timed(op, backward=False),), (_timed(op, backward=True),)) for op in spec.ops])
    return recorder.program([t.name for t in model.tensors])


def _timed(op: ProfiledOp, *, backward: bool) -> Op:
    return Op(
        name=f"{op.name}.grad" if backward else op.name,
        module="measured",
        kind=TIMED,
        batch=ONE * 0.0,
        m=ZERO,
        n=ZERO,
        k=B * (op.backward_s if backward else op.forward_s),
        nbytes=ZERO,
        saved=ZERO,
        kernels=0.0,
        trains=op.tensors if backward else (),
    )
