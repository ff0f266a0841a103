"""What sets the families apart in a config.json, and which of it is refused."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.model_folders import LLAMA3_ROPE, NULL, change

from engine.errors import ModelFolderError
from engine.model_families import MUST_EQUAL, Family
from engine.model_folder import Llama3Rope, ModelConfig
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


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
        "rope_scaling": {**LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 8192},
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
