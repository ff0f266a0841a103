"""A load of HTTP requests that takes little of a processor itself: requests are bytes made beforehand, and
of an answer no more is looked at than where it ends and whether it is a good one.

Bodies must be POSTed as they are to one path. Open loop (each request at its time, whatever became of those
before) or closed loop (so many in flight). Knows no server.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

CONNECTIONS_MAX = 256
"""Open at once; a request of an open loop that finds none free is counted as unsent."""
ANSWER_S_MAX = 30.0
HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTENT_LENGTH = b"content-length:"
GOOD_STATUS = 200
BROKEN = 0
"""The status of an answer that did not come: its connection ended before."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


@dataclass(slots=True)
class Outcomes:
    """What became of a load. Latencies of good answers, in seconds, from when each was due."""

    latencies_s: list[float] = field(default_factory=list)
    took_s: float = 0.0
    failed: Counter[int] = field(default_factory=Counter)
    """By status."""
    unsent: int = 0

    def note(self, status: int, latency_s: float) -> None:
        if status == GOOD_STATUS:
            self.latencies_s.append(latency_s)
        else:
            self.failed[status] += 1


def request_bytes(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One request at a time, any number one after the other."""

    def __init__(self, good: bytes) -> None:
        """An answer of status 200 that lacks `good` is not a good one."""
        self._good = good
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._length: int | None = None
        self._answer: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own class is one in all but name.
        self._transport = cast(asyncio.Transport, transport)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: bytes) -> "asyncio.Future[int]":
        """The status of the answer, once it has come whole."""
        assert self._transport is not None
        assert self._answer is None, "an answer is awaited"
        self._answer = asyncio.get_running_loop().create_future()
        self._received, self._length = b"", None
        self._transport.write(request)
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        if self._length is None:
            self._length = whole_length(self._received)
        length = self._length
        if length is None:
            return
        whole = len(self._received) >= length if length else self._received.endswith(LAST_CHUNK)
        if whole:
            self._end(status_of(self._received, self._good))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(BROKEN)

    def _end(self, status: int) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(status)


def whole_length(received: bytes) -> int | None:
    """Of head and body; 0 where the body comes in chunks, None where the head is not there yet."""
    head_end = received.find(HEAD_END)
    if head_end < 0:
        return None
    head = received[:head_end].lower()
    place = head.find(CONTENT_LENGTH)
    if place < 0:
        return 0
    value = head[place + len(CONTENT_LENGTH) :].split(b"\r\n", 1)[0]
    return head_end + len(HEAD_END) + int(value)


def status_of(answer: bytes, good: bytes) -> int:
    """BROKEN for an answer that says it is good and does not have what a good one has."""
    status = int(answer[9:12])
    return BROKEN if status == GOOD_STATUS and good not in answer else status


async def closed_loop(
    addresses: Sequence[Address], requests: Iterator[bytes], *, concurrency: int, seconds: float, good: bytes
) -> Outcomes:
    """`concurrency` requests in flight, each on a connection of its own."""
    outcomes = Outcomes()
    connections = [await connected(addresses[number % len(addresses)], good) for number in range(concurrency)]
    started_s = perf_counter()

    async def ask_on(connection: Connection) -> None:
        while perf_counter() - started_s < seconds and connection.open:
            asked_s = perf_counter()
            status = await connection.ask(next(requests))
            outcomes.note(status, perf_counter() - asked_s)

    await _within(asyncio.gather(*map(ask_on, connections)), seconds + ANSWER_S_MAX)
    outcomes.took_s = perf_counter() - started_s
    for connection in connections:
        connection.close()
    return outcomes


async def open_loop(
    addresses: Sequence[Address],
    requests: Iterator[bytes],
    *,
    rate: float,
    seconds: float,
    good: bytes,
    seed: int,
) -> Outcomes:
    """Poisson arrivals of `rate` requests a second."""
    numbers = random.Random(seed)
    outcomes = Outcomes()
    free: list[Connection] = []
    asking: set[asyncio.Task[None]] = set()
    opened = 0

    async def ask(due_s: float) -> None:
        nonlocal opened
        connection = free.pop() if free else None
        if connection is None:
            opened += 1
            try:
                connection = await connected(addresses[opened % len(addresses)], good)
            except OSError:
                outcomes.note(BROKEN, 0.0)
                return
        status = await connection.ask(next(requests))
        outcomes.note(status, perf_counter() - due_s)
        if connection.open:
            free.append(connection)

    started_s = due_s = perf_counter()
    while (due_s := due_s + numbers.expovariate(rate)) < started_s + seconds:
        await asyncio.sleep(due_s - perf_counter())
        if len(asking) >= CONNECTIONS_MAX:
            outcomes.unsent += 1
            continue
        task = asyncio.create_task(ask(due_s))
        asking.add(task)
        task.add_done_callback(asking.discard)
    await _within(asyncio.gather(*asking), ANSWER_S_MAX)
    outcomes.took_s = perf_counter() - started_s
    for connection in free:
        connection.close()
    return outcomes


async def connected(address: Address, good: bytes) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(good), address.host, address.port)
    return connection


async def _within(work: "asyncio.Future[list[None]]", seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await work
