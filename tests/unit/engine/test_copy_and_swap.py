"""Blocks that are copied before a step, or taken out and back: what is computed stays the same."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.engine import Engine
from engine.layout import KVLayout
from engine.loader import load_model
from engine.model_folder import ModelConfig
from engine.step import SequenceStep
from engine.swap_space import SwapSpace
from engine.tiny import make_tiny_model
from policy.core import SamplingParams

pytestmark = pytest.mark.unit

BLOCKS = 8
SLOTS = 5
PROMPT = tuple(range(10, 50))
GREEDY = SamplingParams(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, seed=3)
    return folder


class Arena:
    """An engine and the bytes that it computes in."""

    def __init__(self, folder: Path) -> None:
        layout = KVLayout.of(ModelConfig.load(folder))
        self.bytes = np.zeros((BLOCKS, layout.block_bytes), np.uint8)
        self.engine = Engine(
            load_model(folder), layout, memoryview(self.bytes).cast("B"), BLOCKS, swap_slots=SLOTS
        )


@pytest.fixture
def arena(folder: Path) -> Arena:
    return Arena(folder)


def step(token_ids: tuple[int, ...], context_tokens: int, block_ids: tuple[int, ...], **more) -> SequenceStep:
    return SequenceStep(token_ids, context_tokens, block_ids, GREEDY, 0, **more)


def test_a_copied_block_reads_as_the_one_it_came_from(arena: Arena) -> None:
    """The last token of the prompt is computed again in a copy: the same logits, the source untouched."""
    whole = arena.engine.logits([step(PROMPT, 0, (0, 1, 2))])
    before = arena.bytes.copy()
    again = arena.engine.logits([step(PROMPT[-1:], 39, (0, 1, 5), copy_blocks=((2, 5),))])
    torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)
    assert np.array_equal(arena.bytes[:5], before[:5])


def test_copies_come_before_clears_and_writes(arena: Arena) -> None:
    """The source of one copy may be given away in the same step: cleared, written, or copied into."""
    whole = arena.engine.logits([step(PROMPT, 0, (0, 1, 2))])
    arena.engine.logits([step(PROMPT, 0, (3, 4, 6))])
    rows = arena.engine.logits(
        [
            step(PROMPT[-1:], 39, (0, 1, 5), copy_blocks=((2, 5),)),
            step(PROMPT[-1:], 39, (3, 4, 2), copy_blocks=((6, 2),)),
            step((7, 8, 9), 0, (6,), clear_block_ids=(6,)),
        ]
    )
    torch.testing.assert_close(rows[0], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[1], whole[0], rtol=1e-5, atol=1e-5)


def test_blocks_come_back_from_swap_bit_by_bit_wherever_they_go(arena: Arena) -> None:
    arena.engine.logits([step(PROMPT, 0, (0, 1, 2))])
    undisturbed = arena.engine.logits([step((99,), 40, (0, 1, 2))])
    before = arena.bytes.copy()
    arena.engine.swap_out((0, 1, 2), (4, 0, 3))
    arena.bytes[:] = 255
    arena.engine.swap_in((4, 0, 3), (7, 3, 1))
    assert np.array_equal(arena.bytes[[7, 3, 1]], before[[0, 1, 2]])
    assert (arena.bytes[[0, 2, 4, 5, 6]] == 255).all()
    assert torch.equal(arena.engine.logits([step((99,), 40, (7, 3, 1))]), undisturbed)


def test_a_copy_out_of_bounds_is_refused_before_anything_is_written(arena: Arena) -> None:
    before = arena.bytes.copy()
    with pytest.raises(Exception, match="copy_blocks"):
        arena.engine.run([step((7,), 0, (0,), copy_blocks=((1, BLOCKS),))])
    assert np.array_equal(arena.bytes, before)


def test_the_measured_cost_of_a_copy_is_usable(arena: Arena) -> None:
    cost = arena.engine.measure_swap(range(BLOCKS))
    assert cost.fixed_s >= 0
    assert 1e6 < cost.bytes_per_s < 1e13


def test_unequal_numbers_of_blocks_and_slots_are_a_mistake() -> None:
    space = SwapSpace(torch.zeros(4, 3), 2)
    with pytest.raises(ValueError, match="shorter"):
        space.swap_out((0, 1), (0,))
