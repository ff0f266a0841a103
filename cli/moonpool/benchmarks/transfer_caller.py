"""Our library as a benchmark of transfers drives it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtransfer import Access, Region
from moonpool.benchmarks.transfer_pair import BenchMemory, Pair
from moonpool.benchmarks.transfer_plan import (
    CALL_S_MAX,
    DEPTH,
    MEMORY_BYTES,
    Direction,
    Row,
    Sample,
    Side,
    Walk,
    answer,
    sides,
)

ACCESS = {Direction.WRITE: Access.WRITE, Direction.READ: Access.READ}

Ranges = npt.NDArray[np.int64]


class WrongTransfer(Exception):
    """Other bytes arrived than were sent, or they came another way than the one that is measured."""


class TransferCaller:
    """One transport between this process and a process of its own. Made by `running`."""

    def __init__(self, transport: str, memory: BenchMemory, pair: Pair, tokens: dict[Direction, str]) -> None:
        self.transport = transport
        self._memory = memory
        self._pair = pair
        self._region: Region = pair.endpoint.register(memory.buffer)
        self._tokens = tokens

    @classmethod
    @asynccontextmanager
    async def running(cls, transport: str, memory_bytes: int = MEMORY_BYTES) -> AsyncIterator[Self]:
        """Raises kvtransfer's TransportUnavailable."""
        async with Pair.running(transport, memory_bytes) as pair:
            tokens = {direction: await pair.grant(ACCESS[direction]) for direction in Direction}
            yield cls(transport, BenchMemory.touched(memory_bytes), pair, tokens)

    async def verify(self, direction: Direction, row: Row) -> None:
        """Some calls at once whose bytes are looked at on both sides. Raises WrongTransfer, TransferError."""
        source, target = sides(direction)
        about = {"row": [row.ranges, row.range_bytes], "first": 0, "calls": row.verified_calls}
        await self._ask(source, "fill", **about)
        await self._ask(target, "clear", **about)
        await self.sample(direction, row, 0, row.verified_calls, DEPTH)
        sent = await self._ask(source, "digest", **about)
        arrived = await self._ask(target, "digest", **about)
        if sent != arrived:
            raise WrongTransfer(f"{self.transport} {direction}: other bytes arrived than were sent")

    async def sample(self, direction: Direction, row: Row, first: int, calls: int, depth: int) -> Sample:
        """Times `calls` calls from number `first` of the walk on, `depth` at once."""
        walk = Walk(row, len(self._memory.array))
        prepared = iter(
            [
                tuple(_ranges(walk.offsets(side, call), row.range_bytes) for side in Side)
                for call in range(first, first + calls)
            ]
        )
        call_s: list[float] = []
        started_s = time.perf_counter()
        await asyncio.gather(*(self._calls(direction, prepared, call_s) for _ in range(depth)))
        return Sample(time.perf_counter() - started_s, tuple(call_s))

    async def _calls(
        self, direction: Direction, calls: Iterator[tuple[Ranges, ...]], call_s: list[float]
    ) -> None:
        peer, region, token = self._pair.peer, self._region, self._tokens[direction]
        move = peer.write if direction is Direction.WRITE else peer.read
        for local, remote in calls:
            started_s = time.perf_counter()
            moved = await move(region, local, token, remote, timeout_s=CALL_S_MAX)
            call_s.append(time.perf_counter() - started_s)
            if moved.transport != self.transport:
                raise WrongTransfer(f"{direction} was carried by {moved.transport}, not {self.transport}")

    async def _ask(self, side: Side, do: str, **about: object) -> object:
        question = {"do": do, "side": side, **about}
        if side is Side.OWNER:
            return await self._pair.ask(**question)
        return await asyncio.to_thread(answer, self._memory.array, question)


def _ranges(offsets: Ranges, range_bytes: int) -> Ranges:
    ranges = np.empty((len(offsets), 2), np.int64)
    ranges[:, 0] = offsets
    ranges[:, 1] = range_bytes
    return ranges
