"""The side of a link that calls: announces its requests, moves their bytes itself, and tells when it is done.

Implements `transport.Link`. The owner answers a request with keys; from then on the owner's processor has no
part in it, until the immediates that end a write. A call ends only when no work request of its own is
outstanding: one that is given up is drained, and if that takes too long the whole link is closed, which
destroys the queue pairs.
"""

import asyncio
import copy
import socket
import time
from collections.abc import Sequence

from kvtransfer.device import DeviceRegion
from kvtransfer.errors import (
    ChecksumError,
    FrameError,
    GrantError,
    PeerLostError,
    TransferError,
    TransportUnfit,
)
from kvtransfer.grants import REVOKED
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import Limits
from kvtransfer.rdma import frames as own
from kvtransfer.rdma.devices import OpenDevice
from kvtransfer.rdma.frames import OWN_BODY_BYTES_MAX, LaneEnd, RdmaKind
from kvtransfer.rdma.lane_cut import LaneCut, lane_cut
from kvtransfer.rdma.lanes import CallerLanes
from kvtransfer.rdma.pending import Pending
from kvtransfer.rdma.posting import post_all
from kvtransfer.rdma.registrations import PieceKeys, Registrations
from kvtransfer.rdma.sendring import SendRing
from kvtransfer.rdma.work import WORK_BYTES_MAX, pieces_of, planned
from kvtransfer.stream import frames
from kvtransfer.stream.connection import Connection
from kvtransfer.stream.frames import Header, Kind, TransferRequest
from kvtransfer.stream.inbox import Incoming
from kvtransfer.stream.outbox import Outgoing
from kvtransfer.transport import Call
from kvtransfer.verification import digest

_OWN_KINDS = (RdmaKind.LANES, RdmaKind.GO, RdmaKind.REVOKED, RdmaKind.RESET)
CALLER_ACCEPTS = frames.accepts(
    Kind.DONE,
    Kind.ERROR,
    own={kind: OWN_BODY_BYTES_MAX[kind] for kind in _OWN_KINDS},
)
_DRAIN_S_MAX = 0.5
"""A call that is given up waits this long for its work requests; then the link is closed."""
_RESET_WAIT_S = 0.2
"""A queue pair fails when the owner takes its end away: the RESET that says why is waited for so long."""


class RdmaLink:
    """Our requests to one peer. Owns the socket that it is given, and its lanes."""

    kind = TransportKind.RDMA

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        limits: Limits,
        devices: Sequence[OpenDevice],
        registrations: Registrations,
        ring: SendRing,
    ) -> None:
        self.peer = peer
        self._connection = Connection(sock, peer, self, CALLER_ACCEPTS, limits.turn_bytes)
        self._limits = limits
        self._registrations = registrations
        self._lanes = CallerLanes(devices, ring, self._lane_failed)
        self._answer: asyncio.Future[list[LaneEnd]] | None = None
        self._pending: dict[int, Pending] = {}
        self._last_request = 0
        self._failing: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        return self._connection.closed

    async def establish(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Meet the owner's queue pairs, one for each pair (our device, its device).

        Raises PeerLostError if no lane works, FrameError; the caller bounds the time and closes the link.
        """
        self._connection.start()
        try:
            ends = self._lanes.make(pairs)
            self._answer = asyncio.get_running_loop().create_future()
            self._connection.send_frame(own.pack_lanes(ends))
            self._lanes.connect(await self._answer)
            usable = await self._lanes.probe()
        except OSError as error:
            raise PeerLostError(f"no queue pair to {self.peer}: {error}") from error
        self._connection.send_frame(own.pack_ready(usable))

    async def write(self, call: Call) -> None:
        source = call.memory
        sent = await digest(source.region.view, source.ranges) if call.verify else b""
        await self._call(Kind.WRITE, call, sent)

    async def read(self, call: Call) -> None:
        target = call.memory
        pending = await self._call(Kind.READ, call, b"")
        if call.verify and pending.digest != await digest(target.region.view, target.ranges):
            raise ChecksumError(f"what {self.peer} has is not what arrived")

    def takes(self, call: Call) -> bool:
        """`verify` reads the bytes, which only host memory lets it."""
        region = call.memory.region
        devices = self._lanes.devices(len(self._lanes.working))
        return (
            isinstance(region, DeviceRegion)
            and not call.verify
            and self._registrations.reaches(region, devices)
        )

    def close_if_stalled(self) -> None:
        moved_at_s = [lane.progress_at_s for lane in self._lanes.working]
        progress_at_s = max([self._connection.progress_at_s, *moved_at_s])
        silent_s = time.monotonic() - progress_at_s
        if silent_s >= self._limits.stall_s_max:
            self._connection.close(PeerLostError(f"{self.peer} stalls for {silent_s:.1f} s"))

    def close(self) -> None:
        self._connection.close(PeerLostError(f"the connection to {self.peer} was closed"))

    def incoming(self, request: int, count: int) -> Incoming:
        raise FrameError("a DATA frame on an rdma link")

    def on_payload(self, incoming: Incoming) -> None:
        """There is none."""

    def on_sent(self, outgoing: Outgoing) -> None:
        """There is none."""

    def on_frame(self, header: Header, body: bytearray) -> None:
        match header.kind:
            case RdmaKind.LANES:
                self._on_lanes(own.parse_lanes(body))
            case RdmaKind.RESET:
                self._on_reset(own.parse_reset(body))
            case RdmaKind.REVOKED:
                self._on_revoked(header.request)
            case RdmaKind.GO:
                self._on_go(self._of(header), body)
            case Kind.DONE:
                self._on_done(self._of(header), body)
            case _:
                self._on_error(self._of(header), frames.parse_error(body))

    def on_closed(self, error: TransferError) -> None:
        """The lanes first: when a call learns of the end, no device touches its memory any more."""
        if self._failing is not None:
            self._failing.cancel()
        self._lanes.close(error)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            entry.error = entry.error or error
            entry.answered()

    def _on_lanes(self, ends: list[LaneEnd]) -> None:
        if self._answer is None or self._answer.done():
            raise FrameError("LANES that do not answer ours")
        self._answer.set_result(ends)

    def _on_go(self, pending: Pending, body: bytearray) -> None:
        if pending.keys is not None or not pending.cut.payload_bytes:
            raise FrameError(f"GO for request {pending.request}, which has it or needs none")
        pending.keys = own.parse_go(body, pending.cut.lanes)
        pending.answered()

    def _on_done(self, pending: Pending, body: bytearray) -> None:
        done_bytes, pending.digest = frames.parse_done(body)
        early = not pending.posted_whole and not pending.abandoned
        if done_bytes != pending.cut.payload_bytes or early:
            raise FrameError(f"{self.peer} says DONE before it is")
        del self._pending[pending.request]
        pending.finished = True
        pending.answered()

    def _on_error(self, pending: Pending, error: TransferError) -> None:
        if pending.posted and not pending.posted_whole and not pending.abandoned:
            raise FrameError(f"{self.peer} refuses request {pending.request} after it gave its keys")
        del self._pending[pending.request]
        pending.error = error
        pending.answered()

    def _on_revoked(self, request: int) -> None:
        """The call stops where it is; `_call` tells the owner when nothing of it is under way any more."""
        pending = self._pending.get(request)
        if pending is not None and not pending.abandoned:
            pending.error = GrantError(REVOKED)
            pending.answered()

    def _on_reset(self, requests: frozenset[int]) -> None:
        for request in requests:
            pending = self._pending.get(request)
            if pending is not None:
                pending.error = GrantError(REVOKED)
        self._connection.close(PeerLostError(f"{self.peer} made the link anew: a grant was revoked in use"))

    def _of(self, header: Header) -> Pending:
        pending = self._pending.get(header.request)
        if pending is None:
            raise FrameError(f"answer to request {header.request}, which is not pending")
        return pending

    def _lane_failed(self, reason: str) -> None:
        if self._failing is not None:
            return
        error = PeerLostError(f"a lane to {self.peer} failed: {reason}")
        self._failing = asyncio.get_running_loop().call_later(_RESET_WAIT_S, self._connection.close, error)

    async def _call(self, kind: Kind, call: Call, sent: bytes) -> Pending:
        memory = call.memory
        cut = lane_cut(memory.payload_bytes, len(self._lanes.working))
        if isinstance(memory.region, DeviceRegion):
            await asyncio.to_thread(memory.region.device.settle)
        local = await self._registered(call, cut.lanes)
        pending = self._next_pending(cut, kind is Kind.WRITE)
        wanted = TransferRequest(
            *(call.token, call.remote, memory.payload_bytes, call.tag, sent, call.verify, call.earlier_bytes)
        )
        if not self._pending:
            self._connection.await_progress()
        self._pending[pending.request] = pending
        self._connection.send_frame(frames.pack_request(kind, pending.request, wanted))
        try:
            if memory.payload_bytes:
                await self._move(pending, call, local)
            if pending.is_write or call.verify or not memory.payload_bytes:
                await pending.until(lambda: pending.finished)
        except TransferError as error:
            await self._abandon(pending)
            raise self._told(pending, error) from error
        except BaseException:
            await self._abandon(pending)
            raise
        return pending

    async def _registered(self, call: Call, lanes: int) -> PieceKeys | None:
        if not call.memory.payload_bytes:
            return None
        region, pieces = call.memory.region, pieces_of(call.memory.ranges)
        try:
            keys = await self._registrations.make(
                region, pieces, self._lanes.devices(lanes), lambda: not self._connection.closed
            )
        except OSError as error:
            raise TransportUnfit(f"memory cannot be registered for rdma: {error}") from error
        if keys is None:
            raise PeerLostError(f"the connection to {self.peer} is closed")
        return keys

    def _next_pending(self, cut: LaneCut, is_write: bool) -> Pending:
        pending_max = self._limits.requests_pending_max
        if len(self._pending) >= pending_max or self._last_request == own.REQUEST_NUMBER_MAX:
            self._connection.close(PeerLostError(f"{self.peer} left {len(self._pending)} requests open"))
        if self._connection.closed:
            raise PeerLostError(f"the connection to {self.peer} is closed")
        self._last_request += 1
        return Pending(self._last_request, cut, is_write)

    async def _move(self, pending: Pending, call: Call, local: PieceKeys | None) -> None:
        """All bytes of the call, over all lanes of its cut; returns when no work request is outstanding."""
        await pending.until(lambda: pending.keys is not None)
        assert local is not None
        assert pending.keys is not None
        try:
            plan = planned(call.memory.ranges, call.remote, pending.keys, pending.cut, WORK_BYTES_MAX)
        except FrameError as error:
            self._connection.close(error)
            raise
        try:
            await post_all(pending, plan, local, self._lanes.working[: pending.cut.lanes])
        except OSError as error:
            lost = PeerLostError(f"a lane to {self.peer} takes no work: {error}")
            self._connection.close(lost)
            raise lost from error
        if not pending.is_write:
            self._connection.send_frame(own.pack_fin(pending.request))
            if not call.verify:
                del self._pending[pending.request]
                pending.finished = True

    def _told(self, pending: Pending, error: TransferError) -> TransferError:
        """The call's own error: the owner's word for this request if there is one, with what landed."""
        told = copy.copy(pending.error or error)
        told.landed = told.landed or pending.landed()
        return told

    async def _abandon(self, pending: Pending) -> None:
        """The call failed or was given up: afterwards its memory is untouched, and the owner learns of it."""
        try:
            await self._drain(pending)
        except BaseException:
            self._connection.close(PeerLostError(f"a call to {self.peer} was given up twice"))
            raise
        if self._pending.get(pending.request) is pending:
            # Neither answered nor lost with the link.
            pending.abandoned = True
            self._connection.send_frame(frames.pack_abort(pending.request))

    async def _drain(self, pending: Pending) -> None:
        outstanding = [(lane, number) for lane, number in pending.posted.items() if number > lane.retired]
        if not outstanding:
            return
        try:
            async with asyncio.timeout(_DRAIN_S_MAX):
                for lane, number in outstanding:
                    await lane.completed(number)
        except TimeoutError:
            # Destroys the queue pairs: from here on no device touches the memory.
            self._connection.close(PeerLostError(f"{self.peer} did not take what a call had under way"))
        except TransferError:
            return  # the link is closed, so are the lanes
