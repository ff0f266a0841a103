"""A GGUF file written from a known model comes back as that model; anything unknown is named."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from engine.errors import ModelFolderError
from engine.gguf_import import LAYER_TENSORS, import_gguf
from engine.model_folder import ModelConfig
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit

Change = Callable[["Contents"], None]


class Contents:
    """What goes into a GGUF file: the tiny model's fields and tensors, to be changed by a test."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.load(folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
        special = {token["id"] for token in tokenizer["added_tokens"]}
        self.architecture = "llama"
        self.fields: dict[str, object] = {
            "llama.block_count": config.layers,
            "llama.context_length": config.context_tokens_max,
            "llama.embedding_length": config.hidden_size,
            "llama.feed_forward_length": config.intermediate_size,
            "llama.attention.head_count": config.heads,
            "llama.attention.head_count_kv": config.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": config.rope_theta,
            "llama.rope.dimension_count": config.head_dim,
            "llama.vocab_size": config.vocab_size,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if index in special else 1 for index in range(len(tokens))],
            "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": "{{ messages }}",
        }
        self.tensors: dict[str, np.ndarray] = {}
        stored = load_file(folder / "model.safetensors")
        names = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }
        for layer in range(config.layers):
            for gguf_name, ours in LAYER_TENSORS.items():
                names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{gguf_name}.weight"
        for name, tensor in stored.items():
            heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
            self.tensors[names[name]] = tensor if heads is None else permuted(tensor, heads)
        self.quantised: dict[str, GGMLQuantizationType] = {}

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for name, value in self.fields.items():
            if isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            else:
                writer.add_array(name, value)
        for name, tensor in self.tensors.items():
            kind = self.quantised.get(name)
            if kind is None:
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of rotary rows, as its converter does it."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weight.shape))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    make_tiny_model(folder)
    return folder


def imported(contents: Contents, tmp_path: Path) -> Path:
    import_gguf(contents.write(tmp_path / "model.gguf"), tmp_path / "imported", lambda _: None)
    return tmp_path / "imported"


def test_the_model_comes_back(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = Contents(source).write(tmp_path / "model.gguf")
    import_gguf(path, tmp_path / "tiny", said.append)
    expected, found = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "tiny"))
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert ModelConfig.load(tmp_path / "tiny") == ModelConfig.load(source)
    expected_tokenizer, tokenizer = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (source, tmp_path / "tiny")
    )
    assert tokenizer == expected_tokenizer
    settings = json.loads((tmp_path / "tiny" / "tokenizer_config.json").read_text())
    assert (settings["chat_template"], settings["eos_token"]) == ("{{ messages }}", "<|im_end|>")
    assert "0 %" in said[1]
    assert len(said) <= 14


def test_a_tied_head_and_defaults(source: Path, tmp_path: Path) -> None:
    contents = Contents(source)
    del contents.tensors["output.weight"]
    for name in ("llama.rope.freq_base", "llama.rope.dimension_count", "tokenizer.chat_template"):
        del contents.fields[name]
    config = ModelConfig.load(imported(contents, tmp_path))
    assert (config.tie_word_embeddings, config.rope_theta, config.head_dim) == (True, 10_000.0, 16)
    settings = json.loads((tmp_path / "imported" / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16])
def test_quantised_tensors_are_dequantised(source: Path, tmp_path: Path, kind: GGMLQuantizationType) -> None:
    contents = Contents(source)
    contents.quantised = {"blk.1.ffn_up.weight": kind}
    name = "model.layers.1.mlp.up_proj.weight"
    found = load_file(imported(contents, tmp_path) / "model.safetensors")[name]
    expected = load_file(source / "model.safetensors")[name]
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, atol=0.01)


def test_a_tokenizer_that_begins_with_bos_and_keeps_digits(source: Path, tmp_path: Path) -> None:
    contents = Contents(source)
    contents.fields["tokenizer.ggml.add_bos_token"] = True
    contents.fields["tokenizer.ggml.pre"] = "gpt-2"
    types = contents.fields["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    types[511] = 4
    tokenizer = Tokenizer.from_file(str(imported(contents, tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("ab").ids[0] == 1
    assert tokenizer.encode("ab", add_special_tokens=False).ids[0] != 1
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("in 1984")
    assert [piece for piece, _ in pieces] == ["in", "Ġ1984"]
    assert 511 in tokenizer.encode(f"12{tokenizer.id_to_token(511)}3").ids


def field(name: str, value: object) -> Change:
    def change(contents: Contents) -> None:
        contents.fields[name] = value

    return change


def without(name: str) -> Change:
    def change(contents: Contents) -> None:
        contents.fields.pop(name, None)
        contents.tensors.pop(name, None)

    return change


def tensor(name: str, shape: tuple[int, ...]) -> Change:
    def change(contents: Contents) -> None:
        contents.tensors[name] = np.ones(shape, dtype=np.float32)

    return change


def other_architecture(contents: Contents) -> None:
    contents.architecture = "qwen2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_architecture, r"field general\.architecture: 'qwen2' is not supported"),
        (field("llama.expert_count", 8), r"field llama\.expert_count: 8"),
        (field("llama.expert_used_count", 2), r"field llama\.expert_used_count: is not supported"),
        (field("llama.rope.scaling.type", "yarn"), r"field llama\.rope\.scaling\.type: 'yarn'"),
        (field("llama.rope.dimension_count", 8), r"field llama\.rope\.dimension_count: must equal"),
        (field("llama.attention.head_count", 0), r"field llama\.attention\.head_count: must be a whole"),
        (field("llama.attention.head_count_kv", 3), "num_key_value_heads"),
        (without("llama.context_length"), r"field llama\.context_length: is missing"),
        (field("llama.attention.layer_norm_rms_epsilon", -1.0), "layer_norm_rms_epsilon: must be a positive"),
        (field("tokenizer.ggml.model", "llama"), r"field tokenizer\.ggml\.model: 'llama'"),
        (field("tokenizer.ggml.pre", "llama-bpe"), r"field tokenizer\.ggml\.pre: 'llama-bpe'"),
        (field("tokenizer.ggml.add_space_prefix", True), r"tokenizer\.ggml\.add_space_prefix"),
        (field("tokenizer.ggml.add_eos_token", True), r"tokenizer\.ggml\.add_eos_token"),
        (field("tokenizer.ggml.add_bos_token", 1), r"add_bos_token: must be true or false"),
        (field("tokenizer.ggml.token_type", [1] * 512 + [1]), "token_type: has 513 entries for 512"),
        (field("tokenizer.ggml.token_type", [6] * 512), "token_type: 6 of"),
        (field("tokenizer.ggml.merges", ["abc"]), "merges: 'abc' is not two symbols"),
        (field("tokenizer.ggml.merges", "abc"), "merges: must be a list of texts"),
        (field("tokenizer.ggml.eos_token_id", 512), "eos_token_id: 512 is not a token id below 512"),
        (tensor("rope_freqs.weight", (8,)), r"tensor rope_freqs\.weight is not supported"),
        (tensor("output_norm.weight", (65,)), r"tensor output_norm\.weight has shape \(65,\), not \(64,\)"),
        (
            without("blk.1.attn_k.weight"),
            r"the tensor for model\.layers\.1\.self_attn\.k_proj\.weight is missing",
        ),
    ],
)
def test_what_is_not_supported_is_named_and_leaves_nothing(
    source: Path, tmp_path: Path, change: Change, message: str
) -> None:
    contents = Contents(source)
    change(contents)
    with pytest.raises(ModelFolderError, match=message):
        imported(contents, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFolderError, match="not a readable GGUF"):
        import_gguf(path, tmp_path / "out", lambda _: None)
    for damaged in (b"", b"GGUF", b"not a model at all, but long enough to be read as one"):
        path.write_bytes(damaged)
        with pytest.raises(ModelFolderError, match="not a readable GGUF"):
            import_gguf(path, tmp_path / "out", lambda _: None)


def test_a_conversion_that_ends_early_leaves_nothing(source: Path, tmp_path: Path) -> None:
    path = Contents(source).write(tmp_path / "model.gguf")

    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        if len(said) == 6:  # in the midst of the tensors
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, tmp_path / "tiny", interrupt)
    assert "%" in said[-1]
    assert [left.name for left in tmp_path.iterdir()] == ["model.gguf"]


def test_a_folder_that_exists_is_not_touched(source: Path, tmp_path: Path) -> None:
    path = Contents(source).write(tmp_path / "model.gguf")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine").touch()
    with pytest.raises(ModelFolderError, match="exists already"):
        import_gguf(path, tmp_path / "tiny", lambda _: None)
    assert (tmp_path / "tiny" / "mine").exists()
