"""The engine against transformers on tiny random models: same logits, same greedy tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine, KVLayout, SequenceStep
from engine.errors import EngineError, StepError
from engine.loader import load_model
from engine.paged_cache import PagedCache, to_tensors
from engine.step import StepLimits, flatten
from engine.tiny import make_tiny_model
from policy.core import SamplingParams

pytestmark = pytest.mark.unit

BLOCKS = 40
BLOCK_TOKENS = 16
GREEDY = SamplingParams(output_tokens_max=1000)
PENALISED = SamplingParams(output_tokens_max=1000, repetition_penalty=1.1)
PROMPT = tuple(int(token) for token in np.random.default_rng(7).integers(3, 512, 41))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Case:
    folder: Path
    reference: torch.nn.Module

    def engine(self, fill: float = float("nan")) -> Engine:
        """An engine over an arena that holds garbage: nothing stale may ever matter."""
        model = load_model(self.folder)
        layout = KVLayout.of(model.config)
        arena = np.full(BLOCKS * layout.block_bytes // 4, fill, dtype=np.float32)
        return Engine(model, layout, memoryview(arena).cast("B"), BLOCKS)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.reference(torch.tensor([list(token_ids)])).logits[0]


SHAPES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "nine_heads_three_kv": {"hidden_size": 72, "heads": 9, "kv_heads": 3, "layers": 3},
    "every_head_its_own_kv": {"kv_heads": 4},
}


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("models") / request.param
    make_tiny_model(folder, seed=len(request.param), **SHAPES[request.param])
    return Case(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return Case(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def scattered(count: int, seed: int = 0) -> tuple[int, ...]:
    """A block table in no order: addresses must come from the table alone."""
    return tuple(int(block) for block in np.random.default_rng(seed).permutation(BLOCKS)[:count])


def chunk(
    token_ids: Sequence[int], start: int, end: int, blocks: tuple[int, ...], output_tokens: int = 0
) -> SequenceStep:
    return SequenceStep(tuple(token_ids[start:end]), start, blocks, GREEDY, output_tokens)


def greedy(engine: Engine, prompt: Sequence[int], blocks: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    start = 0
    for position in range(count):
        step = chunk(tokens, start, len(tokens), blocks, position)
        start = len(tokens)
        (token,) = engine.run([step]).token_ids
        assert token is not None
        tokens.append(token)
    return tokens[len(prompt) :]


def reference_greedy(case: Case, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):  # without any cache: nothing of the oracle is paged or chunked
        tokens.append(int(case.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_every_chunk_size_gives_the_reference_logits(case: Case) -> None:
    expected = case.logits(PROMPT)
    for size in range(1, len(PROMPT) + 1):
        engine = case.engine()
        blocks = scattered(3, size)
        for start in range(0, len(PROMPT), size):
            end = min(start + size, len(PROMPT))
            found = engine.logits([chunk(PROMPT, start, end, blocks)])[0]
            torch.testing.assert_close(found, expected[end - 1], atol=1e-4, rtol=0)


def test_every_cached_prefix_gives_the_reference_logits(case: Case) -> None:
    expected = case.logits(PROMPT)[-1]
    engine = case.engine()
    blocks = scattered(3)
    engine.logits([chunk(PROMPT, 0, len(PROMPT), blocks)])
    for cached in range(1, len(PROMPT)):
        found = engine.logits([chunk(PROMPT, cached, len(PROMPT), blocks)])[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_greedy_tokens_are_the_reference_s(case: Case) -> None:
    assert greedy(case.engine(), PROMPT, scattered(5), 24) == reference_greedy(case, PROMPT, 24)


def test_prefix_shared_between_sequences(untied: Case) -> None:
    engine = untied.engine()
    shared = scattered(6)
    engine.run([chunk(PROMPT, 0, 32, shared)])
    for tail, blocks in ((PROMPT[32:], (*shared[:2], shared[3])), ((5, 6, 7), (*shared[:2], shared[4]))):
        whole = PROMPT[:32] + tuple(tail)
        found = engine.logits([chunk(whole, 32, len(whole), blocks)])[0]
        torch.testing.assert_close(found, untied.logits(whole)[-1], atol=1e-4, rtol=0)


def test_mixed_batch_equals_single_runs(untied: Case) -> None:
    """A cold prompt, a middle chunk without a token, a chunk on a context and three decodes, in one step."""
    generator = np.random.default_rng(3)
    prompts = [tuple(int(t) for t in generator.integers(3, 512, n)) for n in (1, 16, 17, 30, 33, 48)]
    table = scattered(24)
    tables = [table[4 * i : 4 * i + 4] for i in range(6)]
    engine = untied.engine()
    cached = (0, 0, 9, 29, 32, 47)
    for prompt, blocks, context in zip(prompts, tables, cached, strict=True):
        if context:
            engine.run([chunk(prompt, 0, context, blocks)])
    steps = [
        chunk(prompt, context, len(prompt), blocks)
        for prompt, blocks, context in zip(prompts, tables, cached, strict=True)
    ]
    steps[1] = replace(steps[1], sampling=None)
    result = engine.run(steps)
    expected = [int(untied.logits(prompt)[-1].argmax()) for prompt in prompts]
    assert result.token_ids == (expected[0], None, *expected[2:])
    found = engine.logits(steps)
    sampled = [prompt for index, prompt in enumerate(prompts) if index != 1]
    for row, prompt in zip(found, sampled, strict=True):
        torch.testing.assert_close(row, untied.logits(prompt)[-1], atol=1e-4, rtol=0)


def test_a_request_draws_the_same_tokens_in_any_batch(untied: Case) -> None:
    engine = untied.engine()
    table = scattered(32)
    prompts = [PROMPT[start : start + 12 + start] for start in range(8)]
    steps = [
        SequenceStep(
            prompt,
            0,
            table[4 * i : 4 * i + 4],
            SamplingParams(100, temperature=1.5, top_p=0.9, seed=i),
            3 * i,
        )
        for i, prompt in enumerate(prompts)
    ]
    together = engine.run(steps).token_ids
    assert engine.run(steps[::-1]).token_ids == together[::-1]
    assert tuple(engine.run([step]).token_ids[0] for step in steps) == together
    greedy_tokens = engine.run([replace(step, sampling=GREEDY) for step in steps]).token_ids
    assert sum(a != b for a, b in zip(together, greedy_tokens, strict=True)) >= 3


def test_a_step_with_no_token_wanted_still_computes_its_blocks(untied: Case) -> None:
    engine = untied.engine()
    blocks = scattered(3)
    assert engine.run([replace(chunk(PROMPT, 0, 40, blocks), sampling=None)]).token_ids == (None,)
    found = engine.logits([chunk(PROMPT, 40, 41, blocks)])[0]
    torch.testing.assert_close(found, untied.logits(PROMPT)[-1], atol=1e-4, rtol=0)


def arena_of(engine_model: Path, fill: float) -> tuple[Engine, np.ndarray]:
    model = load_model(engine_model)
    layout = KVLayout.of(model.config)
    arena = np.full((BLOCKS, layout.block_bytes // 4), fill, dtype=np.float32)
    return Engine(model, layout, memoryview(arena).cast("B"), BLOCKS), arena


def test_cleared_blocks_are_zero_where_nothing_was_computed(untied: Case) -> None:
    engine, arena = arena_of(untied.folder, float("nan"))
    step = replace(chunk(PROMPT, 0, 20, (4, 9)), clear_block_ids=(4, 9))
    engine.run([step])
    layout = KVLayout.of(load_model(untied.folder).config)
    block = arena[9].reshape(layout.layers, 2, layout.kv_heads, BLOCK_TOKENS, layout.head_dim)
    assert (block[:, :, :, 4:] == 0).all()
    assert np.abs(block[:, :, :, :4]).min() > 0
    assert np.isfinite(arena[[4, 9]]).all()
    untouched = [block for block in range(BLOCKS) if block not in (4, 9)]
    assert np.isnan(arena[untouched]).all()


def test_only_the_slots_of_new_tokens_are_written(untied: Case) -> None:
    engine, arena = arena_of(untied.folder, 0.0)
    engine.run([chunk(PROMPT, 0, 20, (4, 9))])
    before = arena.copy()
    engine.run([chunk(PROMPT, 20, 22, (4, 9))])
    layout = KVLayout.of(load_model(untied.folder).config)
    changed = (arena != before).reshape(
        BLOCKS, layout.layers, 2, layout.kv_heads, BLOCK_TOKENS, layout.head_dim
    )
    slots = {(int(block), int(token)) for block, *_, token, _ in np.argwhere(changed)}
    assert slots == {(9, 4), (9, 5)}


def test_on_layer_reports_each_layer_when_its_bytes_are_final(untied: Case) -> None:
    engine, arena = arena_of(untied.folder, 0.0)
    layout = KVLayout.of(load_model(untied.folder).config)
    seen: list[tuple[int, bytes]] = []

    def on_layer(layer: int) -> None:
        offset, length = layout.layer_range(layer)
        seen.append((layer, arena[7].tobytes()[offset : offset + length]))

    engine.run([chunk(PROMPT, 0, 16, (7,))], on_layer)
    assert [layer for layer, _ in seen] == list(range(layout.layers))
    assert b"".join(piece for _, piece in seen) == arena[7].tobytes()
    assert np.abs(arena[7]).min() > 0


def test_two_halves_of_the_layers_make_the_whole(untied: Case) -> None:
    halves = [load_model(untied.folder, layers=layers) for layers in (range(1), range(1, 2))]
    caches = []
    for half in halves:
        layout = KVLayout.of(half.config, layers=half.layers)
        assert layout.layers == 1
        buffer = memoryview(bytearray(BLOCKS * layout.block_bytes))
        caches.append(PagedCache.over(layout, buffer, BLOCKS))
    limits = StepLimits(BLOCKS, BLOCK_TOKENS, halves[0].config.context_tokens_max, 512)
    with torch.inference_mode():
        step = to_tensors(flatten([chunk(PROMPT, 0, len(PROMPT), scattered(3))], limits), torch.device("cpu"))
        token_ids = torch.tensor(PROMPT)
        hidden = halves[0].embed(token_ids)
        for half, cache in zip(halves, caches, strict=True):
            hidden = half.forward(hidden, step, cache)
        logits = halves[1].logits(hidden)
    torch.testing.assert_close(logits, untied.logits(PROMPT), atol=1e-4, rtol=0)
    with pytest.raises(EngineError, match="no head"):
        halves[0].logits(hidden)
    with pytest.raises(EngineError, match="no embedding"):
        halves[1].embed(token_ids)
    with pytest.raises(EngineError, match="whole model"):
        Engine(halves[0], KVLayout.of(halves[0].config), memoryview(bytearray(1 << 20)), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ()}, "token_ids: a sequence needs"),
        ({"token_ids": (1, 512)}, r"token_ids: .* outside 0\.\.511"),
        ({"token_ids": (-1,)}, "token_ids"),
        ({"context_tokens": -1}, "context_tokens: must not be negative"),
        ({"context_tokens": 2048}, "over the model's 2048"),
        ({"context_tokens": 31}, "2 blocks of 16 tokens do not hold 34 tokens"),
        ({"block_ids": (0, BLOCKS)}, r"block_ids: .* outside 0\.\.39"),
        ({"clear_block_ids": (-1,)}, "clear_block_ids"),
        ({"output_tokens": -1}, "output_tokens"),
        ({"prompt_token_ids": (3, 512), "sampling": PENALISED}, r"prompt_token_ids: .* outside 0\.\.511"),
        ({"output_token_ids": np.array([-1]), "sampling": PENALISED}, "output_token_ids"),
    ],
)
def test_a_step_out_of_bounds_names_sequence_and_field(
    untied: Case, change: dict[str, object], message: str
) -> None:
    engine, arena = arena_of(untied.folder, 0.0)
    good = chunk(PROMPT, 0, 3, (0, 1))
    with pytest.raises(StepError, match="sequence 1: .*" + message.removeprefix("sequence 1: ")):
        engine.run([replace(good, block_ids=(2, 3)), replace(good, **change)])
    assert not arena.any()
    with pytest.raises(StepError, match="at least one sequence"):
        engine.run([])


def test_a_context_that_was_never_computed_fails_its_sequence_alone(untied: Case) -> None:
    engine = untied.engine()
    broken = chunk(PROMPT, 16, 20, (0, 1))
    middle = replace(chunk(PROMPT, 0, 5, (5,)), sampling=None)
    told = replace(chunk(PROMPT, 0, 20, (3, 4)), sampling=replace(GREEDY, logprobs=2))
    result = engine.run([chunk(PROMPT, 0, 20, (3, 4)), middle, broken, told])
    expected = untied.logits(PROMPT[:20])[-1]
    assert result.token_ids == (int(expected.argmax()), None, None, int(expected.argmax()))
    assert [failure is None for failure in result.failures] == [True, True, False, True]
    assert "not finite" in (result.failures[2] or "")
    assert result.logprobs[:3] == (None, None, None)
    logprobs = result.logprobs[3]
    assert logprobs is not None
    assert [token_id for token_id, _ in logprobs.top] == expected.topk(2).indices.tolist()
    assert logprobs.token_logprob == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-4)


def test_arena_must_be_large_enough_and_writable(untied: Case) -> None:
    model = load_model(untied.folder)
    layout = KVLayout.of(model.config)
    with pytest.raises(EngineError, match="does not hold 2 blocks"):
        Engine(model, layout, memoryview(bytearray(2 * layout.block_bytes - 1)), 2)
    with pytest.raises(EngineError, match="writable"):
        Engine(model, layout, memoryview(bytes(layout.block_bytes)), 1)
    with pytest.raises(EngineError, match="does not fit the model"):
        Engine(model, replace(layout, kv_heads=4), memoryview(bytearray(layout.block_bytes * 2)), 1)
    with pytest.raises(EngineError, match="threads"):
        Engine(model, layout, memoryview(bytearray(layout.block_bytes)), 1, threads=0)
