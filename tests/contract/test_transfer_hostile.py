"""The tcp transport against peers that talk garbage or lie, over real sockets."""

import asyncio
import itertools
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.eventually import eventually
from tests.support.hostile import frame_like, handshake_like
from tests.support.transfer import Side, no_leaks, pattern, side
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, BusyError, FrameError, GrantError, Limits, PeerLostError, TransferError
from kvtransfer.grants import Arrival
from kvtransfer.limits import RANGES_MAX, TAG_BYTES_MAX, TOKEN_BYTES_MAX
from kvtransfer.stream import frames
from kvtransfer.stream.frames import ErrorCode, Kind, TransferRequest, pack_header, pack_request
from kvtransfer.stream.inbox import STAGING_BYTES
from kvtransfer.stream.negotiation import check_caller, prove_as_caller

pytestmark = pytest.mark.contract

SIZE = 1 << 20
WHOLE = np.array([(0, SIZE)])
OVERFLOWING = np.array([(0, 2**62)] * 4)
TIMEOUT_S = 10.0
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def owner() -> AsyncIterator[Side]:
    async with no_leaks(), side("tcp", "owner", np.zeros(SIZE, np.uint8)) as made:
        yield made


@asynccontextmanager
async def dialled(owner: Side) -> AsyncIterator[socket.socket]:
    """A bare connection to the owner's port."""
    address = msgspec.json.decode(owner.endpoint.descriptor())["transports"][0]
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address["host"], address["port"]))
        yield sock


@asynccontextmanager
async def authenticated(owner: Side, link_id: bytes = bytes(16)) -> AsyncIterator[socket.socket]:
    async with dialled(owner) as sock:
        await prove_as_caller(sock, "liar", "owner", SECRET, link_id)
        yield sock


async def send_and_end(sock: socket.socket, data: bytes) -> bytes:
    """Send, say that no more comes, and return all that the other side says until it closes too."""
    loop = asyncio.get_running_loop()
    answer = b""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            await loop.sock_sendall(sock, data)
            sock.shutdown(socket.SHUT_WR)
            while part := await loop.sock_recv(sock, 1 << 16):
                answer += part
        except OSError:  # it closed while we still sent
            return answer
    return answer


async def assert_well(owner: Side) -> None:
    """The owner still serves an honest peer, and nobody else wrote to its memory."""
    assert not owner.memory.any()
    async with side("tcp", "honest", pattern(SIZE)) as honest:
        grant = owner.grant([(0, SIZE)], "honest")
        peer = await honest.connect(owner)
        await peer.write(honest.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
        assert np.array_equal(owner.memory, honest.memory)
    await owner.endpoint.revoke(grant)
    owner.memory[:] = 0


def run_fuzzed(attack: Callable[[Side], Awaitable[None]]) -> None:
    """One example: an owner, the attack, and the owner is well and leaks nothing."""

    async def example() -> None:
        async with no_leaks(), side("tcp", "owner", np.zeros(SIZE, np.uint8)) as owner:
            await attack(owner)
            await assert_well(owner)

    asyncio.run(example())


@FUZZ
@given(handshake_like())
def test_garbage_before_the_handshake(garbage: bytes) -> None:
    async def attack(owner: Side) -> None:
        async with dialled(owner) as sock:
            await send_and_end(sock, garbage)

    run_fuzzed(attack)


@FUZZ
@given(st.lists(st.one_of(frame_like(8), st.binary(max_size=500)), min_size=1, max_size=8))
def test_garbage_after_a_good_handshake(parts: list[bytes]) -> None:
    async def attack(owner: Side) -> None:
        owner.grant([(0, SIZE)], "somebody")
        async with authenticated(owner) as sock:
            await send_and_end(sock, b"".join(parts))

    run_fuzzed(attack)


@FUZZ
@given(st.integers(0, 400), st.integers(0, 255), st.integers(1, 400))
def test_a_good_write_with_one_byte_changed_lands_in_the_grant_or_not_at_all(
    at: int, value: int, granted: int
) -> None:
    """Whatever the changed byte means, nothing outside the granted ranges is touched."""

    async def attack(owner: Side) -> None:
        grant = owner.grant([(1000, granted)], "liar")
        ranges = np.array([(1000, granted)])
        data = bytearray(
            pack_request(Kind.WRITE, 1, TransferRequest(grant.token, ranges, granted))
            + pack_header(Kind.DATA, granted, 1)
            + b"\xff" * granted
        )
        data[at % len(data)] = value
        async with authenticated(owner) as sock:
            await send_and_end(sock, bytes(data))
        inside = owner.memory[1000 : 1000 + granted].copy()
        assert owner.endpoint.written_bytes(grant) <= granted
        owner.memory[1000 : 1000 + granted] = 0
        assert set(inside.tolist()) <= {0, 255, value}
        await owner.endpoint.revoke(grant)

    run_fuzzed(attack)


def _write(token: str, count: int, request: int = 1, **fields: Any) -> bytes:
    return pack_request(Kind.WRITE, request, TransferRequest(token, np.array([(0, count)]), count, **fields))


def _with(frame: bytes, at: int, data: bytes) -> bytes:
    """A request with some bytes of its body replaced."""
    at += frames.HEADER_BYTES
    return frame[:at] + data + frame[at + len(data) :]


RANGE_COUNT_AT, TOKEN_BYTES_AT, FLAGS_AT = 16, 20, 25


@st.composite
def talk(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """What a caller says: well-formed frames, not always those that are due."""
    words = st.tuples(
        st.sampled_from(["write", "write", "data", "data", "data", "abort", "read"]),
        st.integers(0, 3),  # how far the request number is from the last one opened
        st.integers(0, 5000),  # where
        st.integers(0, 5000),  # how many bytes
    )
    return draw(st.lists(words, min_size=1, max_size=12))


@FUZZ
@given(talk(), st.integers(0, 2**32))
def test_whole_streams_of_frames_land_in_the_grant_or_not_at_all(
    said: list[tuple[str, int, int, int]], seed: int
) -> None:
    async def attack(owner: Side) -> None:
        write = owner.grant([(1000, 3000)], "liar", on_arrival=lambda arrival: None)
        read = owner.grant([(0, SIZE)], "liar", access=Access.READ)
        wire, last = b"", 0
        for word, back, at, count in said:
            match word:
                case "write" | "read":
                    last += 1
                    token = write.token if word == "write" else read.token
                    tag = b"tag" if word == "write" and back else b""
                    wanted = TransferRequest(token, np.array([(at, count)]), count, tag)
                    wire += pack_request(Kind.WRITE if word == "write" else Kind.READ, last, wanted)
                case "data":
                    wire += pack_header(Kind.DATA, count, max(0, last - back)) + b"\xff" * count
                case "abort":
                    wire += frames.pack_abort(max(0, last - back))
        chance = random.Random(seed)
        async with authenticated(owner) as sock:
            while wire:
                cut = chance.randint(1, 4000)
                try:
                    await asyncio.get_running_loop().sock_sendall(sock, wire[:cut])
                except OSError:
                    break
                wire = wire[cut:]
            await send_and_end(sock, b"")
        inside = owner.memory[1000:4000].copy()
        assert set(np.unique(inside).tolist()) <= {0, 255}
        owner.memory[1000:4000] = 0
        await owner.endpoint.revoke(write)
        await owner.endpoint.revoke(read)

    run_fuzzed(attack)


@pytest.mark.parametrize(
    "lie",
    [
        lambda token: _write(token, 10) + pack_header(Kind.DATA, 11, 1) + bytes(11),
        lambda token: _write(token, 10) + pack_header(Kind.DATA, 0, 1),
        lambda token: _write(token, 10) + pack_header(Kind.DATA, 5, 2) + bytes(5),
        lambda token: _write(token, 10) + _write(token, 10),
        lambda token: _write(token, 10, request=5) + _write(token, 10, request=4),
        lambda token: pack_request(Kind.WRITE, 1, TransferRequest(token, np.array([(0, 10)]), 11)),
        lambda token: pack_request(
            Kind.WRITE, 1, TransferRequest(token, np.array([(0, 2**62), (0, 2**62)] * 2), 0)
        ),
        lambda token: pack_request(Kind.READ, 1, TransferRequest(token, np.array([(0, 10)]), 10, b"tag")),
        lambda token: _write(token, 10, digest=bytes(15)),
        lambda token: _write(token, 10, tag=bytes(TAG_BYTES_MAX + 1)),
        lambda token: _write("t" * (TOKEN_BYTES_MAX + 1), 10),
        lambda token: _with(_write(token, 10), FLAGS_AT, b"\xff"),
        lambda token: _with(_write(token, 10), RANGE_COUNT_AT, struct.pack("<I", RANGES_MAX + 1)),
        lambda token: _with(_write(token, 10), RANGE_COUNT_AT, struct.pack("<I", 2)),
        lambda token: _with(_write(token, 10), TOKEN_BYTES_AT, struct.pack("<H", 5)),
        lambda token: _write("\x80\xff", 10),
        lambda token: frames.pack_done(1, 10),
        lambda token: frames.pack_abort(1),
        lambda token: pack_header(Kind.WRITE, 2**32 - 1, 1),
        lambda token: pack_header(Kind.DATA, 2**32 - 1, 1),
        lambda token: pack_header(Kind.READ, 3, 1) + b"abc",
    ],
)
async def test_a_lying_caller_is_cut_off(owner: Side, lie: Callable[[str], bytes]) -> None:
    """The owner closes the connection by itself: the liar does not hang up, it waits."""
    grant = owner.grant([(0, SIZE)], "liar")
    loop = asyncio.get_running_loop()
    async with authenticated(owner) as sock, asyncio.timeout(TIMEOUT_S):
        await loop.sock_sendall(sock, lie(grant.token))
        try:
            while await loop.sock_recv(sock, 1 << 16):
                pass
        except ConnectionResetError:
            pass
    await owner.endpoint.revoke(grant)
    await assert_well(owner)


@asynccontextmanager
async def lying_owner(answer: Callable[[int], bytes], then_close: bool) -> AsyncIterator[str]:
    """The descriptor of an owner that knows the secret, reads one request and answers with lies."""
    loop = asyncio.get_running_loop()

    async def serve(sock: socket.socket) -> None:
        with sock:
            welcome = (await check_caller(sock, "liar", SECRET)).welcome
            await loop.sock_sendall(sock, welcome)
            header = b""
            while len(header) < frames.HEADER_BYTES:
                part = await loop.sock_recv(sock, frames.HEADER_BYTES - len(header))
                if not part:
                    return  # a stream of a link that ended on another one
                header += part
            await loop.sock_sendall(
                sock, answer(frames.parse_header(memoryview(header), frames.BODY_BYTES_MAX).request)
            )
            if not then_close:
                await asyncio.Event().wait()

    async def accept() -> None:
        async with asyncio.TaskGroup() as sessions:
            while True:
                sock, _ = await loop.sock_accept(listener)
                sock.setblocking(False)
                sessions.create_task(serve(sock))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(accept())
        address = {"kind": "tcp", "host": "127.0.0.1", "port": listener.getsockname()[1]}
        yield msgspec.json.encode({"name": "liar", "transports": [address], "v": 1}).decode()
        accepting.cancel()
        await asyncio.wait([accepting])


@pytest.mark.parametrize(
    ("answer", "then_close", "error"),
    [
        (lambda request: frames.pack_done(request, SIZE), False, FrameError),
        (lambda request: frames.pack_done(request + 1, SIZE), False, FrameError),
        (lambda request: pack_header(Kind.DATA, SIZE + 1, request) + bytes(SIZE + 1), False, FrameError),
        (lambda request: pack_header(Kind.DATA, 1, request + 7) + b"x", False, FrameError),
        (lambda request: pack_header(Kind.ERROR, 2, request) + b"\xff\xff", False, FrameError),
        (lambda request: pack_header(Kind.DONE, 3, request) + b"abc", False, FrameError),
        (lambda request: frames.pack_done(request, SIZE, bytes(15)), False, FrameError),
        (lambda request: pack_header(Kind.ERROR, 501, request) + bytes(501), False, FrameError),
        (lambda request: frames.pack_error(request + 1, ErrorCode.BUSY, "no") * 1000, False, FrameError),
        (lambda request: pack_header(Kind.WRITE, 0, request), False, FrameError),
        (lambda request: random.Random(1).randbytes(5000), False, FrameError),
        (lambda request: pack_header(Kind.DATA, SIZE, request) + bytes(1000), True, PeerLostError),
        (lambda request: frames.pack_done(request, SIZE)[:-1], True, PeerLostError),
        (lambda request: b"", True, PeerLostError),
    ],
)
async def test_a_lying_owner_fails_that_read(
    answer: Callable[[int], bytes], then_close: bool, error: type[TransferError]
) -> None:
    async with (
        no_leaks(),
        side("tcp", "reader", np.zeros(SIZE, np.uint8)) as reader,
        side("tcp", "honest", pattern(SIZE)) as honest,
        lying_owner(answer, then_close) as descriptor,
    ):
        liar = await reader.endpoint.connect(descriptor, timeout_s=TIMEOUT_S)
        for _ in range(2):  # the second call connects anew
            with pytest.raises(error) as raised:
                await liar.read(reader.region, WHOLE, "g1.x.1", WHOLE, timeout_s=TIMEOUT_S)
            assert raised.type is error
        grant = honest.grant([(0, SIZE)], "reader", access=Access.READ)
        peer = await reader.connect(honest)
        await peer.read(reader.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
        assert np.array_equal(reader.memory, honest.memory)


@pytest.mark.parametrize(("direction", "landed"), [("read", ()), ("write", ((0, SIZE),))])
async def test_what_a_lying_owner_says_has_landed_is_believed_only_as_far_as_it_can_be_true(
    direction: str, landed: tuple[tuple[int, int], ...]
) -> None:
    async with (
        no_leaks(),
        side("tcp", "caller", np.zeros(SIZE, np.uint8)) as caller,
        lying_owner(
            lambda request: frames.pack_error(request, ErrorCode.BUSY, "no", 2**63), False
        ) as descriptor,
    ):
        liar = await caller.endpoint.connect(descriptor, timeout_s=TIMEOUT_S)
        call = liar.read if direction == "read" else liar.write
        with pytest.raises(BusyError) as raised:
            await call(caller.region, WHOLE, "g1.x.1", WHOLE, timeout_s=TIMEOUT_S)
        assert raised.value.landed == landed


@pytest.mark.parametrize("name", ["refused writes", "answers unread"])
async def test_a_caller_that_only_asks_is_cut_off(owner: Side, name: str) -> None:
    """What it makes us remember is bounded: refused writes whose payload never comes, answers that it never
    reads."""
    grant = owner.grant([(0, SIZE)], "liar")
    token, count = ("g1.x.1", 10) if name == "refused writes" else (grant.token, 0)

    async def ask(sock: socket.socket) -> None:
        for first in itertools.count(1, 500):
            asked = b"".join(_write(token, count, request) for request in range(first, first + 500))
            await asyncio.get_running_loop().sock_sendall(sock, asked)

    async with authenticated(owner) as sock, asyncio.timeout(4 * TIMEOUT_S):
        with pytest.raises(ConnectionError):
            await ask(sock)
    await owner.endpoint.revoke(grant)
    await assert_well(owner)


async def test_a_flood_of_aborts_is_harmless(owner: Side) -> None:
    grant = owner.grant([(0, SIZE)], "liar")
    async with authenticated(owner) as sock:
        answer = await send_and_end(sock, _write(grant.token, 10) + frames.pack_abort(1) * 20_000)
        assert answer == frames.pack_error(1, ErrorCode.ABORTED, "aborted by the caller")
    await owner.endpoint.revoke(grant)
    await assert_well(owner)


@pytest.mark.parametrize("cut", [5, frames.HEADER_BYTES, 40, -100])
async def test_a_caller_that_stalls_in_the_middle_of_a_frame_holds_up_nobody(owner: Side, cut: int) -> None:
    grant = owner.grant([(0, SIZE)], "liar")
    wire = _write(grant.token, 1000) + pack_header(Kind.DATA, 1000, 1) + bytes(1000)
    async with authenticated(owner) as sock:
        await asyncio.get_running_loop().sock_sendall(sock, wire[:cut])
        await assert_well(owner)
        await owner.endpoint.revoke(grant)
        await assert_well(owner)


async def test_earlier_bytes_of_a_tag_must_have_landed(owner: Side) -> None:
    """A tag is for bytes that are there, whatever the caller says."""
    arrivals: list[Arrival] = []
    grant = owner.grant([(0, SIZE)], "liar", on_arrival=arrivals.append)
    nothing = np.empty((0, 2), np.int64)
    lie = TransferRequest(grant.token, nothing, 0, tag=b"tag", earlier_bytes=1)
    async with authenticated(owner) as sock:
        answer = await send_and_end(sock, pack_request(Kind.WRITE, 1, lie))
    assert isinstance(frames.parse_error(bytearray(answer[frames.HEADER_BYTES :])), GrantError)
    assert arrivals == []
    await owner.endpoint.revoke(grant)


async def test_silent_connections_are_closed_in_time() -> None:
    limits = Limits(handshake_s_max=0.1)
    async with no_leaks(), side("tcp", "owner", np.zeros(SIZE, np.uint8), limits=limits) as owner:
        async with dialled(owner) as silent, asyncio.timeout(TIMEOUT_S):
            assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
        await assert_well(owner)


async def test_silent_connections_are_bounded() -> None:
    limits = Limits(handshakes_max=2, handshake_s_max=2 * TIMEOUT_S)
    async with no_leaks(), side("tcp", "owner", np.zeros(SIZE, np.uint8), limits=limits) as owner:
        async with dialled(owner), dialled(owner), dialled(owner) as third, asyncio.timeout(TIMEOUT_S):
            assert await asyncio.get_running_loop().sock_recv(third, 1) == b""
        await assert_well(owner)


async def test_a_turn_of_the_loop_receives_a_bounded_number_of_bytes() -> None:
    """However much waits in the kernel."""
    limits = Limits(turn_bytes=4096)
    async with no_leaks(), side("tcp", "owner", np.zeros(SIZE, np.uint8), limits=limits) as owner:
        grant = owner.grant([(0, SIZE)], "liar")
        async with authenticated(owner) as sock:
            count = sock.send(_write(grant.token, SIZE) + pack_header(Kind.DATA, SIZE, 1) + b"\xff" * SIZE)
            assert count > 4 * STAGING_BYTES
            landed = 0
            while landed < count - STAGING_BYTES:
                await asyncio.sleep(0)
                now = owner.endpoint.written_bytes(grant)
                assert now - landed <= STAGING_BYTES + limits.turn_bytes
                landed = now


async def test_connections_of_peers_are_bounded() -> None:
    limits = Limits(connections_max=1)
    async with (
        no_leaks(),
        side("tcp", "owner", np.zeros(SIZE, np.uint8), limits=limits) as owner,
        side("tcp", "first", pattern(SIZE)) as first,
        side("tcp", "second", pattern(SIZE)) as second,
    ):
        await first.connect(owner)
        with pytest.raises(TransferError, match="too many connections"):
            await second.connect(owner)
        await first.endpoint.close()
        grant = owner.grant([(0, SIZE)], "second")
        peer = await second.connect(owner)
        await peer.write(second.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)


async def flood(sock: socket.socket) -> None:
    """Send until the other side does not take it any more."""
    while True:
        await asyncio.get_running_loop().sock_sendall(sock, b"\xff" * 1000)


async def test_a_new_connection_of_a_peer_ends_its_older_one(owner: Side) -> None:
    """What the old one had in flight cannot land after the bytes of the new one."""
    grant = owner.grant([(0, SIZE)], "liar")
    loop = asyncio.get_running_loop()
    async with authenticated(owner) as old:
        await loop.sock_sendall(old, _write(grant.token, SIZE) + pack_header(Kind.DATA, SIZE, 1) + b"\xff")
        await eventually(lambda: owner.endpoint.written_bytes(grant) == 1)
        async with authenticated(owner, link_id=b"x" * 16) as new:
            with pytest.raises(OSError, match=r"reset|pipe"):
                await flood(old)
            assert owner.endpoint.written_bytes(grant) == 1
            await loop.sock_sendall(new, _write(grant.token, 1) + pack_header(Kind.DATA, 1, 1) + b"\0")
            done = frames.pack_done(1, 1)
            async with asyncio.timeout(TIMEOUT_S):
                assert await loop.sock_recv(new, 1000) == done
    assert not owner.memory.any()
