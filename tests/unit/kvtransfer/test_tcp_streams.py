"""Outbox and inbox joined by a wire that cuts bytes anywhere: no socket, no loop."""

import itertools
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import Access, FrameError, Region
from kvtransfer.grants import GrantTable
from kvtransfer.memory import FEW_RANGES, Cursor, checked_ranges, copy_into
from kvtransfer.stream import frames
from kvtransfer.stream.frames import Header, Kind, TransferRequest
from kvtransfer.stream.inbox import STAGING_BYTES, Inbox, Incoming
from kvtransfer.stream.outbox import Outbox, Outgoing
from kvtransfer.stream.vectors import Vectors

pytestmark = pytest.mark.unit

SIZE = 4000
PIPE_BYTES = 100_000
KINDS = frames.accepts(Kind.DATA, Kind.ERROR, Kind.DONE)


class Receiver:
    """Lands payload of known requests and remembers the frames."""

    def __init__(self) -> None:
        self.incomings: dict[int, Incoming] = {}
        self.frames: list[tuple[Header, bytes]] = []

    def incoming(self, request: int, count: int) -> Incoming:
        if request not in self.incomings:
            raise FrameError("unknown request")
        return self.incomings[request]

    def on_payload(self, incoming: Incoming) -> None:
        pass

    def on_frame(self, header: Header, body: bytearray) -> None:
        self.frames.append((header, bytes(body)))
        if header.kind == Kind.ERROR:  # a closing frame
            assert self.incomings[header.request].remaining == 0


def deliver(inbox: Inbox, data: bytes, turn_bytes: int, cuts: random.Random | None = None) -> None:
    """Hand `data` over as a socket would: as much at once as the buffers take, or less."""
    rest = memoryview(data)
    while rest:
        offered = inbox.pieces(turn_bytes)
        room = offered.total_bytes if isinstance(offered, Vectors) else sum(map(len, offered))
        assert room
        room = min(room, len(rest), PIPE_BYTES)
        count = room if cuts is None else cuts.randint(1, room)
        if isinstance(offered, Vectors):
            with piped() as (reader, writer):
                writer.send(rest[:count])
                assert offered.receive(reader.fileno()) == count
        else:
            assert all(len(view) for view in offered)
            copy_into(offered, rest[:count])
        inbox.received(count)
        rest = rest[count:]


def gathered(pieces: list[memoryview] | Vectors) -> bytes:
    """What would be sent."""
    if isinstance(pieces, Vectors):
        with piped() as (reader, writer):
            assert pieces.send(writer.fileno()) == pieces.total_bytes
            return reader.recv(PIPE_BYTES)
    return b"".join(pieces)


@contextmanager
def piped() -> Iterator[tuple[socket.socket, socket.socket]]:
    reader, writer = socket.socketpair()
    with reader, writer:
        yield reader, writer


@dataclass
class Transfer:
    source: np.ndarray
    target: np.ndarray
    source_ranges: np.ndarray
    target_ranges: np.ndarray

    def expected(self) -> np.ndarray:
        moved = np.concatenate([self.source[o : o + n] for o, n in self.source_ranges.tolist()])
        out, done = np.zeros(SIZE, np.uint8), 0
        for offset, length in self.target_ranges.tolist():
            out[offset : offset + length] = moved[done : done + length]
            done += length
        return out


def _cut(draw: st.DrawFn, total: int) -> np.ndarray:
    """`total` bytes as ranges that do not overlap, in random order."""
    marks = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=6 * FEW_RANGES))})
    pieces = [(begin, end - begin) for begin, end in itertools.pairwise(marks)]
    shift = draw(st.integers(0, SIZE - total))
    return checked_ranges([(shift + at, n) for at, n in draw(st.permutations(pieces))], SIZE, "ranges")


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    total = draw(st.integers(1, 1500))
    source = np.random.default_rng(draw(st.integers(0, 9))).integers(1, 255, SIZE, dtype=np.uint8)
    return Transfer(source, np.zeros(SIZE, np.uint8), _cut(draw, total), _cut(draw, total))


@settings(deadline=None, max_examples=80)
@given(st.lists(transfers(), min_size=1, max_size=5), st.integers(1, 700), st.integers(0, 2**32))
def test_whatever_the_cuts_and_withdrawals_the_right_bytes_land(
    moving: list[Transfer], turn_bytes: int, seed: int
) -> None:
    chance = random.Random(seed)
    receiver = Receiver()
    inbox, outbox = Inbox(receiver, KINDS), Outbox(turn_bytes)
    outgoings: dict[int, Outgoing] = {}
    for request, transfer in enumerate(moving, start=1):
        cursor = Cursor(memoryview(transfer.target), transfer.target_ranges)
        receiver.incomings[request] = Incoming(request, cursor.remaining, cursor)
        source = Cursor(memoryview(transfer.source), transfer.source_ranges)
        opening = frames.pack_done(request, source.remaining)
        closing = frames.pack_error(request, frames.ErrorCode.BUSY, "the end")
        outgoings[request] = Outgoing(request, opening, source, closing if request % 2 else b"")
        outbox.add(outgoings[request])
    completed: set[int] = set()
    withdrawn: set[int] = set()
    while pieces := outbox.pieces():
        wire = gathered(pieces)
        count = chance.randint(1, len(wire))
        completed |= {outgoing.request for outgoing in outbox.sent(count)}
        deliver(inbox, wire[:count], turn_bytes, chance)
        victim = chance.choice([0, 0, 0, *outgoings])
        if victim and victim not in completed | withdrawn:
            withdrawn.add(victim)
            outbox.withdraw(outgoings[victim])
            moving[victim - 1].source[:] = 255  # given away: this value must not leave
    assert completed == set(outgoings) - withdrawn
    for request, transfer in enumerate(moving, start=1):
        assert not (transfer.target == 255).any()
        if request in completed:
            assert np.array_equal(transfer.target, transfer.expected())
            assert receiver.incomings[request].remaining == 0
    announced = [header.request for header, _ in receiver.frames if header.kind == Kind.DONE]
    assert announced == sorted(announced)
    assert set(announced) >= completed
    closed = [header.request for header, _ in receiver.frames if header.kind == Kind.ERROR]
    assert sorted(closed) == [request for request in sorted(completed) if request % 2]


@settings(deadline=None)
@given(st.integers(1, 900), st.integers(0, 900), st.integers(0, 2**32))
def test_after_a_revoke_no_byte_lands_and_the_stream_stays_in_step(
    total: int, before: int, seed: int
) -> None:
    before = min(before, total)
    memory = np.zeros(1000, np.uint8)
    region, table = Region(1, memory), GrantTable(1)
    grant = table.issue(region, [(0, total)], "peer", 1, Access.WRITE)
    _, ranges = table.check(grant.token, "peer", Access.WRITE, [(0, total)])
    receiver = Receiver()
    receiver.incomings[1] = Incoming(1, total, Cursor(region.view, ranges), grant)
    inbox = Inbox(receiver, KINDS)
    wire = frames.pack_header(Kind.DATA, total, 1) + b"\xff" * total + frames.pack_done(1, total)
    cut = frames.HEADER_BYTES + before
    deliver(inbox, wire[:cut], 400, random.Random(seed))
    assert (memory[:before] == 255).all()
    assert grant.landed_bytes == before
    # Only the flag is set here, as for a transport that has not been told yet.
    table.revoke(grant)
    memory[:] = 1
    deliver(inbox, wire[cut:], 400, random.Random(seed))
    assert (memory == 1).all()
    assert grant.landed_bytes == before
    assert receiver.frames == [(Header(Kind.DONE, 8, 1), struct.pack("<Q", total))]


def test_bodies_larger_than_the_staging_buffer() -> None:
    receiver = Receiver()
    inbox = Inbox(receiver, frames.accepts(Kind.WRITE))
    ranges = np.stack((np.arange(0, 20_000, 2), np.ones(10_000, int)), axis=1)
    frame = frames.pack_request(Kind.WRITE, 1, TransferRequest("token", ranges, 10_000))
    assert len(frame) > 2 * STAGING_BYTES
    deliver(inbox, frame + frame, 1 << 20)
    assert [body for _, body in receiver.frames] == [frame[frames.HEADER_BYTES :]] * 2
    assert np.array_equal(frames.parse_request(bytearray(receiver.frames[0][1])).ranges, ranges)


def test_frames_of_the_wrong_direction_are_refused() -> None:
    inbox = Inbox(Receiver(), KINDS)
    with pytest.raises(FrameError, match="kind 1"):
        deliver(inbox, frames.pack_header(Kind.WRITE, 10, 1), 100)


def test_requests_take_turns() -> None:
    memory = memoryview(bytearray(1000))
    outbox = Outbox(100)
    for request in (1, 2):
        outbox.add(Outgoing(request, b"", Cursor(memory, checked_ranges([(0, 300)], 1000, "ranges"))))
    order = []
    while pieces := outbox.pieces():
        wire = gathered(pieces)
        order.append(frames.parse_header(memoryview(wire)[: frames.HEADER_BYTES], KINDS).request)
        outbox.sent(len(wire))
    assert order == [1, 2, 1, 2, 1, 2]


@given(st.binary(max_size=200))
def test_parsers_of_bodies_raise_only_frame_errors(body: bytes) -> None:
    for parse in (frames.parse_request, frames.parse_done, frames.parse_error):
        try:
            parse(bytearray(body))
        except FrameError:
            continue
