"""A GGUF file written from a known model comes back as that model; anything unknown is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tests.support.gguf_files import GGUFContents

from engine.errors import ModelFolderError
from engine.gguf_import import import_gguf
from engine.model_folder import ModelConfig
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit

Change = Callable[[GGUFContents], None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    make_tiny_model(folder)
    return folder


def imported(contents: GGUFContents, tmp_path: Path) -> Path:
    import_gguf(contents.write(tmp_path / "model.gguf"), tmp_path / "imported", lambda _: None)
    return tmp_path / "imported"


def test_the_model_comes_back(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    path = GGUFContents(source).write(tmp_path / "model.gguf")
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
    contents = GGUFContents(source)
    del contents.tensors["output.weight"]
    for name in ("llama.rope.freq_base", "llama.rope.dimension_count", "tokenizer.chat_template"):
        del contents.fields[name]
    config = ModelConfig.load(imported(contents, tmp_path))
    assert (config.tie_word_embeddings, config.rope_theta, config.head_dim) == (True, 10_000.0, 16)
    settings = json.loads((tmp_path / "imported" / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings


def field(name: str, value: object) -> Change:
    def change(contents: GGUFContents) -> None:
        contents.fields[name] = value

    return change


def without(name: str) -> Change:
    def change(contents: GGUFContents) -> None:
        contents.fields.pop(name, None)
        contents.tensors.pop(name, None)

    return change


def tensor(name: str, values: list[int]) -> Change:
    def change(contents: GGUFContents) -> None:
        contents.tensors[name] = np.asarray(values, dtype=np.float32)

    return change


def other_architecture(contents: GGUFContents) -> None:
    contents.architecture = "gemma3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_architecture, r"field general\.architecture: 'gemma3' is not supported"),
        (field("llama.expert_count", 8), r"field llama\.expert_count: 8"),
        (field("llama.expert_used_count", 2), r"field llama\.expert_used_count: 2 is not supported"),
        (field("llama.logit_scale", 2.0), r"field llama\.logit_scale: is not supported"),
        (field("llama.rope.scaling.type", "yarn"), r"field llama\.rope\.scaling\.type: 'yarn'"),
        (field("llama.rope.dimension_count", 8), r"field llama\.rope\.dimension_count: must equal"),
        (field("llama.attention.head_count", 0), r"field llama\.attention\.head_count: must be a whole"),
        (field("llama.attention.head_count_kv", 3), "num_key_value_heads"),
        (without("llama.context_length"), r"field llama\.context_length: is missing"),
        (field("llama.attention.layer_norm_rms_epsilon", -1.0), "layer_norm_rms_epsilon: must be a positive"),
        (field("tokenizer.ggml.model", "bert"), r"field tokenizer\.ggml\.model: 'bert'"),
        (field("tokenizer.ggml.pre", "deepseek-llm"), r"field tokenizer\.ggml\.pre: 'deepseek-llm'"),
        (field("tokenizer.ggml.add_space_prefix", True), r"tokenizer\.ggml\.add_space_prefix"),
        (field("tokenizer.ggml.add_eos_token", True), r"tokenizer\.ggml\.add_eos_token"),
        (field("tokenizer.ggml.add_bos_token", 1), r"add_bos_token: must be true or false"),
        (field("tokenizer.ggml.token_type", [1] * 512 + [1]), "token_type: has 513 entries for 512"),
        (field("tokenizer.ggml.token_type", [6] * 512), "token_type: 6 of"),
        (field("tokenizer.ggml.merges", ["abc"]), "merges: 'abc' is not two symbols"),
        (field("tokenizer.ggml.merges", ["a b", "z z"]), "merges: 'zz' of 'z z' is no token"),
        (field("tokenizer.ggml.merges", ["中 b"]), "merges: '中' of '中 b' is no token"),
        (field("tokenizer.ggml.tokens", ["a"] * 512), "tokens: 'a' occurs more than once"),
        (field("tokenizer.ggml.merges", "abc"), "merges: must be a list of texts"),
        (field("tokenizer.ggml.eos_token_id", 512), "eos_token_id: 512 is not a token id below 512"),
        (tensor("rope_freqs.weight", [1, 1, 1, 1, 4, 2, 4, 8]), r"tensor rope_freqs\.weight is not supp"),
        (tensor("rope_freqs.weight", [1] * 7), r"tensor rope_freqs\.weight has shape \(7,\), not \(8,\)"),
        (tensor("blk.0.attn_q.bias", [1] * 64), r"tensor blk\.0\.attn_q\.bias is not supported"),
        (tensor("blk.0.attn_q_norm.weight", [1] * 16), r"attn_q_norm\.weight is not supported"),
        (
            tensor("output_norm.weight", [1] * 65),
            r"output_norm\.weight has shape \(65,\), not \(64,\)",
        ),
        (
            without("blk.1.attn_k.weight"),
            r"the tensor for model\.layers\.1\.self_attn\.k_proj\.weight is missing",
        ),
    ],
)
def test_what_is_not_supported_is_named_and_leaves_nothing(
    source: Path, tmp_path: Path, change: Change, message: str
) -> None:
    contents = GGUFContents(source)
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make_tiny_model(folder / "tiny", layers=1)
    return GGUFContents(folder / "tiny").write(folder / "model.gguf")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 100_000),
)
def test_a_damaged_file_is_refused_or_converted(
    small: Path, tmp_path: Path, flips: list[tuple[int, int]], cut: int | None
) -> None:
    damaged = bytearray(small.read_bytes())
    for at, value in flips:
        damaged[at] = value
    (tmp_path / "model.gguf").write_bytes(damaged[:cut])
    try:
        import_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda _: None)
    except ModelFolderError:
        assert [left.name for left in tmp_path.iterdir()] == ["model.gguf"]
    else:
        shutil.rmtree(tmp_path / "out")


def test_a_text_that_is_none_is_named(small: Path, tmp_path: Path) -> None:
    damaged = small.read_bytes().replace(b"<|im_start|>", b"\xff|im_start|>")
    (tmp_path / "model.gguf").write_bytes(damaged)
    with pytest.raises(ModelFolderError, match=r"field tokenizer\.ggml\.tokens: cannot be read: 'utf-8'"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda _: None)


def test_a_conversion_that_ends_early_leaves_nothing(source: Path, tmp_path: Path) -> None:
    path = GGUFContents(source).write(tmp_path / "model.gguf")

    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        if len(said) == 6:  # in the midst of the tensors
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, tmp_path / "tiny", interrupt)
    assert "%" in said[-1]
    assert [left.name for left in tmp_path.iterdir()] == ["model.gguf"]


def test_too_little_room_is_told_before_the_weights(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = GGUFContents(source).write(tmp_path / "model.gguf")
    size = (source / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size // 2))
    with pytest.raises(ModelFolderError, match=rf"has {size // 2} bytes free, the float32 weights need \d+"):
        import_gguf(path, tmp_path / "tiny", lambda _: None)
    assert [left.name for left in tmp_path.iterdir()] == ["model.gguf"]


def test_a_folder_that_exists_is_not_touched(source: Path, tmp_path: Path) -> None:
    path = GGUFContents(source).write(tmp_path / "model.gguf")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine").touch()
    with pytest.raises(ModelFolderError, match="exists already"):
        import_gguf(path, tmp_path / "tiny", lambda _: None)
    assert (tmp_path / "tiny" / "mine").exists()
