"""A swarm worked by hand: pace, losses, takeovers, checkpoints, storms; and the oracle table in short."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simkit.churn._common import churn
from simkit.des.streams import Streams, child_seed
from simkit.des.swarm import Swarm, SwarmConfig, simulate
from simkit.des.swarm_broker import detection_s
from simkit.des.swarm_config import expected_changes
from simkit.des.swarm_parts import Node, Progress
from simkit.errors import InputError
from simkit.spec.peers import Peer
from simkit.spec.scenario import Scenario
from simkit.spec.stage import uniform
from simkit.swarm import may_gain, replicate, smallest_pool, study
from simkit.swarm_job import begun, job
from simkit.swarm_stats import mean_interval, student
from simkit.trace_swarm import swarm_trace

ROOT = Path(__file__).resolve().parent.parent.parent


def peers(count: int, **fields: Any) -> tuple[Peer, ...]:
    given = {"flops": 1.0, "memory_bytes": 1e10, "up_Bps": 1e7, "down_Bps": 1e8} | fields
    return tuple(Peer(name=f"p{i}", device="x", **given) for i in range(count))


def config(count: int, folder: Path | None = None, stays: str = "", **fields: Any) -> SwarmConfig:
    law = churn("none")
    if folder is not None:
        (folder / "stays.csv").write_text("peer,join_s,leave_s\n" + stays, encoding="utf-8")
        law = churn(f"trace:{folder / 'stays.csv'}")
    given: dict[str, Any] = {"stages": uniform(1, forward_s=1.0), "peers": peers(count), "churn": law,
                             "horizon_s": 3600.0, "broker_s": 0.0, "startup_s": 0.0}  # fmt: skip
    return SwarmConfig(**(given | fields))


# -- progress ---------------------------------------------------------------------------------------------------------


def test_micro_batches_leave_the_line_at_fill_and_every_interval() -> None:
    line = Progress(4, 2, 5.0)
    line.pace(10.0, 2.0)
    # A step: 10 + 3 x 2 = 16; a round of two and its exchange: 37.
    seen = []
    for at in (9.9, 10.0, 11.9, 12.0, 16.0, 25.9, 26.0, 32.0, 36.9):
        line.at_s = at
        seen.append(line.count())
    assert seen == [0, 1, 1, 2, 4, 4, 5, 8, 8]
    line.at_s = 0.0
    assert line.advance(37.0 * 3 + 12.0) == 3
    assert line.count() == 2


def test_a_change_of_pace_keeps_what_is_through() -> None:
    line = Progress(4, 1, 5.0)
    line.pace(10.0, 2.0)
    line.advance(13.0)
    line.pace(40.0, 6.0)
    # Two are through and half of the third's interval is over: 40 + 6 + 3.
    assert line.count() == 2
    assert line.at_s == pytest.approx(49.0)
    line.advance(12.0 - 3.0 + 2.0)
    line.pace(1.0, 1.0)
    # Two seconds into an exchange of five there are three left, whatever the pace.
    assert line.at_s == pytest.approx(4.0 + 2.0)


@pytest.mark.parametrize("stages", [1, 3, 7])
def test_without_churn_the_run_is_the_closed_form(stages: int) -> None:
    rng = np.random.default_rng(stages)
    cost = uniform(stages, forward_s=0.1, activation_bytes=1e6, flops=1.0)
    some = tuple(Peer(name=f"p{i}", device="x", flops=float(f), memory_bytes=1.0, up_Bps=2e6, down_Bps=4e6,
                      latency_s=0.02) for i, f in enumerate(rng.uniform(0.5, 2.0, stages)))  # fmt: skip
    cfg = config(stages, stages=cost, peers=some, micro_batches=9, exchange_s=3.0, horizon_s=1e5)
    compute = [0.3 / p.flops for p in some]
    # A message: two latencies of 20 ms and 1 MB at 2 MB/s, there and back; a line carries both of its messages.
    fill = sum(compute) + (stages - 1) * 2.0 * (0.04 + 0.5)
    lines = [(i > 0) * 0.5 + (i < stages - 1) * 0.5 for i in range(stages)]
    step = fill + 8.0 * max(*compute, *lines) + 3.0
    found = simulate(cfg)
    assert begun(cfg).wiring.units[0].progress.round_s == pytest.approx(step, rel=1e-9)
    assert found.useful - found.open == 9 * math.floor(1e5 / step)
    assert found.lost == {}
    assert found.time_by == {"running": 1e5}


def test_a_job_without_churn_takes_the_step_that_predict_gives() -> None:
    fields = {"model": "bert-large", "cluster": "12x3080", "inter": "wan-1gbps", "dp": 2, "pp": 6}
    work = job(Scenario.of(fields), churn=churn("none"), horizon_s=7200.0)
    from simkit.predict import predict

    step = predict(**fields, method="decentralized").iteration_time_s
    assert work.step_s == pytest.approx(step, rel=1e-9)
    units = begun(work.config).wiring.units
    assert [unit.progress.round_s for unit in units] == pytest.approx([step] * 2, rel=1e-9)


# -- losses and takeovers ---------------------------------------------------------------------------------------------


def test_a_takeover_by_the_clock(tmp_path: Path) -> None:
    # Two pipelines of one stage, one spare. Peer a fails at 100.5 s: its heartbeats are given up within 30 s, the spare
    # fetches 1 GB at the 10 MB/s of the replica: 100 s. A micro-batch takes 3 s, a round has ten: 100.5 s are three
    # rounds and 3 micro-batches, which are lost.
    cfg = config(3, tmp_path, "a,0,100.5\nb,0,\nc,0,\n", pipelines=2, micro_batches=10, record=True,
                 stages=uniform(1, forward_s=1.0, state_bytes=1e9), checkpoint_interval_s=1e6)  # fmt: skip
    swarm = Swarm(cfg)
    found = swarm.run()
    assert found.lost == {"peer failed": 3}
    broken = swarm.wiring.units[0]
    wait = broken.time_by["detect"]
    assert 20.0 <= wait <= 30.0
    assert broken.time_by["load"] == pytest.approx(100.0, rel=1e-6)
    assert found.recovery_s == pytest.approx(wait + 100.0)
    assert found.moved_bytes == pytest.approx(1e9)
    # The replica's own pipeline has one stage and sends nothing: it is not disturbed.
    assert swarm.wiring.units[1].useful == 10 * math.floor(3600.0 / 30.0)
    names = {e["args"]["name"] for e in swarm_trace(found, label="x")["traceEvents"] if e["ph"] == "M"}
    assert {"swarm", "p0", "p1", "p2"} <= names


def test_the_last_holder_takes_the_work_since_the_checkpoint_with_it(tmp_path: Path) -> None:
    # Rounds of 3 s, a checkpoint after 60 s (20 rounds) whose write of 1 MB takes 0.1 s; a leaves at 100 s, after 33
    # rounds: 13 are lost with what was under way, and the spare starts from the checkpoint.
    cfg = config(2, tmp_path, "a,0,100\nb,0,\n", stages=uniform(1, forward_s=1.0, state_bytes=1e6),
                 checkpoint_interval_s=60.0)  # fmt: skip
    swarm = Swarm(cfg)
    found = swarm.run()
    assert found.counts["block lost"] == 1
    assert found.lost == {"block lost": 13}
    assert swarm.transfers.from_checkpoint == 1


def test_who_announces_its_leave_costs_nothing(tmp_path: Path) -> None:
    cfg = config(2, tmp_path, "a,0,300\nb,0,\n", stages=uniform(1, forward_s=1.0, state_bytes=1e8), graceful=1.0,
                 notice_s=60.0)  # fmt: skip
    found = simulate(cfg)
    assert found.counts["handover"] == 1
    assert found.lost == {}
    assert found.time_by == {"running": 3600.0}


def test_no_spare_is_a_stall_with_its_reason(tmp_path: Path) -> None:
    found = simulate(config(1, tmp_path, "a,0,300\nb,2000,\n"))
    assert [round(s.start_s) for s in found.stalls] == [300]
    assert found.stalls[0].end_s == pytest.approx(2000.0)
    assert found.time_by["starved"] == pytest.approx(2000.0 - 300.0 - found.time_by["detect"])


def test_memory_decides_who_may_take_a_place(tmp_path: Path) -> None:
    small = peers(1, memory_bytes=1e9)[0]
    cfg = config(2, tmp_path, "a,0,300\nb,0,\n", peers=(peers(1)[0], small),
                 stages=uniform(1, forward_s=1.0, memory_bytes=5e9))  # fmt: skip
    found = simulate(cfg)
    assert found.time_by["starved"] > 3000.0


def test_a_stochastic_mesh_goes_round_a_loss(tmp_path: Path) -> None:
    # Two stages of two peers: losing one of a stage halves the rate and costs its half of the round at most.
    cfg = config(4, tmp_path, "a,0,1000\nb,0,\nc,0,\nd,0,\n", stages=uniform(2, forward_s=1.0), pipelines=2,
                 micro_batches=50, wiring="stochastic")  # fmt: skip
    found = simulate(cfg)
    assert found.time_by == {"running": 3600.0}
    assert 0 < found.lost["peer failed"] <= 50
    assert found.stalls == ()


def test_a_join_storm_queues_at_the_broker() -> None:
    cfg = config(1, joins=((100.0, 50),), broker_s=2.0)
    found = simulate(cfg)
    assert found.joins == 50
    assert found.broker_longest_s == pytest.approx(100.0)
    assert found.samples["spares"][-1] == 50.0


def test_silence_is_noticed_after_the_last_heartbeat() -> None:
    node = Node(0, peers(1)[0], 100.0, math.inf, (0.0, 0.0, 0.4), 0.0, 10.0)
    # Heartbeats at 104, 114, …; the last before 131 was at 124: given up at 154.
    assert detection_s(node, 131.0, heartbeat_s=10.0, misses=3) == pytest.approx(23.0)


# -- seeds, workers, pools --------------------------------------------------------------------------------------------


def test_streams_do_not_depend_on_who_was_there_before() -> None:
    one, other = Streams(7), Streams(7)
    other.of("peer", 0).random(100)
    assert one.of("peer", 3).random() == other.of("peer", 3).random()
    assert one.of("peer", 3).random() != one.of("peer", 4).random()
    assert len({child_seed(0, i) for i in range(100)}) == 100


def test_workers_change_no_byte() -> None:
    cfg = config(10, churn=churn("exponential:1h"), stages=uniform(5, forward_s=1.0, state_bytes=1e8), pipelines=2,
                 backup_pool=2, horizon_s=6 * 3600.0)  # fmt: skip
    alone, together = (replicate(cfg, replications=3, workers=w) for w in (1, 2))
    for a, b in zip(alone, together, strict=True):
        assert (a.done, a.useful, a.lost, a.counts, a.cost_usd) == (b.done, b.useful, b.lost, b.counts, b.cost_usd)
        assert {k: v.tobytes() for k, v in a.samples.items()} == {k: v.tobytes() for k, v in b.samples.items()}
    assert len({a.useful for a in alone}) > 1


def test_one_more_spare_leaves_the_lives_of_the_others_as_they_were() -> None:
    base = config(6, churn=churn("exponential:1h"), stages=uniform(3, forward_s=1.0), pipelines=2)
    lives = []
    for pool in (0, 1):
        swarm = Swarm(SwarmConfig(**{f: getattr(base, f) for f in base.__slots__} | {"backup_pool": pool}))
        swarm.population.start()
        lives.append([node.leaves_s for node in swarm.population.nodes.values()])
    assert lives[1][: len(lives[0])] == lives[0]


def test_the_smallest_pool_is_enough_and_one_less_is_not() -> None:
    cfg = config(10, churn=churn("exponential:2h"), stages=uniform(10, forward_s=0.1, state_bytes=1e7), micro_batches=8,
                 arrivals="recruit", recruit_s=1800.0, horizon_s=12 * 3600.0, checkpoint_interval_s=60.0)  # fmt: skip
    pool, tried = smallest_pool(cfg, 0.8, replications=3, workers=1)
    found = {row["backup_pool"]: row["goodput"] for row in tried}
    assert pool is not None
    assert pool > 0
    assert found[pool] >= 0.8 > found[pool - 1]


def test_student_quantiles() -> None:
    # Tables: t(1, 95 %) = 12.706, t(9, 95 %) = 2.262, t(19, 99 %) = 2.861, t(1000, 95 %) = 1.962.
    for df, level, wanted in ((1, 0.95, 12.706), (9, 0.95, 2.262), (19, 0.99, 2.861), (1000, 0.95, 1.962)):
        assert student(df, level) == pytest.approx(wanted, abs=6e-4)
    mean, low, high = mean_interval([1.0, 2.0, 3.0], 0.95)
    assert (mean, high - low) == pytest.approx((2.0, 2.0 * 4.3027 / math.sqrt(3.0)), rel=1e-4)


@pytest.mark.parametrize("change", [{"pipelines": 0}, {"horizon_s": math.inf}, {"graceful": 2.0}, {"arrivals": "x"},
                                    {"peers": ()}, {"holders": ((5,),)}, {"stages": uniform(1, forward_s=0.0)},
                                    {"slow_factor": 0.5}, {"startup_s": -1.0},
                                    {"heartbeat_s": 0.0}, {"checkpoint_interval_s": math.nan}])
def test_senseless_configurations_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        config(2, **change)


def test_an_interval_holds_nothing_impossible() -> None:
    # Mean 0.6, t(2, 95 %) = 4.3027, s = 0.5292: 0.6 +- 1.3146, cut to [0, 1].
    assert mean_interval([0.0, 0.8, 1.0], 0.95, least=0.0, most=1.0) == (pytest.approx(0.6), 0.0, 1.0)
    # Uncut where it lies inside: 0.5 +- 0.0248.
    _, low, high = mean_interval([0.49, 0.5, 0.51], 0.95, least=0.0, most=1.0)
    assert (low, high) == pytest.approx((0.4752, 0.5248), abs=1e-4)


def test_only_alike_peers_in_fixed_pipelines_are_bounded_by_their_start() -> None:
    quick = peers(1, flops=2.0)[0]
    assert not may_gain(config(2))
    assert may_gain(config(2, peers=(peers(1)[0], quick)))
    assert may_gain(config(2, wiring="stochastic"))


@pytest.mark.parametrize(("name", "change"), [
    ("churn", {"churn": churn("exponential:1ms")}),
    ("churn", {"churn": churn("correlated:4h,every=1us,share=0.3")}),
    ("slow_every_s", {"slow_every_s": 1e-6, "slow_s": 1e-6}), ("joins", {"joins": ((1.0, 2_000_000),)}),
    ("checkpoint_interval_s", {"checkpoint_interval_s": 1e-6}), ("bins", {"bins": 2_000_000}),
])  # fmt: skip
def test_too_many_changes_are_refused_beforehand(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="1,000,000") as found:
        config(2, **change)
    assert (found.value.key, bool(found.value.hint)) == (name, True)


@pytest.mark.parametrize("law", ["exponential:2min", "weibull:2min,shape=0.6", "correlated:10min,every=4min,share=0.5,"
                                 "duration=2min"])  # fmt: skip
def test_the_expected_comings_are_those_that_come(law: str) -> None:
    cfg = config(40, churn=churn(law), horizon_s=4 * 3600.0)
    joins = simulate(cfg).joins
    assert 0.6 * joins < expected_changes(cfg, cfg.online)["churn"] < 1.7 * joins


def test_a_pool_that_grows_with_the_losses_is_counted_too() -> None:
    with pytest.raises(InputError, match="1,000,000"):
        simulate(config(12, churn=churn("exponential:1s"), pool="poisson", stages=uniform(12, forward_s=1.0)))


def test_a_study_puts_it_together() -> None:
    fields = {"model": "bert-large", "cluster": "12x3080", "inter": "wan-1gbps", "dp": 2, "pp": 6, "tokens": 1e9}
    answer, _, runs = study(Scenario.of(fields), replications=2, churn=churn("exponential:2h"), horizon_s=6 * 3600.0,
                            backup_pool=2)  # fmt: skip
    low, high = answer["interval_95"]["goodput"]
    assert low <= answer["goodput"] <= high
    assert answer["useful_samples_per_s"] <= answer["ideal_samples_per_s"]
    assert answer["time_to_end_s"] == pytest.approx(1e9 / answer["useful_tokens_per_s"])
    assert answer["datacentre"]["throughput_ratio"] > 0.0
    counts = answer["micro_batches"]
    assert counts["done"] == pytest.approx(counts["useful"] + sum(counts["lost"].values()))
    # Rent: everybody is paid while there.
    hours = sum(float(o.peers["online_s"].sum()) for o in runs) / 3600.0 / 2.0
    assert answer["cost_usd_per_hour"] * 6.0 == pytest.approx(hours * 0.15)


# -- theory -----------------------------------------------------------------------------------------------------------


def oracles() -> Any:
    path = ROOT / "benchmarks" / "swarm_oracles.py"
    spec = importlib.util.spec_from_file_location("swarm_oracles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["swarm_oracles"] = module
    spec.loader.exec_module(module)
    return module


def test_theory_lies_in_the_intervals_of_the_simulation() -> None:
    # The whole table takes minutes: `python benchmarks/swarm_oracles.py --check`, and here with SIMKIT_SLOW=1.
    some = ("broker, load 0.5", "M/D/1", "max-min", "join rate N/mean session, exp", "5 places filled, 2",
            "pipeline of 8")  # fmt: skip
    slow = os.environ.get("SIMKIT_SLOW") == "1"
    rows = list(oracles().rows(1.0, 0, 10 if slow else 6, only=("",) if slow else some))
    assert len(rows) >= len(some)
    assert [str(row) for row in rows if not row.met] == []
