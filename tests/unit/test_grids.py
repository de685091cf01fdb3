"""Are axes read as written? Expected values follow from the forms themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from simkit.errors import InputError
from simkit.grids import MAX_POINTS, Axis, axes, axis, setting, text
from simkit.spec.load import link


def values(found: Axis) -> list[Any]:
    return [found.value(i) for i in range(len(found))]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("micro_batch", "1,2,4,8", [1, 2, 4, 8]),
        ("micro_batch", "1:64:*2", [1, 2, 4, 8, 16, 32, 64]),
        ("micro_batch", "64:1:*0.5", [64, 32, 16, 8, 4, 2, 1]),
        ("micro_batch", "1:100:*3", [1, 3, 9, 27, 81]),
        ("micro_batch", "1:10:4", [1, 4, 7, 10]),
        ("micro_batch", "8:2:4", [8, 6, 4, 2]),
        ("micro_batch", "1:3:5", [1, 2, 3]),
        ("micro_batch", "1:1000:4:log", [1, 10, 100, 1000]),
        ("micro_batch", "1,2,4:12:3", [1, 2, 4, 8, 12]),
        ("micro_batch", "5:5:1", [5]),
        ("micro_batch", [4, 2, np.int64(4)], [4, 2]),
        ("micro_batch", 7, [7]),
        ("density", "0.001:0.1:3:log", [0.001, 0.01, 0.1]),
        ("bucket_mb", "0:50:3", [0.0, 25.0, 50.0]),
        ("method", "s-sgd,acp-sgd,s-sgd", ["s-sgd", "acp-sgd"]),
        ("compile", "true,no", [True, False]),
        ("cluster", "8x4x2080ti, 30x3080+20x4090", ["8x4x2080ti", "30x3080+20x4090"]),
        ("inter", "10gbe,25Gb/s@30us", ["10gbe", "25Gb/s@30us"]),
        ("inter", "1Gb/s@10us:3Gb/s@30us:3", ["1Gb/s@10us", "2Gb/s@20us", "3Gb/s@30us"]),
        ("inter", "1Gb/s@5us:100Gb/s@5us:3:log", ["1Gb/s@5us", "10Gb/s@5us", "100Gb/s@5us"]),
        ("inter", "1Gb/s@0s:9Gb/s@0s:*2", ["1Gb/s@0us", "2Gb/s@0us", "4Gb/s@0us", "8Gb/s@0us"]),
        ("intra", "100GB/s@1us", ["800Gb/s@1us"]),
    ],
)
def test_forms(name: str, given: Any, expected: list[Any]) -> None:
    found = values(axis(name, given))
    assert found == (pytest.approx(expected, rel=1e-12) if name in ("density", "bucket_mb") else expected)
    assert [type(v) for v in found] == [type(v) for v in expected]


def test_the_latency_follows_the_rate_in_a_geometric_range() -> None:
    # Four doublings of the rate from 1 to 16 Gb/s while the latency falls from 80 to 5 us, sixteen times less.
    found = axis("inter", "1Gb/s@80us:16Gb/s@5us:*2")
    assert found.Bps is not None
    assert found.latency_s is not None
    assert found.Bps * 8e-9 == pytest.approx([1, 2, 4, 8, 16])
    assert found.latency_s * 1e6 == pytest.approx([80, 40, 20, 10, 5])


def test_a_link_is_written_as_it_is_read() -> None:
    rng = np.random.default_rng(1)
    for rate, latency in zip(10 ** rng.uniform(5, 12, 200), 10 ** rng.uniform(-8, 0, 200), strict=True):
        read = link(text(rate, latency))
        assert math.isclose(read.Bps, rate, rel_tol=1e-15)
        assert math.isclose(read.latency_s, latency, rel_tol=1e-15)


def test_a_column_holds_the_value_of_every_point() -> None:
    found = axis("inter", "1Gb/s@5us:3Gb/s@5us:3")
    assert found.column(np.array([2, 0, 2])).tolist() == ["3Gb/s@5us", "1Gb/s@5us", "3Gb/s@5us"]
    assert axis("rank", "1,2,4").column(np.array([1, 1, 2])).tolist() == [2, 2, 4]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"bandwidth": "1,2"}, ("'bandwidth'", "no known axis")),
        ({"micro_batchs": "1,2"}, ("no known axis", "'micro_batch'")),
        ({"micro_batch": "1:x"}, ("micro_batch", "is no range", "START:STOP:COUNT")),
        ({"micro_batch": "1:x:3"}, ("'x'", "is not a number")),
        ({"micro_batch": "1:8:0"}, ("no count",)),
        ({"micro_batch": "1:8:2.5"}, ("no count",)),
        ({"micro_batch": "1:8:3:lin"}, ("is no range",)),
        ({"micro_batch": "1:8:*1"}, ("never reaches",)),
        ({"micro_batch": "8:1:*2"}, ("never reaches",)),
        ({"micro_batch": "1:8:*"}, ("factor of micro_batch", "not a quantity")),
        ({"micro_batch": "0:8:3"}, ("too small",)),
        ({"zero": "0:3:1"}, ("two ends for one value", "0:3:4")),
        ({"micro_batch": "1,,2"}, ("empty entry",)),
        ({"micro_batch": []}, ("empty list",)),
        ({"bucket_mb": "0:8:3:log"}, ("greater than zero",)),
        ({"method": "s-sgd", "Method": "x"}, ("'Method'",)),
        ({"overlap": "none,nope"}, ("'nope'",)),
        ({"inter": "1Gb/s@5us:8Gb/s@5us:4,10gbe"}, ("mixes names and ranges",)),
        ({"inter": "1Gb/s:8Gb/s:4"}, ("is no range of links",)),
        ({"inter": "1Gb/s@5us:8Gb/s:4"}, ("rate without a latency",)),
        ({"inter": "1Gb/s@0us:8Gb/s@5us:4:log"}, ("greater than zero",)),
        ({"micro_batch": "1:1e9:200000000"}, ("too many values",)),
        ({"micro_batch": "1:100000:100000", "grad_accum": "1:100000:100000"}, ("10000000000", "too many points")),
    ],
)
def test_complaints_are_one_line_with_the_way_out(grid: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        axes(grid)
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line


def test_the_bound_is_on_points_of_the_whole_grid() -> None:
    found = axes({"micro_batch": "1:10000:10000", "grad_accum": "1:10000:10000"})
    assert [len(a) for a in found] == [10_000, 10_000]
    assert math.prod(len(a) for a in found) == MAX_POINTS


def test_settings() -> None:
    assert setting("tp=1,2") == ("tp", "1,2")
    for bad in ("tp", "=1", "tp="):
        with pytest.raises(InputError, match="is no axis"):
            setting(bad)
