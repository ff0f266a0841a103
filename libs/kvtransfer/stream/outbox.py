"""What leaves on a connection: frames and payload of many requests, in batches.

Sans socket: `pieces()` gives what to send next, `sent(n)` says how much of it went. A batch is all frames
that wait and then a chunk of one request's payload, straight from registered memory and at most `turn_bytes`;
the requests take turns chunk by chunk. `withdraw` takes back a request's memory at any moment: what was
promised to the peer but not sent yet goes out as zeros, the connection stays in step.
"""

from collections import deque

from kvtransfer.limits import CHUNK_BYTES_MAX
from kvtransfer.memory import Cursor
from kvtransfer.stream.frames import Kind, pack_header
from kvtransfer.stream.inbox import VIEWS_MAX
from kvtransfer.stream.vectors import Vectors

_NOTHING = memoryview(b"")
_ZEROS = memoryview(bytes(CHUNK_BYTES_MAX))


class Outgoing:
    """One request's way out: an opening frame, a payload and a closing frame, each if any.

    The closing frame goes with the last bytes of the payload, unless they are withdrawn.
    """

    __slots__ = ("announced", "batched", "closing", "cursor", "opening", "request", "sent_bytes", "withdrawn")

    def __init__(self, request: int, opening: bytes, cursor: Cursor | None, closing: bytes = b"") -> None:
        self.request = request
        self.opening = opening
        self.cursor = cursor
        self.closing = closing
        self.announced = not opening
        self.batched = False
        self.withdrawn = False
        self.sent_bytes = 0
        """Of its own memory."""

    def let_go(self) -> None:
        """Of its memory, for good."""
        self.cursor = None


class Outbox:
    """The sending half of one connection."""

    def __init__(self, turn_bytes: int) -> None:
        self._turn_bytes = turn_bytes
        self._frames: deque[bytes] = deque()
        self._queue: deque[Outgoing] = deque()
        self._head = _NOTHING
        self._payload: Outgoing | None = None
        self._chunk_left = 0
        self._finishing: list[Outgoing] = []
        self._vectors: Vectors | None = None

    @property
    def frames_waiting(self) -> int:
        return len(self._frames)

    @property
    def empty(self) -> bool:
        """Nothing is to be sent."""
        return not self._head and self._payload is None and not self._frames and not self._queue

    @property
    def payload_follows(self) -> bool:
        """What `pieces` gave is the head of a batch; its payload comes next."""
        return self._payload is not None and len(self._head) > 0

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
        return outgoing.sent_bytes

    def pieces(self) -> list[memoryview] | Vectors:
        """What to send next, in one system call; an empty list if there is nothing."""
        if not self._head and self._payload is None:
            self._refill()
        payload = self._payload
        if payload is None:
            return [self._head] if self._head else []
        cursor = payload.cursor
        if cursor is None:
            return [self._head, _ZEROS[: self._chunk_left]] if self._head else [_ZEROS[: self._chunk_left]]
        if not cursor.tabled:
            views = cursor.peek(self._chunk_left, VIEWS_MAX)
            if payload.closing and payload.batched and sum(map(len, views)) == self._chunk_left:
                views.append(memoryview(payload.closing))
            return [self._head, *views] if self._head else views
        if self._head:
            return [self._head]
        if self._vectors is None:
            self._vectors = Vectors()
        self._vectors.fill(cursor, self._chunk_left)
        return self._vectors

    def sent(self, count: int) -> list[Outgoing]:
        """`count` bytes of `pieces` went out. Returns the requests whose last byte is gone with them."""
        head_bytes = len(self._head)
        if count < head_bytes:
            self._head = self._head[count:]
            return []
        if head_bytes:
            self._head = _NOTHING
            count -= head_bytes
        payload = self._payload
        if payload is not None:
            payload_bytes = min(count, self._chunk_left)
            self._chunk_left -= payload_bytes
            if payload.cursor is not None:
                payload.cursor.advance(payload_bytes)
                payload.sent_bytes += payload_bytes
            if self._chunk_left:
                return []
            self._payload = None
            if not payload.withdrawn:
                self._chunk_sent(payload, count - payload_bytes)
        if not self._finishing:
            return self._finishing
        finished, self._finishing = self._finishing, []
        return [outgoing for outgoing in finished if not outgoing.withdrawn]

    def _chunk_sent(self, payload: Outgoing, closing_bytes: int) -> None:
        """`closing_bytes` of its closing frame went with the chunk."""
        if not payload.batched:
            self._queue.append(payload)
        elif payload.closing:
            self._head = memoryview(payload.closing)[closing_bytes:]

    def drop(self) -> None:
        """Forget everything and let go of the memory."""
        self._head, self._payload, self._chunk_left = _NOTHING, None, 0
        self._frames.clear()
        self._queue.clear()
        self._finishing.clear()

    def _refill(self) -> None:
        """The next batch: frames, then requests up to the first one with a payload, `turn_bytes` of each."""
        if len(self._frames) == 1 and not self._queue:
            self._head = memoryview(self._frames.popleft())
            return
        heads: list[bytes] = []
        left = self._turn_bytes
        while self._frames and left > 0:
            heads.append(self._frames.popleft())
            left -= len(heads[-1])
        while self._queue and self._payload is None and left > 0:
            outgoing = self._queue.popleft()
            if outgoing.opening:
                heads.append(outgoing.opening)
                left -= len(outgoing.opening)
                outgoing.opening, outgoing.announced = b"", True
            self._commit(outgoing, heads)
        self._head = memoryview(b"".join(heads))

    def _commit(self, outgoing: Outgoing, heads: list[bytes]) -> None:
        """Promise the next chunk of its payload to the peer."""
        remaining = outgoing.cursor.remaining if outgoing.cursor is not None else 0
        count = min(remaining, self._turn_bytes)
        if count:
            heads.append(pack_header(Kind.DATA, count, outgoing.request))
            self._payload, self._chunk_left = outgoing, count
        if count == remaining:
            outgoing.batched = True
            self._finishing.append(outgoing)
