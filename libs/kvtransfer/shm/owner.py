"""The owner's side of a link: copies what the caller PUTs into granted memory.

Holds one entry per PUT that is not answered; READs are admitted by `reads`. A revoked grant stops
its copies before `quiesce` returns.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.errors import (
    FrameError,
    GrantError,
    PeerLostError,
    TransferError,
    TransportUnfit,
)
from kvtransfer.grants import REVOKED, Access, Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Ranges, Region
from kvtransfer.shm import frames as own
from kvtransfer.shm.channel import Channel
from kvtransfer.shm.copying import Copy, Outcome
from kvtransfer.shm.frames import OwnKind, PutFrame
from kvtransfer.shm.memories import Exports, Imports
from kvtransfer.shm.reads import Reads
from kvtransfer.shm.resources import Resources
from kvtransfer.shm.system import PeerProcess
from kvtransfer.stream import frames, landed
from kvtransfer.stream.frames import ErrorCode, Header, Kind, TransferRequest, error_code
from kvtransfer.stream.granted import check_has_view, check_request
from kvtransfer.transport import TransportContext

OWNER_ACCEPTS = frames.accepts(
    Kind.READ,
    Kind.ABORT,
    own={
        kind: own.OWN_BODY_BYTES_MAX[kind]
        for kind in (OwnKind.BOARD, OwnKind.REGION, OwnKind.DROP, OwnKind.PUT, OwnKind.MOVED)
    },
)
"""What an owner receives."""

ALIVE_S = 0.05
"""While a copy goes on the caller hears from us this often, so that it does not take us for stalled."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Put:
    """A PUT that is admitted and not answered. `copy` is nothing while its digest is computed."""

    request: int
    frame: PutFrame
    grant: Grant
    ranges: Ranges
    copy: Copy | None = None
    counted_bytes: int = 0
    aborted: bool = False
    ended: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def wanted(self) -> TransferRequest:
        return self.frame.request


class OwnerSession:
    """The requests of one caller, served. Owns the socket that it is given."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        link_id: bytes,
        context: TransportContext,
        resources: Resources,
        on_closed: "Callable[[OwnerSession], None]",
        on_drained: "Callable[[OwnerSession], None]",
    ) -> None:
        """`on_closed` is called when the connection is closed, `on_drained` when, after that, nothing of it
        touches memory any more."""
        self.peer = peer
        self.link_id = link_id
        self._context = context
        self._resources = resources
        self._tell_closed, self._tell_drained = on_closed, on_drained
        self._counters = context.statistics.of(peer, TransportKind.SHM)
        self._channel = Channel(sock, peer, self, OWNER_ACCEPTS, waits_for_room=True)
        self._exports = Exports(self._channel, resources.board)
        self._imports = Imports(self._channel, PeerProcess(sock), context.limits.regions_max)
        self._last_request = 0
        self._puts: dict[int, _Put] = {}
        self._reads = Reads(peer, context, resources, self._channel, self._exports, self._refuse)
        self._drained = False
        self._alive_at_s = time.monotonic()

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def start(self) -> None:
        """Serve from now on; what came before waits in the socket."""
        self._channel.start()
        self._exports.tell_board()

    def close(self, reason: str) -> None:
        self._channel.close(PeerLostError(reason))

    def release(self, region: Region) -> None:
        """The region is gone."""
        self._exports.drop(region)

    async def stop_grant(self, grant: Grant) -> None:
        """The grant is revoked: returns when nothing lands under it any more; the caller is told."""
        waiting = []
        for put in list(self._puts.values()):
            if put.grant is grant:
                ended = asyncio.get_running_loop().create_future()
                put.ended.append(ended)
                waiting.append(ended)
                self._stop(put)
        for ended in waiting:
            await ended

    def on_frame(self, header: Header, body: bytes) -> None:
        match header.kind:
            case OwnKind.PUT:
                self._on_put(self._opened(header), own.parse_put(body))
            case Kind.READ:
                self._reads.admit(self._opened(header), frames.parse_request(bytearray(body)))
            case OwnKind.MOVED:
                self._reads.count(own.parse_moved(body))
            case Kind.ABORT:
                self._on_abort(header.request)
            case OwnKind.REGION:
                self._imports.on_region(body)
            case OwnKind.DROP:
                self._imports.on_drop(body)
            case _:
                self._imports.on_board()

    def on_closed(self, error: TransferError) -> None:
        if isinstance(error, FrameError):
            _log.warning("connection of %s closed: %s", self.peer, error)
        self._imports.close()
        self._tell_closed(self)
        for put in list(self._puts.values()):
            self._stop(put)
        self._end_if_drained()

    def _opened(self, header: Header) -> int:
        if header.request <= self._last_request:
            raise FrameError(f"request {header.request} after {self._last_request}: numbers must grow")
        self._last_request = header.request
        return header.request

    def _on_put(self, request: int, frame: PutFrame) -> None:
        served_max = self._context.limits.transfers_served_max
        if len(self._puts) >= served_max:
            self._refuse(request, ErrorCode.BUSY, f"transfers_served_max of {served_max} is reached")
            return
        asked = frame.request
        try:
            grant, ranges = check_request(self._context.grants, self.peer, Access.WRITE, asked)
            check_has_view(grant)
        except (GrantError, TransportUnfit) as error:
            self._refuse(request, error_code(error), str(error))
            return
        put = _Put(request, frame, grant, ranges)
        if not asked.payload_bytes:
            landed.all_landed(self, self._resources.digests, put)
            return
        put.copy = self._copy(put)
        if self._resources.runs_inline(asked.payload_bytes):
            self._puts[request] = put
            put.copy.run()
            self._copied(put)
        elif self._resources.threads.ready():
            self._puts[request] = put
            self._resources.threads.start(put.copy, lambda: self._copied(put), lambda: self._progressed(put))
        else:
            self._refuse(request, ErrorCode.BUSY, "no thread is free for another copy")

    def _copy(self, put: _Put) -> Copy:
        """The copy that the PUT asks for, with its source checked."""
        frame = put.frame
        memory = self._imports.region(frame.region_id)
        permission = self._imports.permission(frame.slot, frame.epoch)
        if not memory.covers(frame.source) or int(frame.source[:, 1].sum()) != frame.request.payload_bytes:
            raise FrameError(f"the source of request {put.request} leaves its region or is not its payload")
        region = put.grant.region
        return self._resources.copy(put.ranges, region, frame.source, memory, permission)

    def _count(self, put: _Put) -> None:
        """What landed so far."""
        if put.copy is not None:
            put.grant.landed_bytes += put.copy.copied_bytes - put.counted_bytes
            put.counted_bytes = put.copy.copied_bytes

    def _progressed(self, put: _Put) -> None:
        self._count(put)
        now_s = time.monotonic()
        if now_s - self._alive_at_s >= ALIVE_S:
            self._alive_at_s = now_s
            self._channel.send(own.pack_alive())

    def _copied(self, put: _Put) -> None:
        """Its copy ended, and touches nothing any more."""
        copy = put.copy
        assert copy is not None
        self._count(put)
        put.copy = None
        if copy.outcome is not Outcome.DONE:
            self._fail(put, copy.outcome)
        elif self.stands(put):
            landed.all_landed(self, self._resources.digests, put)

    def stands(self, put: _Put) -> bool:
        """Nobody wants it back: for `stream.landed`, like what follows."""
        if put.grant.revoked or put.aborted or self.closed:
            self._fail(put, Outcome.STOPPED)
            return False
        return True

    def refuse_write(self, put: _Put, code: ErrorCode, text: str, landed_bytes: int) -> None:
        self._refuse(put.request, code, text, landed_bytes)
        self._ended(put)

    def write_is_done(self, put: _Put) -> None:
        payload_bytes = put.wanted.payload_bytes
        self._counters.served_writes += 1
        self._counters.served_written_bytes += payload_bytes
        self._channel.send(frames.pack_done(put.request, payload_bytes))
        self._ended(put)

    def _fail(self, put: _Put, outcome: Outcome | None) -> None:
        request, landed_bytes = put.request, put.counted_bytes
        if put.grant.revoked:
            self._refuse(request, ErrorCode.GRANT, REVOKED, landed_bytes)
        elif outcome is Outcome.STOPPED or outcome is Outcome.WITHDRAWN:
            self._refuse(request, ErrorCode.ABORTED, "aborted by the caller", landed_bytes)
        elif outcome is Outcome.REFUSED:
            self._refuse(
                request, ErrorCode.UNFIT, "the kernel does not let the owner read the caller's memory"
            )
        else:
            self._refuse(request, ErrorCode.ABORTED, "the source is not there", landed_bytes)
            self._channel.close(PeerLostError(f"the memory of {self.peer} is not where it said"))
        self._ended(put)

    def _ended(self, put: _Put) -> None:
        self._puts.pop(put.request, None)
        for waiting in put.ended:
            if not waiting.done():
                waiting.set_result(None)
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self.closed and not self._puts and not self._drained:
            self._drained = True
            self._tell_drained(self)

    def _stop(self, put: _Put) -> None:
        if put.copy is not None:
            self._resources.threads.stop(put.copy)

    def _on_abort(self, request: int) -> None:
        if request > self._last_request:
            raise FrameError(f"ABORT of request {request}, which was never made")
        put = self._puts.get(request)
        if put is not None:
            put.aborted = True
            self._stop(put)

    def _refuse(self, request: int, code: ErrorCode, text: str, landed_bytes: int = 0) -> None:
        self._counters.served_failures += 1
        self._channel.send(frames.pack_error(request, code, text, landed_bytes))
