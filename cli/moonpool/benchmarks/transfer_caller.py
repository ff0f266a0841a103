"""Our library as a benchmark of transfers drives it: an endpoint here, its peer in another process."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtransfer import Endpoint, Peer, Region
from moonpool.benchmarks.line_process import LineProcess, LineProcessError
from moonpool.benchmarks.transfer_memory import BenchMemory, bench_endpoint
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
)

OWNER_MODULE = "moonpool.benchmarks.transfer_owner"
CALLER_NAME = "bench-caller"
OWNER_NAME = "bench-owner"
SECRET_BYTES = 32
CONNECT_S_MAX = 10.0

Ranges = npt.NDArray[np.int64]


class TransferUnavailable(Exception):
    """This machine does not have the transport; the text says why."""


class WrongBytes(Exception):
    """What arrived is not what was sent, or came another way than the one that is measured."""


class TransferCaller:
    """One transport between this process and a process of its own. Made by `running`."""

    def __init__(
        self,
        transport: str,
        memory: BenchMemory,
        endpoint: Endpoint,
        owner: LineProcess,
        peer: Peer,
        tokens: dict[Direction, str],
    ) -> None:
        self.transport = transport
        self._memory = memory
        self._region: Region = endpoint.register(memory.buffer)
        self._owner = owner
        self._peer = peer
        self._tokens = tokens

    @classmethod
    @asynccontextmanager
    async def running(cls, transport: str, memory_bytes: int = MEMORY_BYTES) -> AsyncIterator[Self]:
        """Raises TransferUnavailable."""
        secret = secrets.token_bytes(SECRET_BYTES)
        endpoint = bench_endpoint(CALLER_NAME, secret, transport)
        owner = LineProcess.module(OWNER_MODULE)
        try:
            try:
                started = await asyncio.to_thread(
                    owner.ask,
                    name=OWNER_NAME,
                    secret=secret.hex(),
                    transport=transport,
                    memory_bytes=memory_bytes,
                )
            except LineProcessError as error:
                raise TransferUnavailable(str(error)) from error
            await endpoint.start()
            peer = await endpoint.connect(started["descriptor"], timeout_s=CONNECT_S_MAX)
            tokens = {
                direction: owner.ask(do="grant", peer=CALLER_NAME, access=direction, ranges=None)["token"]
                for direction in Direction
            }
            memory = BenchMemory.touched(memory_bytes)
            yield cls(transport, memory, endpoint, owner, peer, tokens)
        finally:
            await endpoint.close()
            owner.close()

    async def verify(self, direction: Direction, row: Row) -> None:
        """Some calls at once whose bytes are looked at on both sides. Raises WrongBytes."""
        source, target = sides(direction)
        about = {"row": [row.ranges, row.range_bytes], "first": 0, "calls": row.verified_calls}
        await self._ask(source, "fill", **about)
        await self._ask(target, "clear", **about)
        await self.sample(direction, row, 0, row.verified_calls, DEPTH)
        sent = await self._ask(source, "digest", **about)
        arrived = await self._ask(target, "digest", **about)
        if sent != arrived:
            raise WrongBytes(f"{self.transport} {direction} {row.name}: {arrived} arrived, {sent} was sent")

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
        move = self._peer.write if direction is Direction.WRITE else self._peer.read
        token = self._tokens[direction]
        for local, remote in calls:
            started_s = time.perf_counter()
            await move(self._region, local, token, remote, timeout_s=CALL_S_MAX)
            call_s.append(time.perf_counter() - started_s)

    async def _ask(self, side: Side, do: str, **about: object) -> object:
        question = {"do": do, "side": side, **about}
        if side is Side.OWNER:
            return await asyncio.to_thread(self._owner.ask, **question)
        return await asyncio.to_thread(answer, self._memory.array, question)


def sides(direction: Direction) -> tuple[Side, Side]:
    """From which side the bytes come, and to which they go."""
    return (Side.CALLER, Side.OWNER) if direction is Direction.WRITE else (Side.OWNER, Side.CALLER)


def _ranges(offsets: Ranges, range_bytes: int) -> Ranges:
    ranges = np.empty((len(offsets), 2), np.int64)
    ranges[:, 0] = offsets
    ranges[:, 1] = range_bytes
    return ranges
