"""The schema of a scenario file says what `Scenario.of` says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from simkit.cli import main
from simkit.commands.schema import scenario
from simkit.errors import InputError
from simkit.spec.scenario import FIELDS, Scenario


def test_the_schema_holds_every_field_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["properties"]) == set(FIELDS)
    assert found["additionalProperties"] is False
    assert all(found["properties"][name]["description"] == spec.help for name, spec in FIELDS.items())
    assert "required" not in found


@pytest.mark.parametrize(
    ("values", "good"),
    [
        ({"model": "bert-large", "cluster": "8x4x2080ti", "micro_batch": 8, "density": 0.01, "p2p": True}, True),
        ({}, True),
        ({"micro_batch": 0}, False),
        ({"micro_batch": 1.5}, False),
        ({"zero": 4}, False),
        ({"precision": "fp12"}, False),
        ({"modle": "bert-large"}, False),
        ({"density": 2.0}, False),
        ({"compile": "perhaps"}, False),
    ],
)
def test_it_takes_and_refuses_what_a_scenario_does(values: dict[str, Any], good: bool) -> None:
    if good:
        scenario().model_validate(values)
        Scenario.of(values)
        return
    with pytest.raises(ValidationError):
        scenario().model_validate(values)
    with pytest.raises(InputError):
        Scenario.of(values)
