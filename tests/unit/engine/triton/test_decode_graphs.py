"""What surrounds the graphs: which size is taken, what padding looks like, what is recorded when."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.repeating_recorder import RepeatingRecorder
from torch import Tensor

from engine.decode_graphs import BATCH_SIZES, DecodeGraphs, FixedStep, batch_size
from engine.errors import EngineError
from engine.ops import StepTensors

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
BLOCKS_MAX = 6
VOCAB_SIZE = 3


class SeenSteps:
    """Computes what tells rows apart, and keeps what it was given."""

    def __init__(self) -> None:
        self.steps: list[StepTensors] = []

    def __call__(self, step: StepTensors) -> Tensor:
        self.steps.append(step)
        rows = step.token_ids * 1000 + step.positions * 10 + step.block_table[:, 0]
        return rows.float().unsqueeze(1).expand(-1, VOCAB_SIZE)


def decodes(count: int, blocks: int = 2, first: int = 1) -> StepTensors:
    numbers = torch.arange(first, first + count)
    return StepTensors(
        token_ids=numbers,
        positions=numbers + 20,
        slots=numbers * 16,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        kv_tokens=(numbers + 21).to(torch.int32),
        block_table=numbers.to(torch.int32).unsqueeze(1).repeat(1, blocks),
        decodes=count,
        query_tokens_max=1,
        kv_tokens_max=int(numbers[-1]) + 21,
    )


def graphs(
    compute: SeenSteps, recorder: RepeatingRecorder, sizes: tuple[int, ...] = (1, 2, 4)
) -> DecodeGraphs:
    return DecodeGraphs(
        compute, recorder, CPU, blocks_max=BLOCKS_MAX, vocab_size=VOCAB_SIZE, batch_sizes=sizes
    )


@given(st.integers(1, 400))
def test_the_least_size_that_holds_the_batch(sequences: int) -> None:
    size = batch_size(sequences, BATCH_SIZES)
    if size is None:
        assert sequences > BATCH_SIZES[-1]
    else:
        assert sequences <= size
        assert all(other < sequences for other in BATCH_SIZES if other < size)


def test_padding_has_no_context_and_is_written_nowhere() -> None:
    fixed = FixedStep(8, BLOCKS_MAX, CPU)
    fixed.hold(decodes(7, blocks=5, first=50), 8)  # something to be stale
    step = decodes(3)
    held = fixed.hold(step, 4)
    for name in ("token_ids", "positions", "slots", "kv_tokens"):
        assert torch.equal(getattr(held, name)[:3], getattr(step, name))
    assert torch.equal(held.block_table[:3, :2], step.block_table)
    assert held.slots[3:].tolist() == [-1]
    assert held.kv_tokens[3:].tolist() == [0]
    assert held.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert (held.decodes, held.query_tokens_max) == (4, 1)


def test_addresses_do_not_change() -> None:
    fixed = FixedStep(4, BLOCKS_MAX, CPU)
    first, second = fixed.hold(decodes(3), 4), fixed.hold(decodes(4, first=9), 4)
    for name in ("token_ids", "positions", "slots", "query_starts", "kv_tokens", "block_table"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def test_logits_are_those_of_the_step_alone() -> None:
    compute, recorder = SeenSteps(), RepeatingRecorder()
    held = graphs(compute, recorder)
    for count, first in ((3, 1), (4, 30), (1, 60), (2, 5), (3, 70)):
        step = decodes(count, first=first)
        assert torch.equal(held.run(step), SeenSteps()(step))
    # Sizes 4, 1 and 2, each recorded once.
    assert recorder.recorded == 3
    assert held.recorded == (1, 2, 4)


def test_a_batch_above_the_largest_size_is_computed_as_it_is() -> None:
    compute, recorder = SeenSteps(), RepeatingRecorder()
    step = decodes(5)
    assert torch.equal(graphs(compute, recorder).run(step), SeenSteps()(step))
    assert compute.steps == [step]
    assert recorder.recorded == 0


def test_refuses_what_it_cannot_replay() -> None:
    held = graphs(SeenSteps(), RepeatingRecorder())
    with pytest.raises(EngineError, match="1 of 3 sequences are not decodes"):
        held.run(replace(decodes(3), decodes=2))
    with pytest.raises(EngineError, match="7 blocks, over the limit of 6"):
        held.run(decodes(2, blocks=7))
    with pytest.raises(EngineError, match="batch_sizes must be positive and ascending"):
        graphs(SeenSteps(), RepeatingRecorder(), (4, 2))
