"""Money and energy of a step, an hour and a whole job.

    power   = sum over devices of  idle + (board power - idle) · busy,     busy = share of the step the compute stream
    works
    energy  = power · time;        money = rental price · hours,  or power · electricity price for one's own machines

Board power is the datasheet's limit: an upper estimate of what training draws. Hosts, switches and cooling are not in
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simkit.spec.hardware import IDLE_SHARE, Cluster
from simkit.spec.scenario import Scenario

ELECTRICITY_USD_PER_KWH = 0.15
"""About the average retail price of the United States in 2024 (EIA Electric Power Monthly: 0.13 all sectors, 0.165
residential): assumed."""


def cost(
    cluster: Cluster, scenario: Scenario, *, step_s: float, busy: float, samples_per_step: float, tokens_per_step: float
) -> tuple[dict[str, float], list[str], list[str]]:
    """(figures, assumptions, warnings). Figures: cost_usd_per_hour, usd_per_step, power_w, energy_j_per_step,
    electricity_usd_per_hour, hardware_price_usd, and for a whole job duration_s, steps, cost_usd, energy_j."""
    figures: dict[str, float] = {}
    notes: list[str] = []
    warnings: list[str] = []
    rental = _rental(cluster, notes, warnings)
    if rental is not None:
        figures["cost_usd_per_hour"] = rental
        figures["usd_per_step"] = rental * step_s / 3600.0
    prices = [g.device.launch_price_usd for g in cluster.groups]
    if all(p is not None for p in prices):
        figures["hardware_price_usd"] = sum(g.gpus * float(g.device.launch_price_usd or 0.0) for g in cluster.groups)
    power = _power(cluster, busy, warnings)
    if power is not None:
        price = scenario.get("electricity", ELECTRICITY_USD_PER_KWH)
        if not scenario.given("electricity"):
            notes.append(f"electricity = {price} USD/kWh: about the average retail price of the United States")
        figures |= {
            "power_w": power,
            "energy_j_per_step": power * step_s,
            "electricity_usd_per_hour": power / 1000.0 * price,
        }
    whole, said = whole_job(figures, scenario, step_s=step_s, samples=samples_per_step, tokens=tokens_per_step)
    return figures | whole, notes, [*warnings, *said]


def whole_job(
    figures: Mapping[str, Any], scenario: Scenario, *, step_s: Any, samples: Any, tokens: Any
) -> tuple[dict[str, Any], list[str]]:
    """(steps, duration_s and, where a step's are among `figures`, cost_usd and energy_j; warnings): of the whole job,
    where the scenario says how long it is. samples, tokens: of a step."""
    steps = _steps(scenario, samples, tokens)
    if steps is None:
        unknown = "epochs without dataset_samples: how long the whole job is stays unknown"
        return {}, [unknown] if scenario.given("epochs") else []
    found = {"steps": steps, "duration_s": steps * step_s}
    for whole, each in (("cost_usd", "usd_per_step"), ("energy_j", "energy_j_per_step")):
        if each in figures:
            found[whole] = steps * figures[each]
    return found, []


def _rental(cluster: Cluster, notes: list[str], warnings: list[str]) -> float | None:
    total = 0.0
    for group in cluster.groups:
        price = group.device.rental_usd_per_hour
        if price is None:
            warnings.append(f"no rental price known for {group.device.title}: no cost given")
            return None
        notes.append(f"rental = {price:g} USD/h a {group.device.title} ({group.device.rental_date})")
        total += group.gpus * price
    return total


def _power(cluster: Cluster, busy: float, warnings: list[str]) -> float | None:
    total = 0.0
    for group in cluster.groups:
        board = group.device.power_w
        if board is None:
            warnings.append(f"no board power known for {group.device.title}: no energy given")
            return None
        idle = group.device.idle_power_w if group.device.idle_power_w is not None else IDLE_SHARE * board
        total += group.gpus * (idle + (board - idle) * busy)
    return total


def _steps(scenario: Scenario, samples: float, tokens: float) -> float | None:
    """Steps of the whole job, where the scenario says how long it is."""
    if scenario.given("tokens") and np.all(np.greater(tokens, 0)):
        return float(scenario.get("tokens")) / tokens
    if scenario.given("samples"):
        return float(scenario.get("samples")) / samples
    if scenario.given("epochs") and scenario.given("dataset_samples"):
        return float(scenario.get("epochs") * scenario.get("dataset_samples")) / samples
    return None


def ratio(figures: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float | None:
    """figures[key] / other[key] where both know it."""
    if not figures.get(key) or not other.get(key):
        return None
    return float(figures[key]) / float(other[key])
