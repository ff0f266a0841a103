"""The ceiling of whatever reads its operands once: how fast the cores read memory that no cache holds."""

import mmap
import time
from collections.abc import Callable

import torch

READ_BYTES = 512 << 20
"""More than any processor's last cache, and about what SmolLM2's decode step reads."""
READER = "torch.sum of int64, in huge pages"
"""Of torch's reductions the fastest where we tried; with small pages one thread reads half as much."""


def bandwidth_reader(threads: int) -> Callable[[], float]:
    """A function that measures once, in bytes/s, with `threads` of torch's threads."""
    memory = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(memory, dtype=torch.int64).fill_(1)  # pages never written would share one page

    def measure() -> float:
        torch.set_num_threads(threads)
        started_s = time.perf_counter()
        numbers.sum()
        return READ_BYTES / (time.perf_counter() - started_s)

    measure()
    return measure
