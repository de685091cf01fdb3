"""From a name, a path or a callable to a Model.

A name is looked up in the zoo first, then in the tables the user gives, then in the table of architectures that ships
with the measured data. Names are compared without case, spaces, dashes and underscores; Hugging Face ids and the
suffixes of tuned variants (``-hf -instruct -chat -base -it -uncased``) are understood, since tuning changes no shape.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType

from simkit.errors import InputError, unknown
from simkit.spec import convnets
from simkit.spec.model import Model, Tensor, TransformerSpec

Row = Mapping[str, str]
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_TUNED = re.compile(r"[-_ ](?:hf|instruct|chat|base|it|uncased|cased)$", re.IGNORECASE)
PRETRAIN_HEADS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "bert": ("pooler", "mlm", "nsp"), "roberta": ("mlm",), "distilbert": ("mlm",),
})
PADDED_FOR_TRAINING: Mapping[str, int] = MappingProxyType({"bert": 8})
"""NVIDIA's BERT recipes pad the 30,522 rows to a multiple of 8 for tensor cores."""


def model(
    name_or_path: str, *, models_files: tuple[str | Path, ...] = (), seq_len: int | None = None
) -> Model:
    """The network called `name_or_path`: a zoo name, a ``config.json`` or its folder, or ``package.module:callable``.

    models_files: CSVs of architectures, in the columns of either kind that `simkit.spec.tables` reads; seq_len: length
    of a learned position table whose length the facts leave open. The same arguments give the same object.
    Raises InputError for unknown names (with the nearest known one) and for anything malformed behind a path.
    """
    text = str(name_or_path).strip()
    if text.endswith(".json") or ("/" in text and _exists(Path(text))):
        return _from_path(str(Path(text)), _stamp(Path(text)))
    found = _from_zoo(text)
    if found is not None:
        return _against_tables(found, tuple((str(f), _stamp(Path(f))) for f in models_files)) if models_files else found
    for file in map(str, models_files):
        found = _from_table(text, file, _stamp(Path(file)), seq_len)
        if found is not None:
            return found
    shipped = shipped_table()
    found = _from_table(text, str(shipped), 0, seq_len) if shipped else None
    if found is not None:
        return found
    if _CALLABLE.fullmatch(text):
        return _from_callable(text)
    if text and _exists(Path(text)) and Path(text).is_dir():
        return _from_path(str(Path(text)), _stamp(Path(text)))
    raise unknown("model", name_or_path, _all_names(tuple(map(str, models_files))), see="simkit models")


def model_names() -> tuple[str, ...]:
    """Every zoo name, sorted."""
    return tuple(sorted([*(row["model"] for row in _zoo_rows()), *convnets.names()]))


def pretraining_model(base: Model) -> Model:
    """The network that pre-training runs: `base` with the task heads and the padded vocabulary its family trains with.

    BERT gains the masked-LM head (decoder tied to the embedding) and the next-sentence head, and 30,528 rows; RoBERTa
    and DistilBERT gain the masked-LM head. Everything else trains as it is, and the same object comes back.
    """
    return _pretraining(base)


@lru_cache(maxsize=256)
def _pretraining(base: Model) -> Model:
    from simkit.spec.build import build

    spec = base.spec
    if not isinstance(spec, TransformerSpec) or spec.model_type not in PRETRAIN_HEADS or "mlm" in spec.heads_list:
        return base
    multiple = PADDED_FOR_TRAINING.get(spec.model_type, 1)
    vocab = -(-spec.vocab // multiple) * multiple
    heads = PRETRAIN_HEADS[spec.model_type]
    note = f"pre-trains with the heads {' and '.join(heads)}"
    if vocab != spec.vocab:
        note += f", vocabulary {spec.vocab} padded to {vocab}"
    return build(
        replace(spec, heads_list=heads, vocab=vocab, tied=True), name=base.name, source=base.source, dtype=base.dtype,
        buffers=base.buffers, notes=(*base.notes, note),
    )


def padded_vocab(base: Model, tp: int, multiple: int) -> Model:
    """`base` with its vocabulary padded to a multiple of `multiple` for each of `tp` ranks:

        padded = ceil(vocab / (multiple · tp)) · multiple · tp

    so that every rank holds equal, aligned rows of the table and the head. The same object comes back where nothing is
    to be padded. Source: Megatron-LM, `_vocab_size_with_padding` (``--make-vocab-size-divisible-by``, 128).
    """
    spec = base.spec
    step = multiple * tp
    if not isinstance(spec, TransformerSpec) or not spec.vocab or spec.vocab % step == 0:
        return base
    return _padded(base, -(-spec.vocab // step) * step)


@lru_cache(maxsize=256)
def _padded(base: Model, vocab: int) -> Model:
    spec = base.spec
    assert isinstance(spec, TransformerSpec)

    def longer(tensor: Tensor) -> Tensor:
        if tensor.module not in ("embedding", "head") or tensor.shape[0] != spec.vocab:
            return tensor
        return replace(tensor, shape=(vocab, *tensor.shape[1:]))

    tensors = tuple(map(longer, base.tensors))
    added = sum(t.numel for t in tensors) - base.params
    active = None if base.params_active is None else base.params_active + added
    return replace(
        base, spec=replace(spec, vocab=vocab), tensors=tensors, params_active=active,
        notes=(*base.notes, f"vocabulary {spec.vocab} padded to {vocab}"),
    )


def normalise(name: str) -> str:
    """The form in which names are compared."""
    return re.sub(r"[\s_-]+", "", name).lower()


@cache
def _zoo_rows() -> tuple[Row, ...]:
    text = (Path(__file__).parent / "zoo" / "transformers.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


@cache
def _zoo_index() -> dict[str, str]:
    """Every understood spelling -> zoo name; a name proper wins over an alias."""
    index: dict[str, str] = {}
    for row in _zoo_rows():
        for alias in (row["hf_id"], row["hf_id"].rpartition("/")[2], *row["aliases"].split(";")):
            if alias.strip():
                index.setdefault(normalise(alias), row["model"])
    index.update({normalise(name): name for name in convnets.names()})
    index.update({normalise(row["model"]): row["model"] for row in _zoo_rows()})
    return index


def _spellings(name: str) -> list[str]:
    """`name` as it stands, without its owner, and without the suffixes of tuned variants."""
    out = [name, name.rpartition("/")[2]]
    while _TUNED.search(out[-1]):
        out.append(_TUNED.sub("", out[-1]))
    return [normalise(n) for n in out]


@lru_cache(maxsize=1024)
def _from_zoo(text: str) -> Model | None:
    if text.startswith((".", "/", "~")):
        return None
    index = _zoo_index()
    key = next((index[s] for s in _spellings(text) if s in index), None)
    return None if key is None else _zoo_model(key)


@cache
def _zoo_model(name: str) -> Model:
    from simkit.spec.build import build
    from simkit.spec.tables import spec_of

    if name in convnets.names():
        return convnets.build(name)
    row = next(r for r in _zoo_rows() if r["model"] == name)
    file = "transformers.csv"
    return build(
        spec_of(row, file=file), name=name, source=row["source"], dtype=row["dtype"],
        notes=tuple(filter(None, (row["notes"],))), fp8_block=int(row["fp8_block"] or 0),
        extra={k: int(v) for k, v in _pairs(row["extra_params"])},
        buffers={k: float(v) for k, v in _pairs(row["stored_buffers"])},
    )


def _pairs(cell: str) -> list[tuple[str, str]]:
    """``a=1 b=2`` as pairs."""
    return [(k, v) for k, _, v in (item.partition("=") for item in cell.split())]


def zoo_fact(name: str, column: str) -> str:
    """A cell of the zoo, such as ``published_params``; empty where blank or where `name` is no transformer of it."""
    return next((row[column] for row in _zoo_rows() if row["model"] == name), "")


@cache
def shipped_table() -> Path | None:
    """The table of architectures that only measured tables name; None where it is not installed."""
    from importlib.resources import files

    try:
        path = Path(str(files("simkit.validation").joinpath("models.csv")))
    except ModuleNotFoundError:
        path = Path(__file__).parents[2] / "validation" / "models.csv"
    return path if path.is_file() else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _stamp(path: Path) -> int:
    """Changes when the file does, so that an edited file is read again."""
    try:
        target = path / "config.json" if path.is_dir() else path
        return target.stat().st_mtime_ns
    except (OSError, ValueError):
        return -1


def _text(path: Path) -> str:
    """The text of a file, empty where it cannot be read: whoever parses it says why."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@lru_cache(maxsize=256)
def _from_path(path: str, stamp: int) -> Model:
    from simkit.spec import profiled
    from simkit.spec.hf import from_config

    if path.endswith(".json") and profiled.KEY in _text(Path(path)):
        return profiled.from_profile(Path(path))
    return from_config(Path(path))


@lru_cache(maxsize=64)
def _from_callable(text: str) -> Model:
    from simkit.spec.trace_module import from_callable

    return from_callable(text)


@lru_cache(maxsize=64)
def _table_index(file: str, stamp: int) -> dict[str, Row]:
    from simkit.spec.tables import read

    index: dict[str, Row] = {}
    for row in read(file, stamp):
        if normalise(row["model"]) in index:
            raise InputError("stands twice", file=file, key="model", value=row["model"])
        index[normalise(row["model"])] = row
    return index


def _from_table(text: str, file: str, stamp: int, seq_len: int | None) -> Model | None:
    row = _table_index(file, stamp).get(normalise(text))
    if row is None:
        return None
    open_ended = (row.get("positional") or "").strip() == "learned" and not (row.get("max_positions") or "").strip()
    return _row_model(file, stamp, normalise(text), seq_len if open_ended else None)


@lru_cache(maxsize=1024)
def _row_model(file: str, stamp: int, key: str, seq_len: int | None) -> Model:
    from simkit.spec.tables import to_model

    return to_model(_table_index(file, stamp)[key], file=file, seq_len=seq_len)


@lru_cache(maxsize=1024)
def _against_tables(found: Model, tables: tuple[tuple[str, int], ...]) -> Model:
    """The zoo's model, with a note where a user's table gives that name another shape: the zoo wins, and says so."""
    if not isinstance(found.spec, TransformerSpec):
        return found
    notes: list[str] = []
    for file, stamp in tables:
        row = _table_index(file, stamp).get(normalise(found.name))
        given = _row_model(file, stamp, normalise(found.name), None).spec if row else found.spec
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            ours, theirs = getattr(found.spec, field), getattr(given, field, None)
            if theirs is not None and theirs != ours:
                notes.append(f"{field} = {ours} of the zoo taken, not {theirs} of {file}")
    return replace(found, notes=(*found.notes, *notes)) if notes else found


def _all_names(models_files: tuple[str, ...]) -> list[str]:
    shipped = shipped_table()
    rows = [r for f in models_files for r in _table_index(f, _stamp(Path(f))).values()]
    rows += _table_index(str(shipped), 0).values() if shipped else []
    return sorted({*model_names(), *(row["model"] for row in rows)})
