"""An engine whose memory holds tokens instead of KV, and whose next token is a digest of what it reads there.

A block that was shared too long, copied too late, cleared, swapped or given away wrongly changes the answer.
"""

import asyncio
from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np

from engine.step import SequenceStep, StepResult
from kvhash import BLOCK_TOKENS

VOCABULARY = 1000
EMPTY = -1


def next_token(token_ids: Sequence[int], sample: int) -> int:
    """What this "model" says after these tokens."""
    return crc32(np.asarray([sample, *token_ids], "<i4").tobytes()) % VOCABULARY


def answer(prompt: Sequence[int], tokens: int, sample: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(tokens):
        token_ids.append(next_token(token_ids, sample))
    return token_ids[len(prompt) :]


class MemoryEngine:
    """Stands in for `EngineThread`. `before_swap` is awaited before each copy of blocks out or in."""

    def __init__(self, blocks: int, slots: int = 0) -> None:
        self._blocks = np.full((blocks, BLOCK_TOKENS), EMPTY)
        self._slots = np.full((slots, BLOCK_TOKENS), EMPTY)
        self.swaps: list[str] = []
        self.before_swap: Callable[[str], None] = lambda way: None

    async def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None
    ) -> StepResult:
        await asyncio.sleep(0)
        copies = [(self._blocks[source].copy(), to) for s in sequences for source, to in s.copy_blocks]
        for block, to in copies:
            self._blocks[to] = block
        for sequence in sequences:
            self._blocks[list(sequence.clear_block_ids)] = EMPTY
        for sequence in sequences:
            places = range(sequence.context_tokens, sequence.context_tokens + len(sequence.token_ids))
            for place, token_id in zip(places, sequence.token_ids, strict=True):
                self._blocks[sequence.block_ids[place // BLOCK_TOKENS], place % BLOCK_TOKENS] = token_id
        nothing = (None,) * len(sequences)
        return StepResult(tuple(map(self._sampled, sequences)), 0.0, nothing, nothing)

    async def swap_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        await self._swap("out")
        self._slots[list(slots)] = self._blocks[list(block_ids)]

    async def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        await self._swap("in")
        self._blocks[list(block_ids)] = self._slots[list(slots)]

    async def _swap(self, way: str) -> None:
        self.swaps.append(way)
        self.before_swap(way)
        await asyncio.sleep(0)

    def _sampled(self, sequence: SequenceStep) -> int | None:
        if sequence.sampling is None:
            return None
        tokens = sequence.context_tokens + len(sequence.token_ids)
        read = self._blocks[list(sequence.block_ids)].reshape(-1)[:tokens]
        assert EMPTY not in read, "KV was read that nobody computed"
        return next_token(read.tolist(), sequence.sample)
