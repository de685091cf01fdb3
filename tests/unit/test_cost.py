"""Money and energy, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simkit.cost import cost, ratio
from simkit.spec.hardware import Cluster, Device, Group
from simkit.spec.scenario import Scenario

CARD = Device(
    name="card", title="Card", vendor="", peak_flops={}, memory_bytes=1.0, memory_nominal_bytes=1.0, memory_Bps=1.0,
    p2p=False, pcie_generation=4, gpus_per_node=1, intra="", power_w=320.0, idle_power_w=20.0, launch_price_usd=699.0,
    rental_usd_per_hour=0.15, rental_date="2025-06",
)
JOB = {"step_s": 2.0, "busy": 0.5, "samples_per_step": 100.0, "tokens_per_step": 1000.0}


def cluster(*groups: tuple[int, Device]) -> Cluster:
    made = tuple(Group(nodes=n, gpus_per_node=1, device=d) for n, d in groups)
    return Cluster(groups=made, intra=None, inter=None, nics_per_node=1, p2p=False)


def test_fifty_cards() -> None:
    """50 at 0.15 USD/h; 20 W idle and half of the 300 W above it: 170 W each, 8.5 kW, 17 kJ a step of 2 s."""
    figures, notes, warnings = cost(cluster((50, CARD)), Scenario.of({"electricity": 0.20}), **JOB)
    assert figures["cost_usd_per_hour"] == pytest.approx(7.5)
    assert figures["usd_per_step"] == pytest.approx(7.5 * 2 / 3600)
    assert figures["hardware_price_usd"] == pytest.approx(34950)
    assert figures["power_w"] == pytest.approx(8500)
    assert figures["energy_j_per_step"] == pytest.approx(17000)
    assert figures["electricity_usd_per_hour"] == pytest.approx(8.5 * 0.20)
    assert warnings == []
    assert any("2025-06" in note for note in notes)
    assert "cost_usd" not in figures


@pytest.mark.parametrize("fields", [
    {"tokens": 1e6}, {"samples": 1e5}, {"epochs": 2.0, "dataset_samples": 5e4},
])
def test_a_whole_job(fields: dict[str, float]) -> None:
    """A thousand steps of 2 s: 2000 s, 10 cards."""
    figures, _, _ = cost(cluster((10, CARD)), Scenario.of(fields), **JOB)
    assert figures["steps"] == pytest.approx(1000)
    assert figures["duration_s"] == pytest.approx(2000)
    assert figures["cost_usd"] == pytest.approx(1.5 * 2000 / 3600)
    assert figures["energy_j"] == pytest.approx(1700 * 2000)


def test_unknown_facts_are_absent_not_zero() -> None:
    bare = replace(CARD, power_w=None, rental_usd_per_hour=None, launch_price_usd=None)
    figures, _, warnings = cost(cluster((1, CARD), (1, bare)), Scenario.of({}), **JOB)
    assert figures == {}
    assert len(warnings) == 2


def test_idle_power_defaults_to_a_tenth() -> None:
    figures, _, _ = cost(cluster((1, replace(CARD, idle_power_w=None))), Scenario.of({}), **(JOB | {"busy": 0.0}))
    assert figures["power_w"] == pytest.approx(32)


def test_ratios_need_both_sides() -> None:
    assert ratio({"a": 3.0}, {"a": 2.0}, "a") == 1.5
    assert ratio({"a": 3.0}, {}, "a") is None
