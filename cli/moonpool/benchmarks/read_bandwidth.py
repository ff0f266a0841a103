"""The ceiling of whatever reads its operands once: how fast the cores read memory that no cache holds."""

import time
from collections.abc import Callable

import torch

READ_BYTES = 512 << 20
"""More than any processor's last cache, and about what SmolLM2's decode step reads."""
READER = "torch.amax of int8"
"""Of torch's reductions the fastest where we tried; sum and dot of float32 came close."""


def bandwidth_reader(threads: int) -> Callable[[], float]:
    """A function that measures once, in bytes/s, with `threads` of torch's threads."""
    memory = torch.ones(READ_BYTES, dtype=torch.int8)  # written: pages never touched would share one page

    def measure() -> float:
        torch.set_num_threads(threads)
        started_s = time.perf_counter()
        memory.amax()
        return READ_BYTES / (time.perf_counter() - started_s)

    measure()
    return measure
