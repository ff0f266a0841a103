"""Endpoints and memory as workers have them, for benchmarks."""

from dataclasses import dataclass

import numpy as np

from kvtransfer import Endpoint, RegisterableBuffer
from kvtransfer.shared_buffer import SharedBuffer
from moonpool.benchmarks.transfer_plan import Memory


@dataclass(frozen=True, slots=True)
class BenchMemory:
    """`buffer` is registered, `array` is the same bytes."""

    buffer: RegisterableBuffer
    array: Memory

    @classmethod
    def touched(cls, memory_bytes: int) -> "BenchMemory":
        """With all its pages there, so that no timed call is the first to meet one."""
        buffer = SharedBuffer.create(memory_bytes)
        array = np.frombuffer(buffer, np.uint8)
        array[:] = 1
        return cls(buffer, array)


def bench_endpoint(name: str, secret: bytes, transport: str | None) -> Endpoint:
    """On this host, with this transport alone; with those that an endpoint has by itself where it is None."""
    return Endpoint(name, secret)
