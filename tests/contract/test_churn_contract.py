"""Every law of churn and every policy of the broker obeys its rules, found by its file."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simkit import plugins
from simkit.churn._common import Churn, churn
from simkit.errors import InputError
from simkit.spec.peers import Peer

LAWS = plugins.names("simkit.churn")


def law(name: str, folder: Path) -> Churn:
    if name == "empirical":
        (folder / "s.csv").write_text("session_s\n1h\n600\n2h\n", encoding="utf-8")
        return churn(f"empirical:{folder / 's.csv'}")
    if name == "trace":
        (folder / "t.csv").write_text("peer,join_s,leave_s\na,0,1h\nb,600,7200\n", encoding="utf-8")
        return churn(f"trace:{folder / 't.csv'}")
    # Moments exist, so that means settle.
    return churn({"pareto": "pareto:4h,alpha=4", "weibull": "weibull:4h,shape=0.8"}.get(name, name))


@pytest.mark.parametrize("name", LAWS)
def test_sessions_have_the_mean_that_is_said(name: str, tmp_path: Path) -> None:
    found, rng = law(name, tmp_path), np.random.default_rng(1)
    mean = found.mean_session_s()
    if math.isinf(mean):
        assert math.isinf(found.sample(rng))
        return
    drawn = np.array([found.sample(rng) for _ in range(4000)])
    assert (drawn > 0.0).all()
    assert abs(drawn.mean() - mean) < 4.0 * drawn.std() / math.sqrt(len(drawn)) + 1e-9


@pytest.mark.parametrize("name", LAWS)
def test_who_is_met_stays_on_for_half_of_a_length_biased_session(name: str, tmp_path: Path) -> None:
    # Renewal theory: the mean residual life is E[X^2] / (2 E[X]).
    found, rng = law(name, tmp_path), np.random.default_rng(2)
    if math.isinf(found.mean_session_s()):
        return
    drawn = np.array([found.sample(rng) for _ in range(20_000)])
    left = np.array([found.residual(rng) for _ in range(4000)])
    wanted = (drawn**2).mean() / (2.0 * drawn.mean())
    assert abs(left.mean() - wanted) < 5.0 * left.std() / math.sqrt(len(left)) + 0.05 * wanted


@pytest.mark.parametrize("name", LAWS)
def test_a_law_can_be_given_again_as_it_is_printed(name: str, tmp_path: Path) -> None:
    found = law(name, tmp_path)
    assert churn(found.text).p == found.p


@pytest.mark.parametrize("text", ["", "foo", "exponential:4", "exponential:-4h", "exponential:4h,4h",
                                  "exponential:x=1s", "pareto:4h,alpha=1",
                                  "weibull:4h,shape=0", "day-night:4h,amplitude=2", "trace",
                                  "exponential:0s", "exponential:mean=1h,mean=2h", "empirical:nowhere.csv",
                                  "exponential:", "exponential:4h,", "weibull:,shape=1", "exponential:1e300h",
                                  "day-night:4h,peak=99h", "correlated:4h,every=0s"])
def test_senseless_laws_are_one_line(text: str) -> None:
    with pytest.raises(InputError) as found:
        churn(text)
    assert found.value.hint


def test_measured_sessions_need_their_column(tmp_path: Path) -> None:
    (tmp_path / "wrong.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(InputError, match="lacks the column session_s"):
        churn(f"empirical:{tmp_path / 'wrong.csv'}")


@pytest.mark.parametrize("name", LAWS)
def test_the_rate_of_outages_is_the_one_that_is_drawn(name: str, tmp_path: Path) -> None:
    found = law(name, tmp_path)
    drawn = len(found.outages(np.random.default_rng(3), 1000 * 86400.0))
    wanted = found.outages_per_s() * 1000 * 86400.0
    assert abs(drawn - wanted) <= 4.0 * math.sqrt(wanted)


def node(key: int, **fields: Any) -> Any:
    peer = Peer(name=f"p{key}", device="x", **({"flops": 1.0, "memory_bytes": 1.0, "up_Bps": 1.0, "down_Bps": 1.0}
                                               | fields))  # fmt: skip
    return SimpleNamespace(peer=peer, joined_s=float(key), draw=key / 10.0, key=key, uploads=0)


@pytest.mark.parametrize("name", plugins.names("simkit.policies.placement"))
def test_placements_rank_peers(name: str) -> None:
    rank = plugins.get("simkit.policies.placement", name).rank
    better = {"fastest": {"flops": 2.0}, "cheapest": {"flops": 2.0, "price_usd_per_hour": 0.0},
              "best-link": {"up_Bps": 2.0}}.get(name)  # fmt: skip
    if better is not None:
        assert rank(node(9, **better)) < rank(node(1, price_usd_per_hour=1.0))
    assert sorted([rank(node(3)), rank(node(1))])[0] == rank(node(1))


@pytest.mark.parametrize("name", plugins.names("simkit.policies.pool"))
def test_pools_hold_what_was_asked_at_least(name: str) -> None:
    target = plugins.get("simkit.policies.pool", name).target
    for asked in (0, 3, 40):
        assert target(slots=50, backup_pool=asked, losses_per_s=50 / 14400, lead_s=600.0) >= asked
    grown = [target(slots=50, backup_pool=0, losses_per_s=rate, lead_s=600.0) for rate in (0.0, 1e-3, 1e-2, 1.0, 10.0)]
    assert grown == sorted(grown)


def test_the_base_stock_is_a_quantile_of_the_poisson_law() -> None:
    # P(Poisson(2) <= 5) = 0.9834, <= 6 is 0.9955 (tables): 6 spares for 99 %.
    target = plugins.get("simkit.policies.pool", "poisson").target
    assert target(slots=9, backup_pool=0, losses_per_s=2.0 / 600.0, lead_s=600.0) == 6


@pytest.mark.parametrize("name", plugins.names("simkit.policies.deadline"))
def test_deadlines_leave_equal_peers_alone_and_grow_with_them(name: str) -> None:
    limit = plugins.get("simkit.policies.deadline", name).limit_s
    assert limit([1.0] * 8) > 1.0
    assert limit([2.0] * 8) >= limit([1.0] * 8)
    if name != "none":
        assert limit([1.0, 1.1, 0.9, 1.0, 1.05, 9.0]) < 9.0


@pytest.mark.parametrize("name", plugins.names("simkit.policies.replacement"))
def test_replacements_name_peers_that_hold_the_stage_or_nobody(name: str) -> None:
    policy = plugins.get("simkit.policies.replacement", name)
    held = [node(1), node(2)]
    full = SimpleNamespace(replicas=lambda stage, **k: held[: k["count"]], neighbours=lambda unit, stage: [],
                           burden=lambda n: (n.uploads, n.key))  # fmt: skip
    empty = SimpleNamespace(replicas=lambda stage, **k: [], neighbours=lambda unit, stage: [], burden=full.burden)
    assert policy.KEEPS
    assert set(map(id, policy.sources(full, None, 0, 0.3))) <= set(map(id, held))
    assert policy.sources(empty, None, 0, 0.3) == []
