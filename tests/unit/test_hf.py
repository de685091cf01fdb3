"""Public configurations against published counts, and broken ones against one-line errors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkit.count import kv_cache_bytes
from simkit.errors import InputError
from simkit.spec.families import families
from simkit.spec.hf import from_config
from simkit.spec.model import Model, TransformerSpec
from simkit.spec.models import model, pretraining_model

LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "float16", "hidden_act": "silu", "max_position_embeddings": 4096,
}

# The keys that count, as they stand in the public config.json of each model; right: published parameters.
PUBLIC: dict[str, tuple[dict[str, Any], int]] = {
    "llama-2-7b": (LLAMA, 6738415616),
    "llama-3.2-1b": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
         "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
        1235814400,
    ),
    "mistral-nemo": (
        {"model_type": "mistral", "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 14336,
         "head_dim": 128, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
         "sliding_window": None, "tie_word_embeddings": False},
        12247782400,
    ),
    "mixtral-8x7b": (
        {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2, "sliding_window": None},
        46702792704,
    ),
    "qwen2.5-7b": (
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
         "use_sliding_window": False, "sliding_window": 131072},
        7615616512,
    ),
    "qwen1.5-moe-a2.7b": (
        {"model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
         "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
         "decoder_sparse_step": 1},
        14315784192,
    ),
    "qwen3-4b": (
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
         "attention_bias": False},
        4022468096,
    ),
    "qwen3-30b-a3b": (
        {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
         "moe_intermediate_size": 768, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
         "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False},
        30532122624,
    ),
    "gemma-2-2b": (
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096},
        2614341888,
    ),
    "gemma-3-1b": (
        {"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
         "head_dim": 256, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
         "sliding_window": 512, "sliding_window_pattern": 6},
        999885952,
    ),
    "deepseek-v3": (
        {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
         "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
         "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 1,
         "tie_word_embeddings": False, "topk_method": "noaux_tc",
         "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        671026419200,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
         "head_dim": 64, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
         "num_local_experts": 32, "experts_per_token": 4, "attention_bias": True, "sliding_window": 128,
         "layer_types": ["sliding_attention", "full_attention"] * 12, "tie_word_embeddings": False},
        20914757184,
    ),
    "gpt2": (
        {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
         "n_ctx": 1024, "n_inner": None},
        124439808,
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
         "n_inner": None, "rotary_dim": 64, "tie_word_embeddings": False},
        6050882784,
    ),
    "pythia-12b": (
        {"model_type": "gpt_neox", "vocab_size": 50688, "hidden_size": 5120, "intermediate_size": 20480,
         "num_hidden_layers": 36, "num_attention_heads": 40, "tie_word_embeddings": False},
        11846072320,
    ),
    "bloom-176b": (
        {"model_type": "bloom", "vocab_size": 250880, "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112,
         "seq_length": 2048},
        176247271424,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
         "bias": False, "alibi": False},
        6921720704,
    ),
    "falcon-40b": (
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 8192, "num_hidden_layers": 60,
         "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False},
        41303293952,
    ),
    "falcon-180b": (
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 14848, "num_hidden_layers": 80,
         "num_attention_heads": 232, "n_head_kv": 8, "new_decoder_architecture": True, "tie_word_embeddings": False},
        179522565120,
    ),
    "opt-1.3b": (
        {"model_type": "opt", "vocab_size": 50272, "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24,
         "num_attention_heads": 32, "max_position_embeddings": 2048, "word_embed_proj_dim": 2048},
        1315758080,
    ),
    "phi-2": (
        {"model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": None,
         "partial_rotary_factor": 0.4, "tie_word_embeddings": False},
        2779683840,
    ),
    "phi-3-medium": (
        {"model_type": "phi3", "vocab_size": 32064, "hidden_size": 5120, "intermediate_size": 17920,
         "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "tie_word_embeddings": False,
         "sliding_window": 2047},
        13960238080,
    ),
    "mpt-7b": (
        {"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32,
         "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True,
         "attn_config": {"alibi": True, "attn_type": "multihead_attention"}},
        6649286656,
    ),
    "smollm3-3b": (
        {"model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
         "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4},
        3075098624,
    ),
    "qwen-7b": (
        {"model_type": "qwen", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
         "num_hidden_layers": 32, "num_attention_heads": 32, "kv_channels": 128, "no_bias": True,
         "seq_length": 8192},
        7721324544,
    ),
    "chatglm3-6b": (
        {"model_type": "chatglm", "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696,
         "num_layers": 28, "num_attention_heads": 32, "kv_channels": 128, "multi_query_attention": True,
         "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False, "seq_length": 8192,
         "tie_word_embeddings": False},
        6243584000,
    ),
    "baichuan2-7b": (
        {"model_type": "baichuan", "vocab_size": 125696, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False},
        7505973248,
    ),
    "bert-base": (
        {"model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072,
         "num_hidden_layers": 12, "num_attention_heads": 12, "type_vocab_size": 2, "max_position_embeddings": 512},
        109482240,
    ),
    "roberta-base": (
        {"model_type": "roberta", "vocab_size": 50265, "hidden_size": 768, "intermediate_size": 3072,
         "num_hidden_layers": 12, "num_attention_heads": 12, "type_vocab_size": 1, "max_position_embeddings": 514},
        124645632,
    ),
    "distilbert-base": (
        {"model_type": "distilbert", "vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6,
         "n_heads": 12, "max_position_embeddings": 512},
        66362880,
    ),
    "vit-base": (
        {"model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
         "num_attention_heads": 12, "image_size": 224, "patch_size": 16, "num_channels": 3,
         "id2label": {str(i): str(i) for i in range(1000)}},
        86567656,
    ),
    "t5-11b": (
        {"model_type": "t5", "vocab_size": 32128, "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24,
         "num_heads": 128, "relative_attention_num_buckets": 32, "n_positions": 512},
        11307321344,
    ),
    "flan-t5-base": (
        {"model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12,
         "num_decoder_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        247577856,
    ),
}


# sha256 over "name shape" of named_parameters() as transformers 4.57.6 builds each model on the meta device, first 16
# digits. GPT-2 is left out: its Conv1D stores weights with inputs first.
REGISTERED = {
    "llama-2-7b": "2942cd20671da5c2",
    "llama-3.2-1b": "bee4f346df650b8d",
    "mistral-nemo": "63f64cd7eab4d729",
    "qwen2.5-7b": "f9ffd94e6c8ce3f4",
    "qwen3-4b": "25df6c9544aebd31",
    "gemma-2-2b": "63c101fc9e84abc3",
    "gemma-3-1b": "d1cdebc1adacd58f",
    "gpt-j-6b": "bc5e78bd6fbc1e61",
    "pythia-12b": "c58e9102356cfd7d",
    "bloom-176b": "2328d32677d6264d",
    "falcon-7b": "d58b10f3370dcbd3",
    "falcon-40b": "fa9244e784d9981c",
    "opt-1.3b": "0c879da5405bc1d4",
    "phi-2": "2a0e1670fb6fa23d",
    "phi-3-medium": "42edddba2318d972",
    "mpt-7b": "cc21472925c085a0",
    "smollm3-3b": "8495aaa882cdc0b1",
    "bert-base": "3bbe91b933f523af",
    "roberta-base": "81ce597f8a20e6eb",
    "distilbert-base": "271bfd46b2535861",
    "vit-base": "42f552f539575403",
    "t5-11b": "8ee62a34f1a1fa00",
    "flan-t5-base": "9ef63e2ac859f1ea",
}

# Parameters of the model that transformers 4.57.6 builds from the configuration class without any argument.
DEFAULTS = {
    "llama": 6738415616,
    "mistral": 7241732096,
    "mixtral": 46702792704,
    "smollm3": 3075098624,
    "granite": 6738415616,
    "stablelm": 2795443200,
    "cohere": 34980831232,
    "starcoder2": 3030371328,
    "qwen2": 12049846272,
    "qwen3": 12049461248,
    "gemma": 8537680896,
    "gemma2": 2614341888,
    "gemma3_text": 2628658432,
    "deepseek_v2": 38035591168,
    "gpt_oss": 116829156672,
    "gpt2": 124439808,
    "gpt_bigcode": 111446784,
    "gptj": 6050882784,
    "gpt_neox": 20554567680,
    "bloom": 16156544,
    "falcon": 6921720704,
    "opt": 125239296,
    "phi": 1418270720,
    "phi3": 3821079552,
    "mpt": 1311213568,
    "bert": 109482240,
    "roberta": 124644864,
    "distilbert": 66362880,
    "vit": 85800194,
    "t5": 60506624,
}


def digest(net: Model) -> str:
    lines = "\n".join(f"{t.name} {'x'.join(map(str, t.shape))}" for t in net.tensors)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", REGISTERED)
def test_names_shapes_and_order_are_those_of_transformers(name: str) -> None:
    assert digest(from_config(PUBLIC[name][0])) == REGISTERED[name]


def test_bert_for_pretraining_is_that_of_transformers() -> None:
    assert digest(pretraining_model(model("bert-base"))) == "79e918be2509f5a8"


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_are_those_of_transformers(family: str) -> None:
    assert from_config({"model_type": family}).params == DEFAULTS[family]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configuration(name: str) -> None:
    config, published = PUBLIC[name]
    found = from_config(config, name=name)
    assert found.params == published
    zoo = model(name)
    assert [t.shape for t in found.tensors] == [t.shape for t in zoo.tensors]
    assert [t.name for t in found.tensors] == [t.name for t in zoo.tensors]
    assert found.params_active == zoo.params_active
    assert kv_cache_bytes(found, 100_000) == kv_cache_bytes(zoo, 100_000)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        # Sizes of the checkpoints on the Hub, two bytes a parameter.
        ({"model_type": "starcoder2", "vocab_size": 49152, "hidden_size": 4608, "intermediate_size": 18432,
          "num_hidden_layers": 32, "num_attention_heads": 36, "num_key_value_heads": 4, "use_bias": True}, 7173923840),
        ({"model_type": "stablelm", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 5632,
          "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32, "use_qkv_bias": True},
         1644515328),
        ({"model_type": "stablelm"}, 2795443200),
        ({"model_type": "cohere"}, 34980831232),
        ({"model_type": "internlm2", "vocab_size": 92544, "hidden_size": 4096, "intermediate_size": 14336,
          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "bias": False}, 7737708544),
    ],
)
def test_further_families(config: dict[str, Any], published: int) -> None:
    assert from_config(config).params == published


def test_layer_types_without_a_period_are_refused() -> None:
    config = {**PUBLIC["gpt-oss-20b"][0], "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2}
    with pytest.raises(InputError, match="layer_types"):
        from_config(config)


def test_nested_text_and_vision_of_gemma_3() -> None:
    """The public config.json of gemma-3-4b leaves heads, head_dim and vocabulary to the defaults of its class."""
    config = {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "sliding_window": 1024},
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                          "patch_size": 14},
    }
    found = from_config(config)
    assert found.params == 3880263168
    assert found.extra_params == {"vision_tower": 416866032, "projector": 2950272}
    assert found.params + sum(found.extra_params.values()) == 4300079472


def test_vision_tower_of_another_family_is_named_as_left_out() -> None:
    found = from_config({"model_type": "llava", "text_config": dict(LLAMA), "vision_config": {"hidden_size": 1024}})
    assert found.params == 6738415616
    assert any("vision" in note for note in found.notes)


def test_quantised_checkpoint_names_its_scales() -> None:
    found = from_config(PUBLIC["deepseek-v3"][0])
    assert found.buffers["fp8_block_scales"] == 4 * 41540496
    assert found.extra_params["mtp"] == 13463426304


def test_heads_read_from_each_spelling() -> None:
    """BR-11: 1, 8 and 8 key-value heads."""
    for name, heads in (("falcon-7b", 1), ("falcon-40b", 8), ("falcon-180b", 8)):
        spec = from_config(PUBLIC[name][0]).spec
        assert isinstance(spec, TransformerSpec)
        assert spec.kv_heads == heads


@pytest.mark.parametrize(("name", "stored"), [("falcon-7b", 7217189760), ("falcon-40b", 41835970560)])
def test_falcon_checkpoints_store_the_tied_head(name: str, stored: int) -> None:
    """BR-11: what the checkpoint holds, and what is a parameter, differ by the head."""
    assert from_config({**PUBLIC[name][0], "tie_word_embeddings": False}).params == stored


def test_falcon_without_multi_query_has_all_heads() -> None:
    spec = from_config({"model_type": "falcon", "multi_query": False}).spec
    assert isinstance(spec, TransformerSpec)
    assert spec.kv_heads == 71


def test_unknown_llama_like_type_is_read_with_a_note() -> None:
    found = from_config({**LLAMA, "model_type": "llama_next"})
    assert found.params == 6738415616
    assert any("llama_next" in note for note in found.notes)


def test_dtype_of_the_checkpoint_is_kept() -> None:
    assert from_config(LLAMA).dtype == "fp16"
    assert from_config({**LLAMA, "torch_dtype": "bfloat16"}).dtype == "bf16"


def test_folder_file_and_object_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert from_config(tmp_path).params == from_config(tmp_path / "config.json").params == from_config(LLAMA).params
    assert model(str(tmp_path)).params == 6738415616
    assert model(str(tmp_path / "config.json")).name == tmp_path.name


def test_a_folder_wins_over_the_zoo_name_it_ends_in(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert model(str(folder)).params == 6738415616


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_size": "4096"}, "hidden_size = '4096' is no whole number"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": [4096]}, "hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"num_attention_heads": 30}, "does not divide hidden_size = 4096"),
        ({"num_key_value_heads": 5}, "does not divide num_attention_heads = 32"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "exceeds"),
        ({"num_experts": 4}, "num_experts_per_tok"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": "lama"}, "model_type|read as"),
    ],
)
def test_wrong_values_are_one_line(change: dict[str, Any], match: str) -> None:
    config = {**LLAMA, **change}
    if change.get("model_type"):
        config.pop("rms_norm_eps")
    with pytest.raises(InputError, match=match) as caught:
        from_config(config)
    assert "\n" not in caught.value.line()


def test_twenty_four_heads_of_gpt3_xl_need_a_head_dim() -> None:
    """BR-04: 2048 / 24 is no whole number; with head_dim 128 the attention is 3072 wide: 1517123584 parameters."""
    config = {"model_type": "gpt3", "n_embd": 2048, "n_layer": 24, "n_head": 24}
    with pytest.raises(InputError, match="give head_dim"):
        from_config(config)
    assert from_config({**config, "head_dim": 128}).params == 1517123584
    assert from_config({**config, "n_head": 16}).params == 1315723264


def test_integral_float_is_an_integer() -> None:
    assert from_config({**LLAMA, "hidden_size": 4096.0}).params == 6738415616


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"model_type": "llama", "hidden_size": 40', "valid JSON at line 1"),
        ("", "valid JSON"),
        ("[1, 2]", "no JSON object"),
        ('{"model_type": "llama", "hidden_size": NaN}', "NaN"),
        ('{"hidden_size": 4096}', "model_type is missing"),
        ('{"model_type": "whisper"}', "supported: "),
        ('{"model_type": "gemma3", "text_config": 3}', "text_config"),
        ('{"model_type": 7}', "not supported"),
    ],
)
def test_broken_files_are_named_in_one_line(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=match) as caught:
        model(str(path))
    assert "config.json" in caught.value.line()
    assert "\n" not in caught.value.line()


def test_places_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no config\.json"):
        model(str(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        model(str(tmp_path / "config.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        model(str(tmp_path / "binary.json"))


def test_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert model(str(tmp_path)).params == 6738415616


def test_resnet_configuration() -> None:
    config = {"model_type": "resnet", "depths": [3, 4, 6, 3], "layer_type": "bottleneck"}
    assert from_config(config).params == 25557032


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**12), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
KEYS = sorted({k for config, _ in PUBLIC.values() for k in config} - {"model_type"})


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PUBLIC)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_change_of_a_configuration_is_a_model_or_bad_input(name: str, change: dict[str, Any]) -> None:
    try:
        found = from_config({**PUBLIC[name][0], **change})
    except InputError as error:
        line = error.line()
        assert len(line.splitlines()) == 1
    else:
        assert found.params > 0
        assert isinstance(found.spec, TransformerSpec)
        assert isinstance(found.spec.head_dim, int)


def test_every_family_has_traits_of_the_spec() -> None:
    fields = set(TransformerSpec.__dataclass_fields__)
    for name, traits in families().items():
        assert set(traits) - {"defaults"} <= fields, name
