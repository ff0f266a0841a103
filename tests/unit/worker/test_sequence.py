"""Sequences over a pool and a memory of plain tokens: each reads back its own, whoever shares a block."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.workers import packed

from cluster.messages import Work
from kvhash import BLOCK_TOKENS, namespace
from kvindex.core import InstanceId
from kvpool import BlockPool, NoBlocksError
from policy.core import RequestId, SamplingParams
from policy.evict import EvictionOrder, SloClass
from worker.sequence import Sequence

pytestmark = pytest.mark.unit

SPACE = namespace(b"seed", "model")
BLOCKS = 14
CLEARED = -1


def sequence_of(prompt: list[int], samples: int = 1) -> Sequence:
    work = Work(
        RequestId("r"),
        0,
        InstanceId("g"),
        "f",
        SamplingParams(1000, samples=samples),
        len(prompt),
        packed(prompt),
        0,
        b"",
        60.0,
    )
    return Sequence.of(work, packed(prompt), SPACE, 4096)


@dataclass
class Memory:
    """What an engine makes of the arena: a block is the tokens in its slots."""

    blocks: dict[int, list[int]] = field(default_factory=dict)

    def step(self, sequence: Sequence, tokens: int) -> None:
        """Copies, then clears, then writes, as `SequenceStep` says."""
        copied = {to: list(self.blocks[source]) for source, to in sequence.copies}
        self.blocks.update(copied)
        for block_id in sequence.unclear_block_ids:
            self.blocks[block_id] = [CLEARED] * BLOCK_TOKENS
        for position in range(sequence.context_tokens, sequence.context_tokens + tokens):
            index, offset = divmod(position, BLOCK_TOKENS)
            self.blocks[sequence.block_ids[index]][offset] = sequence.token_ids[position]

    def read(self, sequence: Sequence) -> list[int]:
        return [token for i in sequence.block_ids for token in self.blocks[i]][: sequence.context_tokens]


class Desk:
    """A pool, its memory, and steps of one sequence at a time."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.pool = BlockPool(blocks)
        self.memory = Memory()

    def begin(self, prompt: list[int], samples: int = 1, spare_blocks: int = 0) -> Sequence:
        """A sequence that has its prompt computed, and a first token."""
        sequence = sequence_of(prompt, samples)
        sequence.take_blocks(self.pool, spare_blocks)
        self.compute(sequence)
        sequence.goes_on = sequence.decodes = True
        sequence.append(1)
        return sequence

    def compute(self, sequence: Sequence) -> None:
        tokens = sequence.new_tokens
        self.memory.step(sequence, tokens)
        sequence.written(self.pool, tokens)
        sequence.store_full_blocks(self.pool)

    def decode(self, sequence: Sequence, token_id: int, new_tokens: int | None = None) -> None:
        tokens = new_tokens or sequence.new_tokens
        sequence.prepare_write(self.pool, tokens)
        self.memory.step(sequence, tokens)
        sequence.written(self.pool, tokens)
        sequence.store_full_blocks(self.pool)
        if not sequence.new_tokens:
            sequence.append(token_id)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("spare", [False, True])
def test_samples_share_the_prompt_until_each_writes(length: int, spare: bool) -> None:
    desk = Desk()
    prompt = list(range(100, 100 + length))
    samples = 3
    first = desk.begin(prompt, samples, spare_blocks=samples if spare else 0)
    others = [first.fork(desk.pool, sample, length) for sample in (1, 2)]
    prompt_blocks = -(-length // BLOCK_TOKENS)
    spare_blocks = samples if spare else 0
    assert desk.pool.stats().in_use == prompt_blocks + spare_blocks
    if spare:
        assert [one.blocks_to_allocate(desk.pool, one.new_tokens) for one in (first, *others)] == [0, 0, 0]
    for number, sequence in enumerate([first, *others]):
        desk.decode(sequence, 200 + number)
    for number, sequence in enumerate([first, *others]):
        desk.decode(sequence, 300 + number)
        assert desk.memory.read(sequence) == sequence.token_ids[:-1]
        assert len(sequence.block_ids) * BLOCK_TOKENS - sequence.context_tokens < BLOCK_TOKENS
    full_blocks = length // BLOCK_TOKENS
    assert [s.block_ids[:full_blocks] for s in others] == [first.block_ids[:full_blocks]] * 2
    lasts = [sequence.block_ids[-1] for sequence in (first, *others)]
    assert len(set(lasts)) == samples
    own_blocks = sum(len(sequence.block_ids) - full_blocks for sequence in (first, *others))
    assert desk.pool.stats().in_use == full_blocks + own_blocks
    for sequence in (first, *others):
        sequence.give_back(desk.pool)
    assert desk.pool.stats().in_use == 0
    desk.pool.check_integrity()


def test_the_last_who_shares_a_block_writes_it_in_place() -> None:
    desk = Desk()
    first = desk.begin(list(range(20)), samples=2)
    other = first.fork(desk.pool, 1, 20)
    shared = first.block_ids[1]
    desk.decode(other, 7)
    assert other.block_ids[1] != shared
    desk.decode(first, 8)
    assert first.block_ids[1] == shared


def test_equal_answers_share_their_full_blocks_again() -> None:
    desk = Desk()
    first = desk.begin(list(range(20)), samples=2)
    other = first.fork(desk.pool, 1, 20)
    desk.decode(other, 1)
    for token_id in range(50, 70):
        desk.decode(first, token_id)
        desk.decode(other, token_id)
    assert first.token_ids == other.token_ids
    assert first.block_ids[:2] == other.block_ids[:2]
    assert desk.memory.read(other) == other.token_ids[:-1]


def test_who_cannot_be_given_a_copy_keeps_what_it_has() -> None:
    desk = Desk(blocks=2)
    first = desk.begin(list(range(20)), samples=2)
    other = first.fork(desk.pool, 1, 20)
    before = list(other.block_ids)
    assert other.blocks_to_allocate(desk.pool, 1) == 1
    with pytest.raises(NoBlocksError):
        other.prepare_write(desk.pool, 1)
    assert (other.block_ids, other.copies) == (before, [])
    other.give_back(desk.pool)
    assert first.blocks_to_allocate(desk.pool, 1) == 0


def test_forced_tokens_get_all_their_blocks() -> None:
    desk = Desk()
    sequence = desk.begin(list(range(30)))
    sequence.token_ids += range(60, 100)
    assert sequence.blocks_to_allocate(desk.pool, sequence.new_tokens) == 3
    desk.decode(sequence, 0, new_tokens=7)
    assert sequence.new_tokens == 34
    desk.decode(sequence, 0)
    assert desk.memory.read(sequence) == sequence.token_ids[:-1]


@pytest.mark.parametrize(
    ("lesser", "greater"),
    [
        ({"priority": 0}, {"priority": 1}),
        ({"slo": SloClass.RELAXED}, {"slo": SloClass.TIGHT}),
        ({"sampling": SamplingParams(1000)}, {"sampling": SamplingParams(10)}),
    ],
)
def test_blocks_of_the_request_that_is_worth_more_outlive_those_of_a_later_one(
    lesser: dict[str, Any], greater: dict[str, Any]
) -> None:
    pool = BlockPool(100, eviction=EvictionOrder.REQUEST_AWARE)
    sequences = [sequence_of(list(range(start, start + 20))) for start in (0, 100)]
    for sequence, fields in zip(sequences, (greater, lesser), strict=True):
        sequence.work = replace(sequence.work, **fields)
        sequence.take_blocks(pool)
        sequence.written(pool, 20)
        sequence.store_full_blocks(pool)
        sequence.give_back(pool)
    pool.release(pool.allocate(99))
    assert [pool.match(sequence.hashes) for sequence in sequences] == [1, 0]


def test_a_request_that_ended_has_nothing_left_to_put_out() -> None:
    sequence = sequence_of([1, 2, 3])
    assert sequence.use.remaining_tokens == 1000
    sequence.append(4)
    assert sequence.use.remaining_tokens == 999
    sequence.work = replace(sequence.work, sampling=SamplingParams(1000, stop_token_ids=(5,)))
    sequence.append(5)
    assert sequence.use.remaining_tokens == 0


class SequenceMachine(RuleBasedStateMachine):
    """Prompts of few tokens, so that prefixes are shared; forks, steps, preemptions, ends in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk()
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []

    @rule(
        length=st.integers(1, 50),
        token=st.integers(0, 1),
        samples=st.integers(1, 4),
        spare=st.booleans(),
    )
    def begin(self, length, token, samples, spare):
        try:
            first = self.desk.begin([token] * length, samples, samples if spare else 0)
        except NoBlocksError:
            return
        self.live.append(first)
        self.live += [first.fork(self.desk.pool, sample, length) for sample in range(1, samples)]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1), forced=st.integers(0, 20))
    def decode(self, data, token, forced):
        sequence = data.draw(st.sampled_from(self.live))
        sequence.token_ids += [token] * forced
        needed = sequence.blocks_to_allocate(self.desk.pool, sequence.new_tokens)
        if needed > self.desk.pool.available():
            return
        before = self.desk.pool.available()
        self.desk.decode(sequence, token)
        assert before - self.desk.pool.available() <= needed
        assert len(sequence.block_ids) * BLOCK_TOKENS - sequence.context_tokens < BLOCK_TOKENS

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data):
        """Whoever needs nothing gives at least one block: the planner counts on it."""
        sequence = data.draw(st.sampled_from(self.live))
        needs = sequence.blocks_to_allocate(self.desk.pool, sequence.new_tokens)
        before = self.desk.pool.available()
        sequence.give_back(self.desk.pool)
        assert needs or self.desk.pool.available() > before
        self.live.remove(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def readmit(self, data):
        sequence = data.draw(st.sampled_from(self.waiting))
        try:
            sequence.take_blocks(self.desk.pool, spare_blocks=1)
        except NoBlocksError:
            return
        sequence.give_back_spare(self.desk.pool)
        self.desk.compute(sequence)
        sequence.append(0)
        sequence.decodes = True
        self.waiting.remove(sequence)
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        sequence.give_back(self.desk.pool)
        self.live.remove(sequence)

    @invariant()
    def everybody_reads_its_own(self):
        self.desk.pool.check_integrity()
        for sequence in self.live:
            assert self.desk.memory.read(sequence) == sequence.token_ids[: sequence.context_tokens]
        held = {block_id for sequence in self.live for block_id in sequence.block_ids}
        assert self.desk.pool.stats().in_use == len(held)

    def teardown(self):
        for sequence in self.live:
            sequence.give_back(self.desk.pool)
        assert self.desk.pool.stats().in_use == 0


SequenceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSequences = SequenceMachine.TestCase
