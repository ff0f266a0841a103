"""The side of a connection that owns the memory: serves the peer's WRITE and READ requests.

Holds one entry per request in progress. A refused or revoked WRITE stays as an entry whose payload
is thrown away, until all of it came or the caller aborts: the connection stays in step.
"""

import logging
import socket
from collections.abc import Callable

from kvtransfer.errors import FrameError, GrantError, PeerLostError, TransferError
from kvtransfer.grants import Access, Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Cursor
from kvtransfer.stream import frames
from kvtransfer.stream.connection import Connection
from kvtransfer.stream.frames import ErrorCode, Header, Kind, TransferRequest
from kvtransfer.stream.inbox import Incoming
from kvtransfer.stream.outbox import Outgoing
from kvtransfer.transport import TransportContext

OWNER_ACCEPTS = frames.accepts(Kind.WRITE, Kind.READ, Kind.DATA, Kind.ABORT)
"""What an owner receives."""

_log = logging.getLogger(__name__)


class OwnerSession:
    """The requests of one caller, served. Owns the socket that it is given."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        context: TransportContext,
        on_end: "Callable[[OwnerSession], None]",
    ) -> None:
        self.peer = peer
        self._connection = Connection(sock, peer, self, OWNER_ACCEPTS, context.limits.turn_bytes)
        self._context = context
        self._on_end = on_end
        self._counters = context.statistics.of(peer, TransportKind.TCP)
        self._last_request = 0
        self._writes: dict[int, Incoming] = {}
        self._reads: dict[int, tuple[Outgoing, Grant, int]] = {}

    def start(self) -> None:
        self._connection.start()

    def close(self, reason: str) -> None:
        self._connection.close(PeerLostError(reason))

    def incoming(self, request: int, count: int) -> Incoming:
        incoming = self._writes.get(request)
        if incoming is None:
            raise FrameError(f"DATA for request {request}, which is no write in progress")
        return incoming

    def on_frame(self, header: Header, body: bytearray) -> None:
        match header.kind:
            case Kind.WRITE:
                self._on_write(self._open(header), frames.parse_request(body))
            case Kind.READ:
                self._on_read(self._open(header), frames.parse_request(body))
            case Kind.ABORT:
                self._on_abort(header.request)
            case _:
                raise FrameError(f"frame of kind {header.kind} sent to an owner of memory")

    def on_payload(self, incoming: Incoming) -> None:
        if incoming.remaining:
            return
        del self._writes[incoming.request]
        grant = incoming.grant
        if grant is None or incoming.landing() is None:
            return  # its ERROR went out when landing stopped
        self._done_writing(incoming.request, incoming.payload_bytes)

    def on_sent(self, outgoing: Outgoing) -> None:
        entry = self._reads.pop(outgoing.request, None)
        if entry is not None:
            self._done_reading(outgoing.request, entry[2])

    def on_closed(self, error: TransferError) -> None:
        self._counters.served_failures += len(self._writes) + len(self._reads)
        self._writes.clear()
        self._reads.clear()
        if isinstance(error, FrameError):
            _log.warning("connection of %s closed: %s", self.peer, error)
        self._on_end(self)

    def stop_grant(self, grant: Grant) -> None:
        """The grant is revoked: stop what runs under it and tell the caller."""
        for request, incoming in self._writes.items():
            if incoming.grant is grant and incoming.cursor is not None:
                incoming.stop_landing()
                self._refuse(request, ErrorCode.GRANT, "the grant was revoked")
        for request, (outgoing, owner, _) in list(self._reads.items()):
            if owner is grant:
                self._connection.withdraw(outgoing)
                del self._reads[request]
                self._refuse(request, ErrorCode.GRANT, "the grant was revoked")

    def _open(self, header: Header) -> int:
        if header.request <= self._last_request:
            raise FrameError(f"request {header.request} after {self._last_request}: numbers must grow")
        self._last_request = header.request
        return header.request

    def _on_write(self, request: int, wanted: TransferRequest) -> None:
        grant, cursor = self._admit(request, wanted, Access.WRITE)
        if wanted.payload_bytes:
            self._writes[request] = Incoming(request, wanted.payload_bytes, cursor, grant)
        elif grant is not None:
            self._done_writing(request, 0)

    def _on_read(self, request: int, wanted: TransferRequest) -> None:
        grant, cursor = self._admit(request, wanted, Access.READ)
        if grant is None:
            return
        if not wanted.payload_bytes:
            self._done_reading(request, 0)
            return
        outgoing = Outgoing(request, b"", cursor)
        self._reads[request] = (outgoing, grant, wanted.payload_bytes)
        self._connection.send(outgoing)

    def _admit(
        self, request: int, wanted: TransferRequest, access: Access
    ) -> tuple[Grant, Cursor] | tuple[None, None]:
        """The grant and a cursor over its memory, or nothing once the refusal is sent."""
        served_max = self._context.limits.transfers_served_max
        if len(self._writes) + len(self._reads) >= served_max:
            self._refuse(request, ErrorCode.BUSY, f"transfers_served_max of {served_max} is reached")
            return None, None
        try:
            grant, ranges = self._context.grants.check(wanted.token, self.peer, access, wanted.ranges)
        except GrantError as error:
            self._refuse(request, ErrorCode.GRANT, str(error))
            return None, None
        return grant, Cursor(grant.region.view, ranges)

    def _on_abort(self, request: int) -> None:
        if request > self._last_request:
            raise FrameError(f"ABORT of request {request}, which was never made")
        incoming = self._writes.pop(request, None)
        read = self._reads.pop(request, None)
        if read is not None:
            self._connection.withdraw(read[0])
        if read is not None or (incoming is not None and incoming.cursor is not None):
            self._refuse(request, ErrorCode.ABORTED, "aborted by the caller")

    def _done_writing(self, request: int, payload_bytes: int) -> None:
        self._counters.served_writes += 1
        self._counters.served_written_bytes += payload_bytes
        self._connection.send_frame(frames.pack_done(request, payload_bytes))

    def _done_reading(self, request: int, payload_bytes: int) -> None:
        self._counters.served_reads += 1
        self._counters.served_read_bytes += payload_bytes
        self._connection.send_frame(frames.pack_done(request, payload_bytes))

    def _refuse(self, request: int, code: ErrorCode, text: str) -> None:
        self._counters.served_failures += 1
        self._connection.send_frame(frames.pack_error(request, code, text))
