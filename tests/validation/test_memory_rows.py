"""Measured peaks of pre-training, by what was measured, and stage by stage where a table prints every stage."""

from __future__ import annotations

import csv
import statistics

import pytest

from simkit import predict
from simkit.predict import predict_scenario
from simkit.scoreboard import path_of
from simkit.spec.scenario import FIELDS, Scenario
from simkit.units import GIB
from simkit.validate import Row, score

# Bounds as first committed; they only tighten. Rows 47 and 52 of pretrain_flagperf stand far above their neighbours in
# the same table and stay in.
TABLES = {"pretrain_megatron_ci": (0.03, 0.05), "pretrain_flagperf": (0.061, 0.42)}


def peaks(table: str) -> list[Row]:
    return [r for r in score([path_of(table)]) if r.metric == "peak_memory_gib"]


@pytest.mark.parametrize("table", sorted(TABLES))
def test_peaks_stay_within_their_bounds(table: str) -> None:
    mean, worst = TABLES[table]
    errors = [abs(r.error) for r in peaks(table) if r.error is not None]
    assert len(errors) == {"pretrain_megatron_ci": 4, "pretrain_flagperf": 20}[table]
    assert statistics.mean(errors) <= mean
    assert statistics.median(errors) <= 0.03
    assert max(errors) <= worst


@pytest.mark.parametrize(
    ("micro_batch", "recompute", "card", "measured", "bound"),
    [
        (4, "none", "a100-sxm4-80gb", (46.80, 38.93, 31.74, 26.92), 0.055),
        (2, "full", "a100-sxm4-40gb", (20.41, 19.80, 19.41, 20.12), 0.055),
    ],
)
def test_every_stage_of_a_pipeline(
    micro_batch: int, recompute: str, card: str, measured: tuple[float, ...], bound: float
) -> None:
    """FlagPerf, training/nvidia/llama1_7B-paddle/README.md: LLaMA-7B, tp 2, pp 4, the memory of each stage."""
    report = predict(
        model="llama-7b",
        cluster=f"1x8x{card}",
        stack="paddle",
        tp=2,
        pp=4,
        dp=1,
        micro_batch=micro_batch,
        grad_accum=16,
        seq_len=2048,
        precision="fp16",
        attention="flash",
        recompute=recompute,
        optimizer="adamw",
    )
    told = [stage["reserved"] / GIB for stage in report.memory.per_stage]
    assert told == pytest.approx(measured, rel=bound)
    # What one more micro-batch in flight takes, free of every constant.
    if recompute == "none":
        assert told[1] - told[2] == pytest.approx(measured[1] - measured[2], rel=0.02)


def ran(table: str) -> dict[str, bool]:
    """{id of a run that was timed: whether it is said to fit}, each configuration once."""
    found: dict[str, bool] = {}
    seen = set()
    with path_of(table).open(encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            fields = {k: v for k, v in row.items() if k in FIELDS and v}
            key = tuple(sorted(fields.items()))
            if key not in seen:
                seen.add(key)
                found[row["id"]] = predict_scenario(Scenario.of(fields), beside=False).fits
    return found


# Configurations that ran and are said not to fit: llmq stores quantised copies of activations and chunks its head in
# ways that the vocabulary does not express; ZeRO-3 of the 530B model (SC21) gathers less than a block at a time.
SHIPPED = sorted(p.stem for p in path_of("x").parent.glob("pretrain_*.csv"))
UNFIT = {"pretrain_llmq_consumer": 10, "pretrain_megatron_papers": 1}


@pytest.mark.parametrize("table", SHIPPED)
def test_what_ran_is_said_to_fit(table: str) -> None:
    said = ran(table)
    assert said
    assert len([i for i, fits in said.items() if not fits]) <= UNFIT.get(table, 0)
