"""Times as people read them, worked by hand."""

from __future__ import annotations

import pytest

from simkit.units import format_s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (31e-6, "31 us"),
        (0.0125, "12.5 ms"),
        (90.0, "90 s"),
        (600.0, "10 min"),
        (3812.0, "63.53 min"),
        (7200.0, "2 h"),
        (93600.0, "26 h"),
        (14 * 86400.0, "14 days"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_s(seconds) == text
