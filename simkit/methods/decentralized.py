"""Pipelines over peers: unequal stages on unlike cards behind unlike lines, several of them in data parallel.

The job is a graph of operators, cut into runs that peers hold (`placement`); micro-batches flow through (`schedule`,
`wiring`), activations shrink on the wire (`wire`), replicas of a stage average gradients (`exchange`). With
``task = inference`` the peers form a chain that generates tokens. Sources: FusionAI (arXiv 2309.01172), FusionLLM
(arXiv 2410.12707), SWARM (arXiv 2301.11913), Petals (arXiv 2209.01188).
"""

from __future__ import annotations

from simkit.report import Report
from simkit.spec.scenario import Scenario


def report(scenario: Scenario, *, spans: bool = False, beside: bool = True) -> Report:
    """The answer for one scenario of peers."""
    if scenario.get("task") == "inference":
        from simkit.decentral_inference import inference

        return inference(scenario)
    from simkit.decentral import training

    return training(scenario, beside=beside, spans=spans)
