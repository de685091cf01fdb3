"""The zoo against published parameter counts, and the resolver against names, tables and nonsense."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkit.errors import InputError
from simkit.spec import convnets, models
from simkit.spec.model import ConvSpec, Model, TransformerSpec
from simkit.spec.models import model, model_names, pretraining_model, zoo_fact

TRANSFORMERS = [n for n in model_names() if n not in convnets.names()]


def split(net: Model) -> tuple[int, int]:
    """Tensors of two and more dimensions, and vectors."""
    matrices = sum(len(t.shape) > 1 for t in net.tensors)
    return matrices, len(net.tensors) - matrices


def with_extra(net: Model) -> int:
    """What a multimodal checkpoint counts: text and vision, but no multi-token-prediction block."""
    return net.params + sum(v for k, v in net.extra_params.items() if k != "mtp")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_published_count_is_reproduced(name: str) -> None:
    published, status = zoo_fact(name, "published_params"), zoo_fact(name, "count_status")
    found = with_extra(model(name))
    if not published:
        assert status == "recount_only"
        assert found > 0
    elif status.startswith("rounded"):
        # Papers print two or three digits, and leave out embeddings or biases as they like.
        assert found == pytest.approx(int(published), rel=0.03)
    elif "differs by" in status:
        assert int(published) - found == int(status.rsplit(" ", 1)[1])
    else:
        assert found == int(published)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        # BR-17 and BR-02 of the public reports; the published figures of the others are rounded to two digits.
        ("mixtral-8x7b", 12879925248),
        ("qwen3-30b-a3b", 3353032704),
        ("qwen1.5-moe-a2.7b", 2689173504),
        ("deepseek-v3", 37552297472),
        ("gpt-oss-20b", 4187440704),
    ],
)
def test_active_parameters(name: str, active: int) -> None:
    assert model(name).params_active == active


@pytest.mark.parametrize("name", [n for n in TRANSFORMERS if zoo_fact(n, "published_active")])
def test_published_active_figure(name: str) -> None:
    net = model(name)
    assert net.params_active is not None
    published = int(zoo_fact(name, "published_active"))
    without_lookup = net.params_active - sum(t.numel for t in net.tensors if t.role == "embedding")
    assert published in (net.params_active, without_lookup) or published == pytest.approx(net.params_active, rel=0.03)


def test_deepseek_v3_reconciles_with_its_checkpoint() -> None:
    """BR-02: 684531386000 values on the Hub = main + multi-token prediction + FP8 block scales."""
    net = model("deepseek-v3")
    assert net.params == 671026419200
    assert net.extra_params["mtp"] == 13463426304
    assert net.buffers["fp8_block_scales"] / 4 == 41540496
    assert net.params + net.extra_params["mtp"] + net.buffers["fp8_block_scales"] / 4 == 684531386000


@pytest.mark.parametrize(("name", "values"), [("llama-2-7b", 2048), ("llama-2-13b", 2560), ("llama-2-70b", 5120)])
def test_stored_buffers_are_no_parameters(name: str, values: int) -> None:
    """BR-01: the Hub's total is higher by L·64 stored inverse frequencies (two bytes each)."""
    assert model(name).buffers["rotary_inv_freq"] == 2 * values


def test_gpt3_xl_reads_its_odd_row_as_sixteen_heads() -> None:
    """BR-04: 24 x 128 is not 2048; never a fractional head."""
    net = model("gpt3-xl")
    assert isinstance(net.spec, TransformerSpec)
    assert (net.params, net.spec.heads, net.spec.head_dim) == (1315723264, 16, 128)
    assert any("1517123584" in note for note in net.notes)


def test_pythia_sizes_keep_their_own_vocabulary() -> None:
    """BR-12."""
    assert model("pythia-6.9b").params == 6857302016
    assert model("pythia-12b").params == 11846072320


@pytest.mark.parametrize(
    ("name", "params", "matrices", "vectors"),
    [
        # torchvision's model pages print the counts.
        ("resnet-18", 11689512, 21, 41),
        ("resnet-34", 21797672, 37, 73),
        ("resnet-50", 25557032, 54, 107),
        ("resnet-101", 44549160, 105, 209),
        ("resnet-152", 60192808, 156, 311),
        ("vgg-11", 132863336, 11, 11),
        ("vgg-13", 133047848, 13, 13),
        ("vgg-16", 138357544, 16, 16),
        ("vgg-19", 143667240, 19, 19),
        ("vgg-11-bn", 132868840, 11, 27),
        ("vgg-16-bn", 138365992, 16, 42),
        ("vgg-19-bn", 143678248, 19, 51),
    ],
)
def test_convolutional_networks(name: str, params: int, matrices: int, vectors: int) -> None:
    net = model(name)
    assert net.params == params
    assert split(net) == (matrices, vectors)


def test_image_size_changes_maps_and_no_parameters() -> None:
    small = convnets.resized(model("resnet-50"), 160)
    assert small.params == 25557032
    assert isinstance(small.spec, ConvSpec)
    assert [layer.h_out for layer in small.spec.layers if layer.op == "conv"][-1] == 5
    assert convnets.resized(model("vgg-16"), 160).params == 138357544
    with pytest.raises(InputError, match="image_size"):
        convnets.build("resnet-50", image_size=16)


def test_resnet_registers_as_torchvision_does() -> None:
    names = [t.name for t in model("resnet-50").tensors]
    assert names[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    first = [n for n in names if n.startswith("layer1.0.")]
    assert first[:2] == ["layer1.0.conv1.weight", "layer1.0.bn1.weight"]
    assert first[-3:] == ["layer1.0.downsample.0.weight", "layer1.0.downsample.1.weight", "layer1.0.downsample.1.bias"]
    assert names[-2:] == ["fc.weight", "fc.bias"]


def test_bottleneck_strides_in_its_three_by_three() -> None:
    spec = model("resnet-50").spec
    assert isinstance(spec, ConvSpec)
    strided = [layer.name for layer in spec.layers if layer.stride == 2 and layer.name.startswith("layer2.0.conv")]
    assert strided == ["layer2.0.conv2"]


@pytest.mark.parametrize(
    ("name", "params", "matrices", "vectors"),
    [
        # BertForPreTraining with 30528 rows: the tensor shapes behind the compression ratios of arXiv 2306.08881.
        ("bert-base", 110111042, 78, 128),
        ("bert-large", 336232258, 150, 248),
    ],
)
def test_bert_pretraining(name: str, params: int, matrices: int, vectors: int) -> None:
    base = model(name)
    net = pretraining_model(base)
    assert net.params == params
    assert split(net) == (matrices, vectors)
    assert pretraining_model(base) is net
    assert pretraining_model(net) is net


def test_bert_pretraining_order_is_that_of_the_module() -> None:
    names = [t.name for t in pretraining_model(model("bert-base")).tensors]
    assert names[:5] == [
        "bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight",
        "bert.embeddings.token_type_embeddings.weight", "bert.embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.bias",
    ]
    assert names[-9:] == [
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "cls.predictions.bias",
        "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
        "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
        "cls.seq_relationship.weight", "cls.seq_relationship.bias",
    ]
    layer = [n.removeprefix("bert.encoder.layer.0.") for n in names if ".layer.0." in n and n.endswith("weight")]
    assert layer == [
        "attention.self.query.weight", "attention.self.key.weight", "attention.self.value.weight",
        "attention.output.dense.weight", "attention.output.LayerNorm.weight", "intermediate.dense.weight",
        "output.dense.weight", "output.LayerNorm.weight",
    ]


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2", "t5-base", "vit-base", "resnet-50"])
def test_other_families_pretrain_as_they_are(name: str) -> None:
    assert pretraining_model(model(name)) is model(name)


def test_roberta_and_distilbert_gain_the_masked_lm_head() -> None:
    # RoBERTa: no pooler, dense + LayerNorm + bias of the vocabulary; RobertaForMaskedLM has 124697433 parameters.
    assert pretraining_model(model("roberta-base")).params == 124697433
    # DistilBertForMaskedLM has 66985530 parameters.
    assert pretraining_model(model("distilbert-base")).params == 66985530


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Llama 2 7B", "llama-2-7b"),
        ("llama2-7b", "llama-2-7b"),
        ("Vicuna 7B", "llama-2-7b"),
        ("LLAMA_2_7B_CHAT", "llama-2-7b"),
        ("llama-2-7b-chat", "llama-2-7b"),
        ("google-bert/bert-large-uncased", "bert-large"),
        ("bert-base", "bert-base"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("ResNet50", "resnet-50"),
        ("resnet50", "resnet-50"),
        ("vgg16_bn", "vgg-16-bn"),
        ("opt_13", "opt-1.3b"),
        ("gpt3-1.3b", "gpt3-xl"),
        ("TinyLlama 1B", "tinyllama-1.1b"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert model(spelling) is model(name)


def test_every_name_resolves_to_itself() -> None:
    for name in model_names():
        assert model(name).name == name


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(InputError, match="llama-2-7b") as caught:
        model("lama-2-7b")
    assert "\n" not in caught.value.line()


@given(st.text(max_size=40))
def test_any_text_is_a_model_or_bad_input(text: str) -> None:
    try:
        line = model(text).name
    except InputError as error:
        line = error.line()
    assert len(line.splitlines()) == 1


TRAINING = "model,layers,hidden,heads,kv_heads,ffn,vocab,tied,gated_mlp,positional,head_dim,notes\n"


def table(folder: Path, text: str) -> tuple[Path, ...]:
    path = folder / "models.csv"
    path.write_text(text, encoding="utf-8")
    return (path,)


def test_training_columns(tmp_path: Path) -> None:
    files = table(tmp_path, TRAINING + 'mine,2,64,4,2,256,1000,false,true,rope,16,"RMSNorm, SwiGLU, no biases"\n')
    # q and o 64·64, k and v 64·32, three 64·256, two norms; two tables and the last norm.
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256 + 2 * 64
    assert model("mine", models_files=files).params == 2 * block + 2 * 1000 * 64 + 64


def test_training_columns_with_biases_and_open_positions(tmp_path: Path) -> None:
    files = table(tmp_path, TRAINING + "mine,1,64,4,,,1000,true,false,learned,,GELU and biases\n")
    block = 4 * 64 * 64 + 4 * 64 + 8 * 64 * 64 + 5 * 64 + 4 * 64
    total = block + 1000 * 64 + 2 * 64
    assert model("mine", models_files=files, seq_len=512).params == total + 512 * 64
    assert model("mine", models_files=files, seq_len=128).params == total + 128 * 64
    assert "seq_len" in " ".join(model("mine", models_files=files, seq_len=128).notes)


def test_config_columns(tmp_path: Path) -> None:
    files = table(
        tmp_path,
        "model,hf_id,model_type,vocab_size,hidden_size,num_hidden_layers,num_attention_heads,num_key_value_heads,"
        "head_dim,intermediate_size,tie_word_embeddings,max_position_embeddings,attention_bias,other\n"
        "mine,me/mine,qwen2,1000,64,2,4,2,16,256,true,512,qkv,\n",
    )
    block = 2 * 64 * 64 + 2 * 64 * 32 + (64 + 32 + 32) + 3 * 64 * 256 + 2 * 64
    assert model("mine", models_files=files).params == 2 * block + 1000 * 64 + 64


def test_zoo_wins_over_a_table_and_says_so(tmp_path: Path) -> None:
    files = table(tmp_path, TRAINING + "gpt2,1,768,12,12,3072,50257,true,false,learned-64,64,\n")
    net = model("gpt2", models_files=files)
    assert net.params == 124439808
    assert any("layers = 12 of the zoo taken, not 1" in note for note in net.notes)
    assert model("gpt2-large", models_files=files) is model("gpt2-large")


def test_edited_table_is_read_again(tmp_path: Path) -> None:
    row = "mine,{layers},64,4,4,256,1000,true,true,rope,16,\n"
    files = table(tmp_path, TRAINING + row.format(layers=1))
    before = model("mine", models_files=files).params
    table(tmp_path, TRAINING + row.format(layers=2))
    os.utime(files[0], ns=(1, 1))
    assert model("mine", models_files=files).params > before


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,b\n1,2\n", "columns of a table of models"),
        (TRAINING + "mine,two,64,4,4,256,1000,true,true,rope,16,\n", "layers"),
        (TRAINING + "mine,2,64,5,5,256,1000,true,true,rope,,\n", "head_dim"),
        (TRAINING + "mine,2,64,4,3,256,1000,true,true,rope,16,\n", "kv_heads"),
        (TRAINING + "mine,2,-64,4,4,256,1000,true,true,rope,16,\n", "hidden"),
        (TRAINING + "mine,2,64,4,4,256,,true,true,rope,16,\n", "vocab"),
        (TRAINING + "mine,2,64,4,4,256,1000,maybe,true,rope,16,\n", "tied"),
        (TRAINING + "mine,2,64,4,4,256,1000,true,true,spiral,16,\n", "positional"),
        (TRAINING + "mine,2,64\n", "number of cells"),
        (TRAINING + "mine,,,,,,,,,,,\n", "image model"),
        (TRAINING + "mine,2,64,4,4,256,1000,true,true,rope,16,\n" * 2, "twice"),
    ],
)
def test_bad_tables_are_named_in_one_line(tmp_path: Path, text: str, match: str) -> None:
    files = table(tmp_path, text)
    with pytest.raises(InputError, match=match) as caught:
        model("mine", models_files=files)
    assert "models.csv" in caught.value.line()
    assert "\n" not in caught.value.line()


def test_missing_table_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv"):
        model("mine", models_files=(tmp_path / "none.csv",))


def test_shipped_table_serves_names_that_only_measurements_use() -> None:
    path = models.shipped_table()
    assert path is not None
    # llm-foundry prints 1315950592 for its 1B model at 2048 tokens.
    assert model("llmfoundry-mpt-1b", seq_len=2048).params == 1315950592
    assert model("vtrain-gpt-12l-1024h-16a").params > 0


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        # named_parameters() of the public modules: own parameters first, then children in the order of __init__.
        ("opt-125m", ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight",
                      "model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias",
                      "model.decoder.layers.0.self_attn.k_proj.weight"],
         ["model.decoder.layers.11.final_layer_norm.weight", "model.decoder.layers.11.final_layer_norm.bias"]),
        ("gpt2", ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"],
         ["transformer.ln_f.weight", "transformer.ln_f.bias"]),
        ("llama-2-7b", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"],
         ["model.layers.31.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight"]),
        ("pythia-160m", ["gpt_neox.embed_in.weight", "gpt_neox.layers.0.input_layernorm.weight"],
         ["gpt_neox.final_layer_norm.bias", "embed_out.weight"]),
        ("gpt-oss-20b", ["model.embed_tokens.weight", "model.layers.0.self_attn.sinks"], ["lm_head.weight"]),
        ("t5-small", ["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"],
         ["decoder.block.5.layer.2.layer_norm.weight", "decoder.final_layer_norm.weight"]),
        ("vit-base", ["vit.embeddings.cls_token", "vit.embeddings.position_embeddings"],
         ["classifier.weight", "classifier.bias"]),
    ],
)
def test_registration_order(name: str, start: list[str], end: list[str]) -> None:
    names = [t.name for t in model(name).tensors]
    assert names[: len(start)] == start
    assert names[-len(end) :] == end


def test_no_alias_means_two_models() -> None:
    seen: dict[str, str] = {}
    for name in TRANSFORMERS:
        aliases = [zoo_fact(name, "hf_id"), *zoo_fact(name, "aliases").split(";"), name]
        for alias in filter(None, (models.normalise(a) for a in aliases)):
            assert seen.setdefault(alias, name) == name, alias


@pytest.mark.data
def test_every_name_of_the_measured_tables_resolves() -> None:
    folder = os.environ.get("SIMKIT_DATA")
    if not folder:
        pytest.skip("SIMKIT_DATA names no folder of measured tables")
    names: set[str] = set()
    for path in sorted(Path(folder).glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as handle:
            names |= {row["model"] for row in csv.DictReader(handle) if row.get("model")}
    assert names, folder
    for name in names:
        assert model(name).params > 0


def test_zoo_rows_carry_a_source() -> None:
    for name in TRANSFORMERS:
        assert zoo_fact(name, "source"), name


def test_tensor_names_are_unique() -> None:
    for name in model_names():
        names = [t.name for t in pretraining_model(model(name)).tensors]
        assert len(names) == len(set(names)), name
