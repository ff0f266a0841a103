"""The side of a link that owns the memory: checks requests against grants, gives keys, learns of the end.

What this trusts: a key opens a whole piece of a region to the caller's queue pairs, so a peer that knows the
cluster secret and lies could, while a request of its is open or later on the same link, touch bytes of the
pieces that it was not granted. An honest peer touches what was granted only while its request is open, and
that is what revocation relies on. If a grant is revoked while a request that has its keys is open, the caller
is asked to stop; one that has not stopped after REVOKE_S_MAX has the queue pairs of its link destroyed before
the revocation returns.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from kvtransfer.errors import (
    FrameError,
    GrantError,
    PeerLostError,
    TransferError,
    TransportUnfit,
)
from kvtransfer.grants import REVOKED, Access, Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.rdma import frames as own
from kvtransfer.rdma.devices import OpenDevice
from kvtransfer.rdma.frames import OWN_BODY_BYTES_MAX, LaneEnd, RdmaKind
from kvtransfer.rdma.giving import KeyGiver
from kvtransfer.rdma.lane_cut import lane_cut
from kvtransfer.rdma.lanes import OwnerLanes
from kvtransfer.rdma.registrations import Registrations
from kvtransfer.rdma.sendring import SendRing
from kvtransfer.rdma.serving import Serving
from kvtransfer.rdma.work import RemoteKeys
from kvtransfer.stream import frames, landed
from kvtransfer.stream.connection import Connection
from kvtransfer.stream.frames import ErrorCode, Header, Kind, TransferRequest, error_code
from kvtransfer.stream.granted import check_has_view, check_request
from kvtransfer.stream.inbox import Incoming
from kvtransfer.stream.outbox import Outgoing
from kvtransfer.transport import TransportContext
from kvtransfer.verification import GrantedDigests

OWNER_ACCEPTS = frames.accepts(
    Kind.WRITE,
    Kind.READ,
    Kind.ABORT,
    own={kind: OWN_BODY_BYTES_MAX[kind] for kind in (RdmaKind.LANES, RdmaKind.READY, RdmaKind.FIN)},
)
"""What an owner receives."""

REVOKE_S_MAX = 0.25
"""So long a caller has to stop, and to say so, when a grant is revoked in use."""

_log = logging.getLogger(__name__)


class RdmaSession:
    """The requests of one caller, served. Owns the socket that it is given, and its lanes."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        link_id: bytes,
        context: TransportContext,
        devices: Sequence[OpenDevice],
        registrations: Registrations,
        ring: SendRing,
        digests: GrantedDigests,
        on_end: "Callable[[RdmaSession], None]",
    ) -> None:
        self.peer = peer
        self.link_id = link_id
        self._connection = Connection(sock, peer, self, OWNER_ACCEPTS, context.limits.turn_bytes)
        self._context = context
        self._keys = KeyGiver(
            registrations,
            self._go,
            lambda serving, reason: self._refuse(serving.request, ErrorCode.UNFIT, reason),
        )
        self._lanes = OwnerLanes(
            *(devices, ring, self._on_immediate),
            on_failure=lambda reason: self.close(f"a lane of {peer} failed: {reason}"),
        )
        self._digests = digests
        self._on_end = on_end
        self._counters = context.statistics.of(peer, TransportKind.RDMA)
        self._is_reset = False
        self._last_request = 0
        self._serving: dict[int, Serving] = {}

    def start(self) -> None:
        self._connection.start()

    def close(self, reason: str) -> None:
        self._connection.close(PeerLostError(reason))

    def incoming(self, request: int, count: int) -> Incoming:
        raise FrameError("a DATA frame on an rdma link")

    def on_payload(self, incoming: Incoming) -> None:
        """There is none."""

    def on_sent(self, outgoing: Outgoing) -> None:
        """There is none."""

    def on_frame(self, header: Header, body: bytearray) -> None:
        if self._is_reset:
            return  # sent before the caller knew
        match header.kind:
            case RdmaKind.LANES:
                self._on_lanes(own.parse_lanes(body))
            case RdmaKind.READY:
                self._lanes.take_ready(body)
            case Kind.WRITE:
                self._on_request(header, frames.parse_request(body), Access.WRITE)
            case Kind.READ:
                self._on_request(header, frames.parse_request(body), Access.READ)
            case RdmaKind.FIN:
                self._on_fin(header.request)
            case _:
                self._on_abort(header.request)

    def on_closed(self, error: TransferError) -> None:
        self._lanes.close(error)
        self._end_all()
        self._keys.close()
        if isinstance(error, FrameError):
            _log.warning("rdma link of %s closed: %s", self.peer, error)
        self._on_end(self)

    async def stop_grant(self, grant: Grant) -> None:
        """The grant is revoked: when this returns, the caller does not touch its memory any more."""
        moving = []
        for serving in [serving for serving in self._serving.values() if serving.grant is grant]:
            if serving.moving:
                moving.append(serving)
                self._connection.send_frame(own.pack_revoked(serving.request))
            else:
                self._refuse(serving.request, ErrorCode.GRANT, REVOKED)
        if not moving:
            return
        try:
            async with asyncio.timeout(REVOKE_S_MAX):
                for serving in moving:
                    await serving.ended.wait()
        except TimeoutError:
            self._reset([serving.request for serving in moving if self._is_open(serving)])
        except asyncio.CancelledError:
            self._reset([serving.request for serving in moving if self._is_open(serving)])
            raise

    def _reset(self, requests: list[int]) -> None:
        """Take the queue pairs away and tell the caller, who closes the link."""
        self._is_reset = True
        self._lanes.close(PeerLostError("a grant was revoked in use"))
        self._end_all()
        self._connection.send_frame(own.pack_reset(requests[: own.RESET_REQUESTS_MAX]))

    def _on_lanes(self, theirs: list[LaneEnd]) -> None:
        self._connection.send_frame(own.pack_lanes(self._lanes.make(theirs)))

    def _end_all(self) -> None:
        """Without an answer: the link is lost."""
        self._counters.served_failures += len(self._serving)
        for serving in list(self._serving.values()):
            self._end(serving)

    def _on_request(self, header: Header, wanted: TransferRequest, access: Access) -> None:
        if not self._lanes.ready:
            raise FrameError("a request before READY")
        if not self._last_request < header.request <= own.REQUEST_NUMBER_MAX:
            raise FrameError(f"request {header.request} after {self._last_request}: numbers must grow")
        self._last_request = header.request
        serving = self._admit(header.request, wanted, access)
        if serving is None:
            return
        if wanted.payload_bytes:
            self._keys.give(serving, self._lanes.devices(serving.cut.lanes))
        elif access is Access.WRITE:
            landed.all_landed(self, self._digests, serving)
        else:
            self._all_read(serving)

    def _admit(self, request: int, wanted: TransferRequest, access: Access) -> Serving | None:
        """The request under its grant, or None once the refusal is sent."""
        served_max = self._context.limits.transfers_served_max
        if len(self._serving) >= served_max:
            self._refuse(request, ErrorCode.BUSY, f"transfers_served_max of {served_max} is reached")
            return None
        try:
            grant, ranges = check_request(self._context.grants, self.peer, access, wanted)
            check_has_view(grant)
        except (GrantError, TransportUnfit) as error:
            self._refuse(request, error_code(error), str(error))
            return None
        cut = lane_cut(wanted.payload_bytes, len(self._lanes.working))
        serving = self._serving[request] = Serving(request, wanted, grant, ranges, access, cut)
        return serving

    def _go(self, serving: Serving, keys: RemoteKeys) -> None:
        serving.keys_given = True
        self._connection.send_frame(own.pack_go(serving.request, keys))

    def _on_immediate(self, lane: int, request: int) -> None:
        """A part landed. Of a request that ended meanwhile it means nothing."""
        serving = self._serving.get(request)
        if serving is None or serving.access is not Access.WRITE or not serving.keys_given:
            return
        parts = serving.cut.parts_of(lane) if lane < serving.cut.lanes else range(0)
        count = serving.parts_landed[lane]
        if count == len(parts):
            self._connection.close(FrameError(f"more parts of request {request} than it has"))
            return
        serving.parts_landed[lane] = count + 1
        serving.grant.landed_bytes += serving.cut.stretch(parts[count])[1]
        if serving.all_landed:
            landed.all_landed(self, self._digests, serving)

    def _on_fin(self, request: int) -> None:
        serving = self._serving.get(request)
        if serving is None:
            return  # it was refused while the FIN was on its way
        if serving.access is not Access.READ or not serving.keys_given:
            raise FrameError(f"FIN of request {request}, which is no READ with keys")
        serving.keys_given = False
        self._all_read(serving)

    def _on_abort(self, request: int) -> None:
        if request > self._last_request:
            raise FrameError(f"ABORT of request {request}, which was never made")
        serving = self._serving.get(request)
        if serving is None:
            return
        if serving.grant.revoked:
            self._refuse(request, ErrorCode.GRANT, REVOKED)
        else:
            self._refuse(request, ErrorCode.ABORTED, "aborted by the caller")

    def stands(self, serving: Serving) -> bool:
        """Not answered yet: for `stream.landed`, like what follows."""
        return self._is_open(serving)

    def refuse_write(self, serving: Serving, code: ErrorCode, text: str, landed_bytes: int) -> None:
        self._refuse(serving.request, code, text, landed_bytes)

    def write_is_done(self, serving: Serving) -> None:
        payload_bytes = serving.wanted.payload_bytes
        self._end(serving)
        self._counters.served_writes += 1
        self._counters.served_written_bytes += payload_bytes
        self._connection.send_frame(frames.pack_done(serving.request, payload_bytes))

    def _all_read(self, serving: Serving) -> None:
        if serving.wanted.verify:
            self._digests.start(
                serving.grant, serving.ranges, lambda found: self._conclude_read(serving, found)
            )
        else:
            self._conclude_read(serving, b"")

    def _conclude_read(self, serving: Serving, digest: bytes) -> None:
        """A caller that reads bytes without `verify` knows the end by itself and waits for no DONE."""
        if not self._is_open(serving):
            return
        if serving.wanted.verify and serving.grant.revoked:
            self._refuse(serving.request, ErrorCode.GRANT, REVOKED)  # its digest was cut short
            return
        self._end(serving)
        payload_bytes = serving.wanted.payload_bytes
        self._counters.served_reads += 1
        self._counters.served_read_bytes += payload_bytes
        if serving.wanted.verify or not payload_bytes:
            self._connection.send_frame(frames.pack_done(serving.request, payload_bytes, digest))

    def _end(self, serving: Serving) -> None:
        del self._serving[serving.request]
        serving.ended.set()

    def _is_open(self, serving: Serving) -> bool:
        """Not answered yet."""
        return self._serving.get(serving.request) is serving

    def _refuse(self, request: int, code: ErrorCode, text: str, landed_bytes: int = 0) -> None:
        serving = self._serving.get(request)
        if serving is not None:
            self._end(serving)
        self._counters.served_failures += 1
        self._connection.send_frame(frames.pack_error(request, code, text, landed_bytes))
