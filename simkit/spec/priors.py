"""What is assumed where nothing was measured: `hwprofiles/priors.toml`, pooled over the measured devices.

The ceiling of matrix products follows the power a device may draw: with u = power / peak of the dtype (W per TFLOP/s),

    ceiling = min(cap, reference · (u / u_reference) ^ exponent)

per architecture, and pooled where an architecture has no measured device. Consumer cards whose fp32-accumulate rate is
half of what the silicon does are not limited by power and reach their cap.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib.resources import files

from simkit.spec.hardware import Device, Fit
from simkit.spec.stack import fit

DEFAULT_CEILING = 0.90
DEFAULT_DEPTH = 60.0
DEFAULT_FRACTION = 0.80
DEFAULT_KERNEL_S = 3e-6
DEFAULT_ATTENTION_SHARE = 0.7
DEFAULT_ATTENTION_DEPTH = 300.0
POWER_EXPONENT = 0.45


_instead: list[Mapping[str, Fit]] = []


@contextmanager
def replaced(trial: Mapping[str, Fit]) -> Iterator[None]:
    """Within the block, `trial` stands for the file: `simkit calibrate` tries what it has not written yet."""
    _instead.append(trial)
    try:
        yield
    finally:
        _instead.pop()


def set_trial(trial: Mapping[str, Fit]) -> None:
    """Within `replaced`: takes `trial` instead from now on."""
    _instead[-1] = trial


def priors() -> Mapping[str, Fit]:
    """The fitted tables of ``hwprofiles/priors.toml``."""
    return _instead[-1] if _instead else _shipped()


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, Fit]:
    text = files("simkit.hwprofiles").joinpath("priors.toml").read_text(encoding="utf-8")
    return {k: fit(k, v, "priors.toml") for k, v in tomllib.loads(text).get("calibration", {}).items()}


def flop_per_clock(device: Device, flops: float) -> float | None:
    """FLOP that one processor (SM) does per clock at a peak of `flops`, to the power of two; None where a fact is
    missing."""
    if not (flops and device.sm_count and device.boost_hz):
        return None
    return float(2 ** round(math.log2(flops / (device.sm_count * device.boost_hz))))


def pools(device: Device, dtype: str) -> tuple[str, ...]:
    """Names of the priors a device and dtype belong to, closest first: same processor (architecture and FLOP per clock
    of one SM: an A100 is another chip than an A40, and a GeForce runs at half of its silicon's rate), same
    architecture, all devices."""
    arithmetic = "fp32" if dtype == "fp32" else "tensor"
    names = [f"gemm.{arithmetic}.{device.architecture}", f"gemm.{arithmetic}"]
    per_clock = flop_per_clock(device, device.peak_flops.get(dtype, 0.0))
    if per_clock is not None:
        names.insert(0, f"{names[0]}.{per_clock:.0f}")
    return tuple(names)


def sustained_pool(device: Device) -> str | None:
    """Name of the prior for the clock under load: of one architecture and FLOP per clock of 16-bit products; None where
    a fact is missing."""
    per_clock = flop_per_clock(device, device.peak_flops.get("fp16", 0.0))
    return None if per_clock is None else f"sustained.{device.architecture}.{per_clock:.0f}"


def memory_prior(device: Device) -> float:
    """Fraction of the memory bandwidth that streaming reaches on a device nobody measured: of its architecture, or
    pooled over all."""
    return prior(f"memory.{device.architecture}", "fraction", prior("memory", "fraction", DEFAULT_FRACTION))


def attention_prior(device: Device, ceiling: float) -> tuple[float, float]:
    """(ceiling, depth) of fused attention nobody measured: its share of the ceiling of matrix products, per
    architecture or pooled over all."""
    table = priors()
    prior = table.get(f"attention.{device.architecture}") or table.get("attention")
    if prior is None:
        return DEFAULT_ATTENTION_SHARE * ceiling, DEFAULT_ATTENTION_DEPTH
    return prior["share"] * ceiling, prior["depth"]


def gemm_prior(device: Device, dtype: str, peak_flops: float) -> tuple[float, float, str]:
    """(ceiling, depth, one line saying where they come from) of a device and dtype nobody measured."""
    table = priors()
    prior = next((table[pool] for pool in pools(device, dtype) if pool in table), None)
    if prior is None:
        return DEFAULT_CEILING, DEFAULT_DEPTH, "default ceiling, nothing measured"
    ceiling = prior["ceiling"]
    if device.power_w and "watt_per_tflops" in prior.values:
        u = device.power_w / (peak_flops / 1e12)
        ceiling = min(prior["cap"], ceiling * (u / prior["watt_per_tflops"]) ** prior["exponent"])
    return ceiling, prior["depth"], f"prior {prior.name}"


def forget() -> None:
    """Reads the file again when next asked."""
    _shipped.cache_clear()


def prior(name: str, key: str, default: float) -> float:
    """One constant of a pooled fit, or its default."""
    found = priors().get(name)
    return found.get(key, default) if found is not None else default
