"""Calls in pieces: each byte once, the tag last, what is known when one fails; how an owner asks for them."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import BusyError, FrameError, Limits, Region, TransportUnfit
from kvtransfer.errors import PieceTooLarge
from kvtransfer.limits import PIECE_BYTES_MIN
from kvtransfer.memory import no_ranges
from kvtransfer.piecewise import PIECES_AT_ONCE, Piece, in_pieces
from kvtransfer.stream import frames
from kvtransfer.stream.frames import HEADER_BYTES, ErrorCode, Kind, TransferRequest
from kvtransfer.transport import Call, LocalMemory

pytestmark = pytest.mark.unit


def call_of(count: int, tag: bytes = b"") -> Call:
    ranges = np.array([(5, count)]) if count else no_ranges()
    memory = LocalMemory(Region(1, bytearray(count + 5)), ranges, count)
    return Call(memory, "token", ranges + np.array([2, 0]), tag, piece_bytes_max=10)


@given(st.integers(0, 100), st.integers(1, 30), st.booleans())
async def test_every_byte_goes_once_and_the_tag_goes_last(count: int, size: int, tagged: bool) -> None:
    moved: list[Piece] = []
    running = 0

    async def move(piece: Piece) -> None:
        nonlocal running
        running += 1
        assert running <= (1 if piece.tag else PIECES_AT_ONCE)
        await asyncio.sleep(0)
        running -= 1
        moved.append(piece)

    whole = call_of(count, b"tag" if tagged else b"")
    await in_pieces(whole, size, move)
    in_order = sorted(moved, key=lambda one: one.start)
    assert [at for piece in in_order for at in span(piece)] == list(range(count))
    assert [piece.tag for piece in moved if piece.tag] == ([b"tag"] if tagged else [])
    if tagged:
        last = moved[-1].call(whole)
        assert (last.tag, last.earlier_bytes) == (b"tag", count - moved[-1].count)
    for piece in moved:
        made = piece.call(whole)
        assert made.memory.payload_bytes == piece.count
        expected = [[5 + piece.start, piece.count]] if piece.count else []
        assert made.memory.ranges.tolist() == expected
        assert (made.remote - [2, 0]).tolist() == expected
        assert made.piece_bytes_max == 10


def span(piece: Piece) -> range:
    return range(piece.start, piece.start + piece.count)


async def test_a_piece_that_fails_is_the_calls_error_with_what_landed_of_all() -> None:
    async def move(piece: Piece) -> None:
        if piece.start == 20:
            error = BusyError("no more")
            error.landed = ((0, 4),)
            raise error

    with pytest.raises(BusyError, match="no more") as raised:
        await in_pieces(call_of(100), 10, move)
    assert raised.value.landed == ((0, 10), (10, 10), (20, 4), *((at, 10) for at in range(30, 100, 10)))
    assert not raised.value.settled


@pytest.mark.parametrize("tag", [b"", b"tag"])
async def test_pieces_that_the_transport_does_not_serve_leave_none_on_its_way(tag: bytes) -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def move(piece: Piece) -> None:
        begun.append(piece.start)
        for _ in range(piece.start):  # the later ones take longer
            await asyncio.sleep(0)
        ended.append(piece.start)
        raise TransportUnfit("not this memory")

    with pytest.raises(TransportUnfit) as raised:
        await in_pieces(call_of(100, tag), 10, move)
    assert begun == ended == [0, 10, 20, 30]
    assert raised.value.settled
    assert raised.value.landed == ()


def test_an_owner_says_how_large_pieces_may_be() -> None:
    told = frames.pack_error(1, ErrorCode.PIECES, "at most so many", 1 << 20)
    error = frames.parse_error(bytearray(told[HEADER_BYTES:]))
    assert isinstance(error, PieceTooLarge)
    assert error.piece_bytes_max == 1 << 20
    assert error.landed == ()


def test_an_owner_cannot_ask_for_tiny_pieces() -> None:
    told = frames.pack_error(1, ErrorCode.PIECES, "", PIECE_BYTES_MIN - 1)
    with pytest.raises(FrameError, match="at least 4096"):
        frames.parse_error(bytearray(told[HEADER_BYTES:]))
    with pytest.raises(ValueError, match="bounce_slot_bytes must be at least 4096"):
        Limits(bounce_slot_bytes=PIECE_BYTES_MIN - 1)


def test_that_a_write_waits_for_go_is_said_on_the_wire() -> None:
    for waits in (False, True):
        wanted = TransferRequest("token", np.array([(0, 3)]), 3, awaits_go=waits)
        packed = frames.pack_request(Kind.WRITE, 1, wanted)
        assert frames.parse_request(bytearray(packed[HEADER_BYTES:])).awaits_go is waits
