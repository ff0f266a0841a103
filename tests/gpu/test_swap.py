"""Swap space beside a cache on a GPU: blocks come back bit by bit, through pinned memory."""

import pytest
import torch

from engine.swap_space import SwapSpace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS = 64
SLOTS = 32
BLOCK_SHAPE = (32, 2, 8, 16, 128)
"""Llama-8B: 2 MiB in bfloat16."""


def test_blocks_come_back_bit_by_bit_wherever_they_go() -> None:
    cache = torch.randint(-(2**15), 2**15, (BLOCKS, *BLOCK_SHAPE), dtype=torch.int16, device="cuda")
    before = cache.clone()
    space = SwapSpace(cache, SLOTS)
    out, back = list(range(0, BLOCKS, 2)), list(range(1, BLOCKS, 2))
    slots = list(reversed(range(SLOTS)))
    space.swap_out(out, slots)
    cache[out] = 0
    space.swap_in(slots, back)
    assert torch.equal(cache[back], before[out])
    assert not cache[out].any()


def test_the_copy_is_as_fast_as_pinned_memory_is() -> None:
    """At least half of what one large copy reaches; whole blocks leave little to gain."""
    cache = torch.zeros((BLOCKS, *BLOCK_SHAPE), dtype=torch.bfloat16, device="cuda")
    cost = SwapSpace(cache, SLOTS).measure(range(SLOTS))
    pinned = torch.empty(cache.shape, dtype=cache.dtype, pin_memory=True)
    pinned.copy_(cache)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    pinned.copy_(cache, non_blocking=True)
    end.record()
    end.synchronize()
    ceiling_bytes_per_s = cache.nbytes / (start.elapsed_time(end) / 1e3)
    print(f"swap {cost.bytes_per_s / 1e9:.1f} GB/s, one copy {ceiling_bytes_per_s / 1e9:.1f} GB/s")
    assert cost.bytes_per_s > 0.5 * ceiling_bytes_per_s
