"""Settings of other frameworks: what each key becomes, worked out from the frameworks' own documents."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import simkit
from simkit import plugins
from simkit.errors import InputError
from simkit.predict import predict_scenario
from simkit.spec import imports

GPT = r"""
#!/bin/bash
# The 355 M network of the Megatron papers.
GPUS_PER_NODE=8
NNODES=${NNODES:-4}
TP=4
GLOBAL=$((16 * TP * 2))   # 128
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr $MASTER_ADDR
)
GPT_ARGS="
    --num-layers 24 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 1024 \
    --max-position-embeddings 1024 --vocab-size 51200
"
TRAIN_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size=2
    --num-layers-per-virtual-pipeline-stage 3
    --sequence-parallel --bf16 --use-distributed-optimizer
    --micro-batch-size 4
    --global-batch-size $GLOBAL
    --train-iters 1000 --lr 1.5e-4
    --recompute-granularity selective
    --data-path "$DATA_PATH" --frobnicate 3
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_ARGS} ${TRAIN_ARGS[@]} "$@" | tee log.txt
"""
DEEPSPEED = {
    "train_batch_size": 1.024e3,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": None,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "gradient_clipping": 1.0,
    "mystery": 3,
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
  fsdp_offload_params: true
gradient_accumulation_steps: 2
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
global_batch_size = 64
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""


def write(folder: Path, name: str, text: object) -> Path:
    path = folder / name
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return path


def values(*files: Path, **fields: object) -> dict[str, object]:
    return dict(imports.scenario(list(files), fields).values)


def ledger(draft: imports.Draft, part: str) -> dict[str, str]:
    return {e.key: e.reason for e in getattr(draft, part)}


def megatron(folder: Path, text: str) -> imports.Draft:
    return imports.read(write(folder, "run.sh", text))


def test_every_format_is_a_plug_in() -> None:
    for key in plugins.names(imports.PACKAGE):
        module = plugins.get(imports.PACKAGE, key)
        assert callable(module.read)
        assert isinstance(module.PRIORITY, int)


def test_each_file_is_recognised(tmp_path: Path) -> None:
    samples = {"megatron": ("a.sh", GPT), "deepspeed": ("a.json", DEEPSPEED), "accelerate": ("a.yaml", ACCELERATE)}
    samples["torchtitan"] = ("a.toml", TITAN)
    for key, (name, text) in samples.items():
        assert imports.read(write(tmp_path, name, text)).kind == key
    with pytest.raises(InputError, match="of no known format"):
        imports.read(write(tmp_path, "b.txt", "hello"))


def test_megatron_flags_become_fields(tmp_path: Path) -> None:
    found = values(write(tmp_path, "run.sh", GPT))
    assert found == {
        "stack": "megatron", "tp": 4, "pp": 2, "sp": 4, "zero": 1, "precision": "bf16", "recompute": "selective",
        "micro_batch": 4, "global_batch": 128, "seq_len": 1024, "samples": 128_000, "model": "megatron-24l-1024h-16a",
        "vpp": 4,  # 24 layers / (2 stages x 3 layers a chunk)
        "cluster": "4x8xh100",
    }  # fmt: skip


def test_the_ledger_of_a_script_holds_every_flag(tmp_path: Path) -> None:
    draft = megatron(tmp_path, GPT)
    ignored = ledger(draft, "ignored")
    assert ignored["--frobnicate"] == "not known to simkit"
    assert "does not change" in ignored["--lr"]
    assert "$DATA_PATH is not set in the file" in ignored["--data-path"]
    assert "$MASTER_ADDR" in ignored["--master-addr"]
    assert not any("ARGS" in key for key in ignored)
    assert "--nnodes, --nproc-per-node" in ledger(draft, "auto")
    told = {e.key for part in (draft.mapped, draft.ignored) for e in part}
    assert {"--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size", "--sequence-parallel"} <= told


def test_parameters_of_a_megatron_network(tmp_path: Path) -> None:
    # SC21 paper, equation 2: 12 l h² (1 + 13/12h + (V+s)/12lh), and the last norm of 2 h on top:
    # 12·24·1024² + 13·24·1024 + (51200 + 1024)·1024 + 2·1024 = 301,989,888 + 319,488 + 53,477,376 + 2,048
    network = megatron(tmp_path, GPT.replace("TP=4", "TP=1")).network
    assert network is not None
    assert network.params == 355_788_800


def test_parameters_of_llama_2_7b_from_flags(tmp_path: Path) -> None:
    # 6,738,415,616 is the count of the published checkpoint; 32,000 is a multiple of 128 already.
    text = """pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096
    --max-position-embeddings 4096 --swiglu --ffn-hidden-size 11008 --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --tokenizer-type Llama2Tokenizer"""
    draft = megatron(tmp_path, text)
    assert draft.network is not None
    assert draft.network.params == 6_738_415_616
    assert "32000" in ledger(draft, "auto")["--vocab-size"]


def test_parameters_of_mixtral_8x7b_from_flags(tmp_path: Path) -> None:
    # 46,702,792,704 is the count of the published checkpoint.
    text = """--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --vocab-size 32000 --num-experts 8 --moe-router-topk 2
    --expert-model-parallel-size 8 --seq-length 4096 --max-position-embeddings 32768"""
    draft = megatron(tmp_path, text)
    assert draft.network is not None
    assert draft.network.params == 46_702_792_704
    assert draft.get("ep") == 8


def test_the_vocabulary_is_padded_to_128_tp(tmp_path: Path) -> None:
    # GPT-2's 50,257 rows: 50,304 = 393 · 128, and 50,688 = 99 · 512 for tp = 4.
    text = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --tensor-model-parallel-size {}"
    for tp, rows in ((1, 50_304), (4, 50_688)):
        network = megatron(tmp_path, text.format(tp)).network
        assert network is not None
        assert network.tensors[0].shape == (rows, 64)


@pytest.mark.parametrize("branch", ["if [ $1 = 7B ]; then", "case $1 in"])
def test_a_variable_set_in_branches_stays_open(tmp_path: Path, branch: str) -> None:
    close = "fi" if branch.startswith("if") else "esac"
    text = (
        f"{branch}\nLAYERS=32\nelse\nLAYERS=40\n{close}\npretrain_gpt.py --num-layers $LAYERS --hidden-size 64 --bf16"
    )
    draft = megatron(tmp_path, text)
    assert "$LAYERS is not set" in ledger(draft, "ignored")["--num-layers"]
    with pytest.raises(InputError, match="--num-layers"):
        imports.scenario([tmp_path / "run.sh"])
    assert values(tmp_path / "run.sh", model="gpt2")["model"] == "gpt2"


def test_flags_in_branches(tmp_path: Path) -> None:
    text = """pretrain_gpt.py --hidden-size 64 --tensor-model-parallel-size 2
    if [ $BIG = 1 ]; then
        ARGS="--micro-batch-size 4 --tensor-model-parallel-size 8 --seq-length 512"
    else
        ARGS="--micro-batch-size 2 --seq-length 512"
    fi
    run --tensor-model-parallel-size 4 # --micro-batch-size 16
    """
    draft = megatron(tmp_path, text)
    assert draft.get("tp") == 4  # the last one outside of branches holds
    assert draft.get("micro_batch") is None
    assert "different values" in ledger(draft, "ignored")["--micro-batch-size"]
    assert draft.get("seq_len") == 512
    assert "branch" in ledger(draft, "auto")["--seq-length"]


def test_a_comment_between_continued_lines(tmp_path: Path) -> None:
    draft = megatron(tmp_path, "x --micro-batch-size 4 \\\n  # --seq-length 9 \\\n  --tensor-model-parallel-size 2\n")
    assert (draft.get("micro_batch"), draft.get("seq_len"), draft.get("tp")) == (4, None, 2)


def test_deepspeed_with_auto_null_and_floats(tmp_path: Path) -> None:
    draft = imports.read(write(tmp_path, "ds.json", DEEPSPEED))
    assert draft.get("global_batch") == 1024
    assert isinstance(draft.get("global_batch"), int)
    assert (draft.get("zero"), draft.get("offload"), draft.get("precision")) == (2, "optimizer", "bf16")
    # 5e8 elements, of four bytes uncompressed, in MiB
    assert draft.get("bucket_mb") == pytest.approx(5e8 * 4 / 2**20)
    assert set(ledger(draft, "auto")) == {
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer.params.lr",
    }  # fmt: skip
    assert ledger(draft, "ignored")["mystery"] == "not known to simkit"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3},
         "ds.json: train_batch_size = 100 is no multiple of train_micro_batch_size_per_gpu 8 x "
         "gradient_accumulation_steps 3 = 24"),
        ({"fp16": {"enabled": True}}, "bf16.enabled = True contradicts fp16.enabled"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4"),
        ({"zero_optimization": [3]}, "zero_optimization = [3] is no table"),
        ({"train_micro_batch_size_per_gpu": 1.5}, "train_micro_batch_size_per_gpu = 1.5 is not a whole number"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu = 0 is too small"),
    ],
)  # fmt: skip
def test_contradictions_of_deepspeed_name_file_and_key(tmp_path: Path, change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as error:
        imports.scenario([write(tmp_path, "ds.json", DEEPSPEED | change)])
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_the_batch_is_checked_against_the_cluster(tmp_path: Path) -> None:
    # 4 · 16 · 8 ranks = 512, not 256.
    batch = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16}
    file = write(tmp_path, "ds.json", batch)
    with pytest.raises(InputError, match=r"ds\.json: train_batch_size = 256 contradicts .* = 512"):
        predict_scenario(imports.scenario([file], {"model": "gpt2", "cluster": "1x8xh100"}))
    four = predict_scenario(imports.scenario([file], {"model": "gpt2", "cluster": "1x4xh100"}))
    assert four.scenario["dp"] == 4


def test_accelerate(tmp_path: Path) -> None:
    assert values(write(tmp_path, "a.yaml", ACCELERATE)) == {
        "stack": "pytorch-fsdp", "precision": "fp32", "zero": 3, "shard_group": 8, "recompute": "full",
        "offload": "params", "grad_accum": 2, "cluster": "2x8xh100",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "zero"),
    [
        ({"fsdp_sharding_strategy": 1}, 3), ({"fsdp_sharding_strategy": 2}, 2),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 0),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, 3),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, 2),
    ],
)  # fmt: skip
def test_fsdp_strategies(tmp_path: Path, config: dict[str, object], zero: int) -> None:
    text = yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": config})
    assert values(write(tmp_path, "a.yml", text))["zero"] == zero


def test_accelerate_of_deepspeed_and_megatron(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  offload_param_device: cpu\n"
    text += "  offload_optimizer_device: cpu\n"
    found = values(write(tmp_path, "a.yaml", text))
    assert (found["zero"], found["offload"], found["stack"]) == (3, "params", "deepspeed")
    text = "distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n"
    text += "  megatron_lm_sequence_parallelism: true\n  megatron_lm_pp_degree: 4\n"
    found = values(write(tmp_path, "b.yaml", text))
    assert (found["tp"], found["sp"], found["pp"], found["stack"]) == (2, 2, 4, "megatron")


def test_torchtitan(tmp_path: Path) -> None:
    file = write(tmp_path, "t.toml", TITAN)
    assert values(file) == {
        "stack": "torchtitan", "model": "llama-3-8b", "seq_len": 8192, "global_batch": 64, "samples": 64_000,
        "micro_batch": 1,  # a pipeline cuts the local batch into micro-batches of one
        "tp": 2, "sp": 2, "pp": 2, "dp": 8, "zero": 3, "shard_group": 4, "schedule": "interleaved", "recompute": "full",
        "compile": True, "precision": "bf16",
    }  # fmt: skip
    assert "not priced" in ledger(imports.read(file), "ignored")["parallelism.enable_async_tensor_parallel"]


def test_an_unknown_flavor_needs_a_model(tmp_path: Path) -> None:
    file = write(tmp_path, "t.toml", TITAN.replace('"8B"', '"debugmodel"'))
    with pytest.raises(InputError, match=r"t\.toml: model\.flavor"):
        imports.scenario([file])
    assert values(file, model="llama-3-8b")["model"] == "llama-3-8b"


def test_files_merge_and_flags_win(tmp_path: Path) -> None:
    script, config = write(tmp_path, "run.sh", GPT), write(tmp_path, "ds.json", DEEPSPEED)
    with pytest.raises(
        InputError, match=r"ds\.json: train_batch_size = 1024 contradicts --global-batch-size = 128 of .*run"
    ):
        imports.scenario([script, config])
    scenario = imports.scenario([script, config], {"global_batch": 256, "cluster": "2x8xa100"})
    found = scenario.values
    assert (found["stack"], found["zero"], found["offload"]) == ("megatron-deepspeed", 2, "optimizer")
    assert (found["global_batch"], found["samples"], found["cluster"]) == (256, 256_000, "2x8xa100")
    told = scenario.imported.to_dict(found)
    given_otherwise = {e["key"] for e in told["ignored"] if "given otherwise" in e["reason"]}
    assert given_otherwise == {"--global-batch-size", "train_batch_size", "--use-distributed-optimizer"}


def test_the_report_lists_what_became_of_each_key(tmp_path: Path) -> None:
    report = predict_scenario(imports.scenario([write(tmp_path, "run.sh", GPT)], {"cluster": "4x8xa100"}))
    told = report.to_dict()["imported"]
    assert set(told) == {"mapped", "ignored", "auto"}
    entry = next(e for e in told["mapped"] if e["key"] == "--micro-batch-size")
    assert (entry["field"], entry["set"], entry["value"]) == ("micro_batch", 4, "4")
    assert report.scenario["model"] == "megatron-24l-1024h-16a"
    assert report.scenario["tp"] == 4
    assert "--frobnicate" in str(report)
    assert "--frobnicate" in report.to_markdown()
    assert "imported" not in simkit.predict(model="gpt2", cluster="8xh100", micro_batch=1).to_dict()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '{"train_batch_size": 4', "cut off"), ("a.json", '{"train_batch_size": NaN}', "NaN"),
        ("a.json", "[]", "no keys"), ("a.yaml", "a: [", "no valid YAML"), ("a.toml", "[training", "no valid TOML"),
        ("a.yaml", "fsdp_config: &a\n  x: *a\n", "tables in each other"),
        ("a.yaml", "fsdp_config: 3", "is no table"), ("a.toml", "[training]\nseq_len = nan", "training.seq_len"),
        ("a.sh", "--num-layers", "has no value"),
        ("a.sh", "--hidden-size 64 --micro-batch-size x", "--micro-batch-size"),
        ("a.sh", "--num-layers 2 --hidden-size 65 --num-attention-heads 2", "--num-attention-heads"),
    ],
)  # fmt: skip
def test_malformed_files_are_one_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        imports.scenario([write(tmp_path, name, text)])
    assert says in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


ODD = [None, True, "", "auto", "x", -1, 0, 1.5, 1e400, 10**400, [], [1], {}, {"a": 1}, {"enabled": []}, "1e3", "é"]


def complaint_of(read: Callable[[], object]) -> str:
    """What a reader says of its input, empty where it takes it; anything but an InputError fails the test."""
    try:
        read()
    except InputError as error:
        return str(error)
    return ""


def test_any_value_is_an_answer_or_one_line(tmp_path: Path) -> None:
    rng, taken = random.Random(5), 0
    titan = imports.load(write(tmp_path, "t.toml", TITAN)).data
    samples = {"deepspeed": DEEPSPEED, "accelerate": yaml.safe_load(ACCELERATE), "torchtitan": titan}
    for _ in range(400):
        kind, sample = rng.choice(list(samples.items()))
        data = copy.deepcopy(dict(sample))
        for _ in range(rng.randint(1, 3)):
            table = rng.choice([data, *(v for v in data.values() if isinstance(v, dict) and v)])
            table[rng.choice(sorted(table))] = copy.deepcopy(rng.choice(ODD))
        read = plugins.get(imports.PACKAGE, kind).read
        said = complaint_of(lambda read=read, data=data: read(imports.Document(file="f.x", text="", data=data)))
        assert said == "" or (said.startswith("f.x: ") and "\n" not in said)
        taken += not said
    assert 100 < taken < 400


def test_scripts_of_noise_do_not_break_the_reader(tmp_path: Path) -> None:
    rng = random.Random(1)
    pieces = [
        *GPT.split(),
        "\n",
        '"',
        "'",
        "$(",
        "$((",
        "))",
        "${",
        "}",
        "(",
        ")",
        "\\",
        "A=$A$A$A",
        "$A",
        "if",
        "fi",
        "--x=",
    ]
    for _ in range(300):
        text = " ".join(rng.choice(pieces) for _ in range(60)) + " --hidden-size 64"
        file = write(tmp_path, "n.sh", text)
        said = complaint_of(lambda file=file: imports.read(file))
        assert said == "" or "n.sh: " in said


def test_variables_do_not_grow_without_end(tmp_path: Path) -> None:
    text = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 60 + "pretrain_gpt.py --hidden-size 64 --num-layers $A"
    draft = megatron(tmp_path, text)
    assert max(len(e.value) for e in draft.ignored) < 5000
