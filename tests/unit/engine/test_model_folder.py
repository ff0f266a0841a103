"""What a model folder says, and what it may not say."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError, ModelFolderError
from engine.layout import KVLayout
from engine.model_families import MUST_EQUAL, Family
from engine.model_folder import Llama3Rope, ModelConfig, weight_files
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NULL = object()
"""A field that is there and null."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def change(folder: Path, file: str = "config.json", **fields: object) -> None:
    """Sets fields of a JSON file; None removes one, NULL makes it null."""
    config = {**json.loads((folder / file).read_text()), **fields}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / file).write_text(json.dumps(kept, default=lambda value: None if value is NULL else value))


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
    change(folder, **{"rope_parameters": None, field: LLAMA3})
    assert ModelConfig.load(folder).rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 64)


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
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, r"rope_parameters\.high_freq_factor"),
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


def become(folder: Path, architecture: str, model_type: str, **fields: object) -> ModelConfig:
    change(folder, architectures=[architecture], model_type=model_type, **fields)
    return ModelConfig.load(folder)


def test_the_families_differ_in_what_they_have(folder: Path) -> None:
    mistral = become(folder, "MistralForCausalLM", "mistral", sliding_window=NULL)
    qwen2 = become(folder, "Qwen2ForCausalLM", "qwen2", attention_bias=True)
    qwen3 = become(folder, "Qwen3ForCausalLM", "qwen3", head_dim=None, attention_bias=False)
    found = [(c.family, c.qkv_bias, c.head_norm, c.head_dim) for c in (mistral, qwen2, qwen3)]
    assert found == [
        (Family.MISTRAL, False, False, 16),
        (Family.QWEN2, True, False, 16),
        (Family.QWEN3, False, True, 128),  # a default of its own, not hidden_size / heads
    ]


@pytest.mark.parametrize("window", [NULL, 128])
def test_mistral_slides_in_every_layer_or_in_none(folder: Path, window: object) -> None:
    config = become(folder, "MistralForCausalLM", "mistral", sliding_window=window)
    assert config.windows == ((None, None) if window is NULL else (128, 128))


def test_mistral_without_the_field_has_the_library_s_window(folder: Path) -> None:
    assert become(folder, "MistralForCausalLM", "mistral").windows == (4096, 4096)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 128}, (None, None)),  # Qwen2.5's configs: a window that is off
        ({"use_sliding_window": True, "sliding_window": 128}, (None, None)),  # the first 28 layers do not
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, (None, 128)),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}, (128, 128)),
        ({"use_sliding_window": True, "sliding_window": NULL, "max_window_layers": 0}, (None, None)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (128, None),
        ),
    ],
)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_where_qwen_slides(
    folder: Path, family: str, fields: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    assert become(folder, f"{family}ForCausalLM", family.lower(), **fields).windows == windows


@pytest.mark.parametrize(
    ("architecture", "model_type", "fields", "named"),
    [
        ("Qwen2ForCausalLM", "qwen3", {}, "model_type"),
        ("Qwen2ForCausalLM", "qwen2", {"use_mrope": True}, "use_mrope"),
        ("Qwen2ForCausalLM", "qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
        ("Qwen2ForCausalLM", "qwen2", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("Qwen3ForCausalLM", "qwen3", {"attention_bias": True}, "attention_bias"),
        ("Qwen3ForCausalLM", "qwen3", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ("MistralForCausalLM", "mistral", {"attention_bias": True}, "attention_bias"),
        ("MistralForCausalLM", "mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("Qwen3MoeForCausalLM", "qwen3_moe", {}, "architectures"),
    ],
)
def test_what_a_family_does_not_compute_is_named(
    folder: Path, architecture: str, model_type: str, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelFolderError, match=f"field {named}:"):
        become(folder, architecture, model_type, **fields)


PUBLISHED: dict[str, dict[str, object]] = {
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "max_position_embeddings": 4096,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 32000,
        "eos_token_id": 2,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "max_position_embeddings": 131072,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "eos_token_id": [128001, 128008, 128009],
    },
    "Qwen2.5-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "num_hidden_layers": 28,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 152064,
        "eos_token_id": 151645,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "eos_token_id": 151645,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
        "eos_token_id": 2,
    },
}
"""What their authors publish, as far as it matters here."""


@pytest.mark.parametrize(
    ("name", "head_dim", "window", "scaling", "dtype"),
    [
        ("Llama-2-7b", 128, None, None, "float16"),
        ("Llama-3.2-1B", 64, None, Llama3Rope(32.0, 1.0, 4.0, 8192), "bfloat16"),
        ("Qwen2.5-7B-Instruct", 128, None, None, "bfloat16"),
        ("Qwen3-8B", 128, None, None, "bfloat16"),
        ("Mistral-7B-v0.1", 128, 4096, None, "bfloat16"),
    ],
)
def test_published_configs(
    tmp_path: Path, name: str, head_dim: int, window: int | None, scaling: Llama3Rope | None, dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = ModelConfig.load(tmp_path)
    assert (config.head_dim, config.rope_scaling, config.dtype) == (head_dim, scaling, dtype)
    assert config.windows == (window,) * config.layers
    assert config.rope_theta == PUBLISHED[name].get("rope_theta", 10_000.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=20), values, max_size=3),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(PUBLISHED)),
    changes=st.dictionaries(
        st.sampled_from(sorted({*MUST_EQUAL, *(field for fields in PUBLISHED.values() for field in fields)})),
        json_values,
        max_size=3,
    ),
)
def test_any_config_loads_or_is_refused(tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **changes}))
    with suppress(ModelFolderError):
        ModelConfig.load(tmp_path)


def test_an_end_token_outside_the_vocabulary(folder: Path) -> None:
    change(folder, "generation_config.json", eos_token_id=512)
    with pytest.raises(ModelFolderError, match="eos_token_id: 512 is not a token id below 512"):
        ModelConfig.load(folder)


def test_missing_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        ModelConfig.load(tmp_path / "nowhere")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelFolderError, match="JSON object"):
        ModelConfig.load(folder)
    (folder / "config.json").write_text("{")
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
