"""The side of a connection that calls: our own writes and reads, pending by request number.

Each announced request stays pending until the owner's DONE or ERROR, even if its caller gave up:
only then is its number settled, and late payload of an abandoned read goes nowhere.
"""

import asyncio
import socket
import time
from collections.abc import Callable

from kvtransfer.errors import ChecksumError, FrameError, PeerLostError, TransferError
from kvtransfer.limits import Limits
from kvtransfer.memory import Cursor
from kvtransfer.stream import frames
from kvtransfer.stream.connection import Connection
from kvtransfer.stream.frames import Header, Kind, TransferRequest
from kvtransfer.stream.inbox import Incoming
from kvtransfer.stream.outbox import Outgoing
from kvtransfer.tcp.frames import GO
from kvtransfer.transport import Call
from kvtransfer.verification import digest

CALLER_ACCEPTS = frames.accepts(Kind.DATA, Kind.DONE, Kind.ERROR, own={GO: 0})
"""What a caller receives."""

_DONE = int(Kind.DONE)


class _Pending:
    """A request that is not settled: a write has no `incoming`, a read lands there. `held_back` is the
    payload of a write that waits for the owner's GO."""

    __slots__ = ("digest", "future", "held_back", "incoming", "outgoing", "payload_bytes")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        outgoing: Outgoing,
        incoming: Incoming | None,
        payload_bytes: int,
    ) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self.outgoing = outgoing
        self.incoming = incoming
        self.payload_bytes = payload_bytes
        self.digest = b""
        self.held_back: Cursor | None = None


class CallerStream:
    """Our requests on one connection. Owns the socket that it is given."""

    def __init__(self, sock: socket.socket, peer: str, limits: Limits) -> None:
        self._connection = Connection(sock, peer, self, CALLER_ACCEPTS, limits.turn_bytes)
        self._loop = asyncio.get_running_loop()
        self._pending_max = limits.requests_pending_max
        self._last_request = 0
        self._pending: dict[int, _Pending] = {}
        self._abandoned_writes: set[int] = set()
        self._on_lost: Callable[[TransferError], None] = _nobody_told
        self.outstanding_bytes = 0
        """Of all that is pending."""
        self.settling: asyncio.Future[None] | None = None
        """There while bytes of a write that was given up may still land; done when none can any more."""

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def start(self, on_lost: Callable[[TransferError], None]) -> None:
        """`on_lost` is called once, when the connection is closed for whatever reason."""
        self._on_lost = on_lost
        self._connection.start()

    def close(self, error: TransferError) -> None:
        self._connection.close(error)

    def silent_s(self) -> float:
        """For how long nothing moved while something is pending."""
        return time.monotonic() - self._connection.progress_at_s if self._pending else 0.0

    async def write(self, call: Call, *, earlier_bytes: int = 0, tag_follows: bool = False) -> None:
        """The whole of a call or a part: a part is followed by the tag, if the call has one; the last request
        brings the tag, after `earlier_bytes` that are DONE."""
        source = call.memory
        sent = await digest(source.region.view, source.ranges) if call.verify else b""
        request = self._next_request()
        awaits_go = call.piece_bytes_max is not None and source.payload_bytes > 0
        wanted = TransferRequest(
            call.token,
            call.remote,
            source.payload_bytes,
            call.tag,
            sent,
            call.verify,
            earlier_bytes + call.earlier_bytes,
            tag_follows,
            awaits_go,
        )
        opening = frames.pack_request(Kind.WRITE, request, wanted)
        outgoing = Outgoing(request, opening, Cursor(source.region.view, source.ranges))
        pending = _Pending(self._loop, outgoing, None, source.payload_bytes)
        if awaits_go:
            pending.held_back, outgoing.cursor = outgoing.cursor, None
        self._begin(pending)
        try:
            await pending.future
        except asyncio.CancelledError:
            self._abandon(pending)
            raise

    async def read(self, call: Call) -> None:
        target = call.memory
        request = self._next_request()
        wanted = TransferRequest(call.token, call.remote, target.payload_bytes, verify=call.verify)
        opening = frames.pack_request(Kind.READ, request, wanted)
        incoming = Incoming(request, target.payload_bytes, Cursor(target.region.view, target.ranges))
        pending = _Pending(self._loop, Outgoing(request, opening, None), incoming, target.payload_bytes)
        self._begin(pending)
        try:
            await pending.future
        except asyncio.CancelledError:
            self._abandon(pending)
            raise
        if call.verify and pending.digest != await digest(target.region.view, target.ranges):
            raise ChecksumError(f"what {self._connection.peer} sent is not what arrived")

    def incoming(self, request: int, count: int) -> Incoming:
        pending = self._pending.get(request)
        if pending is None or pending.incoming is None:
            raise FrameError(f"DATA for request {request}, which is no read in progress")
        return pending.incoming

    def on_payload(self, incoming: Incoming) -> None:
        """A read ends with the owner's DONE, not with its last byte: a revoke may come between."""

    def on_sent(self, outgoing: Outgoing) -> None:
        """A write ends with the owner's DONE."""

    def on_frame(self, header: Header, body: bytearray) -> None:
        pending = self._pending.get(header.request)
        if pending is None:
            raise FrameError(f"answer to request {header.request}, which is not pending")
        if header.kind == GO:
            self._on_go(pending)
            return
        error: TransferError | None = None
        if header.kind == _DONE:
            done_bytes, pending.digest = frames.parse_done(body)
            self._check_done(pending, done_bytes)
        else:
            error = _believable(frames.parse_error(body), pending)
        # A malformed answer raised above, while the request is still among those that the close fails.
        self._forget(header.request)
        _settle(pending.future, error)
        if error is not None:
            pending.held_back = None
            self._stop(pending)

    def on_closed(self, error: TransferError) -> None:
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            entry.held_back = None
            entry.outgoing.let_go()
            if entry.incoming is not None:
                entry.incoming.stop_landing()
            _settle(entry.future, error)
        self._abandoned_writes.clear()
        self._settled()
        self._on_lost(error)

    def _on_go(self, pending: _Pending) -> None:
        """The owner wants the payload of a write now. It may have been given up meanwhile."""
        if pending.incoming is not None or not pending.outgoing.batched:
            raise FrameError(f"GO for request {pending.outgoing.request}, which does not wait for it")
        payload, pending.held_back = pending.held_back, None
        if payload is not None:
            pending.outgoing = Outgoing(pending.outgoing.request, b"", payload)
            self._connection.send(pending.outgoing)

    def _next_request(self) -> int:
        if len(self._pending) >= self._pending_max:
            text = f"{self._connection.peer} left {self._pending_max} requests open"
            self._connection.close(PeerLostError(text))
        if self._connection.closed:
            raise PeerLostError(f"the connection to {self._connection.peer} is closed")
        self._last_request += 1
        return self._last_request

    def _begin(self, pending: _Pending) -> None:
        if not self._pending:
            self._connection.await_progress()
        self._pending[pending.outgoing.request] = pending
        self.outstanding_bytes += pending.payload_bytes
        self._connection.send(pending.outgoing)
        self._connection.receive_early()

    def _abandon(self, pending: _Pending) -> None:
        """The caller gives up, perhaps while the owner still works on it."""
        request = pending.outgoing.request
        if self._pending.get(request) is not pending:
            return
        self._stop(pending)
        if not pending.outgoing.announced:
            self._forget(request)
        elif pending.incoming is None:
            self._abandoned_writes.add(request)
            if self.settling is None:
                self.settling = self._loop.create_future()
        elif pending.outgoing.batched:
            self._connection.send_frame(frames.pack_abort(request))

    def _stop(self, pending: _Pending) -> None:
        """Touch the local memory no more; tell the owner if payload that it waits for will not come."""
        if pending.incoming is not None:
            pending.incoming.stop_landing()
        outgoing = pending.outgoing
        self._connection.withdraw(outgoing)
        held_back, pending.held_back = pending.held_back, None
        if outgoing.announced and (held_back is not None or not outgoing.batched):
            self._connection.send_frame(frames.pack_abort(outgoing.request))

    def _forget(self, request: int) -> None:
        """It is settled: the owner answered, or never heard of it."""
        self.outstanding_bytes -= self._pending.pop(request).payload_bytes
        if request in self._abandoned_writes:
            self._abandoned_writes.remove(request)
            self._settled()

    def _settled(self) -> None:
        if self.settling is not None and not self._abandoned_writes:
            self.settling.set_result(None)
            self.settling = None

    def _check_done(self, pending: _Pending, done_bytes: int) -> None:
        incoming = pending.incoming
        complete = pending.outgoing.batched if incoming is None else incoming.remaining == 0
        complete = complete and pending.held_back is None
        if not complete or done_bytes != pending.payload_bytes:
            raise FrameError(f"{self._connection.peer} says DONE before it is")


def _believable(error: TransferError, pending: _Pending) -> TransferError:
    """What landed by the owner's word, as far as it can be true: of a read it must have come here."""
    known = pending.incoming.landed_bytes if pending.incoming is not None else pending.payload_bytes
    error.landed = tuple((start, min(count, known)) for start, count in error.landed if known)
    return error


def _settle(future: asyncio.Future[None], error: TransferError | None) -> None:
    """Give the result, unless the caller gave up."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _nobody_told(error: TransferError) -> None:
    """Until the link is there."""
