"""A sharded step by hand: volumes on the wire, terms, pipelines, offload, and who talks over what."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from simkit import predict, schedules, train, train_messages
from simkit.des.pipeline import simulate
from simkit.errors import InputError, RefusedError
from simkit.evaluate import Evaluation, evaluate
from simkit.network import slot_Bps
from simkit.spec.resolve import Resolved, resolve
from simkit.spec.scenario import Scenario

LLAMA = 6738415616
BLOCK = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
JOB = {"model": "llama-2-7b", "micro_batch": 2, "grad_accum": 4, "seq_len": 1024, "precision": "bf16",
       "reduce_dtype": "bf16", "stack": "megatron"}  # fmt: skip


def resolved(**fields: Any) -> Resolved:
    return resolve(Scenario.of(JOB | fields))


def run(**fields: Any) -> Evaluation:
    return evaluate(resolved(**fields))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int, float]]]:
    """A network on which a byte takes a second: (op, ranks, stride, bytes) of everything that is sent."""
    sent: list[tuple[str, int, int, float]] = []

    def cost(op: str, cluster: Any, ranks: int, stride: int, algorithm: str) -> Any:
        def seconds(nbytes: float) -> float:
            if ranks > 1 and nbytes:
                sent.append((op, ranks, stride, float(nbytes)))
            return float(nbytes) if ranks > 1 else 0.0

        return seconds

    monkeypatch.setattr(train_messages, "group_cost", cost)
    train._micro_batch.cache_clear()
    yield sent
    train._micro_batch.cache_clear()


def test_bytes_of_a_tensor_parallel_all_reduce(wire: list[tuple[str, int, int, float]]) -> None:
    """b·s·h elements of 2 bytes over neighbours."""
    found = run(cluster="1x8xa100", tp=4)
    nbytes = 2 * 1024 * 4096 * 2.0
    assert ("all_reduce", 4, 1, nbytes) in wire
    # 32 blocks with two messages forward and two backward, one more after the look-up and one before the head.
    assert found.messages["tensor parallelism"] == (pytest.approx(65 * nbytes), pytest.approx(65 * nbytes))


def test_sequence_parallelism_gathers_and_scatters(wire: list[tuple[str, int, int, float]]) -> None:
    """The same tensor as an all-gather and a reduce-scatter; backward each product gathers its input once more."""
    run(cluster="1x8xa100", tp=4, sp=4)
    kinds = {(op, n) for op, ranks, _, n in wire if ranks == 4}
    assert kinds == {("all_gather", 2 * 1024 * 4096 * 2.0), ("reduce_scatter", 2 * 1024 * 4096 * 2.0)}


@pytest.mark.parametrize(("stack", "share"), [("pytorch", 1), ("megatron", 2)])
def test_messages_of_a_pipeline_and_of_a_ring(
    wire: list[tuple[str, int, int, float]], stack: str, share: int
) -> None:
    """A stage sends the whole activation from every rank, or under scatter and gather (Megatron-LM) each rank its share
    to be gathered inside the node; a hop of the ring carries keys and values of the rank's heads."""
    run(cluster="2x8xa100", tp=2, pp=2, cp=2, stack=stack)
    activation = 2 * 1024 / 2 * 4096 * 2.0
    sends = {(stride, n) for op, _, stride, n in wire if op == "send_recv"}
    assert sends == {(8, activation / share), (2, 2 * 1024 / 2 * 2 * 4096 * 2.0 / 2)}
    assert (("all_gather", 2, 1, activation) in wire) == (share > 1)


def test_volume_of_zero_3_is_three_times_the_parameters(wire: list[tuple[str, int, int, float]]) -> None:
    """BR-84: two all-gathers and one reduce-scatter of 2 bytes a parameter in every micro-batch: 3·2·N."""
    found = run(cluster="1x8xa100", zero=3)
    per_micro_batch = 3 * 2.0 * LLAMA
    norm = 2.0 * 3 * 4096
    assert found.exchange.wire_bytes == pytest.approx(4 * per_micro_batch, abs=4 * norm)
    gathered, reduced = found.messages["sharded parameters"]
    assert gathered + reduced == pytest.approx(per_micro_batch, rel=0.05)
    assert {op for op, ranks, stride, _ in wire if ranks == 8} == {"all_gather", "reduce_scatter"}
    assert "gradient exchange" not in found.messages


def test_volume_of_zero_1_and_of_data_parallelism(wire: list[tuple[str, int, int, float]]) -> None:
    """ZeRO-1: a reduce-scatter of gradients and an all-gather of weights, once a step. DP: one all-reduce."""
    one = run(cluster="2x8xa100", tp=2, zero=1)
    rank = 32 * (BLOCK - 2 * 4096) / 2 + 32 * 2 * 4096 + 32000 * 4096 + 4096 / 2
    sent = {(op, ranks, stride): n for op, ranks, stride, n in wire if stride == 2}
    assert set(sent) == {("reduce_scatter", 8, 2), ("all_gather", 8, 2)}
    assert all(n == pytest.approx(2.0 * rank, rel=1e-9) for n in sent.values())
    assert one.exchange.wire_bytes == pytest.approx(2.0 * rank)
    wire.clear()
    run(cluster="2x8xa100", tp=2)
    assert {(op, ranks, stride) for op, ranks, stride, _ in wire if stride == 2} == {("all_reduce", 8, 2)}


def test_hybrid_sharding_reduces_across_groups(wire: list[tuple[str, int, int, float]]) -> None:
    """Shards over the 8 ranks of a node; their eighths are summed over the two nodes."""
    run(cluster="2x8xa100", zero=3, shard_group=8)
    sent = [(op, ranks, stride, n) for op, ranks, stride, n in wire if op == "all_reduce"]
    assert sent == [("all_reduce", 2, 8, pytest.approx(2.0 * BLOCK / 8))]


def test_context_parallel_ranks_shard_with_data_parallel_ones(wire: list[tuple[str, int, int, float]]) -> None:
    """With dp 1 and cp 8 the states are still sharded eight ways and the gradients summed over the ring."""
    run(cluster="1x8xa100", cp=8, zero=3, seq_len=4096)
    assert {(op, ranks) for op, ranks, _, _ in wire} >= {("all_gather", 8), ("reduce_scatter", 8)}


def test_degree_one_is_the_unsharded_step() -> None:
    plain, sharded = (run(cluster="1x1xa100", stack="deepspeed", zero=z) for z in (0, 1))
    for term in ("forward_s", "backward_s", "optimizer_s"):
        assert sharded.breakdown[term] == pytest.approx(plain.breakdown[term], rel=1e-3), term
    assert {k for k, v in sharded.breakdown.items() if v > 1e-6 * sharded.end_s} == {
        "forward_s", "backward_s", "accumulation_s", "optimizer_s"
    }  # fmt: skip


@pytest.mark.parametrize(
    "degrees",
    [{"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2, "sp": 2}, {"zero": 3}, {"cp": 2}, {"zero": 2, "recompute": "full"}],
)
def test_model_flops_of_all_ranks_together(degrees: dict[str, Any]) -> None:
    """BR-60: forward 2·t·(4h² + 3hf)·L + 4·b·s²·h·L + 2·t·h·V, times 3, however it is divided."""
    report = predict(**JOB | {"stack": "pytorch", "cluster": "1x8xa100"} | degrees)
    t = 1024 * report.scenario["global_batch"]
    forward = 32 * (2 * t * (4 * 4096**2 + 3 * 4096 * 11008) + 4 * t * 1024 * 4096) + 2 * t * 4096 * 32000
    assert 8 * report.facts["model_flops_per_gpu_step"] == pytest.approx(3 * forward, rel=1e-9)
    assert report.mfu == pytest.approx(3 * forward / (8 * 312e12 * report.iteration_time_s), rel=1e-9)


def test_tokens_of_a_step_count_accumulation_and_data_ranks_alone() -> None:
    """BR-68: micro-batch x accumulation x dp x length, whatever tp and pp."""
    report = predict(**JOB | {"cluster": "2x8xa100", "tp": 2, "pp": 2})
    assert report.tokens_per_s is not None
    assert report.tokens_per_s * report.iteration_time_s == pytest.approx(2 * 4 * 4 * 1024)


@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)]
)
def test_the_pipeline_is_its_simulation(schedule: str, vpp: int) -> None:
    """Stages as priced, event by event; messages occupy the receiver."""
    fields = {"cluster": "1x8xa100", "tp": 2, "pp": 4, "vpp": vpp, "schedule": schedule, "grad_accum": 8}
    found = run(**fields)
    terms = found.breakdown
    pipeline_s = sum(v for k, v in terms.items() if k not in ("exposed_comm_s", "optimizer_s", "host_s", "straggler_s"))
    forward, backward = _stages(fields)
    chosen = schedules.get(schedule)
    p2p_s = found.messages["pipeline stages"][0] / 3
    line = simulate(chosen.order, forward, backward, micro_batches=8, virtual=vpp, p2p_s=p2p_s)
    tolerance = 1e-9 if vpp == 1 else 0.02
    assert pipeline_s == pytest.approx(float(line.end_s), rel=tolerance)


def _stages(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Seconds of the stages of a scenario, taken where they enter the schedule."""
    seen: list[Any] = []
    name = fields["schedule"]
    module = schedules.get(name)
    original = module.seconds

    def spy(forward_s: Any, backward_s: Any, **rest: Any) -> Any:
        seen.append((forward_s, backward_s))
        return original(forward_s, backward_s, **rest)

    patch = pytest.MonkeyPatch()
    with patch.context() as at:
        at.setattr(module, "seconds", spy)
        run(**fields)
    return seen[-1]


def test_bubble_of_an_interleaved_pipeline() -> None:
    """BR-88: (p-1)/(v·m) of the ideal time; p 8, m 32: 21.9 % for one chunk a rank. With v chunks it is a v-th of
    that, plus what the head of the last stage and the messages, of which there are v times as many, add."""
    fields = {"model": "gpt3-175b", "cluster": "8x8xa100", "tp": 8, "pp": 8, "grad_accum": 32, "micro_batch": 1,
              "seq_len": 2048}  # fmt: skip
    shares = []
    for vpp in (1, 4):
        terms = run(**fields, vpp=vpp).breakdown
        ideal = ("forward_s", "backward_s", "tp_comm_s", "accumulation_s")
        shares.append(terms["bubble_s"] / sum(terms[k] for k in ideal))
    assert shares[0] == pytest.approx(7 / 32, rel=0.05)
    assert 7 / 128 <= shares[1] <= 1.6 * 7 / 128


def test_micro_batches_of_an_interleaved_pipeline() -> None:
    """BR-89: a multiple of the stages, said in one line; a stack with flexible groups takes ten on four."""
    fields = JOB | {"cluster": "1x8xa100", "tp": 2, "pp": 4, "vpp": 2, "grad_accum": 10}
    with pytest.raises(InputError, match=r"grad_accum = 10 .*multiple of pp = 4.*use 8 or 12"):
        predict(**fields)
    assert predict(**fields | {"stack": "torchtitan"}).iteration_time_s > 0
    assert predict(**fields | {"grad_accum": 12}).iteration_time_s > 0


def test_groups_say_their_size_and_link() -> None:
    """BR-82: tp 8 on 64 GPUs is eight groups of eight inside their nodes, whatever the number of GPUs; BR-09: dp 8 on
    one node takes the link of the node."""
    groups = predict(**JOB | {"cluster": "8x8xa100", "tp": 8, "pp": 2, "zero": 1}).groups
    assert groups["tp"].startswith("8 ranks, 8 groups, over NVLink 3")
    assert "InfiniBand" not in groups["tp"]
    assert groups["pp"].startswith("2 ranks, 32 groups, over 8 x InfiniBand")
    assert groups["dp"].startswith("4 ranks, 16 groups, over 8 x InfiniBand")
    assert groups["zero"] == "optimizer states over the dp group"
    one = predict(**JOB | {"cluster": "1x8xa100", "zero": 2}).groups
    assert "NVLink" in one["dp"]
    assert "InfiniBand" not in one["dp"]


def test_more_gpus_leave_the_tensor_parallel_group_alone() -> None:
    """BR-82."""
    small, large = (run(cluster=f"{n}x8xa100", tp=8) for n in (1, 8))
    assert large.messages["tensor parallelism"] == small.messages["tensor parallelism"]
    assert large.breakdown["tp_comm_s"] == small.breakdown["tp_comm_s"]


def test_another_node_can_make_it_slower() -> None:
    """BR-85: 16 V100 over one 25 Gb/s link took longer than 8 in one node."""
    one, two = (
        predict(model="gpt2-xl", cluster=f"{n}x8xv100", inter="25gbe", nics_per_node=1, zero=3, micro_batch=4,
                grad_accum=1, seq_len=1024, stack="deepspeed")
        for n in (1, 2)
    )  # fmt: skip
    assert two.samples_per_s < one.samples_per_s
    assert "sharded parameters" in two.bottleneck
    assert "25 Gigabit" in two.bottleneck


def test_an_offloaded_optimizer_by_hand() -> None:
    """Eight ranks of one thread: 30 bytes an element of a rank's eighth at 1.4 GB/s, and 2 bytes back over the slot."""
    at = {"cluster": "1x8xa100", "zero": 2, "offload": "optimizer", "stack": "deepspeed"}
    found = run(**at)
    mine = LLAMA / 8
    pcie = 0.8 * 16 * 1.969e9
    assert slot_Bps(found.device) == pytest.approx(16 * 1.969e9)
    assert found.breakdown["optimizer_s"] == pytest.approx(mine * 30 / 1.4e9 + 2 * mine / pcie, rel=1e-6)
    # A rank alone has the whole host: 100 GB/s.
    alone = run(**at | {"cluster": "1x1xa100"})
    assert alone.breakdown["optimizer_s"] == pytest.approx(LLAMA * 30 / 100e9 + 2 * LLAMA / pcie, rel=1e-6)


def test_offloaded_parameters_come_up_twice_a_micro_batch() -> None:
    """One device, tiny batch: 2 N bytes forward and 2 N backward over the slot are longer than the compute, of which
    the last of 32 blocks remains in either pass."""
    found = run(cluster="1x1x4090", offload="params", micro_batch=1, seq_len=16, grad_accum=3)
    plain = run(cluster="1x1x4090", zero=1, micro_batch=1, seq_len=16, grad_accum=3)
    up_s = 2 * LLAMA / (0.8 * 16 * 1.969e9)
    alone, beside = (
        math.fsum(v for k, v in report.breakdown.items() if k not in ("optimizer_s", "host_s"))
        for report in (plain, found)
    )
    assert beside == pytest.approx(3 * 2 * up_s + alone / 32, rel=1e-6)


def test_offloaded_parameters_cost_more_than_an_offloaded_optimizer() -> None:
    """Where compute hides all but the first block: twice 2 bytes of a block's weights a micro-batch."""
    fields = {"cluster": "1x1x4090", "micro_batch": 8, "seq_len": 4096, "grad_accum": 3}
    params, optimizer = (run(**fields, offload=o) for o in ("params", "optimizer"))
    block = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    added = params.end_s - optimizer.end_s
    assert added == pytest.approx(3 * 2 * 2 * block / (0.8 * 16 * 1.969e9), rel=1e-6)
    for zero, cluster in ((0, "1x1x3080"), (1, "1x8xa100"), (3, "1x8xa100"), (3, "2x8xh100")):
        fields = {"cluster": cluster, "zero": zero, "micro_batch": 1, "seq_len": 512}
        params, optimizer = (run(**fields, offload=o) for o in ("params", "optimizer"))
        assert params.end_s > optimizer.end_s


def test_the_rates_of_the_host_are_stated() -> None:
    many = predict(**JOB | {"cluster": "1x8xa100"}, zero=2, offload="optimizer").assumptions
    assert any("1.4 GB/s a GPU" in note and "LLaMA-7B" in note for note in many)
    assert any("PCIe slot carries" in note for note in many)
    one = predict(**JOB | {"cluster": "1x1x4090"}, offload="optimizer").assumptions
    assert any("100 GB/s" in note for note in one)
    none = predict(**JOB | {"cluster": "1x8xa100"}, zero=2).assumptions
    assert not any(note.startswith("offload") for note in none)


def test_a_stack_that_updates_on_the_device_streams_its_state() -> None:
    """llmq: 12 bytes an element over the slot and the usual update, no work of the host."""
    fields = {"cluster": "1x1x4090", "stack": "llmq"}
    found, plain = run(**fields, offload="optimizer"), run(**fields, zero=1)
    assert found.breakdown["optimizer_s"] == pytest.approx(
        plain.breakdown["optimizer_s"] + 12 * LLAMA / (0.8 * 16 * 1.969e9), rel=1e-6
    )


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(RefusedError, match="acp-sgd is priced under data parallelism alone"):
        predict(**JOB | {"cluster": "1x8xa100", "tp": 2, "method": "acp-sgd"})
    with pytest.raises(RefusedError, match="offload"):
        predict(model="resnet-50", cluster="1x8xa100", offload="optimizer")


def test_a_padded_vocabulary_enters_head_and_memory_and_is_said() -> None:
    """BR-15: 50,257 rows at tp 8 are 51,200 under Megatron-LM."""
    fields = {"model": "gpt2-xl", "cluster": "1x8xa100", "micro_batch": 1, "grad_accum": 1, "seq_len": 1024}
    plain = predict(**fields, zero=1)
    padded = predict(**fields, zero=1, stack="megatron")
    extra = 3 * 2 * 1024 * 1600 * (50304 - 50257)
    assert padded.facts["model_flops_per_gpu_step"] - plain.facts["model_flops_per_gpu_step"] == pytest.approx(extra)
    assert padded.facts["params"] - plain.facts["params"] == 1600 * (50304 - 50257)
    assert any("vocabulary 50257 padded to 50304" in line for line in padded.assumptions)
    eight = resolve(Scenario.of({**fields, "model": "gpt2", "stack": "megatron", "tp": 4}))
    assert eight.model.spec.vocab == 50688


def test_the_bottleneck_names_what_dominates() -> None:
    few = predict(**JOB | {"cluster": "1x8xa100", "pp": 8, "grad_accum": 1})
    assert few.bottleneck.startswith("pipeline of 8 stages with 1 micro-batches")
    slow = predict(**JOB | {"cluster": "8x1xa100", "tp": 8, "inter": "1gbe"})
    assert slow.bottleneck.startswith("messages inside a block over 1 Gigabit Ethernet")
    shards = predict(**JOB | {"cluster": "8x1xa100", "zero": 3, "inter": "1gbe"})
    assert "waits for sharded parameters" in shards.bottleneck
    host = predict(**JOB | {"cluster": "1x8xa100", "zero": 2, "offload": "optimizer", "stack": "deepspeed"})
    assert host.bottleneck.startswith("the optimizer in host memory")
    assert {t.name: t for t in host.ledger}["optimizer_s"].evidence == "end-to-end"
    assert all(t.bound for t in (*few.ledger, *slow.ledger, *shards.ledger))
