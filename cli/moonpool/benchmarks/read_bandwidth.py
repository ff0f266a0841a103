"""The ceiling of whatever reads its operands once: how fast the cores read memory that no cache holds."""

import time
from collections.abc import Callable

import torch

READ_BYTES = 512 << 20
"""More than any processor's last cache, and about what SmolLM2's decode step reads."""


def bandwidth_reader(threads: int) -> Callable[[], float]:
    """A function that measures once, in bytes/s: the largest byte of `READ_BYTES`, with torch's threads.

    Of torch's reductions the one that was fastest where we tried (sum and dot of float32 came close).
    """
    memory = torch.ones(READ_BYTES, dtype=torch.int8)  # written: pages never touched would share one page

    def measure() -> float:
        torch.set_num_threads(threads)
        started_s = time.perf_counter()
        memory.amax()
        return READ_BYTES / (time.perf_counter() - started_s)

    measure()
    return measure
