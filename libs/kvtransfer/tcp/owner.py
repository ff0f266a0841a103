"""The side of a connection that owns the memory: serves the peer's WRITE and READ requests.

Holds one entry per request in progress. A refused or revoked WRITE stays as an entry whose payload
is thrown away, until all of it came or the caller aborts: the connection stays in step.
"""

import logging
import socket
import time
from collections.abc import Callable

from kvtransfer.device import DeviceRegion
from kvtransfer.errors import (
    BusyError,
    FrameError,
    GrantError,
    PeerLostError,
    PieceTooLarge,
    TransferError,
)
from kvtransfer.grants import REVOKED, Access, Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Cursor
from kvtransfer.stream import frames, landed
from kvtransfer.stream.connection import Connection
from kvtransfer.stream.frames import ErrorCode, Header, Kind, TransferRequest, error_code
from kvtransfer.stream.granted import check_request
from kvtransfer.stream.inbox import Incoming
from kvtransfer.stream.outbox import Outgoing
from kvtransfer.tcp.frames import pack_go
from kvtransfer.tcp.serving import Serving
from kvtransfer.tcp.staging import Staging
from kvtransfer.transport import TransportContext
from kvtransfer.verification import GrantedDigests

OWNER_ACCEPTS = frames.accepts(Kind.WRITE, Kind.READ, Kind.DATA, Kind.ABORT)
"""What an owner receives."""

_WRITE, _READ = int(Kind.WRITE), int(Kind.READ)
"""A look at a member of an enum costs more than the comparison."""

REFUSED_OPEN_MAX = 4096
"""Refused writes whose payload is still to come; a caller with more of them is cut off."""

_log = logging.getLogger(__name__)


class OwnerSession:
    """The requests of one connection, served. Owns the socket that it is given."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        context: TransportContext,
        digests: GrantedDigests,
        staging: Staging,
        on_end: "Callable[[OwnerSession], None]",
    ) -> None:
        self.peer = peer
        self._connection = Connection(sock, peer, self, OWNER_ACCEPTS, context.limits.turn_bytes)
        self._context = context
        self._digests = digests
        self._staging = staging
        self._on_end = on_end
        self._counters = context.statistics.of(peer, TransportKind.TCP)
        self._last_request = 0
        self._serving: dict[int, Serving] = {}
        self._incoming: dict[int, Incoming] = {}

    def start(self) -> None:
        self._connection.start()

    def close(self, reason: str) -> None:
        self._connection.close(PeerLostError(reason))

    def incoming(self, request: int, count: int) -> Incoming:
        incoming = self._incoming.get(request)
        if incoming is None:
            raise FrameError(f"DATA for request {request}, which is no write in progress")
        return incoming

    def on_frame(self, header: Header, body: bytearray) -> None:
        kind = header.kind
        if kind == _WRITE:
            self._on_write(self._open(header), frames.parse_request(body))
        elif kind == _READ:
            self._on_read(self._open(header), frames.parse_request(body))
        else:
            assert kind == Kind.ABORT  # OWNER_ACCEPTS lets through nothing else
            self._on_abort(header.request)

    def on_payload(self, incoming: Incoming) -> None:
        if incoming.remaining:
            return
        del self._incoming[incoming.request]
        serving = self._serving.get(incoming.request)
        if serving is None:
            return  # its ERROR went out when landing stopped
        if serving.staged is not None:
            if incoming.landing() is not None:
                serving.staged.has_moved()
            incoming.stop_landing()
        elif incoming.landing() is None:
            self._refuse(incoming.request, ErrorCode.GRANT, REVOKED, incoming.landed_bytes)
        else:
            landed.all_landed(self, self._digests, serving)

    def on_sent(self, outgoing: Outgoing) -> None:
        serving = self._serving.get(outgoing.request)
        if serving is None:
            return
        if serving.staged is not None:
            serving.staged.has_moved()
            self._read_is_served(serving)
        else:
            self._conclude_read(serving)

    def on_closed(self, error: TransferError) -> None:
        self._counters.served_failures += len(self._serving)
        served, self._serving = self._serving, {}
        for serving in served.values():
            self._give_up(serving, ErrorCode.ABORTED, str(error))
        self._incoming.clear()
        if isinstance(error, FrameError):
            _log.warning("connection of %s closed: %s", self.peer, error)
        self._on_end(self)

    def stop_grant(self, grant: Grant) -> None:
        """The grant is revoked: stop what runs under it and tell the caller."""
        for serving in [serving for serving in self._serving.values() if serving.grant is grant]:
            landed_bytes = self._stop(serving)
            if not self._give_up(serving, ErrorCode.GRANT, REVOKED):
                self._refuse(serving.request, ErrorCode.GRANT, REVOKED, landed_bytes)

    def land(self, serving: Serving, slot: Cursor) -> None:
        """For memory of a device: as `StagingSession` has it, like what follows."""
        request, payload_bytes = serving.request, serving.wanted.payload_bytes
        self._incoming[request] = Incoming(request, payload_bytes, slot)
        self._connection.send_frame(pack_go(request))

    def send(self, serving: Serving, outgoing: Outgoing) -> None:
        serving.outgoing = outgoing
        self._connection.send(outgoing)

    def stop(self, serving: Serving) -> None:
        self._stop(serving)

    def silent_s(self) -> float:
        return time.monotonic() - self._connection.progress_at_s

    def refuse_if_open(self, serving: Serving, code: ErrorCode, text: str) -> None:
        if self._is_open(serving):
            self._refuse(serving.request, code, text)

    def _open(self, header: Header) -> int:
        if header.request <= self._last_request:
            raise FrameError(f"request {header.request} after {self._last_request}: numbers must grow")
        if len(self._incoming) - len(self._serving) >= REFUSED_OPEN_MAX:
            raise FrameError(f"{REFUSED_OPEN_MAX} refused writes are open and more requests come")
        self._last_request = header.request
        return header.request

    def _on_write(self, request: int, wanted: TransferRequest) -> None:
        serving = self._admit(request, wanted, Access.WRITE)
        if serving is not None and isinstance(serving.grant.region, DeviceRegion):
            self._staging.start(self, serving)
            return
        if wanted.awaits_go:
            if serving is None:
                return  # the payload does not come
            self._connection.send_frame(pack_go(request))
        if wanted.payload_bytes:
            grant = serving.grant if serving is not None else None
            cursor = Cursor(serving.grant.region.view, serving.ranges) if serving is not None else None
            self._incoming[request] = Incoming(request, wanted.payload_bytes, cursor, grant)
        elif serving is not None:
            landed.all_landed(self, self._digests, serving)

    def _on_read(self, request: int, wanted: TransferRequest) -> None:
        if wanted.awaits_go:
            raise FrameError("a READ that waits for GO")
        serving = self._admit(request, wanted, Access.READ)
        if serving is None:
            return
        if isinstance(serving.grant.region, DeviceRegion):
            self._staging.start(self, serving)
            return
        if not wanted.payload_bytes:
            self._conclude_read(serving)
            return
        # Without a digest there is nothing to wait for: DONE goes with the last bytes.
        closing = b"" if wanted.verify else frames.pack_done(request, wanted.payload_bytes)
        cursor = Cursor(serving.grant.region.view, serving.ranges)
        serving.outgoing = Outgoing(request, b"", cursor, closing)
        self._connection.send(serving.outgoing)

    def _admit(self, request: int, wanted: TransferRequest, access: Access) -> Serving | None:
        """The request under its grant, or None once the refusal is sent."""
        served_max = self._context.limits.transfers_served_max
        if len(self._serving) >= served_max:
            self._refuse(request, ErrorCode.BUSY, f"transfers_served_max of {served_max} is reached")
            return None
        try:
            grant, ranges = check_request(self._context.grants, self.peer, access, wanted)
            if isinstance(grant.region, DeviceRegion):
                self._staging.check(access, wanted)
        except PieceTooLarge as error:
            self._refuse(request, ErrorCode.PIECES, str(error), error.piece_bytes_max)
            return None
        except (BusyError, GrantError) as error:
            self._refuse(request, error_code(error), str(error))
            return None
        serving = self._serving[request] = Serving(request, wanted, grant, ranges, access)
        return serving

    def _on_abort(self, request: int) -> None:
        if request > self._last_request:
            raise FrameError(f"ABORT of request {request}, which was never made")
        serving = self._serving.get(request)
        incoming = self._incoming.get(request)
        if serving is not None and serving.staged is not None:
            self._stop(serving)
            self._give_up(serving, ErrorCode.ABORTED, "aborted by the caller")
        elif serving is not None and (incoming is not None or serving.outgoing is not None):
            self._refuse(request, ErrorCode.ABORTED, "aborted by the caller", self._stop(serving))
        # The rest of the payload does not come.
        self._incoming.pop(request, None)

    def _give_up(self, serving: Serving, code: ErrorCode, text: str) -> bool:
        """If its memory is that of a device: the answer follows once nothing touches that any more."""
        if serving.staged is not None:
            self._staging.give_up(serving.staged, code, text)
        return serving.staged is not None

    def _stop(self, serving: Serving) -> int:
        """Touch its memory no more; how many bytes landed, or left, from the first one on."""
        if serving.outgoing is not None:
            return self._connection.withdraw(serving.outgoing)
        incoming = self._incoming.get(serving.request)
        if incoming is None:
            return serving.wanted.payload_bytes
        incoming.stop_landing()
        return incoming.landed_bytes

    def conclude_write(self, serving: Serving) -> None:
        landed.conclude_write(self, serving)

    def stands(self, serving: Serving) -> bool:
        """Not answered yet: for `stream.landed`, like what follows."""
        return self._is_open(serving)

    def refuse_write(self, serving: Serving, code: ErrorCode, text: str, landed_bytes: int) -> None:
        self._refuse(serving.request, code, text, landed_bytes)

    def write_is_done(self, serving: Serving) -> None:
        payload_bytes = serving.wanted.payload_bytes
        del self._serving[serving.request]
        self._counters.served_writes += 1
        self._counters.served_written_bytes += payload_bytes
        self._connection.send_frame(frames.pack_done(serving.request, payload_bytes))

    def _conclude_read(self, serving: Serving) -> None:
        """The payload is with the kernel, and DONE too unless the caller wants a digest."""
        if serving.wanted.verify:
            self._digests.start(
                serving.grant, serving.ranges, lambda digest: self.conclude_read(serving, digest)
            )
            return
        self._read_is_served(serving)
        if not serving.wanted.payload_bytes:
            self._connection.send_frame(frames.pack_done(serving.request, 0))

    def conclude_read(self, serving: Serving, digest: bytes) -> None:
        if not self._is_open(serving):
            return
        payload_bytes = serving.wanted.payload_bytes
        if serving.grant.revoked:
            self._refuse(serving.request, ErrorCode.GRANT, REVOKED, payload_bytes)
            return
        self._read_is_served(serving)
        self._connection.send_frame(frames.pack_done(serving.request, payload_bytes, digest))

    def _read_is_served(self, serving: Serving) -> None:
        del self._serving[serving.request]
        self._counters.served_reads += 1
        self._counters.served_read_bytes += serving.wanted.payload_bytes

    def _is_open(self, serving: Serving) -> bool:
        """Not answered yet."""
        return self._serving.get(serving.request) is serving

    def _refuse(self, request: int, code: ErrorCode, text: str, landed_bytes: int = 0) -> None:
        self._serving.pop(request, None)
        self._counters.served_failures += 1
        self._connection.send_frame(frames.pack_error(request, code, text, landed_bytes))
