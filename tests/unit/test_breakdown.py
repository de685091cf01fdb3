"""Where a micro-batch goes: parts that sum to the whole, by hand where a hand can."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from simkit import breakdown, predict
from simkit.cli import main
from simkit.errors import InputError
from simkit.evaluate import Evaluation, evaluate
from simkit.render import to_dict
from simkit.report import BREAKDOWNS, Report
from simkit.spec.resolve import resolve
from simkit.spec.scenario import Scenario

JOB = {"model": "llama-2-7b", "cluster": "2x8xa100", "tp": 2, "pp": 2, "zero": 1, "micro_batch": 1, "grad_accum": 4,
       "seq_len": 2048, "stack": "megatron"}  # fmt: skip


def run(**fields: Any) -> Evaluation:
    return evaluate(resolve(Scenario.of(JOB | fields)))


def computing(parts: list[breakdown.Part]) -> list[breakdown.Part]:
    return [p for p in parts if p.kind != "communication"]


@pytest.mark.parametrize("by", BREAKDOWNS)
@pytest.mark.parametrize("fields", [{}, {"model": "mixtral-8x7b", "pp": 1, "ep": 4}, {"recompute": "full"}])
def test_parts_sum_to_the_micro_batch(by: str, fields: dict[str, Any]) -> None:
    found = run(**fields)
    parts = computing(getattr(breakdown, by)(found))
    assert math.fsum(p.forward_s for p in parts) == pytest.approx(found.compute.forward_total_s, rel=1e-9)
    assert math.fsum(p.backward_s for p in parts) == pytest.approx(found.compute.backward_total_s, rel=1e-9)
    assert math.fsum(p.share for p in parts) == pytest.approx(1.0)


def test_modules_of_a_llama_run_as_often_as_its_layers() -> None:
    found = {p.name: p for p in breakdown.operators(run())}
    for name in ("q_proj", "k_proj", "v_proj"):
        assert found[f"attention.qkv: {name}"].count == 32
    assert found["mlp: gate_proj"].count == found["mlp: up_proj"].count == found["mlp: down_proj"].count == 32
    assert found["head: vocabulary"].count == 1
    assert found["norm: final_norm"].count == 1
    by_module = {p.name: p for p in breakdown.modules(run())}
    assert by_module["attention.qkv"].count == 96
    assert by_module["norm"].count == 2 * 32 + 1


def test_equal_products_take_equal_time_and_gradients_twice_as_long() -> None:
    """q, k and v of Llama-2-7B have one shape; a product's two gradients are two products of as many FLOPs."""
    found = {p.name: p for p in breakdown.operators(run(seq_len=4096))}
    q, k = found["attention.qkv: q_proj"], found["attention.qkv: k_proj"]
    assert (q.forward_s, q.backward_s) == (k.forward_s, k.backward_s)
    assert q.backward_s / q.forward_s == pytest.approx(2.0, abs=0.25)
    mlp, attention = found["mlp: up_proj"], found["attention.out: o_proj"]
    assert mlp.forward_s / attention.forward_s == pytest.approx(11008 / 4096, rel=0.15)


def test_most_of_a_decoder_is_in_its_blocks() -> None:
    """Dissecting (arXiv 2311.03687): decoder layers take most of the time."""
    before, blocks, after, *_ = breakdown.layers(run())
    assert (before.name, blocks.name, blocks.count) == ("before the blocks", "blocks 0 to 31", 32)
    assert blocks.share > 0.9 > 0.1 > after.share > before.share


def test_layers_of_two_kinds_are_told_apart() -> None:
    """DeepSeek-V2-Lite: the first block is dense, the other 26 route to experts."""
    names = [p.name for p in breakdown.layers(run(model="deepseek-v2-lite", tp=1, pp=1, ep=4, stack="pytorch"))]
    assert "block 0" in names
    assert "blocks 1 to 26" in names


def test_messages_stand_beside_compute() -> None:
    found = {p.name: p for p in breakdown.modules(run(cp=2))}
    assert {"tensor parallelism", "pipeline stages", "gradient exchange"} <= set(found)
    assert found["gradient exchange"].per == "step"
    assert found["tensor parallelism"].per == "micro-batch"
    shares = [p.share for p in found.values() if p.kind == "communication"]
    assert math.fsum(shares) == pytest.approx(1.0)
    plain = breakdown.messages(run(model="resnet-50", tp=1, pp=1, zero=0, stack="pytorch", micro_batch=32))
    assert [p.name for p in plain] == ["gradient exchange"]
    assert breakdown.messages(run(cluster="1x1xa100", tp=1, pp=1, zero=0)) == []


def test_flash_attention_is_one_operator_and_math_several() -> None:
    flash = {p.name for p in breakdown.operators(run(attention="flash"))}
    math_ = {p.name for p in breakdown.operators(run(attention="math"))}
    assert "attention: flash" in flash
    assert {"attention: qk", "attention: softmax", "attention: pv"} <= math_
    assert not any(name.endswith((".grad", ".wgrad", ".dgrad", ".dq", ".dk")) for name in flash | math_)


def test_the_answer_shows_a_breakdown_where_asked() -> None:
    from dataclasses import replace

    report: Report = predict(**JOB)
    assert "modules" not in to_dict(report)
    shown = replace(report, shown=("modules", "operators"))
    found = to_dict(shown)
    assert [m["name"] for m in found["modules"]] == [p.name for p in report.parts("modules")]
    assert set(found["operators"][0]) == {"name", "kind", "forward_s", "backward_s", "share", "count", "per"}
    assert "modules" not in shown.to_csv()
    assert "by modules" in shown.to_markdown()
    assert "by modules" in str(shown)
    assert "by layers" not in str(shown)
    with pytest.raises(InputError, match="modules"):
        report.parts("module")


def test_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict --model llama-2-7b --cluster 1x8xa100 --tp 2 --zero 1 --micro-batch 1 --grad-accum 1 --seq-len 512"
    assert main([*words.split(), "--breakdown", "modules", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {m["name"] for m in found["modules"]} >= {"attention.qkv", "attention", "attention.out", "mlp", "norm"}
    assert main([*words.split(), "--breakdown", "layers"]) == 0
    out = capsys.readouterr().out
    assert "Where a micro-batch goes, by layers" in out
    assert "blocks 0 to 31" in out
