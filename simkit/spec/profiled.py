"""A network whose compute was measured: a JSON file with the seconds of each part, in place of operators to be priced.

    {"compute_profile": 1, "name": "tiny-transformer", "device": "amd-epyc-1t", "batch": 8, "input": "tokens",
     "time_share": 2.0,
     "tensors": {"0.weight": [1024, 256], ...},                                  in the order of registration
     "ops": [{"name": "0", "forward_s": 1e-3, "backward_s": 2e-3, "tensors": ["0.weight"]}, ...],    in forward order
     "measured": {...}}

Back-propagation runs the parts in reverse; a part's gradients are ready when its backward seconds are over. Seconds are
those of one micro-batch of `batch` samples on the device that was measured, times `time_share`, the ranks that share a
processor (seconds are then processor seconds); they grow in proportion to the batch. `simkit measure train` writes such
files. Nothing but the exchange, the compression, the optimizer and the schedule is left to be predicted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec.model import Model, ProfiledOp, ProfiledSpec, Tensor

KEY = "compute_profile"
KEYS = frozenset({KEY, "name", "device", "batch", "input", "time_share", "tensors", "ops", "measured"})
OP_KEYS = frozenset({"name", "forward_s", "backward_s", "tensors"})
INPUTS = ("tokens", "images", "samples")


def is_profile(data: object) -> bool:
    """Whether parsed JSON is a compute profile."""
    return isinstance(data, Mapping) and KEY in data


def from_profile(path: Path) -> Model:
    """The Model of a file. Raises InputError: unreadable, unknown keys, values of the wrong kind, a tensor that no part
    trains."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot be read ({type(error).__name__})", file=str(path), hint="give a JSON file") from None
    return to_model(data, file=str(path))


def to_model(data: Mapping[str, Any], *, file: str = "") -> Model:
    """The Model of a parsed profile."""
    for key in data:
        if key not in KEYS:
            raise unknown("key", key, KEYS, file=file)
    share = _number(data.get("time_share", 1.0), "time_share", file, least=1e-6)
    batch = _number(data.get("batch", 1), "batch", file, least=1)
    kind = data.get("input", "samples")
    if kind not in INPUTS:
        raise unknown("input", kind, INPUTS, file=file)
    shapes = data.get("tensors")
    if not isinstance(shapes, Mapping) or not shapes:
        raise InputError("names no tensors", file=file, key="tensors", hint='write {"0.weight": [1024, 256]}')
    tensors = tuple(Tensor(str(n), _shape(n, s, file), "linear", role="dense") for n, s in shapes.items())
    ops = tuple(_op(i, entry, share / batch, shapes, file) for i, entry in enumerate(_list(data.get("ops"), file)))
    trained = {name for op in ops for name in op.tensors}
    missing = next((t.name for t in tensors if t.name not in trained), None)
    if missing is not None:
        raise InputError("is trained by no op", file=file, key=f"tensors.{missing}", hint="name it in one of ops")
    notes = [f"compute measured on {data.get('device', 'an unnamed device')}: other devices are not priced by it"]
    return Model(
        name=str(data.get("name", Path(file).stem or "profiled")),
        workload="profiled",
        spec=ProfiledSpec(ops=ops),
        tensors=tensors,
        input_kind=kind,
        source=file or "profile",
        notes=tuple(notes),
    )


def _list(value: Any, file: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise InputError("is no list of parts", file=file, key="ops", hint='write [{"name": "0", "forward_s": 1e-3}]')
    return value


def _op(index: int, entry: Any, per_sample: float, shapes: Mapping[str, Any], file: str) -> ProfiledOp:
    key = f"ops[{index}]"
    if not isinstance(entry, Mapping):
        raise InputError("is no object", file=file, key=key, value=entry, hint=f"with the keys {', '.join(OP_KEYS)}")
    for name in entry:
        if name not in OP_KEYS:
            raise unknown("key", name, OP_KEYS, file=file, key=key)
    names = tuple(map(str, entry.get("tensors", ())))
    for name in names:
        if name not in shapes:
            raise unknown("tensor", name, shapes, file=file, key=f"{key}.tensors")
    forward_s, backward_s = (
        per_sample * _number(entry.get(side, 0.0), f"{key}.{side}", file) for side in ("forward_s", "backward_s")
    )
    return ProfiledOp(
        name=str(entry.get("name", index)), forward_s=forward_s, backward_s=backward_s, tensors=names
    )


def _number(value: Any, key: str, file: str, *, least: float = 0.0) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= least
    if not good:
        raise InputError("is no number", file=file, key=key, value=value, hint=f"at least {least:g}")
    return float(value)


def _shape(name: str, shape: Any, file: str) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape):
        raise InputError("is no shape", file=file, key=f"tensors.{name}", value=shape, hint="a list of whole numbers")
    return tuple(shape)
