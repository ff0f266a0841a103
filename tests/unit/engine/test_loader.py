"""Weights: shared through the page cache, complete, of the right shapes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.bare_model import BareModel
from tests.support.tiny_oracles import make_oracle
from transformers import AutoModelForCausalLM

from engine.dtypes import TORCH_DTYPES
from engine.engine import Engine, KVLayout, SequenceStep
from engine.errors import ModelFolderError
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.safetensors_file import ALIGNMENT_BYTES, write_float32
from engine.tensor_shapes import tensor_shapes
from engine.tiny import make_tiny_model
from policy.core import SamplingParams

pytestmark = pytest.mark.unit

PROMPT = tuple(range(3, 60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def last_logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    layout = KVLayout.of(model.config)
    engine = Engine(model, layout, memoryview(bytearray(8 * layout.block_bytes)), 8)
    step = SequenceStep(PROMPT, 0, tuple(range(8)), SamplingParams(output_tokens_max=1), 0)
    return engine.logits([step])[0]


def reference(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, -1]


def mapped_bytes(path: Path) -> tuple[int, int]:
    """(resident, copied) bytes of this process's mappings of a file."""
    resident = copied = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            resident += 1024 * int(line.split()[1])
        elif inside and first == "Anonymous:":
            copied += 1024 * int(line.split()[1])
    return resident, copied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_the_asked_dtype_stay_in_the_file_s_pages(tmp_path: Path, dtype: str) -> None:
    make_tiny_model(tmp_path, intermediate_size=4096)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor.to(TORCH_DTYPES[dtype]) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    model = load_model(tmp_path, dtype=dtype)
    step = SequenceStep(PROMPT, 0, tuple(range(8)), None, 0)
    BareModel([model], 8, TORCH_DTYPES[dtype]).logits([step])
    resident, copied = mapped_bytes(path)
    assert resident > 0.8 * path.stat().st_size
    assert copied == 0


def test_shards_are_one_model(folder: Path) -> None:
    expected = last_logits(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(last_logits(folder), expected, atol=1e-5, rtol=0)  # alignment changes rounding


def test_bfloat16_weights_are_computed_in_float32(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(last_logits(folder), reference(folder), atol=1e-4, rtol=0)


def test_llama3_rope_matches_the_reference(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    plain = last_logits(folder)
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(last_logits(folder), reference(folder), atol=1e-4, rtol=0)
    assert (last_logits(folder) - plain).abs().max() > 1e-2


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"tensor model\.norm\.weight is missing"),
        ({"lm_head.weight": None}, r"tensor lm_head\.weight is missing"),
        ({"model.norm.weight": torch.ones(63)}, r"model\.norm\.weight has shape \(63,\).*\(64,\)"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "unsupported dtype"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, "q_norm.weight is not supported"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias is not supported"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    rewrite(folder, changes)
    with pytest.raises(ModelFolderError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("oracle", "name", "shape"),
    [("qwen2", "self_attn.k_proj.bias", (32,)), ("qwen3", "self_attn.q_norm.weight", (32,))],
)
def test_a_family_s_own_tensors_are_wanted(
    tmp_path: Path, oracle: str, name: str, shape: tuple[int, ...]
) -> None:
    make_oracle(tmp_path, oracle)
    full_name = f"model.layers.1.{name}"
    rewrite(tmp_path, {full_name: torch.ones(7)})
    with pytest.raises(
        ModelFolderError, match=re.escape(f"{full_name} has shape (7,), config.json says {shape}")
    ):
        load_model(tmp_path)
    rewrite(tmp_path, {full_name: None})
    with pytest.raises(ModelFolderError, match=re.escape(f"tensor {full_name} is missing")):
        load_model(tmp_path)


def test_what_may_be_there_and_is_not_used(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, tie_word_embeddings=True)
    expected = last_logits(tmp_path)
    rewrite(
        tmp_path,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            "lm_head.weight": torch.zeros(512, 64),
        },
    )
    assert torch.equal(last_logits(tmp_path), expected)


def test_arguments_and_damage(folder: Path) -> None:
    with pytest.raises(ModelFolderError, match="dtype 'int8'"):
        load_model(folder, dtype="int8")
    for layers in (range(0), range(3), range(-1, 1), range(0, 2, 2)):
        with pytest.raises(ModelFolderError, match="consecutive range"):
            load_model(folder, layers=layers)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFolderError, match="not a readable safetensors file"):
        load_model(folder)


def test_the_writer_aligns_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(5, dtype=np.float32)
    write_float32(path, [("first", (2, 3)), ("second", (5,))], iter([first, second]))
    loaded = load_file(path)
    assert loaded["first"].tolist() == first.tolist()
    assert loaded["second"].tolist() == second.tolist()
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header_bytes) % ALIGNMENT_BYTES == 0
    with pytest.raises(ValueError, match="announced as"):
        write_float32(path, [("first", (3, 2))], iter([first]))


def test_tensor_shapes_are_a_checkpoint_s(folder: Path) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert tensor_shapes(ModelConfig.load(folder)) == stored
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == stored
