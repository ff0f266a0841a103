"""What arrives on a connection: a parser that receives payload straight into its memory.

Sans socket: `pieces()` says where the next bytes go, `received(n)` that n of them came. Payload goes
first, a little staging after it catches the next frames in the same system call; between payloads
everything goes to the staging buffer, so small frames cost one call together.
"""

from collections.abc import Mapping
from typing import Protocol

from kvtransfer.errors import FrameError
from kvtransfer.grants import Grant
from kvtransfer.memory import Cursor, address_of, copy_into
from kvtransfer.stream.frames import HEADER_BYTES, Header, Kind, parse_header
from kvtransfer.stream.vectors import Vectors

STAGING_BYTES = 16 << 10
"""Holds a small transfer whole. What of a larger one comes here is copied once more, so not larger."""

TAIL_BYTES = 1 << 10
"""Of the staging, received behind what is due: room for a request with a few ranges and its DATA header."""

_DATA = int(Kind.DATA)
_DISCARD_BYTES = 64 << 10
VIEWS_MAX = 1000
"""Buffers in one system call; Linux takes 1,024 (IOV_MAX), a few are for headers and staging."""


class Incoming:
    """The payload of one request on its way in.

    It lands while there is a cursor and the grant, if any, stands; otherwise it is read and thrown away.
    """

    __slots__ = ("cursor", "grant", "landed_bytes", "payload_bytes", "remaining", "request")

    def __init__(
        self, request: int, payload_bytes: int, cursor: Cursor | None, grant: Grant | None = None
    ) -> None:
        self.request = request
        self.payload_bytes = payload_bytes
        self.remaining = payload_bytes
        self.landed_bytes = 0
        self.cursor = cursor
        self.grant = grant

    def stop_landing(self) -> None:
        self.cursor = None

    def landing(self) -> Cursor | None:
        """Where the next byte goes. Asked before every copy and every system call, never kept."""
        if self.grant is not None and self.grant.revoked:
            return None
        return self.cursor

    def landed(self, count: int) -> None:
        """`count` bytes came in, to wherever `landing` pointed in this same step."""
        self.remaining -= count
        cursor = self.landing()
        if cursor is not None:
            cursor.advance(count)
            self.landed_bytes += count
            if self.grant is not None:
                self.grant.landed_bytes += count


class FrameHandler(Protocol):
    """The side of a connection that gives frames their meaning. Each method may raise FrameError."""

    def incoming(self, request: int, count: int) -> Incoming:
        """The payload that the next `count` bytes belong to."""
        ...

    def on_payload(self, incoming: Incoming) -> None:
        """Some more of it came in."""
        ...

    def on_frame(self, header: Header, body: bytearray) -> None:
        """A whole frame that is not DATA."""
        ...


class Inbox:
    """The receiving half of one connection."""

    def __init__(self, handler: FrameHandler, accepted: Mapping[int, int]) -> None:
        self._handler = handler
        self._accepted = accepted
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._staging_address = address_of(self._staging)
        self._begin = 0
        self._end = 0
        self._discard: memoryview | None = None
        self._payload: Incoming | None = None
        self._payload_left = 0
        self._header: Header | None = None
        self._body = bytearray()
        self._body_have = 0
        self._vectors: Vectors | None = None

    @property
    def in_payload(self) -> bool:
        """More bytes of a payload are due."""
        return self._payload is not None

    @property
    def payload_due_bytes(self) -> int:
        """What is still to come of the DATA frame that is coming."""
        return self._payload_left if self._payload is not None else 0

    def pieces(self, bytes_max: int) -> list[memoryview] | Vectors:
        """Where to receive to; never empty. Ask again right before each receive.

        What is due goes where it belongs; a little staging after it catches what follows it.
        """
        if self._payload is not None:
            return self._payload_pieces(self._payload, min(self._payload_left, bytes_max))
        if self._header is not None:
            rest = memoryview(self._body)[self._body_have :]
            return [rest, self._staging[:TAIL_BYTES]] if len(rest) <= bytes_max else [rest[:bytes_max]]
        if self._begin:
            staged = bytes(self._staging[self._begin : self._end])
            self._begin, self._end = 0, len(staged)
            self._staging[: self._end] = staged
        return [self._staging[self._end :]]

    def received(self, count: int) -> None:
        """Take in `count` bytes that went to what `pieces` last gave. Raises FrameError."""
        # While payload or a body is due the staging buffer is empty: they ate it first.
        if self._payload is not None:
            direct = min(count, self._payload_left)
            self._begin, self._end = 0, count - direct
            self._take_payload(direct)
        elif self._header is not None:
            direct = min(count, len(self._body) - self._body_have)
            self._begin, self._end = 0, count - direct
            self._take_body(direct)
        else:
            self._end += count
        if self._begin < self._end:
            self._parse_staged()

    def drop(self) -> None:
        """Let go of all memory; nothing is received or parsed after this."""
        if self._payload is not None:
            self._payload.stop_landing()
        self._begin = self._end = 0

    def _parse_staged(self) -> None:
        while self._begin < self._end:
            if self._payload is not None:
                self._land_staged(self._payload)
            elif self._header is not None:
                have, end = self._body_have, min(self._end, self._begin + len(self._body) - self._body_have)
                self._body[have : have + end - self._begin] = self._staging[self._begin : end]
                count, self._begin = end - self._begin, end
                self._take_body(count)
            elif self._end - self._begin >= HEADER_BYTES:
                self._next_frame()
            else:
                return
        self._begin = self._end = 0

    def _next_frame(self) -> None:
        body_at = self._begin + HEADER_BYTES
        header = parse_header(self._staging[self._begin : body_at], self._accepted)
        self._begin = body_at
        if header.kind == _DATA:
            incoming = self._handler.incoming(header.request, header.body_bytes)
            if not 0 < header.body_bytes <= incoming.remaining:
                raise FrameError(f"DATA of {header.body_bytes} bytes where {incoming.remaining} are due")
            self._payload, self._payload_left = incoming, header.body_bytes
        elif header.body_bytes <= self._end - body_at:
            self._begin += header.body_bytes
            self._handler.on_frame(header, bytearray(self._staging[body_at : self._begin]))
        else:
            self._header, self._body, self._body_have = header, bytearray(header.body_bytes), 0

    def _land_staged(self, incoming: Incoming) -> None:
        count = min(self._payload_left, self._end - self._begin)
        staged = self._staging[self._begin : self._begin + count]
        count = copy_into(self._payload_views(incoming, count), staged)
        self._begin += count
        self._take_payload(count)

    def _take_body(self, count: int) -> None:
        header = self._header
        assert header is not None
        self._body_have += count
        if self._body_have == header.body_bytes:
            body, self._header, self._body = self._body, None, bytearray()
            self._handler.on_frame(header, body)

    def _take_payload(self, count: int) -> None:
        incoming = self._payload
        assert incoming is not None
        incoming.landed(count)
        self._payload_left -= count
        if self._payload_left == 0:
            self._payload = None
        self._handler.on_payload(incoming)

    def _payload_pieces(self, incoming: Incoming, count: int) -> list[memoryview] | Vectors:
        cursor = incoming.landing()
        if cursor is None or not cursor.tabled:
            views = self._payload_views(incoming, count)
            if sum(map(len, views)) == self._payload_left:
                views.append(self._staging[:TAIL_BYTES])
            return views
        if self._vectors is None:
            self._vectors = Vectors()
        self._vectors.fill(cursor, count)
        if self._vectors.total_bytes == self._payload_left:
            self._vectors.add(self._staging_address, TAIL_BYTES)
        return self._vectors

    def _payload_views(self, incoming: Incoming, count: int) -> list[memoryview]:
        cursor = incoming.landing()
        if cursor is not None:
            return cursor.peek(count, VIEWS_MAX)
        if self._discard is None:
            self._discard = memoryview(bytearray(_DISCARD_BYTES))
        return [self._discard[:count]]
