"""What a model folder says, and what it may not say."""

import json
from pathlib import Path

import pytest
from tests.support.model_folders import LLAMA3_ROPE, change

from engine.errors import EngineError, ModelFolderError
from engine.layout import KVLayout
from engine.model_folder import Llama3Rope, ModelConfig, weight_files
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_s_config(folder: Path) -> None:
    config = ModelConfig.load(folder)
    assert (config.name, config.layers, config.heads, config.kv_heads, config.head_dim) == (
        "tiny",
        2,
        4,
        2,
        16,
    )
    assert (config.vocab_size, config.context_tokens_max, config.eos_token_ids) == (512, 2048, (2,))
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (10_000.0, None, "float32")


def test_defaults_of_older_configs(folder: Path) -> None:
    change(folder, rope_parameters=None, dtype=None, head_dim=None, num_key_value_heads=None, rope_theta=5e5)
    config = ModelConfig.load(folder)
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.dtype) == (4, 16, 5e5, "float32")


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_llama3_rope_in_both_spellings(folder: Path, field: str) -> None:
    change(folder, **{"rope_parameters": None, field: LLAMA3_ROPE})
    assert ModelConfig.load(folder).rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 64)


def test_both_rope_spellings_that_say_the_same(folder: Path) -> None:
    change(folder, rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5}, rope_scaling=LLAMA3_ROPE)
    config = ModelConfig.load(folder)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Llama3Rope(8.0, 1.0, 4.0, 64))


def test_end_tokens_of_the_generation_config_count(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=[0, 2])
    assert ModelConfig.load(folder).eos_token_ids == (0, 2)
    (folder / "generation_config.json").unlink()
    assert ModelConfig.load(folder).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"model_type": "qwen2"}, "model_type"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": 4}, "num_experts"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, r"rope_parameters\.rope_type"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope_parameters\.factor"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, r"rope_parameters\.rope_type"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [8]}}, r"rope_parameters\.mrope_section"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters\.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, r"rope_parameters\.high_freq_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.rope_type",
        ),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        # transformers would follow rope_scaling
        ({"rope_parameters": {}, "rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3_ROPE}, "rope_scaling"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"vocab_size": 1e300}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_supported_is_named(folder: Path, fields: dict[str, object], named: str) -> None:
    change(folder, **fields)
    with pytest.raises(ModelFolderError, match=f"field {named}:"):
        ModelConfig.load(folder)


@pytest.mark.parametrize("token_id", [512, -1, True, 1.0, [[1]]])
def test_an_end_token_outside_the_vocabulary(folder: Path, token_id: object) -> None:
    change(folder, "generation_config.json", eos_token_id=token_id)
    with pytest.raises(ModelFolderError, match=r"eos_token_id: .* is not a token id below 512"):
        ModelConfig.load(folder)


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        ModelConfig.load(tmp_path / "nowhere")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelFolderError, match="JSON object"):
        ModelConfig.load(folder)
    for text in ("{", "[" * 200_000):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelFolderError, match="cannot be read"):
            ModelConfig.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json is missing"):
        ModelConfig.load(folder)


def test_the_files_an_index_names(folder: Path) -> None:
    assert weight_files(folder) == (folder / "model.safetensors",)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(ModelFolderError, match=r"one\.safetensors is missing"):
        weight_files(folder)
    for name in ("one.safetensors", "two.safetensors"):
        (folder / name).touch()
    assert [path.name for path in weight_files(folder)] == ["one.safetensors", "two.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(ModelFolderError, match="not a plain file name"):
        weight_files(folder)
    index.write_text("{}")
    with pytest.raises(ModelFolderError, match="weight_map"):
        weight_files(folder)
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="neither"):
        weight_files(folder)


def test_layout_arithmetic(folder: Path) -> None:
    layout = KVLayout.of(ModelConfig.load(folder))
    assert layout == KVLayout(2, 2, 16, 16, "float32")
    assert (layout.layer_bytes, layout.block_bytes, layout.token_bytes) == (4096, 8192, 512)
    assert [layout.layer_range(layer) for layer in range(2)] == [(0, 4096), (4096, 4096)]
    for layer in (-1, 2):
        with pytest.raises(EngineError, match=f"layer {layer}"):
            layout.layer_range(layer)
    with pytest.raises(EngineError, match="head_dim"):
        KVLayout(2, 2, 16, 0, "float32")
    with pytest.raises(EngineError, match="dtype_name"):
        KVLayout(2, 2, 16, 16, "int4")
