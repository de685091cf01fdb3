"""Writing the minimal profile of a device of one's own: a title, memory, its bandwidth, and a peak or two."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from simkit.errors import InputError, unknown
from simkit.spec import load
from simkit.spec.hardware import Device

_STEM = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_TEXT = ("title", "vendor", "kind", "architecture", "form_factor", "rental_date", "intra", "memory_nominal", "l2",
         "boost_clock", "base_clock", "power", "idle_power", "launch_price", "rental_price")
_OTHER = ("year", "sm_count", "p2p", "pcie_generation", "pcie_lanes", "gpus_per_node", "aliases")


def add_device(
    name: str,
    *,
    memory: str,
    bandwidth: str,
    peak: Mapping[str, str],
    directory: str | Path,
    force: bool = False,
    **optional: str | int | bool | list[str],
) -> Path:
    """Writes ``<directory>/devices/<name>.toml`` and returns its path; the file then loads under ``--profiles``.

    memory: ``"24 GiB"``; bandwidth: ``"1008 GB/s"``; peak: dtype -> ``"165 TFLOP/s"`` (dense, fp32 accumulation); the
    keyword arguments are further keys of ``[device]``, such as ``power="450 W"``. The file is checked before it takes
    its place, at once and whole. Raises InputError: a name that is no file stem, an existing file without `force`, an
    unknown key, any value that the loader would refuse, a folder that cannot be written.
    """
    if not isinstance(name, str) or not _STEM.fullmatch(name) or name.endswith(".toml"):
        raise InputError("is no profile name", key="name", value=name,
                         hint="use lower-case letters, digits, dots and dashes, such as my-gpu-24gb")
    folder = Path(directory) / "devices"
    target = folder / f"{name}.toml"
    if target.exists() and not force:
        raise InputError("exists already", file=str(target), hint="give --force to overwrite it, or another name")
    lines = ["[device]", _line("title", optional.pop("title", name)), _line("memory", memory),
             _line("memory_bandwidth", bandwidth)]
    for key, value in optional.items():
        if key not in (*_TEXT, *_OTHER):
            raise unknown("key", key, (*_TEXT, *_OTHER), key="device key")
        if value is not None:
            lines.append(_line(key, value))
    lines += ["", "[device.peak]", *(_line(dtype, value) for dtype, value in peak.items()), ""]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(target, "\n".join(lines))
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise InputError(what, file=str(target), hint="choose another folder") from error
    load.forget()
    return target


def _line(key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}"
    if isinstance(value, int):
        return f"{key} = {value}"
    if isinstance(value, (list, tuple)):
        return f"{key} = [{', '.join(_quoted(item) for item in value)}]"
    return f"{key} = {_quoted(value)}"


def _quoted(value: object) -> str:
    """A TOML basic string."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in text) + '"'


def _write(target: Path, text: str) -> None:
    """Writes beside the target, loads it to check it, and moves it into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
        draft = Path(scratch) / target.name
        draft.write_text(text, encoding="utf-8")
        try:
            _checked(draft)
        except InputError as error:
            raise InputError(error.what, key=error.key, value=error.value, hint=error.hint) from error
        os.replace(draft, target)


def _checked(draft: Path) -> Device:
    return load.device(str(draft))
