"""The shared memory transport against peers that talk garbage, lie, or send what is no memory."""

import asyncio
import itertools
import os
import random
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.eventually import eventually
from tests.support.hostile import frame_like, handshake_like
from tests.support.shm import ShmSide, shm_side
from tests.support.transfer import no_leaks, pattern
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, AuthError, BusyError, FrameError, Limits, PeerLostError, TransferError
from kvtransfer.errors import TransportUnfit
from kvtransfer.shared_buffer import SharedBuffer
from kvtransfer.shm import channel, frames
from kvtransfer.shm.frames import GoFrame, MovedFrame, OwnKind, PutFrame, RegionFrame
from kvtransfer.stream.frames import (
    HEADER_BYTES,
    Kind,
    TransferRequest,
    pack_abort,
    pack_done,
    pack_header,
    pack_request,
)
from kvtransfer.stream.handshake import LINK_ID_BYTES
from kvtransfer.stream.negotiation import check_caller, prove_as_caller

pytestmark = pytest.mark.unit

SIZE = 1 << 20
WHOLE = [(0, SIZE)]
TIMEOUT_S = 10.0
FUZZ = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def owner() -> AsyncIterator[ShmSide]:
    async with no_leaks(), shm_side("owner", SharedBuffer.create(SIZE)) as made:
        yield made


def socket_address(side: ShmSide) -> str:
    return f"\0{side.address['name']}"


@asynccontextmanager
async def dialled(owner: ShmSide) -> AsyncIterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, socket_address(owner))
        yield sock


@asynccontextmanager
async def authenticated(owner: ShmSide, name: str = "liar") -> AsyncIterator[socket.socket]:
    async with dialled(owner) as sock:
        await prove_as_caller(sock, name, "owner", SECRET, bytes(LINK_ID_BYTES))
        yield sock


async def until_closed(sock: socket.socket) -> bytes:
    """All that the other side says until it closes by itself; its descriptors are not taken."""
    said = b""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                said += part
        except ConnectionResetError:
            return said
    return said


async def assert_well(owner: ShmSide) -> None:
    """The owner still serves an honest peer, and nobody else wrote to its memory."""
    assert not owner.memory.any()
    async with shm_side("honest", pattern(SIZE)) as honest:
        grant = owner.grant(WHOLE, "honest")
        link = await honest.dial(owner)
        await link.write(honest.call(WHOLE, grant, WHOLE))
        assert np.array_equal(owner.memory, honest.memory)
    await owner.revoke(grant)
    owner.memory[:] = 0


def run_fuzzed(attack: Callable[[ShmSide], Awaitable[None]]) -> None:
    """One example: an owner, the attack, and the owner is well and leaks nothing."""

    async def example() -> None:
        async with no_leaks(), shm_side("owner", SharedBuffer.create(SIZE)) as owner:
            await attack(owner)
            await assert_well(owner)

    asyncio.run(example())


async def send_and_end(sock: socket.socket, data: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:  # it closed while we still sent
        return
    await until_closed(sock)


@FUZZ
@given(handshake_like())
def test_garbage_before_the_handshake(garbage: bytes) -> None:
    async def attack(owner: ShmSide) -> None:
        async with dialled(owner) as sock:
            await send_and_end(sock, garbage)

    run_fuzzed(attack)


@FUZZ
@given(st.lists(st.one_of(frame_like(24), st.binary(max_size=500)), min_size=1, max_size=8))
def test_garbage_after_a_good_handshake(parts: list[bytes]) -> None:
    async def attack(owner: ShmSide) -> None:
        owner.grant(WHOLE, "somebody")
        async with authenticated(owner) as sock:
            await send_and_end(sock, b"".join(parts))

    run_fuzzed(attack)


@dataclass
class Liar:
    """Makes the frames of a caller; `memory` and `board` are real, whatever it says of them."""

    token: str = "g1.x.1"
    memory: SharedBuffer = field(default_factory=lambda: SharedBuffer.create(SIZE))
    board: SharedBuffer = field(default_factory=lambda: SharedBuffer.create(80))
    opened: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        np.frombuffer(self.memory, np.uint8)[:] = 255
        memoryview(self.board).cast("Q")[3] = 5

    def region(self, number: int = 1, size: int = SIZE, offset: int = 0) -> tuple[bytes, int]:
        return frames.pack_region(RegionFrame(number, size, True, offset, 0)), self.memory.fileno()

    def told(self) -> list[tuple[bytes, int | None]]:
        """What an honest caller says first."""
        return [(frames.pack_board(), self.board.fileno()), self.region()]

    def put(self, number: int = 1, **changed) -> tuple[bytes, None]:
        given = {
            "region_id": 1,
            "slot": 3,
            "epoch": 5,
            "source": np.array([(0, 10)]),
            "remote": np.array([(0, 10)]),
            "payload": 10,
            **changed,
        }
        request = TransferRequest(
            self.token, given["remote"], given["payload"], earlier_bytes=given.get("earlier", 0)
        )
        put = PutFrame(given["region_id"], given["slot"], given["epoch"], given["source"], request)
        return frames.pack_put(number, put), None

    def pipe(self) -> int:
        ours, other = os.pipe()
        self.opened += [ours, other]
        return ours

    def file(self) -> int:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
        os.truncate(descriptor, SIZE)
        self.opened.append(descriptor)
        return descriptor

    def unsealed(self) -> int:
        descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, SIZE)
        self.opened.append(descriptor)
        return descriptor

    def close(self) -> None:
        for descriptor in self.opened:
            os.close(descriptor)
        self.memory.close()
        self.board.close()


async def send_all(sock: socket.socket, parts: list[tuple[bytes, int | list[int] | None]]) -> None:
    """Each part in one message, with its descriptors."""
    for data, descriptors in parts:
        if descriptors is None:
            await asyncio.get_running_loop().sock_sendall(sock, data)
        else:
            many = descriptors if isinstance(descriptors, list) else [descriptors]
            assert socket.send_fds(sock, [data], many) == len(data)


def read_of(token: str, **more) -> bytes:
    return pack_request(Kind.READ, 1, TransferRequest(token, np.array([(0, 10)]), 10, **more))


FAR = 1 << 40
LIES: dict[str, Callable[[Liar], list[tuple[bytes, int | list[int] | None]]]] = {
    "a region that was never told of": lambda liar: [liar.told()[0], liar.put()],
    "no board": lambda liar: [liar.region(), liar.put()],
    "a slot beyond the board": lambda liar: [*liar.told(), liar.put(slot=10)],
    "no epoch": lambda liar: [*liar.told(), liar.put(epoch=0)],
    "a source beyond its region": lambda liar: [*liar.told(), liar.put(source=np.array([(SIZE - 9, 10)]))],
    "a source far beyond": lambda liar: [*liar.told(), liar.put(source=np.array([(2**63 - 5, 10)]))],
    "a source before its region": lambda liar: [*liar.told(), liar.put(source=np.array([(-1, 10)]))],
    "a source of negative length": lambda liar: [
        *liar.told(),
        liar.put(source=np.array([(0, 20), (50, -10)])),
    ],
    "lengths that overflow": lambda liar: [
        *liar.told(),
        liar.put(source=np.array([(0, 2**62), (0, 2**62), (0, 2**62), (0, 2**62 + 10)])),
    ],
    "a source shorter than the payload": lambda liar: [*liar.told(), liar.put(source=np.array([(0, 9)]))],
    "a source longer than the payload": lambda liar: [*liar.told(), liar.put(source=np.array([(0, 11)]))],
    "no source": lambda liar: [*liar.told(), liar.put(source=np.empty((0, 2), np.int64))],
    "a payload that its ranges are not": lambda liar: [*liar.told(), liar.put(payload=11)],
    "a part of a write": lambda liar: [*liar.told(), liar.put(earlier=1)],
    "a number again": lambda liar: [*liar.told(), liar.put(5), liar.put(5)],
    "a smaller number": lambda liar: [*liar.told(), liar.put(5), liar.put(4)],
    "a region again": lambda liar: [*liar.told(), liar.region()],
    "a second board": lambda liar: [liar.told()[0], liar.told()[0]],
    "a region without its descriptor": lambda liar: [(liar.region()[0], None)],
    "a board without its descriptor": lambda liar: [(frames.pack_board(), None)],
    "a pipe for a region": lambda liar: [(liar.region()[0], liar.pipe())],
    "a file for a region": lambda liar: [(liar.region()[0], liar.file())],
    "memory that can shrink": lambda liar: [(liar.region()[0], liar.unsealed())],
    "memory that can shrink for a board": lambda liar: [(frames.pack_board(), liar.unsealed())],
    "a region larger than its memory": lambda liar: [liar.region(size=SIZE + 1)],
    "a region beyond its memory": lambda liar: [liar.region(offset=SIZE)],
    "a region of nothing": lambda liar: [liar.region(size=0)],
    "descriptors that nobody asked for": lambda liar: [
        (frames.pack_moved(MovedFrame(0, 0, 0)), [liar.memory.fileno()] * 3) for _ in range(4)
    ],
    "more descriptors than are taken": lambda liar: [(b"\0", [liar.memory.fileno()] * 100)],
    "an ABORT of what was never made": lambda liar: [(pack_abort(7), None)],
    "an answer": lambda liar: [(pack_done(1, 10), None)],
    "a GO": lambda liar: [(pack_header(OwnKind.GO, 0, 1), None)],
    "a WRITE as over tcp": lambda liar: [
        (pack_request(Kind.WRITE, 1, TransferRequest("x", np.array([(0, 1)]), 1)), None)
    ],
    "a body over its limit": lambda liar: [(pack_header(OwnKind.PUT, 2**32 - 1, 1), None)],
    "a body too short": lambda liar: [(pack_header(OwnKind.PUT, 3, 1) + b"abc", None)],
    "a READ with a tag": lambda liar: [(read_of(liar.token, tag=b"x"), None)],
    "a READ with a digest": lambda liar: [(read_of(liar.token, digest=bytes(16)), None)],
    "a DROP of the wrong size": lambda liar: [(pack_header(OwnKind.DROP, 1, 0) + b"x", None)],
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_caller_is_cut_off(owner: ShmSide, lie: str) -> None:
    """The owner closes by itself: the liar does not hang up, it waits. Nothing lands that was not asked
    for rightly, and nothing stays open or mapped."""
    grant = owner.grant([(0, 100)], "liar")
    liar = Liar(grant.token)
    async with authenticated(owner) as sock:
        await send_all(sock, LIES[lie](liar))
        await until_closed(sock)
    landed = owner.memory[:10].tolist()
    assert landed in ([0] * 10, [255] * 10)
    if landed[0]:  # the number again came after a first one that was right
        assert "number" in lie
    assert not owner.memory[10:].any()
    await owner.revoke(grant)
    owner.memory[:] = 0
    liar.close()
    await assert_well(owner)


async def test_an_honest_caller_made_of_the_same_frames_is_served(owner: ShmSide) -> None:
    """So that the lies above fail for what they change."""
    grant = owner.grant([(0, 100)], "liar")
    liar = Liar(grant.token)
    async with authenticated(owner) as sock:
        await send_all(sock, [*liar.told(), liar.put()])
        await eventually(lambda: grant.landed_bytes == 10)
    assert (owner.memory[:10] == 255).all()
    liar.close()


async def test_an_address_where_no_memory_is(owner: ShmSide) -> None:
    grant = owner.grant([(0, 100)], "liar")
    liar = Liar(grant.token)
    region = frames.pack_region(RegionFrame(1, SIZE, False, 0, 4096))
    async with authenticated(owner) as sock:
        await send_all(sock, [liar.told()[0], (region, None), liar.put()])
        assert b"not there" in await until_closed(sock)
    assert not owner.memory.any()
    liar.close()
    await assert_well(owner)


async def test_a_caller_in_another_process_id_space_is_not_read(
    owner: ShmSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has no number here: 0 is what the kernel says."""
    monkeypatch.setattr("kvtransfer.shm.system._opened", lambda pid: None)
    async with shm_side("private", pattern(SIZE)) as private:
        link = await private.dial(owner)
        with pytest.raises(TransportUnfit):
            await link.write(private.call(WHOLE, owner.grant(WHOLE, "private"), WHOLE))
    assert not owner.memory.any()


async def test_a_caller_that_takes_no_answers_is_not_read_either(owner: ShmSide, monkeypatch) -> None:
    """Its requests wait in the kernel, not in our memory."""
    monkeypatch.setattr(channel, "BACKLOG_BYTES_MAX", 1 << 16)
    wanted = TransferRequest("g1.x.1", np.array([(0, 10)]), 10)

    async def flood(sock: socket.socket) -> None:
        for number in itertools.count(1):
            await asyncio.get_running_loop().sock_sendall(sock, pack_request(Kind.READ, number, wanted))

    async with authenticated(owner) as sock:
        flooding = asyncio.create_task(flood(sock))
        await eventually(lambda: owner.transport._sessions)
        (session,) = owner.transport._sessions.values()
        await eventually(lambda: not session._channel._reading)
        sent = session._last_request
        assert session._channel._backlog_bytes < 1 << 20
        await asyncio.sleep(0.01)
        assert session._last_request == sent
        flooding.cancel()
        await asyncio.wait([flooding])
    await eventually(lambda: not owner.transport._sessions)
    await assert_well(owner)


async def test_frames_in_pieces_are_put_together(owner: ShmSide) -> None:
    grant = owner.grant([(0, 100)], "liar")
    liar = Liar(grant.token)
    async with authenticated(owner) as sock:
        await send_all(sock, liar.told())
        frame, _ = liar.put()
        for at in range(len(frame)):
            await send_all(sock, [(frame[at : at + 1], None)])
            await asyncio.sleep(0)
        await eventually(lambda: grant.landed_bytes == 10)
    liar.close()


@asynccontextmanager
async def lying_owner(answer: Callable[[int], list], then_close: bool) -> AsyncIterator[dict[str, str | int]]:
    """The address of an owner that knows the secret, reads one request and answers with lies."""
    loop = asyncio.get_running_loop()

    async def serve(sock: socket.socket) -> None:
        with sock:
            admitted = await check_caller(sock, "liar", SECRET)
            await loop.sock_sendall(sock, admitted.welcome)
            data = b""
            while (number := _request_number(data)) is None:
                part = await loop.sock_recv(sock, 1 << 16)
                if not part:
                    return
                data += part
            await send_all(sock, answer(number))
            if not then_close:
                await asyncio.Event().wait()

    async def accept() -> None:
        async with asyncio.TaskGroup() as sessions:
            while True:
                sock, _ = await loop.sock_accept(listener)
                sock.setblocking(False)
                sessions.create_task(serve(sock))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.setblocking(False)
        name = f"moonpool-test-{random.Random().randbytes(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen()
        accepting = asyncio.create_task(accept())
        yield {"kind": "shm", "name": name}
        accepting.cancel()
        await asyncio.wait([accepting])


def _request_number(data: bytes) -> int | None:
    """Of the first READ or PUT in it that is whole."""
    at = 0
    while len(data) - at >= HEADER_BYTES:
        kind, body_bytes, number = struct.unpack_from("<B3xIQ", data, at)
        at += HEADER_BYTES + body_bytes
        if kind in (Kind.READ, OwnKind.PUT) and at <= len(data):
            return number
    return None


LIAR = Liar()


def go(number: int, **changed) -> tuple[bytes, None]:
    given = {
        "region_id": 1,
        "slot": 3,
        "epoch": 5,
        "digest": b"",
        "stretches": np.array([(0, SIZE)]),
        **changed,
    }
    return frames.pack_go(number, GoFrame(**given)), None


ANSWERS: list[tuple[str, Callable[[int], list], bool, type[TransferError]]] = [
    ("DONE", lambda n: [(pack_done(n, SIZE), None)], False, FrameError),
    ("another number", lambda n: [*LIAR.told(), go(n + 1)], False, FrameError),
    ("no region", lambda n: [LIAR.told()[0], go(n)], False, FrameError),
    ("no board", lambda n: [LIAR.region(), go(n)], False, FrameError),
    ("no such slot", lambda n: [*LIAR.told(), go(n, slot=10)], False, FrameError),
    ("too small a region", lambda n: [LIAR.told()[0], LIAR.region(size=SIZE - 1), go(n)], False, FrameError),
    ("stretches beyond", lambda n: [*LIAR.told(), go(n, stretches=np.array([(1, SIZE)]))], False, FrameError),
    ("a digest unasked", lambda n: [*LIAR.told(), go(n, digest=bytes(16))], False, FrameError),
    ("a broken ERROR", lambda n: [(pack_header(Kind.ERROR, 2, n) + b"\xff\xff", None)], False, FrameError),
    ("a request", lambda n: [(pack_header(Kind.READ, 0, n), None)], False, FrameError),
    ("noise", lambda n: [(random.Random(1).randbytes(5000), None)], False, FrameError),
    ("a pipe", lambda n: [(LIAR.region()[0], LIAR.pipe())], False, FrameError),
    ("half a frame", lambda n: [*LIAR.told(), (go(n)[0][:-1], None)], True, PeerLostError),
    ("nothing", lambda n: [], True, PeerLostError),
    ("no memory", lambda n: [LIAR.told()[0], (_NOWHERE, None), go(n)], False, PeerLostError),
]
_NOWHERE = frames.pack_region(RegionFrame(1, SIZE, False, 0, 4096))


@pytest.mark.parametrize(
    ("name", "answer", "then_close", "error"), ANSWERS, ids=[entry[0] for entry in ANSWERS]
)
async def test_a_lying_owner_fails_that_read(
    name: str, answer: Callable[[int], list], then_close: bool, error: type[TransferError]
) -> None:
    LIAR.pipe()  # opened before the leak check begins to look
    async with (
        no_leaks(),
        shm_side("reader", SharedBuffer.create(SIZE)) as reader,
        shm_side("honest", pattern(SIZE)) as honest,
        lying_owner(answer, then_close) as address,
    ):
        before = set(LIAR.opened)
        link = await reader.transport.dial(address, "liar")
        with pytest.raises(error) as raised:
            await link.read(reader.call(WHOLE, "g1.x.1", WHOLE))
        assert raised.type is error
        assert link.closed
        grant = honest.grant(WHOLE, "reader", Access.READ)
        honest_link = await reader.dial(honest)
        await honest_link.read(reader.call(WHOLE, grant, WHOLE))
        assert np.array_equal(reader.memory, honest.memory)
        for descriptor in set(LIAR.opened) - before:
            os.close(descriptor)
            LIAR.opened.remove(descriptor)


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: [*LIAR.told(), go(number)],
        lambda number: [(pack_done(number, SIZE - 1), None)],
        lambda number: [(pack_done(number + 1, SIZE), None)],
    ],
)
async def test_a_lying_owner_fails_that_write(answer: Callable[[int], list]) -> None:
    async with (
        no_leaks(),
        shm_side("writer", SharedBuffer.create(SIZE)) as writer,
        lying_owner(answer, False) as address,
    ):
        link = await writer.transport.dial(address, "liar")
        with pytest.raises(FrameError):
            await link.write(writer.call(WHOLE, "g1.x.1", WHOLE))
        assert link.closed


async def test_wrong_secret(owner: ShmSide) -> None:
    async with shm_side("stranger", pattern(SIZE), secret=b"another secret, as long") as stranger:
        with pytest.raises(AuthError):
            await stranger.dial(owner)
    await assert_well(owner)


async def test_silent_connections_are_closed_in_time_and_bounded() -> None:
    limits = Limits(handshakes_max=1, handshake_s_max=0.2)
    async with no_leaks(), shm_side("owner", SharedBuffer.create(SIZE), limits=limits) as owner:
        async with dialled(owner) as silent, dialled(owner) as second:
            assert await until_closed(second) == b""
            assert await until_closed(silent) == b""
        await assert_well(owner)


async def test_connections_of_peers_are_bounded() -> None:
    limits = Limits(connections_max=1)
    async with (
        no_leaks(),
        shm_side("owner", SharedBuffer.create(SIZE), limits=limits) as owner,
        shm_side("first", pattern(SIZE)) as first,
        shm_side("second", pattern(SIZE)) as second,
    ):
        link = await first.dial(owner)
        with pytest.raises(BusyError):
            await second.dial(owner)
        link.close()
        await eventually(lambda: not owner.transport._sessions)
        await second.dial(owner)


async def test_regions_that_a_peer_tells_of_are_bounded() -> None:
    limits = Limits(regions_max=3)
    async with no_leaks(), shm_side("owner", SharedBuffer.create(SIZE), limits=limits) as owner:
        liar = Liar()
        async with authenticated(owner) as sock:
            await send_all(sock, [liar.region(number) for number in range(4)])
            await until_closed(sock)
        liar.close()


async def test_nobody_at_the_address(owner: ShmSide) -> None:
    gone = {**owner.address, "name": "moonpool-nobody"}
    with pytest.raises(PeerLostError):
        await owner.transport.dial(gone, "nobody")
