"""What the tests of transfers share: endpoints by transport, memory with a pattern, the leak check."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, Endpoint, Grant, Limits, Peer, Region, TransportKind

TRANSPORTS = ("tcp",)
"""Every transport that the contract suite runs over."""

Memory = npt.NDArray[np.uint8]


def make_endpoint(
    transport: str, name: str, *, secret: bytes = SECRET, limits: Limits | None = None
) -> Endpoint:
    assert transport in TRANSPORTS
    return Endpoint(name, secret, limits=limits, transports=[TransportKind(transport)])


def pattern(count: int, seed: int = 1) -> Memory:
    """Bytes without zeros, so that memory that was not written shows; random, with a prime period."""
    return np.resize(np.random.default_rng(seed).integers(1, 250, 1_000_003, dtype=np.uint8), count)


@dataclass(slots=True)
class Side:
    """An endpoint with one region, in this process."""

    endpoint: Endpoint
    memory: Memory
    region: Region

    def grant(
        self, ranges: npt.ArrayLike, peer: str, *, generation: int = 1, access: Access = Access.WRITE
    ) -> Grant:
        return self.endpoint.grant(self.region, ranges, peer=peer, generation=generation, access=access)

    async def connect(self, other: "Side") -> Peer:
        return await self.endpoint.connect(other.endpoint.descriptor(), timeout_s=5)


@asynccontextmanager
async def side(
    transport: str,
    name: str,
    memory: Memory,
    *,
    secret: bytes = SECRET,
    limits: Limits | None = None,
) -> AsyncIterator[Side]:
    endpoint = make_endpoint(transport, name, secret=secret, limits=limits)
    await endpoint.start()
    try:
        yield Side(endpoint, memory, endpoint.register(memory))
    finally:
        await endpoint.close()


@asynccontextmanager
async def no_leaks() -> AsyncIterator[None]:
    """Tasks and file descriptors are after it what they were before."""
    tasks, descriptors = asyncio.all_tasks(), _open_files()
    yield
    await asyncio.sleep(0)
    # A fixture's two halves run in tasks of their own.
    assert asyncio.all_tasks() - tasks - {asyncio.current_task()} == set()
    assert _open_files() - descriptors == set()


def _open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found
