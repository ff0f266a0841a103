"""What arrives on a connection: a parser that receives payload straight into its memory.

Sans socket: `buffers()` says where the next bytes go, `received(n)` that n of them came. Payload
views come first, a few bytes of staging after them catch the next header in the same system call;
between payloads everything goes to the staging buffer, so small frames cost one call together.
"""

from collections.abc import Mapping
from typing import Protocol

from kvtransfer.errors import FrameError
from kvtransfer.grants import Grant
from kvtransfer.memory import Cursor, copy_into
from kvtransfer.stream.frames import HEADER_BYTES, Header, Kind, parse_header

STAGING_BYTES = 64 << 10
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
        self._begin = 0
        self._end = 0
        self._discard: memoryview | None = None
        self._payload: Incoming | None = None
        self._payload_left = 0
        self._header: Header | None = None
        self._body = bytearray()
        self._body_have = 0

    def buffers(self, bytes_max: int) -> list[memoryview]:
        """Where to receive to; never empty. Call it again right before each receive."""
        if self._payload is not None:
            views = self._payload_views(self._payload, bytes_max)
            return [*views, self._staging[:HEADER_BYTES]] if _length(views) == self._payload_left else views
        if self._header is not None:
            rest = memoryview(self._body)[self._body_have :]
            return [rest[:bytes_max]]
        if self._begin:
            staged = bytes(self._staging[self._begin : self._end])
            self._begin, self._end = 0, len(staged)
            self._staging[: self._end] = staged
        return [self._staging[self._end :]]

    def received(self, count: int) -> None:
        """Take in `count` bytes that went to what `buffers` last gave. Raises FrameError."""
        if self._payload is not None:
            direct = min(count, self._payload_left)
            # While payload is due the staging buffer is empty: the payload ate it first.
            self._begin, self._end = 0, count - direct
            self._take_payload(direct)
        elif self._header is not None:
            self._take_body(count)
        else:
            self._end += count
        self._parse_staged()

    def drop(self) -> None:
        """Let go of all memory; nothing is received after this."""
        if self._payload is not None:
            self._payload.stop_landing()

    def _parse_staged(self) -> None:
        while self._begin < self._end:
            staged = self._staging[self._begin : self._end]
            if self._payload is not None:
                count = copy_into(self._payload_views(self._payload, len(staged)), staged)
                self._begin += count
                self._take_payload(count)
            elif self._header is not None:
                count = min(len(staged), len(self._body) - self._body_have)
                self._body[self._body_have : self._body_have + count] = staged[:count]
                self._begin += count
                self._take_body(count)
            elif len(staged) >= HEADER_BYTES:
                self._begin += HEADER_BYTES
                self._take_header(parse_header(staged[:HEADER_BYTES], self._accepted))
            else:
                return
        self._begin = self._end = 0

    def _take_header(self, header: Header) -> None:
        if header.kind != Kind.DATA:
            self._header, self._body, self._body_have = header, bytearray(header.body_bytes), 0
            self._take_body(0)
            return
        incoming = self._handler.incoming(header.request, header.body_bytes)
        if not 0 < header.body_bytes <= incoming.remaining:
            raise FrameError(f"DATA of {header.body_bytes} bytes where {incoming.remaining} are due")
        self._payload, self._payload_left = incoming, header.body_bytes

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

    def _payload_views(self, incoming: Incoming, bytes_max: int) -> list[memoryview]:
        count = min(self._payload_left, bytes_max)
        cursor = incoming.landing()
        if cursor is not None:
            return cursor.peek(count, VIEWS_MAX)
        if self._discard is None:
            self._discard = memoryview(bytearray(_DISCARD_BYTES))
        return [self._discard[:count]]


def _length(views: list[memoryview]) -> int:
    return sum(map(len, views))
