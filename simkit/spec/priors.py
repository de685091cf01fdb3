"""What is assumed where nothing was measured: `hwprofiles/priors.toml`, pooled over the measured devices.

The ceiling of matrix products follows the power a device may draw: with u = power / peak of the dtype (W per TFLOP/s),

    ceiling = min(cap, reference · (u / u_reference) ^ exponent)

per architecture, and pooled where an architecture has no measured device. Consumer cards whose fp32-accumulate rate is
half of what the silicon does are not limited by power and reach their cap.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

from simkit.spec.hardware import Device, Fit
from simkit.spec.stack import fit

DEFAULT_CEILING = 0.90
DEFAULT_DEPTH = 60.0
DEFAULT_FRACTION = 0.80
DEFAULT_KERNEL_S = 3e-6
POWER_EXPONENT = 0.45


@lru_cache(maxsize=1)
def priors() -> dict[str, Fit]:
    """The fitted tables of ``hwprofiles/priors.toml``."""
    text = files("simkit.hwprofiles").joinpath("priors.toml").read_text(encoding="utf-8")
    return {k: fit(k, v, "priors.toml") for k, v in tomllib.loads(text).get("calibration", {}).items()}


def gemm_prior(device: Device, dtype: str, peak_flops: float) -> tuple[float, float, str]:
    """(ceiling, depth, one line saying where they come from) of a device and dtype nobody measured."""
    table = priors()
    arithmetic = "fp32" if dtype == "fp32" else "tensor"
    prior = table.get(f"gemm.{arithmetic}.{device.architecture}") or table.get(f"gemm.{arithmetic}")
    if prior is None:
        return DEFAULT_CEILING, DEFAULT_DEPTH, "default ceiling, nothing measured"
    ceiling = prior["ceiling"]
    if device.power_w and "watt_per_tflops" in prior.values:
        u = device.power_w / (peak_flops / 1e12)
        ceiling = min(prior["cap"], ceiling * (u / prior["watt_per_tflops"]) ** prior["exponent"])
    return ceiling, prior["depth"], f"prior {prior.name}"


def prior(name: str, key: str, default: float) -> float:
    """One constant of a pooled fit, or its default."""
    found = priors().get(name)
    return found.get(key, default) if found is not None else default
