"""What a worker relies on in its engine: the real one, and the timed one of the load tests."""

import math
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from tests.support.timed_engine import TimedEngine, timed_answer

from engine.engine import Engine
from engine.errors import StepError
from engine.layout import KVLayout
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.step import SequenceStep, StepResult
from engine.tiny import make_tiny_model
from policy.core import CostCoefficients, SamplingParams

pytestmark = pytest.mark.contract

BLOCKS = 40
SLOTS = 5
PROMPT = tuple(range(10, 50))
OTHER_PROMPT = tuple(range(120, 147))
GREEDY = SamplingParams(8)
ANSWER_TOKENS = 8
COST = CostCoefficients(1e-4, 1e-6, 0.0, 1e-4, 1e-5, 0.0, 0.001, 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, seed=3)
    return folder


class Arena:
    """An engine and the bytes that it computes in."""

    def __init__(self, folder: Path, timed: bool, cost: CostCoefficients = COST) -> None:
        config = ModelConfig.load(folder)
        self.layout = KVLayout.of(config)
        self.bytes = np.full((BLOCKS, self.layout.block_bytes), 255, np.uint8)
        buffer = memoryview(self.bytes).cast("B")
        self.engine: Engine | TimedEngine
        if timed:
            self.engine = TimedEngine(
                self.layout,
                buffer,
                BLOCKS,
                cost,
                vocab_size=config.vocab_size,
                context_tokens_max=config.context_tokens_max,
                swap_slots=SLOTS,
            )
        else:
            self.engine = Engine(load_model(folder), self.layout, buffer, BLOCKS, swap_slots=SLOTS)

    def layer(self, layer: int, blocks: list[int]) -> bytes:
        start, length = self.layout.layer_range(layer)
        return self.bytes[blocks, start : start + length].tobytes()

    def answer(self, first: StepResult, context_tokens: int, block_ids: tuple[int, ...]) -> list[int]:
        """The tokens from `first` on, one step each."""
        answer = [first.token_ids[0]]
        while len(answer) < ANSWER_TOKENS:
            context = context_tokens + len(answer) - 1
            (token_id,) = self.engine.run([step((answer[-1],), context, block_ids)]).token_ids
            answer.append(token_id)
        return answer


@pytest.fixture(params=["computing", "timed"])
def arena(request: pytest.FixtureRequest, folder: Path) -> Arena:
    return Arena(folder, request.param == "timed")


def step(token_ids, context_tokens, block_ids, sampling=GREEDY, **more) -> SequenceStep:
    return SequenceStep(tuple(token_ids), context_tokens, block_ids, sampling, 0, **more)


def test_an_answer_does_not_depend_on_blocks_chunks_or_company(arena: Arena) -> None:
    whole = arena.answer(arena.engine.run([step(PROMPT, 0, (0, 1, 2))]), 40, (0, 1, 2))
    elsewhere = arena.answer(arena.engine.run([step(PROMPT, 0, (7, 3, 5))]), 40, (7, 3, 5))
    middle = arena.engine.run([step(PROMPT[:20], 0, (8, 9, 10), None)])
    last = [step(PROMPT[20:], 20, (8, 9, 10)), step(OTHER_PROMPT, 0, (11, 12))]
    chunked = arena.answer(arena.engine.run(last), 40, (8, 9, 10))
    assert middle.token_ids == (None,)
    assert whole == elsewhere == chunked
    assert all(0 <= token_id < 512 for token_id in whole)


def test_a_result_has_one_entry_for_each_sequence_in_the_order_given(arena: Arena) -> None:
    alone = [arena.engine.run([step(p, 0, b)]) for p, b in ((PROMPT, (0, 1, 2)), (OTHER_PROMPT, (3, 4)))]
    steps = [step(PROMPT, 0, (5, 6, 7)), step(PROMPT[:16], 0, (8,), None), step(OTHER_PROMPT, 0, (9, 10))]
    result = arena.engine.run(steps)
    assert result.token_ids == (alone[0].token_ids[0], None, alone[1].token_ids[0])
    assert result.logprobs == result.failures == (None, None, None)
    assert result.elapsed_s > 0


def test_blocks_written_from_outside_are_computed_on(arena: Arena) -> None:
    """A transfer is no more than bytes."""
    first = arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
    arena.bytes[[20, 21, 22]] = arena.bytes[[0, 1, 2]]
    arena.engine.load_blocks((20, 21, 22))
    here = arena.answer(first, 40, (0, 1, 2))
    arena.bytes[[0, 1, 2]] = 255
    assert arena.answer(first, 40, (20, 21, 22)) == here


def test_layers_are_told_in_order_when_their_bytes_are_there(arena: Arena) -> None:
    arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
    blocks = [3, 4, 5]
    told: list[tuple[int, bytes]] = []
    arena.engine.run(
        [step(PROMPT, 0, (3, 4, 5))], lambda layer: told.append((layer, arena.layer(layer, blocks)))
    )
    assert [layer for layer, _ in told] == list(range(arena.layout.layers))
    for layer, seen in told:
        assert seen == arena.layer(layer, blocks)


def test_a_copied_block_reads_as_the_one_it_came_from(arena: Arena) -> None:
    whole = arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
    copied = arena.engine.run([step(PROMPT[-1:], 39, (0, 1, 5), copy_blocks=((2, 5),))])
    assert copied.token_ids == whole.token_ids


def test_copies_come_before_clears_and_writes(arena: Arena) -> None:
    whole = arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
    arena.engine.run([step(PROMPT, 0, (3, 4, 6))])
    result = arena.engine.run(
        [
            step(PROMPT[-1:], 39, (0, 1, 5), copy_blocks=((2, 5),)),
            step(PROMPT[-1:], 39, (3, 4, 2), copy_blocks=((6, 2),)),
            step((7, 8, 9), 0, (6,), clear_block_ids=(6,)),
        ]
    )
    assert result.token_ids[:2] == whole.token_ids * 2


def test_blocks_come_back_from_swap_wherever_they_go(arena: Arena) -> None:
    first = arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
    undisturbed = arena.engine.run([step(first.token_ids, 40, (0, 1, 2))])
    before = arena.bytes.copy()
    arena.engine.swap_out((0, 1, 2), (4, 0, 3))
    arena.bytes[:] = 255
    arena.engine.swap_in((4, 0, 3), (7, 3, 1))
    assert np.array_equal(arena.bytes[[7, 3, 1]], before[[0, 1, 2]])
    assert arena.engine.run([step(first.token_ids, 40, (7, 3, 1))]).token_ids == undisturbed.token_ids


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (step((), 0, (0,)), "token_ids"),
        (step((512,), 0, (0,)), "token_ids"),
        (step((7,), 16, (0,)), "block_ids"),
        (step((7,), 0, (BLOCKS,)), "block_ids"),
        (step((7,), 0, (0,), copy_blocks=((1, BLOCKS),)), "copy_blocks"),
        (step((7,), 2048, tuple(range(BLOCKS))), "context_tokens"),
    ],
)
def test_a_step_out_of_bounds_is_refused_before_anything_is_written(
    arena: Arena, wrong: SequenceStep, field: str
) -> None:
    before = arena.bytes.copy()
    with pytest.raises(StepError, match=field):
        arena.engine.run([step(PROMPT, 0, (1, 2, 3)), wrong])
    assert np.array_equal(arena.bytes, before)


def test_a_profile_is_a_cost_model_with_the_given_transfer(arena: Arena) -> None:
    cost = arena.engine.profile(range(BLOCKS), transfer_fixed_s=0.003, transfer_bytes_per_s=5e8)
    assert (cost.transfer_fixed_s, cost.transfer_bytes_per_s) == (0.003, 5e8)
    assert all(math.isfinite(value) and value >= 0 for value in astuple(cost))
    assert cost.prefill_fixed_s + cost.prefill_per_token_s + cost.prefill_per_token_pair_s > 0
    assert cost.step_fixed_s + cost.step_per_request_s > 0


def test_the_cost_of_a_swap_is_usable(arena: Arena) -> None:
    cost = arena.engine.measure_swap(range(BLOCKS))
    assert cost.fixed_s >= 0
    assert cost.bytes_per_s > 1e6


def test_it_computes_on_the_arena(arena: Arena) -> None:
    assert arena.engine.computes_on_arena


class TestTimed:
    """What is the timed engine's alone."""

    def test_its_answers_are_known(self, folder: Path) -> None:
        arena = Arena(folder, timed=True)
        first = arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
        assert arena.answer(first, 40, (0, 1, 2)) == timed_answer(PROMPT, ANSWER_TOKENS)

    def test_a_step_takes_the_time_that_its_profile_predicts(self, folder: Path) -> None:
        cost = CostCoefficients(0.01, 0.001, 0.0, 0.02, 0.005, 0.0, 0.001, 1e9)
        arena = Arena(folder, timed=True, cost=cost)
        prefill = arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
        assert 0.05 <= prefill.elapsed_s < 0.2
        decodes = arena.engine.run([step((7,), 40, (0, 1, 2)), step((7,), 40, (0, 1, 2))])
        assert 0.03 <= decodes.elapsed_s < 0.2

    def test_a_block_of_other_bytes_fails_the_step(self, folder: Path) -> None:
        arena = Arena(folder, timed=True)
        arena.engine.run([step(PROMPT, 0, (0, 1, 2))])
        start, length = arena.layout.layer_range(1)
        arena.bytes[1, start : start + length] = 0
        with pytest.raises(StepError, match="layer"):
            arena.engine.run([step((7,), 40, (0, 1, 2))])
