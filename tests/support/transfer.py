"""What the tests of transfers share: endpoints by transport, memory with a pattern, the leak check."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.support.eventually import eventually
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, Endpoint, Grant, Limits, Peer, Region, TransportKind


def selected_transports() -> list[str]:
    """The transports that the contract suite runs over: MOONPOOL_TRANSFER_TRANSPORTS, "tcp,shm" by default.

    rdma needs a machine with a device: tests/rdma runs the suite in one.
    """
    return [
        TransportKind(name) for name in os.environ.get("MOONPOOL_TRANSFER_TRANSPORTS", "tcp,shm").split(",")
    ]


Memory = npt.NDArray[np.uint8]


def make_endpoint(
    transport: str | Sequence[str], name: str, *, secret: bytes = SECRET, limits: Limits | None = None
) -> Endpoint:
    """With this transport alone, or with these."""
    kinds = [transport] if isinstance(transport, str) else transport
    return Endpoint(name, secret, limits=limits, transports=[TransportKind(kind) for kind in kinds])


def pattern(count: int, seed: int = 1) -> Memory:
    """Bytes without zeros, so that memory that was not written shows; random, with a prime period."""
    return np.resize(np.random.default_rng(seed).integers(1, 250, 1_000_003, dtype=np.uint8), count)


READERS_LOOK_TWICE = frozenset({TransportKind.SHM})
"""A reader maps the owner's memory: what it copied after a revoke is not believed, but it is copied."""


@dataclass(slots=True)
class Side:
    """An endpoint with one region, in this process."""

    endpoint: Endpoint
    memory: Memory
    region: Region

    def grant(
        self,
        ranges: npt.ArrayLike,
        peer: str,
        *,
        generation: int = 1,
        access: Access = Access.WRITE,
        **more: Any,
    ) -> Grant:
        return self.endpoint.grant(
            self.region, ranges, peer=peer, generation=generation, access=access, **more
        )

    async def connect(self, other: "Side") -> Peer:
        return await self.endpoint.connect(other.endpoint.descriptor(), timeout_s=5)


Pair = tuple[Side, Side]


async def landing(owner: Side, grant: Grant, more_than_bytes: int = 0) -> None:
    """Wait until some bytes of the grant are there."""
    await eventually(lambda: owner.endpoint.written_bytes(grant) > more_than_bytes)


async def firing(call: Callable[[], Awaitable[object]]) -> None:
    """Make the call over and over, until one fails: whatever happens to it happens in the middle of one."""
    while True:
        await call()


@asynccontextmanager
async def side(
    transport: str | Sequence[str],
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
    leaked = _open_files() - descriptors
    assert leaked == set(), leaked


def _open_files() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found
