"""Software stacks: data files which say what a stack fuses, overlaps and costs per step."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from simkit.errors import InputError, unknown
from simkit.spec.hardware import Fit
from simkit.spec.scenario import FIELDS, OPTIMIZERS

FOLDER = Path(__file__).parent / "stacks"
DEFAULT = "pytorch"
_KEYS = frozenset(
    {
        "title",
        "inherits",
        "overlap",
        "fusion",
        "bucket_mb",
        "mlm_positions",
        "optimizer_bytes",
        "optimizer_kernels",
        "compiled",
        "fused",
        "reduce_dtype",
        "autocast",
        "accumulation_passes",
        "scatter_gather",
        "attention_kernels",
        "host_optimizer",
        "vocab_multiple",
        "strict_interleaving",
        "softmax_batches",
        "tp_overlap",
        "zero_owners",
        "sources",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stack:
    """A software stack. mlm_positions: share of the positions a masked-LM head is computed for. optimizer_bytes: bytes
    moved per parameter and step; attention_kernels: ``newest`` of the device, ``flash-2``, which knows no Hopper, or
    ``sdpa``, PyTorch's choice; scatter_gather: between pipeline stages a tensor-parallel rank sends its share alone;
    optimizer_kernels: launches per tensor and step. fused: point-wise operators that run inside a neighbour's kernel,
    by their names in `simkit.workloads`; reduce_dtype: of the gradient exchange; autocast: weights are cast at each use
    rather than kept in the dtype of the arithmetic; accumulation_passes: gradients read and written, in elements a
    parameter and micro-batch, to add them to those of earlier micro-batches. host_optimizer: an offloaded optimizer
    runs on the host's processors (false: its state streams through the device); vocab_multiple: the vocabulary is
    padded to a multiple of this for each tensor-parallel rank; strict_interleaving: interleaved pipelines take a
    multiple of pp micro-batches only; softmax_batches: the fused masked softmax takes score matrices of a rank (micro-
    batch times heads over tp) in multiples of this, and any other number runs kernel by kernel. tp_overlap: as in
    `simkit.spec.plan.Plan`; zero_owners: ZeRO-1 and 2 give every tensor one owner, which broadcasts it, rather than
    every rank a slice; parents: the stacks it inherits from, closest first. calibration holds at most three fitted
    constants a stack, those it inherits included, of ``eager`` (elementwise, host_kernel_s, step_s, interference),
    ``attention`` (time), ``conv`` (fp32, tensor) and ``message`` (seconds)."""

    name: str
    title: str
    overlap: str
    fusion: str
    bucket_mb: float
    mlm_positions: float
    optimizer_bytes: Mapping[str, float]
    optimizer_kernels: Mapping[str, float]
    compiled: bool = False
    fused: frozenset[str] = frozenset()
    reduce_dtype: str = "fp32"
    autocast: bool = True
    accumulation_passes: float = 3.0
    scatter_gather: bool = False
    attention_kernels: str = "newest"
    host_optimizer: bool = True
    vocab_multiple: int = 1
    strict_interleaving: bool = False
    softmax_batches: int = 1
    tp_overlap: str = "none"
    zero_owners: bool = False
    parents: tuple[str, ...] = ()
    sources: Mapping[str, str]
    calibration: Mapping[str, Fit]
    file: str = ""


def stack_names(profiles: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Every stack that has a file, shipped or in one of the user's folders."""
    folders = [FOLDER, *(Path(p) / "stacks" for p in profiles)]
    return tuple(sorted({f.stem for folder in folders if folder.is_dir() for f in folder.glob("*.toml")}))


@lru_cache(maxsize=256)
def known(name: str, profiles: tuple[str, ...] = ()) -> bool:
    """Whether a stack of that name has a file."""
    return name in stack_names(profiles)


def stack(name: str, *, profiles: tuple[str, ...] = ()) -> Stack:
    """The stack of that name, its parent's values filled in.

    Raises InputError for a name without a file, an unknown key, or a value of the wrong type.
    """
    return _stack(name, tuple(profiles))


@lru_cache(maxsize=64)
def _stack(name: str, profiles: tuple[str, ...]) -> Stack:
    merged, file = _merged(name, profiles, depth=0)
    table, fits = merged["stack"], merged.get("calibration", {})
    return Stack(
        name=name,
        title=str(table["title"]),
        overlap=str(table["overlap"]),
        fusion=str(table["fusion"]),
        bucket_mb=float(table["bucket_mb"]),
        mlm_positions=float(table["mlm_positions"]),
        optimizer_bytes=MappingProxyType({k: float(v) for k, v in table["optimizer_bytes"].items()}),
        optimizer_kernels=MappingProxyType({k: float(v) for k, v in table["optimizer_kernels"].items()}),
        compiled=bool(table.get("compiled", False)),
        fused=frozenset(table.get("fused", ())),
        autocast=bool(table.get("autocast", True)),
        attention_kernels=str(table.get("attention_kernels", "newest")),
        scatter_gather=bool(table.get("scatter_gather", False)),
        accumulation_passes=float(table.get("accumulation_passes", 3.0)),
        host_optimizer=bool(table.get("host_optimizer", True)),
        vocab_multiple=int(table.get("vocab_multiple", 1)),
        strict_interleaving=bool(table.get("strict_interleaving", False)),
        softmax_batches=int(table.get("softmax_batches", 1)),
        zero_owners=bool(table.get("zero_owners", False)),
        tp_overlap=str(table.get("tp_overlap", "none")),
        parents=tuple(merged["parents"]),
        reduce_dtype=str(table.get("reduce_dtype", "fp32")),
        sources=MappingProxyType(dict(table.get("sources", {}))),
        calibration=MappingProxyType({k: fit(k, v, file) for k, v in fits.items()}),
        file=file,
    )


def _merged(name: str, profiles: tuple[str, ...], *, depth: int) -> tuple[dict[str, Any], str]:
    candidates = [*(Path(p) / "stacks" / f"{name}.toml" for p in profiles), FOLDER / f"{name}.toml"]
    path = next((c for c in candidates if c.is_file()), None)
    if path is None:
        raise unknown("stack", name, stack_names(profiles))
    file = path.name
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is not valid TOML: {error}", file=file) from None
    table = read.get("stack")
    if not isinstance(table, dict):
        raise InputError("has no [stack] table", file=file, hint="see simkit/spec/stacks/pytorch.toml")
    for key in table:
        if key not in _KEYS:
            raise unknown("key", key, _KEYS, file=file)
    _check(table, file)
    parent = table.pop("inherits", None)
    if parent is None:
        return read | {"parents": []}, str(path)
    if depth > 8:
        raise InputError("inherits from itself", file=file, key="inherits", value=parent)
    base, _ = _merged(parent, profiles, depth=depth + 1)
    return {
        "stack": base["stack"] | table,
        "calibration": base.get("calibration", {}) | read.get("calibration", {}),
        "parents": [parent, *base["parents"]],
    }, str(path)


_CHOICES = {
    "attention_kernels": ("newest", "flash-2", "sdpa"),
    "tp_overlap": FIELDS["tp_overlap"].choices,
    "reduce_dtype": (*FIELDS["reduce_dtype"].choices, "compute", "main"),
}


def _check(table: dict[str, Any], file: str) -> None:
    for key, choices in _CHOICES.items():
        if key in table and table[key] not in choices:
            raise unknown(key, table[key], choices, file=file)
    for key in ("overlap", "fusion"):
        if key in table and table[key] not in FIELDS[key].choices:
            raise unknown(key, table[key], FIELDS[key].choices, file=file)
    for key in ("optimizer_bytes", "optimizer_kernels"):
        for optimizer, value in table.get(key, {}).items():
            if optimizer not in OPTIMIZERS:
                raise unknown("optimizer", optimizer, OPTIMIZERS, file=file)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise InputError("is not a number of at least 0", file=file, key=f"{key}.{optimizer}", value=value)


def fit(name: str, table: Mapping[str, Any], file: str) -> Fit:
    """A [calibration.*] table as a Fit. Raises InputError where it has no values."""
    if not isinstance(table.get("values"), dict):
        raise InputError("has no values", file=file, key=f"calibration.{name}", hint="run `simkit calibrate` again")
    return Fit(
        name=name,
        values=MappingProxyType({k: float(v) for k, v in table["values"].items()}),
        dataset=tuple(table.get("dataset", ())),
        rows=int(table.get("rows", 0)),
        valid=MappingProxyType({k: (float(v[0]), float(v[1])) for k, v in table.get("valid", {}).items()}),
        mape=table.get("mape"),
        evidence=str(table.get("evidence", "fitted")),
        note=str(table.get("note", "")),
    )
