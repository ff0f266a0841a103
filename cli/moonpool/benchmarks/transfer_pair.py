"""Two processes that move bytes: an endpoint here, and a process with the memory that is called in.

Used for the transfers alone and for those of a handover. Knows nothing of what is moved.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvtransfer import (
    TRANSPORTS,
    Access,
    Endpoint,
    Peer,
    RegisterableBuffer,
    TransportKind,
    TransportUnavailable,
)
from kvtransfer.shared_buffer import SharedBuffer
from moonpool.benchmarks.line_process import Json, LineProcess
from moonpool.benchmarks.transfer_plan import Memory

OWNER_MODULE = "moonpool.benchmarks.transfer_owner"
CALLER_NAME = "bench-caller"
OWNER_NAME = "bench-owner"
SECRET_BYTES = 32
CONNECT_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class BenchMemory:
    """Memory as a pool with `pool_huge_pages` has it: `buffer` is registered, `array` is the same bytes."""

    buffer: RegisterableBuffer
    array: Memory

    @classmethod
    def touched(cls, memory_bytes: int) -> "BenchMemory":
        """With all its pages there, so that no timed call is the first to meet one."""
        buffer = SharedBuffer.create(memory_bytes)
        array = np.frombuffer(buffer, np.uint8)
        array[:] = 1
        buffer.take_memory()  # numpy asks for huge pages too, and the ceilings' memory is numpy's
        return cls(buffer, array)


def bench_endpoint(name: str, secret: bytes, transport: str | None) -> Endpoint:
    """On this host, with this transport alone; with those that an endpoint has by itself where it is None."""
    return Endpoint(name, secret, transports=TRANSPORTS if transport is None else (TransportKind(transport),))


class Pair:
    """Made by `running`."""

    def __init__(self, endpoint: Endpoint, owner: LineProcess, peer: Peer) -> None:
        self.endpoint = endpoint
        self.peer = peer
        self._owner = owner

    @classmethod
    @asynccontextmanager
    async def running(cls, transport: str | None, memory_bytes: int) -> AsyncIterator[Self]:
        """Connected. Raises TransportUnavailable where this machine does not have the transport."""
        secret = secrets.token_bytes(SECRET_BYTES)
        endpoint = bench_endpoint(CALLER_NAME, secret, transport)
        try:
            await endpoint.start()
            with LineProcess.module(OWNER_MODULE) as owner:
                started = await asyncio.to_thread(
                    owner.ask,
                    name=OWNER_NAME,
                    secret=secret.hex(),
                    transport=transport,
                    memory_bytes=memory_bytes,
                )
                if "unavailable" in started:
                    raise TransportUnavailable(started["unavailable"])
                peer = await endpoint.connect(started["descriptor"], timeout_s=CONNECT_S_MAX)
                yield cls(endpoint, owner, peer)
        finally:
            await endpoint.close()

    async def ask(self, **question: object) -> Json:
        """The process with the memory. Raises LineProcessError."""
        return await asyncio.to_thread(self._owner.ask, **question)

    async def grant(self, access: Access, ranges: Sequence[Sequence[int]] | None = None) -> str:
        """The token of a grant to us, of all the memory where no ranges are given."""
        answer = await self.ask(do="grant", peer=CALLER_NAME, access=access, ranges=ranges)
        token: str = answer["token"]
        return token

    def carriers(self) -> list[str]:
        """The transports that carried our calls so far."""
        counters = self.endpoint.statistics()[OWNER_NAME].by_transport
        return sorted(kind for kind, counted in counters.items() if counted.writes or counted.reads)
