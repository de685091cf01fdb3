"""Local SGD (DiLoCo): every worker takes `inner_steps` of its own, then all average what they learned.

A worker is a node of the cluster, or a row of a peers CSV; inside it the job runs as `simkit predict` knows it (ZeRO,
tensor parallelism). The average of the parameters' change is quantised (`outer_dtype`), goes over the access lines, and
may be spread over the inner steps in `fragments` (streaming). Sources: Douillard et al., DiLoCo (arXiv 2311.08105);
Streaming DiLoCo (arXiv 2501.18512); INTELLECT-1 (arXiv 2412.01152).
"""

from __future__ import annotations

from simkit.report import Report
from simkit.spec.scenario import Scenario


def report(scenario: Scenario, *, spans: bool = False, beside: bool = True) -> Report:
    """The answer for one scenario of local SGD."""
    from simkit.decentral_local import local

    return local(scenario, beside=beside)
