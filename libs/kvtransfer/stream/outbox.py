"""What leaves on a connection: frames and payload of many requests, gathered into batches.

Sans socket: `buffers()` gives what to send next, `sent(n)` says how much went. Payload leaves
straight from registered memory, at most `turn_bytes` of it is committed to the wire at a time, and
the requests take turns chunk by chunk. `withdraw` takes back a request's memory at any moment: what
was promised to the peer but not sent yet goes out as zeros, the connection stays in step.
"""

from collections import deque

from kvtransfer.limits import CHUNK_BYTES_MAX
from kvtransfer.memory import Cursor
from kvtransfer.stream.frames import Kind, pack_header
from kvtransfer.stream.inbox import VIEWS_MAX

_ZEROS = memoryview(bytes(CHUNK_BYTES_MAX))


class Outgoing:
    """One request's way out: an opening frame, if any, and a payload, if any."""

    __slots__ = ("announced", "batched", "cursor", "opening", "request", "withdrawn")

    def __init__(self, request: int, opening: bytes, cursor: Cursor | None) -> None:
        self.request = request
        self.opening = opening
        self.cursor = cursor
        self.announced = not opening
        self.batched = False
        self.withdrawn = False

    def let_go(self) -> None:
        """Of its memory, for good."""
        self.cursor = None

    def payload_left(self) -> int:
        """Bytes that are not committed to the wire yet."""
        return self.cursor.remaining if self.cursor is not None else 0


class Outbox:
    """The sending half of one connection."""

    def __init__(self, turn_bytes: int) -> None:
        self._turn_bytes = turn_bytes
        self._frames: deque[bytes] = deque()
        self._queue: deque[Outgoing] = deque()
        self._views: list[memoryview] = []
        self._owners: list[Outgoing | None] = []
        self._at = 0
        self._flushed: list[Outgoing] = []

    def add_frame(self, frame: bytes) -> None:
        """A small frame; goes before all payload that is not committed yet."""
        self._frames.append(frame)

    def add(self, outgoing: Outgoing) -> None:
        self._queue.append(outgoing)

    def withdraw(self, outgoing: Outgoing) -> int:
        """Send no further byte of its memory. Returns how many went before."""
        outgoing.withdrawn = True
        outgoing.let_go()
        if outgoing in self._queue:
            self._queue.remove(outgoing)
        for index in range(self._at, len(self._views)):
            if self._owners[index] is outgoing:
                self._views[index] = _ZEROS[: len(self._views[index])]
        return 0

    def buffers(self) -> list[memoryview]:
        """What to send next; empty if there is nothing."""
        if self._at == len(self._views):
            self._refill()
        return self._views[self._at :]

    def sent(self, count: int) -> list[Outgoing]:
        """`count` bytes of `buffers` went out. Returns the requests whose last byte is gone with them."""
        while count:
            view = self._views[self._at]
            if count < len(view):
                self._views[self._at] = view[count:]
                break
            count -= len(view)
            self._at += 1
        if self._at < len(self._views):
            return []
        self._clear_batch()
        flushed, self._flushed = self._flushed, []
        return [outgoing for outgoing in flushed if not outgoing.withdrawn]

    def drop(self) -> None:
        """Forget everything and let go of the memory."""
        self._clear_batch()
        self._frames.clear()
        self._queue.clear()
        self._flushed.clear()

    def _clear_batch(self) -> None:
        self._views, self._owners, self._at = [], [], 0

    def _refill(self) -> None:
        self._clear_batch()
        left = self._turn_bytes
        while self._frames and left > 0 and len(self._views) < VIEWS_MAX:
            left -= self._push(self._frames.popleft())
        while self._queue and left > 0 and len(self._views) < VIEWS_MAX:
            outgoing = self._queue.popleft()
            if outgoing.opening:
                left -= self._push(outgoing.opening)
                outgoing.opening, outgoing.announced = b"", True
            left -= self._push_chunk(outgoing, left)
            if outgoing.payload_left():
                self._queue.append(outgoing)
            else:
                outgoing.batched = True
                self._flushed.append(outgoing)

    def _push(self, frame: bytes) -> int:
        self._views.append(memoryview(frame))
        self._owners.append(None)
        return len(frame)

    def _push_chunk(self, outgoing: Outgoing, bytes_max: int) -> int:
        cursor = outgoing.cursor
        if cursor is None or bytes_max <= 0:
            return 0
        views = cursor.peek(bytes_max, max(1, VIEWS_MAX - len(self._views)))
        count = sum(map(len, views))
        if count == 0:
            return 0
        self._push(pack_header(Kind.DATA, count, outgoing.request))
        self._views.extend(views)
        self._owners.extend([outgoing] * len(views))
        cursor.advance(count)
        return count
