"""Writes that wait for the owner's GO, against an owner that the test plays."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest

from kvtransfer import BusyError, FrameError, Limits, Region
from kvtransfer.stream import frames
from kvtransfer.stream.frames import HEADER_BYTES, ErrorCode, Kind, TransferRequest
from kvtransfer.tcp.caller import CallerStream
from kvtransfer.tcp.frames import pack_go
from kvtransfer.transport import Call, LocalMemory

pytestmark = pytest.mark.unit

SIZE = 1000
ANY_KIND = frames.accepts(*Kind)


@dataclass(slots=True)
class Owner:
    """The other end of the stream."""

    sock: socket.socket
    stream: CallerStream
    memory: bytearray

    def write(self) -> "asyncio.Task[None]":
        ranges = np.array([(0, SIZE)])
        memory = LocalMemory(Region(1, self.memory), ranges, SIZE)
        return asyncio.create_task(self.stream.write(Call(memory, "token", ranges, piece_bytes_max=4096)))

    async def say(self, frame: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, frame)

    async def hear(self) -> tuple[int, int, bytes]:
        """The next frame: kind, request, body."""
        header = frames.parse_header(memoryview(await self._exactly(HEADER_BYTES)), ANY_KIND)
        return header.kind, header.request, await self._exactly(header.body_bytes)

    async def _exactly(self, count: int) -> bytes:
        data = b""
        async with asyncio.timeout(5):
            while len(data) < count:
                data += await asyncio.get_running_loop().sock_recv(self.sock, count - len(data))
        return data


@pytest.fixture
async def owner() -> AsyncIterator[Owner]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    stream = CallerStream(ours, "owner", Limits())
    stream.start(lambda error: None)
    yield Owner(theirs, stream, bytearray(b"p" * SIZE))
    stream.close(FrameError("the test is over"))
    theirs.close()


async def asked(owner: Owner) -> TransferRequest:
    kind, _, body = await owner.hear()
    assert kind == Kind.WRITE
    return frames.parse_request(bytearray(body))


async def test_the_payload_follows_go(owner: Owner) -> None:
    writing = owner.write()
    assert (await asked(owner)).awaits_go
    with pytest.raises(BlockingIOError):
        owner.sock.recv(1)
    await owner.say(pack_go(1))
    assert await owner.hear() == (Kind.DATA, 1, b"p" * SIZE)
    await owner.say(frames.pack_done(1, SIZE))
    await writing


async def test_done_before_go_is_a_lie(owner: Owner) -> None:
    writing = owner.write()
    await asked(owner)
    await owner.say(frames.pack_done(1, SIZE))
    with pytest.raises(FrameError, match="says DONE before it is"):
        await writing


async def test_a_refusal_instead_of_go_ends_the_call_and_no_payload_follows(owner: Owner) -> None:
    writing = owner.write()
    await asked(owner)
    await owner.say(frames.pack_error(1, ErrorCode.BUSY, "no slot"))
    with pytest.raises(BusyError, match="no slot"):
        await writing
    again = owner.write()
    assert (await owner.hear())[:2] == (Kind.WRITE, 2)
    await owner.say(pack_go(1))  # of a request that is settled
    with pytest.raises(FrameError, match="not pending"):
        await again


async def test_a_call_given_up_before_go_is_aborted_and_sends_nothing(owner: Owner) -> None:
    writing = owner.write()
    await asked(owner)
    writing.cancel()
    assert await owner.hear() == (Kind.ABORT, 1, b"")
    await owner.say(pack_go(1))  # it crossed the ABORT
    assert owner.stream.settling is not None
    await owner.say(frames.pack_error(1, ErrorCode.ABORTED, "aborted"))
    async with asyncio.timeout(5):
        await owner.stream.settling
    again = owner.write()
    assert (await owner.hear())[:2] == (Kind.WRITE, 2)
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    with pytest.raises(asyncio.CancelledError):
        await writing


async def test_go_for_a_read_is_a_lie(owner: Owner) -> None:
    ranges = np.array([(0, SIZE)])
    memory = LocalMemory(Region(1, owner.memory), ranges, SIZE)
    reading = asyncio.create_task(owner.stream.read(Call(memory, "token", ranges)))
    assert (await owner.hear())[0] == Kind.READ
    await owner.say(pack_go(1))
    with pytest.raises(FrameError, match="does not wait for it"):
        await reading
