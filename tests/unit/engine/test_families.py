"""Every family against transformers on tiny random models: the same logits however the work is cut."""

from collections.abc import Iterator

import pytest
import torch
from safetensors import safe_open
from tests.support.bare_model import BareModel, chunk
from tests.support.tiny_oracles import Oracle

from engine.dtypes import TORCH_DTYPES
from engine.engine import Engine, KVLayout
from engine.errors import EngineError
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.native.native_ops import NativeOps
from engine.ops import Ops
from engine.step import SequenceStep
from engine.tensor_shapes import tensor_shapes
from engine.torch_ops import TorchOps
from policy.core import SamplingParams

pytestmark = pytest.mark.unit

BLOCKS = 24
TABLE = (11, 3, 17, 0, 8)
"""Blocks of one sequence, in no order: addresses must come from the table alone."""
GREEDY = SamplingParams(output_tokens_max=1000)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    return NativeOps.build(request.config.cache.mkdir("native"))  # kept between runs


@pytest.fixture
def model(oracle: Oracle, ops: Ops) -> BareModel:
    return BareModel([load_model(oracle.folder, ops)], BLOCKS)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def in_chunks(model: BareModel, token_ids: tuple[int, ...], size: int) -> torch.Tensor:
    """The logits of all tokens, computed `size` tokens at a time into blocks that hold nothing."""
    model.forget()
    ends = [*range(size, len(token_ids), size), len(token_ids)]
    starts = [0, *ends[:-1]]
    steps = [chunk(token_ids, start, end, TABLE) for start, end in zip(starts, ends, strict=True)]
    return torch.cat([model.logits([step])[0] for step in steps])


def test_every_chunk_size_gives_the_reference_logits(oracle: Oracle, model: BareModel) -> None:
    for size in range(1, len(oracle.prompt) + 1):
        assert_close(in_chunks(model, oracle.prompt, size), oracle.logits)


def test_every_cached_prefix_gives_the_reference_logits(oracle: Oracle, model: BareModel) -> None:
    tokens = len(oracle.prompt)
    model.logits([chunk(oracle.prompt, 0, tokens, TABLE)])
    for cached in range(1, tokens):
        (found,) = model.logits([chunk(oracle.prompt, cached, tokens, TABLE)])
        assert_close(found, oracle.logits[cached:])


@pytest.mark.parametrize("cached", [1, 15, 16, 17, 32])
def test_chunks_on_a_cached_prefix(oracle: Oracle, model: BareModel, cached: int) -> None:
    for size in (5, 16, 33):
        model.forget()
        model.logits([chunk(oracle.prompt, 0, cached, TABLE)])
        for start in range(cached, len(oracle.prompt), size):
            end = min(start + size, len(oracle.prompt))
            (found,) = model.logits([chunk(oracle.prompt, start, end, TABLE)])
            assert_close(found, oracle.logits[start:end])


def test_sequences_of_one_step_do_not_see_each_other(oracle: Oracle, model: BareModel) -> None:
    """Decodes, a cold prompt and chunks on contexts at once, each at another place of the same text."""
    ends = {1: (0, 1), 18: (17, 18), 48: (47, 48), 16: (0, 16), 33: (20, 33), 47: (3, 47)}
    tables = [tuple(range(4 * index, 4 * index + 4)) for index in range(len(ends))]
    for table, (start, _) in zip(tables, ends.values(), strict=True):
        if start:
            model.logits([chunk(oracle.prompt, 0, start, table)])
    steps = [
        chunk(oracle.prompt, start, end, table)
        for table, (start, end) in zip(tables, ends.values(), strict=True)
    ]
    for found, (start, end) in zip(model.logits(steps), ends.values(), strict=True):
        assert_close(found, oracle.logits[start:end])


def test_greedy_tokens_are_the_reference_s(oracle: Oracle, ops: Ops) -> None:
    loaded = load_model(oracle.folder, ops)
    layout = KVLayout.of(loaded.config)
    engine = Engine(loaded, layout, memoryview(bytearray(BLOCKS * layout.block_bytes)), BLOCKS)
    tokens, computed = list(oracle.prompt), 0
    for position in range(len(oracle.answer)):
        step = SequenceStep(tuple(tokens[computed:]), computed, TABLE, GREEDY, position)
        computed = len(tokens)
        (token,) = engine.run([step]).token_ids
        assert token is not None
        tokens.append(token)
    assert tuple(tokens[len(oracle.prompt) :]) == oracle.answer


def test_two_parts_of_the_layers_make_the_whole(oracle: Oracle, ops: Ops) -> None:
    halves = [load_model(oracle.folder, ops, layers=layers) for layers in (range(1), range(1, 2))]
    parts = BareModel(halves, BLOCKS)
    for size in (7, 48):
        assert_close(in_chunks(parts, oracle.prompt, size), oracle.logits)
    with pytest.raises(EngineError, match="no head"):
        halves[0].logits(torch.zeros(1, 64))
    with pytest.raises(EngineError, match="no embedding"):
        halves[1].embed(torch.tensor([1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(oracle: Oracle, dtype: str) -> None:
    loaded = load_model(oracle.folder, dtype=dtype)
    assert loaded.embed(torch.tensor([5])).dtype == TORCH_DTYPES[dtype]
    found = in_chunks(BareModel([loaded], BLOCKS, TORCH_DTYPES[dtype]), oracle.prompt, 20)
    assert found.dtype == torch.float32
    error = (found - oracle.logits).abs().mean() / oracle.logits.std()
    assert error < {"bfloat16": 0.05, "float16": 0.01}[dtype]


def test_tensor_shapes_are_the_checkpoint_s(oracle: Oracle) -> None:
    with safe_open(oracle.folder / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert tensor_shapes(ModelConfig.load(oracle.folder)) == stored
