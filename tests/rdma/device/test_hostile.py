"""Peers that know the secret and talk garbage on the control stream of an rdma link."""

import asyncio
import random
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
from tests.support.transfer import Side, no_leaks, pattern, side
from tests.support.transfer_peer import SECRET

from kvtransfer import Access, FrameError, PeerLostError, TransferError
from kvtransfer.rdma import frames as own
from kvtransfer.rdma.frames import LaneEnd, RdmaKind
from kvtransfer.rdma.work import RemoteKeys
from kvtransfer.stream import frames
from kvtransfer.stream.frames import Kind, TransferRequest, pack_header, pack_request
from kvtransfer.stream.handshake import LINK_ID_BYTES
from kvtransfer.stream.negotiation import check_caller, prove_as_caller

pytestmark = pytest.mark.rdma

SIZE = 1 << 20
WHOLE = [(0, SIZE)]
TIMEOUT_S = 20.0
LANE = LaneEnd(0, "0000:0000:0000:0000:0000:ffff:c0a8:b101", 0x123456, 7, 0, 4096, 1)
ATTACKS = 30


def address_of(descriptor: str) -> dict[str, str | int]:
    return msgspec.json.decode(descriptor)["transports"][0]


@asynccontextmanager
async def authenticated(owner: Side, name: str = "liar") -> AsyncIterator[socket.socket]:
    address = address_of(owner.endpoint.descriptor())
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address["host"], address["port"]))
        await prove_as_caller(sock, name, "owner", SECRET, secrets.token_bytes(LINK_ID_BYTES))
        yield sock


async def until_closed(sock: socket.socket) -> bytes:
    """All that the other side says until it closes the connection by itself."""
    answer = b""
    async with asyncio.timeout(TIMEOUT_S):
        try:
            while part := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                answer += part
        except OSError:
            return answer
    return answer


async def assert_well(owner: Side) -> None:
    assert not owner.memory.any()
    async with side("rdma", "honest", pattern(SIZE)) as honest:
        grant = owner.grant(WHOLE, "honest")
        peer = await honest.connect(owner)
        await peer.write(honest.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
        assert np.array_equal(owner.memory, honest.memory)
    await owner.endpoint.revoke(grant)
    owner.memory[:] = 0


def _request(kind: Kind, token: str, count: int, request: int = 1, tag: bytes = b"") -> bytes:
    return pack_request(kind, request, TransferRequest(token, np.array([(0, count)]), count, tag))


LANES = own.pack_lanes([LANE])
READY = own.pack_ready([True])
LIES: dict[str, Callable[[str], bytes]] = {
    "a request before the lanes": lambda token: _request(Kind.WRITE, token, 10),
    "READY before the lanes": lambda token: READY,
    "lanes twice": lambda token: LANES + LANES,
    "a device that is not there": lambda token: own.pack_lanes([LaneEnd(9, *_rest(LANE))]),
    "no lane": lambda token: pack_header(RdmaKind.LANES, 0, 0),
    "half a lane": lambda token: pack_header(RdmaKind.LANES, 22, 0) + LANES[16:38],
    "ready without a lane": lambda token: LANES + pack_header(RdmaKind.READY, 1, 0) + b"\0",
    "ready for more lanes": lambda token: LANES + own.pack_ready([True, True]),
    "ready twice": lambda token: LANES + READY + READY,
    "data": lambda token: LANES + READY + pack_header(Kind.DATA, 4, 1) + b"data",
    "keys from a caller": lambda token: LANES + READY + own.pack_go(1, _keys()),
    "a reset from a caller": lambda token: LANES + READY + own.pack_reset([1]),
    "the end of a write": lambda token: LANES + READY + _request(Kind.WRITE, token, 10) + own.pack_fin(1),
    "an abort of nothing": lambda token: LANES + READY + frames.pack_abort(7),
    "numbers that fall": lambda token: (
        LANES + READY + _request(Kind.WRITE, token, 10, 5) + _request(Kind.WRITE, token, 10, 4)
    ),
    "a number that no immediate holds": lambda token: (
        LANES + READY + _request(Kind.WRITE, token, 10, 1 << 32)
    ),
    "a read with a tag": lambda token: LANES + READY + _request(Kind.READ, token, 10, tag=b"tag"),
}


def _rest(lane: LaneEnd) -> tuple[str, int, int, int, int, int]:
    return lane.gid, lane.number, lane.first_packet, lane.lid, lane.mtu_bytes, lane.reads_max


def _keys() -> RemoteKeys:
    return RemoteKeys(0, np.array([0]), np.array([SIZE]), np.zeros((1, 1), np.uint32))


async def test_a_lying_caller_is_cut_off_and_the_owner_is_well() -> None:
    async with no_leaks(), side("rdma", "owner", np.zeros(SIZE, np.uint8)) as owner:
        grant = owner.grant(WHOLE, "liar")
        for name, lie in LIES.items():
            async with authenticated(owner) as sock:
                await asyncio.get_running_loop().sock_sendall(sock, lie(grant.token))
                try:
                    await until_closed(sock)
                except TimeoutError:
                    pytest.fail(f"not cut off: {name}")
        await owner.endpoint.revoke(grant)
        await assert_well(owner)


async def test_garbage_on_the_control_stream_leaves_the_owner_well() -> None:
    chance = random.Random(7)
    loop = asyncio.get_running_loop()
    async with no_leaks(), side("rdma", "owner", np.zeros(SIZE, np.uint8)) as owner:
        grant = owner.grant(WHOLE, "liar")
        good = LANES + READY + _request(Kind.WRITE, grant.token, SIZE) + _request(Kind.READ, "x", 9, 2)
        for _ in range(ATTACKS):
            garbage = bytearray(good)
            for _ in range(chance.randrange(1, 4)):
                garbage[chance.randrange(len(garbage))] = chance.randrange(256)
            if chance.random() < 0.3:
                kind, length = chance.randrange(24), chance.choice([0, 5, 32, 2**32 - 1])
                garbage += struct.pack("<B3xIQ", kind, length, chance.randrange(2**64))
                garbage += chance.randbytes(40)
            async with authenticated(owner) as sock:
                try:
                    await loop.sock_sendall(sock, bytes(garbage))
                    sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass  # it was cut off already
                await until_closed(sock)
        await owner.endpoint.revoke(grant)
        await assert_well(owner)


@asynccontextmanager
async def lying_owner(gids: str, script: list[Callable[[], bytes]]) -> AsyncIterator[str]:
    """The descriptor of an owner that knows the secret and answers each frame with the next lie."""
    loop = asyncio.get_running_loop()

    async def receive(sock: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await loop.sock_recv(sock, count - len(data))
            if not part:
                raise ConnectionError
            data += part
        return data

    async def serve(sock: socket.socket) -> None:
        with sock:
            sock.setblocking(False)
            try:
                admitted = await check_caller(sock, "liar", SECRET)
                await loop.sock_sendall(sock, admitted.welcome)
                for lie in script:
                    _, body_bytes, _ = struct.unpack("<B3xIQ", await receive(sock, 16))
                    await receive(sock, body_bytes)
                    await loop.sock_sendall(sock, lie())
                await asyncio.Event().wait()
            except OSError:
                return

    async def accept() -> None:
        async with asyncio.TaskGroup() as sessions:
            while True:
                sock, _ = await loop.sock_accept(listener)
                sessions.create_task(serve(sock))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(accept())
        port = listener.getsockname()[1]
        address = {"kind": "rdma", "host": "127.0.0.1", "port": port, "gids": gids}
        yield msgspec.json.encode({"name": "liar", "transports": [address], "v": 1}).decode()
        accepting.cancel()
        await asyncio.wait([accepting])


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([lambda: own.pack_lanes([LANE, LANE, LANE])], FrameError),
        ([lambda: own.pack_lanes([LaneEnd(5, *_rest(LANE))])], FrameError),
        ([lambda: pack_header(RdmaKind.LANES, 3, 0) + b"abc"], FrameError),
        ([lambda: own.pack_go(1, _keys())], FrameError),
        ([lambda: frames.pack_done(1, 5)], FrameError),
        ([lambda: random.Random(3).randbytes(4000)], FrameError),
        ([lambda: own.pack_lanes([LANE])], PeerLostError),  # a queue pair that is not there
    ],
)
async def test_a_lying_owner_fails_the_connection(
    script: list[Callable[[], bytes]], error: type[TransferError]
) -> None:
    async with no_leaks(), side("rdma", "reader", np.zeros(SIZE, np.uint8)) as reader:
        async with lying_owner(LANE.gid, script) as descriptor:
            with pytest.raises(error) as raised:
                await reader.endpoint.connect(descriptor, timeout_s=TIMEOUT_S)
            assert raised.type is error
        async with side("rdma", "honest", pattern(SIZE)) as honest:
            grant = honest.grant(WHOLE, "reader", access=Access.READ)
            peer = await reader.connect(honest)
            await peer.read(reader.region, WHOLE, grant.token, WHOLE, timeout_s=TIMEOUT_S)
            assert np.array_equal(reader.memory, honest.memory)
