"""What this machine is: the facts that the operating system or the driver tells, versions, how busy it is."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simkit.errors import InputError

if TYPE_CHECKING:
    from simkit.measure import Options

CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device to measure. name: stem of its profile; device: ``cpu`` or ``cuda``; threads: of the CPU that are used;
    memory_bytes, cache_bytes, clock_hz, processors (cores in use, or SMs), power_w: None where nobody says;
    shipped: the profile of the package that describes this card already, empty where there is none."""

    name: str
    title: str
    device: str
    threads: int
    memory_bytes: float
    cache_bytes: float | None
    clock_hz: float | None
    processors: int
    date: str
    shipped: str = ""
    architecture: str = ""

    def load(self) -> str:
        """Processes that wanted to run in the last minute, which tells how quiet the machine was."""
        return f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""


def torch_or_complain() -> Any:
    """torch. Raises InputError where it is not installed."""
    try:
        import torch
    except ImportError:
        raise InputError("needs torch", key="measure", hint="pip install 'simkit-perf[kernels]'") from None
    return torch


def machine(options: Options) -> Machine:
    """This machine as the options want it measured. Raises InputError for a device it does not have."""
    torch = torch_or_complain()
    date = datetime.now(UTC).date().isoformat()
    if options.device == "cuda":
        return _cuda(torch, options, date)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or cores
    if not 1 <= threads <= cores:
        raise InputError("is out of range", key="--threads", value=threads, hint=f"1 to {cores} on this machine")
    torch.set_num_threads(threads)
    info = _cpuinfo()
    title = info.get("model name") or platform.processor() or platform.machine()
    clock = info.get("cpu MHz")
    return Machine(
        name=options.name or f"{_slug(title)}-{threads}t",
        title=f"{title}, {threads} of {cores} cores",
        device="cpu",
        threads=threads,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cache_bytes=_last_cache(),
        clock_hz=float(clock) * 1e6 if clock else None,
        processors=threads,
        date=date,
        architecture=platform.machine().replace("_", "-").lower(),
    )


def _cuda(torch: Any, options: Options, date: str) -> Machine:
    from simkit.spec import load
    from simkit.spec import profiles as store

    if not torch.cuda.is_available():
        raise InputError("has no CUDA device that torch sees", key="--device", value="cuda", hint="--device cpu")
    facts = torch.cuda.get_device_properties(0)
    path = store.find("device", facts.name)
    known = load.device(path.stem, calibration=False) if path is not None else None
    clock = getattr(facts, "clock_rate", None)
    cache = getattr(facts, "L2_cache_size", None)
    return Machine(
        name=options.name or (known.name if known else _slug(facts.name)),
        title=facts.name,
        device="cuda",
        threads=1,
        memory_bytes=float(facts.total_memory),
        cache_bytes=float(cache) if cache else None,
        clock_hz=float(clock) * 1e3 if clock else None,
        processors=int(facts.multi_processor_count),
        date=date,
        shipped=known.name if known and not options.name else "",
        architecture=known.architecture if known else f"sm-{facts.major}{facts.minor}",
    )


def versions(device: str) -> str:
    """What ran: ``simkit 0.1.0, torch 2.13.0, python 3.11.2, linux 6.18``."""
    from simkit import __version__

    torch = torch_or_complain()
    parts = [
        f"simkit {__version__}",
        f"torch {torch.__version__}",
        f"python {platform.python_version()}",
        f"{platform.system().lower()} {'.'.join(platform.release().split('.')[:2])}",
    ]
    if device == "cuda":
        parts.insert(2, f"cuda {torch.version.cuda}")
    return ", ".join(parts)


def _cpuinfo() -> dict[str, str]:
    try:
        lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _last_cache() -> float | None:
    """Bytes of the largest data cache of core 0."""
    sizes = []
    for path in sorted(CACHE.glob("index*")) if CACHE.is_dir() else ():
        match = re.fullmatch(r"(\d+)([KM]?)\s*", (path / "size").read_text(encoding="utf-8"))
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]])
    return float(max(sizes)) if sizes else None


def _slug(title: str) -> str:
    """A file stem from a name: ``AMD EPYC 7763 64-Core Processor`` -> ``amd-epyc-7763``."""
    kept = re.sub(r"\(r\)|\(tm\)|\d+-core|processor|cpu|@.*", " ", title.lower())
    return "-".join(re.findall(r"[a-z0-9.]+", kept))[:48].strip(".") or "machine"
