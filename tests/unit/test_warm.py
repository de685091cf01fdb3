"""What makes warm predictions cheap must not change them: fields made when read, sums that steps share."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import fake_report
import numpy as np
import pytest

from simkit import predict
from simkit.des.iteration import simulate
from simkit.report import Report
from simkit.timeline import Step, Sums, schedule, stretched


def deferred(calls: list[str]) -> Report:
    given = {f.name: getattr(fake_report.report(), f.name) for f in fields(Report)}
    open_fields = {name: given.pop(name) for name in ("ledger", "bottleneck")}
    given.pop("later")

    def later(name: str) -> Any:
        calls.append(name)
        return open_fields[name]

    return Report.deferred(later, frozenset(open_fields), **given)


def test_a_deferred_field_is_made_once_when_first_read() -> None:
    calls: list[str] = []
    report = deferred(calls)
    assert report.iteration_time_s == fake_report.report().iteration_time_s
    assert calls == []
    assert report.bottleneck == report.bottleneck == fake_report.report().bottleneck
    assert calls == ["bottleneck"]


def test_a_deferred_report_can_be_replaced_and_compared_like_any() -> None:
    calls: list[str] = []
    report = deferred(calls)
    changed = replace(report, warnings=("w",))
    assert (changed.ledger, changed.warnings) == (fake_report.report().ledger, ("w",))
    assert report == replace(report)
    assert report != changed
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = report.no_such_field  # type: ignore[attr-defined]


def test_defaults_of_a_deferred_report_are_those_of_a_report() -> None:
    short: dict[str, Any] = {
        "scenario": {}, "iteration_time_s": 1.0, "samples_per_s": 1.0, "breakdown": {}, "memory": fake_report.memory(),
    }  # fmt: skip
    assert Report.deferred(lambda name: None, frozenset(), **short) == Report(**short)


def test_a_prediction_says_the_same_however_late_it_is_read() -> None:
    job: dict[str, Any] = {"model": "resnet-18", "cluster": "2x1x3080", "inter": "10gbe", "micro_batch": 4}
    early = predict(**job)
    first = early.to_dict()
    late = predict(**job)
    predict(**job | {"micro_batch": 8, "inter": "1gbe"})
    assert late.to_dict() == first


def blocking(ready: list[int]) -> Step:
    """Three segments of 1 s; two chains of encode 1, send 2, between 3, send 4, decode 5: 15 s each."""
    return Step(
        forward_s=1.0,
        backward_s=np.ones(3),
        ready=np.array(ready),
        encode_s=np.array([1.0, 1.0]),
        comm_s=np.array([[2.0, 2.0], [4.0, 4.0]]),
        between_s=np.array([[3.0, 3.0]]),
        decode_s=np.array([5.0, 5.0]),
        placement="hook",
        blocking=True,
    )


def test_chains_that_block_and_never_meet_add_up() -> None:
    found = schedule(blocking([0, 2]))
    assert found.end_s == 1.0 + 3.0 + 2 * 15.0
    assert found.breakdown["exposed_comm_s"] == 12.0
    # The first chain starts at 2 s, the second after two more segments at 19 s; both have sent after 10 s.
    assert found.comm_end_s.tolist() == [12.0, 29.0]


@pytest.mark.parametrize("ready", [[0, 2], [1, 1], [-1, 2], [-1, -1]])
def test_blocking_chains_are_simulated_alike(ready: list[int]) -> None:
    closed, simulated = schedule(blocking(ready)), simulate(blocking(ready))
    assert closed.end_s == pytest.approx(simulated.end_s, rel=1e-9)
    assert closed.comm_end_s == pytest.approx(simulated.comm_end_s, rel=1e-9)


def test_sums_handed_in_are_sums_worked_out() -> None:
    step = replace(blocking([0, 2]), blocking=False)
    for placement in ("hook", "inline"):
        one = replace(step, placement=placement)
        plain, shared = schedule(one, interference=0.5), schedule(one, interference=0.5, sums=Sums.of(one))
        assert plain.breakdown == shared.breakdown
        factor = plain.breakdown["backward_s"] / 3.0
        assert factor > 1.0
        assert schedule(stretched(one, factor)).end_s == pytest.approx(plain.end_s, rel=1e-9)
