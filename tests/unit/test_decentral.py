"""Work over peers: the limit where nothing waits, terms that sum, memory, formats, placements, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

import simkit
from simkit import plugins
from simkit.decentral import asked
from simkit.decentral_job import job, sustained
from simkit.decentral_search import answer, attempt, crew_of
from simkit.decentral_step import dealt, problem, step
from simkit.errors import InputError, RefusedError
from simkit.evaluate import evaluate
from simkit.opgraph import graph, units
from simkit.placement import Assignment, Held
from simkit.predict import predict_scenario
from simkit.spec.resolve import resolve
from simkit.spec.scenario import Scenario
from simkit.trace import chrome_trace

MODELS = ("bert-large", "llama-2-7b", "resnet-50", "gpt-j-6b", "flan-t5-base", "vit-base", "vgg-16", "gpt2",
          "mixtral-8x7b")


def alone(model: str, device: str = "3080", **fields: object):
    given = {"model": model, "cluster": f"1x1x{device}", "micro_batch": 2, "grad_accum": 1, **fields}
    return resolve(Scenario.of(given))


def question(**fields: object):
    return asked(Scenario.of({"method": "decentralized", **fields}))[0]


# -- the graph ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_units_hold_every_operator_and_parameter_once(model: str) -> None:
    resolved = alone(model)
    found = job(resolved, resolved.plan)
    u, program = found.units, found.program
    assert u.elements.sum() == resolved.model.params
    np.testing.assert_allclose(u.forward_rows.sum(axis=0), program.forward.counts)
    np.testing.assert_allclose(u.backward_rows.sum(axis=0), program.backward.counts)
    assert (u.crossing_bytes > 0.0).all()
    known = graph(program, resolved.model)
    assert all(j < i for j, i in known.edges)


def test_a_cut_between_blocks_sends_one_hidden_state() -> None:
    """b·s·h two-byte elements; attention and MLP of a block are units of their own."""
    resolved = alone("llama-2-7b", seq_len=1024)
    found = job(resolved, resolved.plan).units
    assert len(found) == 2 * 32 + 2
    assert set(found.crossing_bytes) == {2 * 1024 * 4096 * 2.0}


def test_a_convolutional_network_is_cut_between_its_blocks() -> None:
    """ResNet-50 at 224: 64·56² behind the stem, then 256·56², 512·28², 1024·14², 2048·7² (He et al. 2015, table 1)."""
    resolved = alone("resnet-50")
    found = job(resolved, resolved.plan).units
    sizes = sorted(set(found.crossing_bytes / (2 * 2.0)), reverse=True)
    assert 64 * 56**2 == 1024 * 14**2
    assert sizes == [256 * 56**2, 512 * 28**2, 1024 * 14**2, 2048 * 7**2]


def test_the_decoder_of_t5_also_carries_the_encoder_s_output() -> None:
    resolved = alone("flan-t5-base")
    program = job(resolved, resolved.plan).program
    found = units(program, resolved.model, micro_batch=1.0, seq_len=512.0, element_bytes=2.0)
    one = 512 * 768 * 2.0
    inside = [b for n, b in zip(found.names[:-1], found.crossing_bytes, strict=True) if n.startswith("20.")]
    assert set(inside) == {2 * one}
    assert found.crossing_bytes[2] == one


@pytest.mark.parametrize("model", ["bert-large", "resnet-50", "llama-2-7b"])
def test_all_units_on_one_device_are_the_ordinary_step(model: str) -> None:
    resolved = alone(model, cluster="1x1xa100-sxm4-80gb")
    found = job(resolved, resolved.plan)
    kind = found.kind(resolved.device)
    whole = evaluate(resolved)
    assert kind.forward_s[0, -1] == pytest.approx(whole.breakdown["forward_s"])
    assert kind.backward_s[0, -1] == pytest.approx(whole.breakdown["backward_s"])
    memory = found.state_bytes[0, -1] + found.kept_bytes[0, -1]
    assert resolved.device.memory_bytes - kind.room_bytes + memory == pytest.approx(whole.memory.device_bytes, rel=1e-3)


def test_adapters_count_r_times_inputs_and_outputs() -> None:
    """LoRA of rank 16 on all matrices of Llama-2-7B: 39,976,960 (r = 64: 159,907,840, as `peft` prints it)."""
    resolved = alone("llama-2-7b")
    assert job(resolved, resolved.plan, lora_rank=16).adapters.sum() == 39_976_960
    plain, lora = job(resolved, resolved.plan), job(resolved, resolved.plan, lora_rank=16)
    device = resolved.device
    assert lora.kind(device).backward_s[0, -1] < 0.75 * plain.kind(device).backward_s[0, -1]
    # 16-bit weights without gradients or moments: 2 bytes a parameter instead of 18.
    assert lora.state_bytes[0, -1] < plain.state_bytes[0, -1] / 7


# -- the compute-bound limit -------------------------------------------------------------------------------------------


def config(folder: Path, layers: int) -> str:
    """A decoder of equal layers with next to no head, so that it cuts evenly."""
    file = folder / "even.json"
    file.write_text(json.dumps({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 8, "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }))  # fmt: skip
    return str(file)


def test_fifty_3080_over_four_h100_is_the_ratio_of_their_rates(tmp_path: Path) -> None:
    """FusionAI's headline in the limit where nothing waits: lines of 10 Pb/s and 4,000 micro-batches through ten
    pipelines of five stages. Rates are those of single cards, by the ordinary line of `simkit predict`."""
    given = {"model": config(tmp_path, 50), "precision": "bf16", "seq_len": 1024, "micro_batch": 1}

    def rate(cluster: str) -> float:
        one = simkit.predict(cluster=cluster, grad_accum=1, **given)
        return 1.0 / (one.breakdown["forward_s"] + one.breakdown["backward_s"])

    expected = 50 * rate("1x1x3080") / (4 * rate("1x1xh100-pcie-80gb"))

    def many(cluster: str, pipelines: int) -> float:
        asked_ = question(cluster=cluster, inter="10000000Gb/s@0s", dp=pipelines, grad_accum=4000, **given)
        found = answer(asked_)
        pipe = max(p.end_s for p in found.step.pipes)
        return found.samples / pipe

    ratio = many("50x3080", 10) / many("4x1xh100-pcie-80gb", 4)
    assert ratio == pytest.approx(expected, rel=0.01)
    # Of the datasheets it would be 50 x 59.5 / (4 x 756) = 0.984; the consumer card comes closer to its own.
    assert ratio > 0.984


def test_terms_sum_to_the_step_and_the_timeline_to_the_samples() -> None:
    for extra in ({}, {"schedule": "gpipe"}, {"staleness": 1}, {"dp": 1}, {"wiring": "stochastic"}):
        found = simkit.predict(method="decentralized", cluster="12x3080", model="gpt2-medium", inter="1gbe",
                               global_batch=96, **extra)  # fmt: skip
        terms = {k: v for k, v in found.breakdown.items() if k != "compute_s"}
        if "wiring" not in extra:
            assert sum(terms.values()) == pytest.approx(found.iteration_time_s, rel=1e-6), extra
            mean = np.mean([p["samples_per_s"] for p in found.extras["throughput_timeline"]])
            assert mean == pytest.approx(found.samples_per_s, rel=1e-6), extra
        assert all(v >= 0.0 for v in terms.values())
        assert found.samples_per_s <= found.extras["compute_bound_samples_per_s"] * (1 + 1e-9)
        assert 0.0 < found.extras["utilisation"]["mean"] <= 1.0


# -- directions --------------------------------------------------------------------------------------------------------

BASE = {"method": "decentralized", "cluster": "8x3080", "model": "gpt2-medium", "micro_batch": 2, "grad_accum": 16,
        "dp": 1}  # fmt: skip


def seconds(**extra: object) -> float:
    return simkit.predict(**{**BASE, **extra}).iteration_time_s


def test_more_bandwidth_less_latency_and_smaller_messages_help() -> None:
    slow = seconds(inter="50Mb/s@20ms", pp=4)
    assert seconds(inter="500Mb/s@20ms", pp=4) < slow
    assert seconds(inter="50Mb/s@1ms", pp=4) < slow
    assert seconds(inter="50Mb/s@20ms", pp=4, wire="int8") < slow
    assert seconds(inter="50Mb/s@20ms", pp=4, wire="top-k") < slow
    assert seconds(inter="50Mb/s@20ms", pp=4, staleness=1) <= slow


def test_compression_gains_most_on_slow_lines() -> None:
    """FusionLLM's direction: the gain of compressed activations falls from 8 Mb/s to 10 Gb/s."""
    given = {"model": "tinyllama-1.1b", "pp": 4, "seq_len": 512}
    gains = [seconds(inter=f"{r}@5ms", **given) / seconds(inter=f"{r}@5ms", **given, wire="top-k")
             for r in ("8Mb/s", "100Mb/s", "1Gb/s", "10Gb/s")]  # fmt: skip
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 9.0
    assert gains[-1] < 1.25


def test_the_default_placement_is_no_worse_than_the_baselines() -> None:
    given = {"cluster": "4x3080+4x4090", "inter": "1gbe", "pp": 8}
    best = seconds(**given)
    for name in plugins.names("simkit.placement"):
        assert best <= seconds(**given, placement=name) * 1.001, name


def test_faster_cards_do_more_of_the_micro_batches() -> None:
    q = question(cluster="4x3080+4x4090", model="gpt2", inter="10gbe", dp=8, micro_batch=2, global_batch=160)
    found = answer(q)
    counts = {q.peers[p.held[0].peer].device: p.micro_batches for p in found.step.pipes}
    assert counts["rtx4090"] > counts["rtx3080"]
    assert sum(p.micro_batches for p in found.step.pipes) == 80


def test_dealing_ends_together() -> None:
    """Two pipelines, one three times as fast: 10 micro-batches go 2 or 3 to 8 or 7."""
    q = question(cluster="2x3080", model="gpt2", inter="10gbe", dp=2, micro_batch=1, grad_accum=1)
    crew = crew_of(q, job(q.resolved, replace(q.resolved.plan, micro_batch=1, grad_accum=1)))
    crew = replace(crew, slow=np.array([1.0, 1.0 / 3.0]))
    n = crew.job.count
    found = step(crew, q.rules, Assignment(pipelines=((Held(0, 0, n),), (Held(1, 0, n),))), micro_batches=10)
    assert [p.micro_batches for p in found.pipes] in ([2, 8], [3, 7])
    assert dealt(7, [found.pipes[0].chain] * 3, q.rules) == [3, 2, 2]


def test_averaging_gradients_takes_the_all_reduce_of_the_lines() -> None:
    """Two replicas of GPT-2 over 100 Mb/s: 124.4 M fp32 gradients once each way at 0.956 of the rate."""
    given = {"method": "decentralized", "cluster": "2x3080", "model": "gpt2", "inter": "100Mb/s@0s", "dp": 2,
             "micro_batch": 1, "grad_accum": 1}  # fmt: skip
    found = simkit.predict(**given, exchange="s-sgd")
    wire = 124_439_808 * 4 / (12.5e6 * 1448 / 1514)
    assert found.breakdown["exposed_comm_s"] == pytest.approx(wire, rel=0.02)
    small = simkit.predict(**given, exchange="acp-sgd", rank=4)
    assert small.breakdown["exposed_comm_s"] < found.breakdown["exposed_comm_s"] / 20
    lora = simkit.predict(**given, peft="lora", lora_rank=8, task="finetune")
    assert lora.breakdown["exposed_comm_s"] == pytest.approx(wire * 1_179_648 / 124_439_808, rel=0.05)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_whether_ten_gigabytes_hold_a_stage() -> None:
    """Llama-2-70B: an MLP unit of 705 M parameters needs 12.7 GB for weights, gradients and Adam alone."""
    no = simkit.predict(method="decentralized", cluster="50x3080", model="llama-2-70b", inter="10gbe", seq_len=512)
    assert not no.fits
    held = no.extras["holds"][0]
    assert not held["holds"]
    assert held["needs_bytes"] > 3 * 8192 * 28672 * 18
    assert "not even one unit" in no.memory.way_out
    yes = simkit.predict(method="decentralized", cluster="80x3080", model="llama-2-70b", inter="10gbe", peft="lora",
                         seq_len=512, micro_batch=1, grad_accum=80, dp=1)  # fmt: skip
    assert yes.extras["holds"][0]["holds"]
    assert yes.fits


def test_no_stage_exceeds_its_peer() -> None:
    found = simkit.predict(method="decentralized", cluster="30x3080+20x4090", model="llama-2-7b", inter="10gbe", dp=2)
    assert found.fits
    room = {"rtx3080": 10.0, "rtx4090": 24.0}
    for stage in found.extras["per_stage"]:
        assert stage["peak_memory_gib"] <= room[stage["device"]]


def test_gpipe_holds_more_than_1f1b() -> None:
    q = question(cluster="4x3080", model="gpt2", inter="10gbe", micro_batch=1, grad_accum=32)
    crew = crew_of(q, job(q.resolved, replace(q.resolved.plan, micro_batch=1)))
    f = problem(crew, q.rules, micro_batches=32, depth=4, seed=0).in_flight
    g = problem(crew, replace(q.rules, schedule="gpipe"), micro_batches=32, depth=4, seed=0).in_flight
    assert f.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert set(g.tolist()) == {32.0}


# -- what is chosen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "model"), [("20x3080", "gpt2-medium"), ("12x3080+8x4090", "gpt3-2.7b")])
def test_the_default_plan_is_no_slower_than_with_recomputation_given(cluster: str, model: str) -> None:
    given = {"method": "decentralized", "cluster": cluster, "model": model, "inter": "1Gb/s@10ms"}
    chosen = simkit.predict(**given)
    for recompute in ("none", "full"):
        assert chosen.samples_per_s >= 0.99 * simkit.predict(**given, recompute=recompute).samples_per_s, recompute
    assert any(n.startswith(f"recompute = {chosen.scenario['recompute']}: ") for n in chosen.assumptions)


def test_the_default_plan_is_near_the_fastest_of_all() -> None:
    """Every number of pipelines, depth and micro-batch of ten peers, with and without recomputation."""
    q = question(cluster="10x3080", model="gpt2-medium", inter="1Gb/s@10ms", exchange="acp-sgd")
    found = answer(q)
    rates = []
    for recompute in ("none", "full"):
        cache: dict = {}
        for dp, pp, micro in product(range(1, 11), range(1, 11), (1, 2, 4, 8, 16, 32)):
            if dp * pp <= 10 and (one := attempt(q, dp, pp, micro, recompute, cache)) is not None:
                rates.append(one.samples / one.step.end_s)
    assert found.samples / found.step.end_s >= 0.95 * max(rates)


def test_terms_are_those_of_the_stage_that_computes_longest() -> None:
    found = simkit.predict(method="decentralized", cluster="20x3080", model="gpt2-medium", inter="1Gb/s@10ms", dp=5,
                           recompute="none", micro_batch=8, exchange="acp-sgd")  # fmt: skip
    computed = [s["compute_s"] * s["micro_batches"] for s in found.extras["per_stage"]]
    terms = found.breakdown
    assert terms["forward_s"] + terms["backward_s"] == pytest.approx(max(computed), rel=0.1)
    assert sum(v for k, v in terms.items() if k != "compute_s") == pytest.approx(found.iteration_time_s)


# -- what is asked and what is refused ---------------------------------------------------------------------------------


def test_peers_may_be_a_number() -> None:
    found = simkit.predict(method="decentralized", peers="12", model="gpt2", inter="1gbe")
    assert found.facts["gpus"] == 12
    assert any("12x3080" in n for n in found.assumptions)
    with pytest.raises(InputError, match="nobody"):
        simkit.predict(method="decentralized", peers="0", model="gpt2")


def test_a_peers_file_and_a_cluster_text_give_the_same(tmp_path: Path) -> None:
    file = tmp_path / "peers.csv"
    file.write_text("device,up_Bps,down_Bps,latency_s,count\n3080,1 Gb/s,1 Gb/s,5ms,6\n")
    given = {"method": "decentralized", "model": "gpt2-medium", "global_batch": 64}
    a = simkit.predict(peers=str(file), **given)
    b = simkit.predict(cluster="6x3080", inter="1Gb/s@10ms", **given)
    assert a.iteration_time_s == pytest.approx(b.iteration_time_s)


def test_a_slow_peer_is_known_by_its_flops(tmp_path: Path) -> None:
    file = tmp_path / "peers.csv"
    rate = sustained(alone("gpt2").stack, "bf16")(alone("gpt2").device)
    file.write_text(f"name,device,up_Bps,down_Bps,flops\na,3080,1e9,1e9,{rate}\nb,3080,1e9,1e9,{rate / 2}\n")
    q = question(peers=str(file), model="gpt2", dp=2, micro_batch=1, grad_accum=2)
    found = answer(q)
    a, b = (float(p.chain.busy_s[0]) for p in found.step.pipes)
    assert max(a, b) == pytest.approx(2 * min(a, b), rel=1e-3)


def test_the_same_input_gives_the_same_bytes() -> None:
    given = {"method": "decentralized", "cluster": "6x3080", "model": "gpt2", "inter": "1gbe", "placement": "random"}
    a, b = (json.dumps(simkit.predict(**given, seed=3).to_dict(), sort_keys=True) for _ in range(2))
    assert a == b


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"tp": 2}, RefusedError, "tp = 2"),
        ({"zero": 3}, RefusedError, "zero"),
        ({"inner_steps": 10}, RefusedError, "local-sgd"),
        ({"placement": "exakt"}, InputError, "exact"),
        ({"wire": "int9"}, InputError, "int8"),
        ({"exchange": "power"}, InputError, "power-sgd"),
        ({"schedule": "zb"}, RefusedError, "1f1b"),
        ({"algorithm": "tree"}, RefusedError, "butterfly"),
        ({"dp": 5, "pp": 3}, InputError, "8 peers"),
        ({"peers": "5"}, InputError, "8 of the cluster"),
        ({"peers": "none.csv"}, InputError, "peers"),
        ({"lora_rank": 8}, InputError, "peft"),
        ({"global_batch": 8, "grad_accum": 2}, InputError, "grad_accum"),
        ({"wiring": "stochastic", "dp": 2}, InputError, "dp"),
        ({"wiring": "stochastic", "exchange": "acp-sgd"}, RefusedError, "exchange"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        simkit.predict(method="decentralized", cluster="8x3080", model="gpt2", inter="1gbe", **fields)


@pytest.mark.parametrize("fields", [{"wire": "int8"}, {"peers": "p.csv"}, {"peft": "lora"}, {"task": "inference"},
                                    {"inner_steps": 5}, {"quant": "int8"}])
def test_an_ordinary_job_refuses_what_only_peers_have(fields: dict) -> None:
    with pytest.raises(RefusedError, match="decentralized"):
        simkit.predict(cluster="8x3080", model="gpt2", **fields)


def test_sweep_and_compare_take_peers() -> None:
    given = {"method": "decentralized", "cluster": "6x3080", "model": "gpt2", "micro_batch": 2, "global_batch": 32}
    found = simkit.sweep(grid={"inter": ["100Mb/s@5ms", "10Gb/s@1ms"]}, **given)
    for i, inter in enumerate(("100Mb/s@5ms", "10Gb/s@1ms")):
        assert found["samples_per_s"][i] == pytest.approx(simkit.predict(inter=inter, **given).samples_per_s)
    both = simkit.compare(inter="1gbe", schedule=["1f1b", "gpipe"], **given)
    assert len(both.reports) == 2


def test_a_trace_has_a_track_per_peer() -> None:
    given = {"cluster": "4x3080", "model": "gpt2", "inter": "1gbe", "dp": 2, "micro_batch": 1, "grad_accum": 3}
    report = predict_scenario(Scenario.of({"method": "decentralized", **given}), spans=True, beside=False)
    events = chrome_trace(report.timeline, device_names=report.device_names)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {f"rtx3080-{i}" for i in range(4)}
    spans = [e for e in events if e["ph"] == "X"]
    # Two stages each compute three micro-batches forward and backward, in two pipelines.
    assert sum(e["cat"] in ("forward", "backward") for e in spans) == 2 * 2 * 3 * 2
    assert max(e["ts"] + e["dur"] for e in spans) / 1e6 == pytest.approx(report.iteration_time_s, rel=1e-6)
    for pid in {e["pid"] for e in spans}:
        mine = sorted((e["ts"], e["dur"]) for e in spans if e["pid"] == pid and e["tid"] == 1)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in pairwise(mine))


@pytest.mark.parametrize("method", ["decentralized", "local-sgd"])
def test_a_whole_job_is_as_long_as_its_epochs(method: str) -> None:
    fields = {"model": "bert-large", "cluster": "50x3080", "inter": "1gbe", "epochs": 2, "dataset_samples": 10**6}
    found = simkit.predict(method=method, **fields)
    assert found.cost["steps"] == pytest.approx(2e6 / found.scenario["global_batch"])
    assert found.cost["duration_s"] == pytest.approx(found.cost["steps"] * found.iteration_time_s)
    assert found.cost["energy_j"] == pytest.approx(found.cost["steps"] * found.cost["energy_j_per_step"])
