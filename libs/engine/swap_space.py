"""Host memory for blocks that were taken out of the cache, and the copies there and back.

Owns bytes, not slots: which slot holds what is the caller's. A block is copied whole, bit by bit, so what
comes back is what went out. Belongs on the engine thread, between steps.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from policy.preempt import HostCopyCost

MEASURED_BLOCKS_MAX = 64
"""Blocks copied at once when the bandwidth is measured."""
MEASURED_ROUNDS = 3
"""The fastest counts."""


class SwapSpace:
    """`slots` blocks beside a cache [block, …]; memory is taken as slots are first used, pinned at once
    where the cache is on a GPU."""

    def __init__(self, cache_blocks: Tensor, slots: int) -> None:
        self._blocks = cache_blocks
        self._slots = torch.empty(
            (slots, *cache_blocks.shape[1:]), dtype=cache_blocks.dtype, pin_memory=cache_blocks.is_cuda
        )

    @property
    def slots(self) -> int:
        return len(self._slots)

    def swap_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Block i of `block_ids` goes to slot i of `slots`; done when this returns."""
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._slots[slot].copy_(self._blocks[block_id], non_blocking=True)
        self._wait()

    def swap_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """The way back; done when this returns."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            self._blocks[block_id].copy_(self._slots[slot], non_blocking=True)
        self._wait()

    def measure(self, block_ids: Sequence[int]) -> HostCopyCost:
        """How fast this host copies, on scratch blocks. Whoever measures has all slots to himself."""
        count = min(len(block_ids), self.slots, MEASURED_BLOCKS_MAX)
        block_bytes = self._blocks[0].nbytes
        one_s, many_s = self._fastest_s(block_ids[:1]), self._fastest_s(block_ids[:count])
        per_block_s = max(many_s - one_s, 0.0) / max(1, count - 1) or many_s / count
        return HostCopyCost(max(0.0, one_s - per_block_s), block_bytes / per_block_s)

    def _fastest_s(self, block_ids: Sequence[int]) -> float:
        """One way, the mean of out and in."""
        slots = range(len(block_ids))
        self.swap_out(block_ids, slots)
        rounds_s = []
        for _ in range(MEASURED_ROUNDS):
            started_s = time.perf_counter()
            self.swap_out(block_ids, slots)
            self.swap_in(slots, block_ids)
            rounds_s.append((time.perf_counter() - started_s) / 2)
        return min(rounds_s)

    def _wait(self) -> None:
        if self._blocks.is_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()
