"""A connection in the loop, its other end a bare socket: what it takes at once, and what later."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from tests.support.eventually import eventually

from kvtransfer import FrameError, PeerLostError, TransferError
from kvtransfer.memory import Cursor, checked_ranges
from kvtransfer.stream import frames
from kvtransfer.stream.connection import (
    EARLY_RECEIVES_MAX,
    FRAMES_WAITING_MAX,
    LOW_WATER_BYTES_MAX,
    RECEIVES_PER_TURN_MAX,
    Connection,
)
from kvtransfer.stream.frames import Header, Kind
from kvtransfer.stream.inbox import Incoming
from kvtransfer.stream.outbox import Outgoing

pytestmark = pytest.mark.unit

TURN_BYTES = 1 << 16


class Handler:
    """Remembers what happened; an ABORT frame makes it fail."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.sent: list[Outgoing] = []
        self.errors: list[TransferError] = []
        self.landing: Incoming | None = None

    def incoming(self, request: int, count: int) -> Incoming:
        assert self.landing is not None
        return self.landing

    def on_payload(self, incoming: Incoming) -> None:
        pass

    def on_frame(self, header: Header, body: bytearray) -> None:
        if header.kind == Kind.ABORT:
            raise KeyError("a defect")
        self.requests.append(header.request)

    def on_sent(self, outgoing: Outgoing) -> None:
        self.sent.append(outgoing)

    def on_closed(self, error: TransferError) -> None:
        self.errors.append(error)


class Pair:
    """A connection with its handler, and the socket at the other end."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair()
        near.setblocking(False)
        self.far.setblocking(False)
        self.handler = Handler()
        accepted = frames.accepts(Kind.DONE, Kind.DATA, Kind.ABORT)
        self.connection = Connection(near, "far", self.handler, accepted, TURN_BYTES)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    made.connection.start()
    yield made
    made.connection.close(PeerLostError("the test is over"))
    made.far.close()


async def test_what_is_there_is_received_early_but_not_for_ever(pair: Pair) -> None:
    """A caller whose answers are always there already must give the loop its turn."""
    for request in range(1, EARLY_RECEIVES_MAX + 3):
        pair.far.send(frames.pack_done(request, 0))
        pair.connection.receive_early()
    assert pair.handler.requests == list(range(1, EARLY_RECEIVES_MAX + 1))
    await eventually(lambda: len(pair.handler.requests) == EARLY_RECEIVES_MAX + 2)
    pair.far.send(frames.pack_done(100, 0))
    pair.connection.receive_early()
    assert pair.handler.requests[-1] == 100


async def test_an_early_receive_of_nothing_is_harmless(pair: Pair) -> None:
    for _ in range(2 * EARLY_RECEIVES_MAX):
        pair.connection.receive_early()
    assert not pair.connection.closed
    pair.connection.close(PeerLostError("gone"))
    pair.connection.receive_early()
    assert [str(error) for error in pair.handler.errors] == ["gone"]


async def test_a_peer_that_takes_no_frames_is_cut_off(pair: Pair) -> None:
    taken = 0
    while not pair.connection.closed:
        pair.connection.send_frame(frames.pack_error(1, frames.ErrorCode.BUSY, "b" * 400))
        taken += 1
    assert taken > FRAMES_WAITING_MAX
    (error,) = pair.handler.errors
    assert isinstance(error, FrameError)
    assert str(FRAMES_WAITING_MAX) in str(error)
    pair.connection.send_frame(b"later")
    assert len(pair.handler.errors) == 1


async def test_a_peer_that_sends_byte_by_byte_gets_no_more_of_a_turn(pair: Pair) -> None:
    """The number of receives in a turn is bounded, not only their bytes."""
    cursor = Cursor(memoryview(bytearray(1000)), checked_ranges([(0, 1000)], 1000, "ranges"))
    pair.handler.landing = Incoming(1, 1000, cursor)
    received = 0

    def send_one_more(incoming: Incoming) -> None:
        nonlocal received
        received += 1
        pair.far.send(b"x")

    pair.handler.on_payload = send_one_more
    pair.far.send(frames.pack_header(Kind.DATA, 1000, 1) + b"x")
    pair.connection._on_readable()
    assert received == RECEIVES_PER_TURN_MAX


async def test_the_last_bytes_of_a_large_payload_are_heard_of() -> None:
    """The kernel is told to wake us for many bytes, and never for more than are due."""
    total = LOW_WATER_BYTES_MAX + 1000
    memory = memoryview(bytearray(total))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    near.setblocking(False)
    handler = Handler()
    handler.landing = Incoming(1, total, Cursor(memory, checked_ranges([(0, total)], total, "ranges")))
    connection = Connection(near, "far", handler, frames.accepts(Kind.DONE, Kind.DATA), TURN_BYTES)
    connection.start()

    def low_water() -> int:
        return near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    far.sendall(frames.pack_header(Kind.DATA, total, 1) + b"x")
    await eventually(lambda: handler.landing.remaining == total - 1)
    assert low_water() == LOW_WATER_BYTES_MAX
    far.sendall(b"x" * LOW_WATER_BYTES_MAX)
    await eventually(lambda: handler.landing.remaining <= 999)
    assert low_water() == 1
    far.sendall(b"x" * handler.landing.remaining)
    await eventually(lambda: handler.landing.remaining == 0)
    far.sendall(frames.pack_done(1, total))
    await eventually(lambda: handler.requests == [1])
    assert bytes(memory) == b"x" * total
    far.close()
    await eventually(lambda: connection.closed)


async def test_a_defect_of_our_own_ends_this_connection_only(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.far.send(frames.pack_abort(1))
    await eventually(lambda: pair.connection.closed)
    (error,) = pair.handler.errors
    assert isinstance(error, PeerLostError)
    assert "a defect" in caplog.text


async def test_payload_leaves_and_withdrawn_payload_leaves_as_zeros(pair: Pair) -> None:
    memory = memoryview(bytearray(b"\1" * 4 * TURN_BYTES))
    cursor = Cursor(memory, checked_ranges([(0, len(memory))], len(memory), "ranges"))
    outgoing = Outgoing(1, b"", cursor)
    pair.connection.send(outgoing)
    before = pair.connection.withdraw(outgoing)
    wire = b""
    while len(wire) < before + frames.HEADER_BYTES or len(wire) % (TURN_BYTES + frames.HEADER_BYTES):
        wire += await asyncio.get_running_loop().sock_recv(pair.far, 1 << 20)
    payload = b"".join(
        wire[at + frames.HEADER_BYTES : at + frames.HEADER_BYTES + TURN_BYTES]
        for at in range(0, len(wire), TURN_BYTES + frames.HEADER_BYTES)
    )
    assert payload == b"\1" * before + bytes(len(payload) - before)
    assert pair.handler.sent == []
