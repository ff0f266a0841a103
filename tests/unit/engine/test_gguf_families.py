"""A family's GGUF file gives the model of its Hugging Face folder, in every kind of quantisation."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file
from tests.support.bare_model import BareModel, chunk
from tests.support.gguf_files import GGUFContents
from tests.support.tiny_oracles import SPECS, Oracle

from engine.errors import ModelFolderError
from engine.gguf_import import import_gguf
from engine.loader import load_model
from engine.model_families import Family
from engine.model_folder import ModelConfig
from engine.tiny import make_tiny_model

pytestmark = pytest.mark.unit

WITHOUT_SLIDING_QWEN = [name for name in SPECS if not name.endswith("slides")]
"""GGUF says nothing of a window in the upper layers only."""
SUPER_BLOCK = 256
"""Weights that K-quants keep together."""


@pytest.mark.parametrize("oracle", WITHOUT_SLIDING_QWEN, indirect=True)
def test_a_family_s_gguf_is_its_folder(oracle: Oracle, tmp_path: Path) -> None:
    expected_config = ModelConfig.load(oracle.folder)
    if expected_config.family is Family.MISTRAL and expected_config.windows[0] is None:
        expected_config = replace(expected_config, family=Family.LLAMA)  # they compute the same
    path = GGUFContents(oracle.folder).write(tmp_path / "model.gguf")
    folder = tmp_path / oracle.folder.name
    import_gguf(path, folder, lambda _: None)
    assert ModelConfig.load(folder) == expected_config
    expected, found = (load_file(place / "model.safetensors") for place in (oracle.folder, folder))
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    model = BareModel([load_model(folder)], blocks=4)
    (logits,) = model.logits([chunk(oracle.prompt, 0, len(oracle.prompt), (2, 0, 3))])
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    make_tiny_model(folder, intermediate_size=SUPER_BLOCK)
    return folder


def imported(contents: GGUFContents, tmp_path: Path) -> dict[str, npt.NDArray[np.float32]]:
    import_gguf(contents.write(tmp_path / "model.gguf"), tmp_path / "imported", lambda _: None)
    return load_file(tmp_path / "imported" / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("F16", 2**-9),
        ("BF16", 2**-7),
        ("Q8_0", 1 / 127),
        ("Q4_0", 1 / 7),
        ("Q4_1", 1 / 7),
        ("Q5_0", 1 / 15),
        ("Q5_1", 1 / 15),
    ],
)
def test_each_kind_is_within_one_step_of_the_weights(
    source: Path, tmp_path: Path, kind: str, step: float
) -> None:
    contents = GGUFContents(source)
    matrices = [name for name, tensor in contents.tensors.items() if tensor.ndim == 2]
    contents.quantised = dict.fromkeys(matrices, GGMLQuantizationType[kind])
    expected = load_file(source / "model.safetensors")
    for name, found in imported(contents, tmp_path).items():
        if expected[name].ndim == 1:
            assert np.array_equal(found, expected[name])
            continue
        assert not np.array_equal(found, expected[name])
        np.testing.assert_allclose(found, expected[name], atol=step * np.abs(expected[name]).max())


def test_q6_k_by_its_definition(source: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    rows = 64
    low = generator.integers(0, 256, (rows, 128), dtype=np.uint8)
    high = generator.integers(0, 256, (rows, 64), dtype=np.uint8)
    scales = generator.integers(-128, 128, (rows, 16), dtype=np.int8)
    whole = generator.uniform(-0.01, 0.01, (rows, 1)).astype(np.float16)
    raw = np.concatenate([low, high, scales.view(np.uint8), whole.view(np.uint8)], axis=1)
    expected = np.empty((rows, SUPER_BLOCK))
    for half in range(2):
        for lane in range(32):
            for quarter in range(4):
                nibbles = low[:, 64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2))
                bits = high[:, 32 * half + lane] >> (2 * quarter)
                number = ((nibbles & 15) | ((bits & 3) << 4)).astype(np.int64) - 32
                scale = scales[:, 8 * half + 2 * quarter + lane // 16].astype(np.float64)
                expected[:, 128 * half + 32 * quarter + lane] = whole[:, 0] * scale * number
    assert_down_projection(source, tmp_path, raw, GGMLQuantizationType.Q6_K, expected)


def test_q4_k_by_its_definition(source: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    rows = 64
    whole = generator.uniform(0.001, 0.01, (rows, 2)).astype(np.float16)
    scales = generator.integers(0, 64, (rows, 8), dtype=np.uint8)
    minima = generator.integers(0, 64, (rows, 8), dtype=np.uint8)
    numbers = generator.integers(0, 16, (rows, 8, 32), dtype=np.uint8)
    packed = np.empty((rows, 12), dtype=np.uint8)
    packed[:, 0:4] = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    packed[:, 4:8] = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    packed[:, 8:12] = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    nibbles = (numbers[:, 0::2] | (numbers[:, 1::2] << 4)).reshape(rows, 128)
    raw = np.concatenate([whole.view(np.uint8), packed, nibbles], axis=1)
    factor, floor = whole[:, :1].astype(np.float64), whole[:, 1:].astype(np.float64)
    expected = (factor * scales)[:, :, None] * numbers - (floor * minima)[:, :, None]
    assert_down_projection(
        source, tmp_path, raw, GGMLQuantizationType.Q4_K, expected.reshape(rows, SUPER_BLOCK)
    )


def assert_down_projection(
    source: Path,
    tmp_path: Path,
    raw: npt.NDArray[np.uint8],
    kind: GGMLQuantizationType,
    expected: npt.NDArray[np.float64],
) -> None:
    contents = GGUFContents(source)
    contents.raw = {"blk.1.ffn_down.weight": (raw, kind)}
    found = imported(contents, tmp_path)["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("factor", "context", "theta", "head_dim"),
    [(8.0, 8192, 500_000.0, 128), (32.0, 8192, 500_000.0, 64), (4.0, 64, 10_000.0, 16)],
)
def test_what_a_llama_3_was_stretched_by_comes_back(
    source: Path, tmp_path: Path, factor: float, context: int, theta: float, head_dim: int
) -> None:
    make_tiny_model(tmp_path / "tiny", hidden_size=4 * head_dim, intermediate_size=8, layers=1)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    imported(GGUFContents(tmp_path / "tiny"), tmp_path)
    expected, found = (ModelConfig.load(tmp_path / name) for name in ("tiny", "imported"))
    assert (found.rope_theta, found.rope_scaling) == (expected.rope_theta, expected.rope_scaling)


@pytest.mark.parametrize("oracle", ["qwen2", "qwen3"], indirect=True)
def test_a_qwen_that_slides_has_no_known_gguf(oracle: Oracle, tmp_path: Path) -> None:
    contents = GGUFContents(oracle.folder)
    contents.fields[f"{contents.architecture}.attention.sliding_window"] = 16
    with pytest.raises(ModelFolderError, match=r"attention\.sliding_window: is not supported with qwen"):
        imported(contents, tmp_path)


def test_a_window_of_nothing_is_none(source: Path, tmp_path: Path) -> None:
    contents = GGUFContents(source)
    contents.fields["llama.attention.sliding_window"] = 0
    imported(contents, tmp_path)
    assert ModelConfig.load(tmp_path / "imported").windows == (None, None)
