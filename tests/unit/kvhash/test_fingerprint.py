"""The model fingerprint: what changes it, what does not, what it costs, what it refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import kvhash.fingerprint as fingerprint_module
from kvhash import FingerprintError, model_fingerprint

pytestmark = pytest.mark.unit

SETTINGS = ("bfloat16", "bfloat16", 16)


def _tensors(seed: int, tensors: int, values: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {f"layer.{i:04}": random.standard_normal(values).astype(np.float32) for i in range(tensors)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    save_file(_tensors(1, 3, 5000), path / "model-1.safetensors")
    save_file(_tensors(2, 2, 700), path / "model-2.safetensors")
    return path


@pytest.fixture
def large_folder(folder: Path) -> Path:
    """More bytes than are sampled, in tensors of 30 windows each."""
    save_file(_tensors(3, 100, 30 * 1024), folder / "model-3.safetensors")
    return folder


def test_a_copy_elsewhere_has_the_same_fingerprint(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert model_fingerprint(copy, *SETTINGS) == model_fingerprint(folder, *SETTINGS)
    assert len(bytes.fromhex(model_fingerprint(folder, *SETTINGS))) == 16


def test_golden_vector(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\x01\x02\x03\x04"
    (tmp_path / "model.safetensors").write_bytes(data)
    assert model_fingerprint(tmp_path, *SETTINGS) == "7b02d0a55b097d43784348e61a1721e9"


@pytest.mark.parametrize(
    "settings", [("float16", "bfloat16", 16), ("bfloat16", "int8", 16), ("bfloat16", "bfloat16", 32)]
)
def test_the_settings_count(folder, settings):
    assert model_fingerprint(folder, *settings) != model_fingerprint(folder, *SETTINGS)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_configuration_and_tokenizer_count(folder, name):
    before = model_fingerprint(folder, *SETTINGS)
    (folder / name).write_text((folder / name).read_text() + " ")
    assert model_fingerprint(folder, *SETTINGS) != before


def test_a_model_may_have_no_tokenizer(folder):
    before = model_fingerprint(folder, *SETTINGS)
    (folder / "tokenizer.json").unlink()
    assert model_fingerprint(folder, *SETTINGS) != before


def test_the_names_of_weight_files_count(folder):
    before = model_fingerprint(folder, *SETTINGS)
    (folder / "model-2.safetensors").rename(folder / "model-9.safetensors")
    assert model_fingerprint(folder, *SETTINGS) != before


@pytest.mark.parametrize("position", [-1, -4096, -10_000, -20_000])
def test_every_byte_of_small_weights_counts(folder, position):
    before = model_fingerprint(folder, *SETTINGS)
    _flip(folder / "model-1.safetensors", position)
    assert model_fingerprint(folder, *SETTINGS) != before


def test_every_tensor_of_large_weights_counts(large_folder):
    before = model_fingerprint(large_folder, *SETTINGS)
    tensors = _tensors(3, 100, 30 * 1024)
    for name in ("layer.0000", "layer.0057", "layer.0099"):
        save_file({**tensors, name: tensors[name] + 1}, large_folder / "model-3.safetensors")
        assert model_fingerprint(large_folder, *SETTINGS) != before


def test_the_bytes_read_of_weights_are_bounded(large_folder, monkeypatch):
    weights = fingerprint_module._weight_files(large_folder)
    windows = list(fingerprint_module._sampled_windows(weights))
    total_bytes = sum(weight_file.size_bytes for weight_file in weights)
    assert total_bytes > fingerprint_module.WINDOWS_MAX * fingerprint_module.WINDOW_BYTES
    assert 1000 < len(windows) <= fingerprint_module.WINDOWS_MAX
    monkeypatch.setattr(fingerprint_module, "WINDOWS_MAX", 10)
    assert len(list(fingerprint_module._sampled_windows(weights))) == 10


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json: No such file"),
        (lambda path: [file.unlink() for file in path.glob("*.safetensors")], "no .*safetensors file"),
        (lambda path: (path / "model-1.safetensors").write_bytes(b"\xff" * 100), "a header of .* at most 92"),
        (lambda path: (path / "model-1.safetensors").write_bytes(b""), "a header of 0 bytes"),
        (lambda path: _write_header(path, b"[]"), "not a safetensors header"),
        (lambda path: _write_header(path, b'{"w": {"data_offsets": [0]}}'), "not a safetensors header"),
        (lambda path: _write_header(path, b'{"w": {"data_offsets": [0, 9]}}'), "outside of the file"),
        (lambda path: _write_header(path, b'{"w": {"data_offsets": [-9, 0]}}'), "outside of the file"),
    ],
)
def test_a_folder_without_a_model_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(FingerprintError, match=message):
        model_fingerprint(folder, *SETTINGS)


def test_an_oversized_text_file_is_refused(folder, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "TEXT_FILE_BYTES_MAX", 20)
    with pytest.raises(FingerprintError, match=r"config.json: 23 bytes, at most 20"):
        model_fingerprint(folder, *SETTINGS)


def _write_header(folder: Path, header: bytes) -> None:
    data = len(header).to_bytes(8, "little") + header + b"\0" * 4
    (folder / "model-1.safetensors").write_bytes(data)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
