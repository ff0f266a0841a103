"""The caller's side of a link: PUTs that the owner copies, and reads that we copy ourselves.

Each of our writes in flight is a permission on our board. It is taken back when the call ends, however
it ends: an owner that stood still meanwhile finds it gone before it reports success, and wipes what it
copied after that. So a call that is cancelled or out of time may give its source away at once. Other
writes wait until the owner has answered it: what is wiped must not be what they brought.

What a READ was admitted to is kept, so that the next read under the same grant needs no word with the
owner, only a look at its board. What we read so is reported to the owner in bulk, for its statistics.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from copy import copy as anew

from kvtransfer.errors import (
    BusyError,
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
from kvtransfer.memory import Region
from kvtransfer.outlasting import outlast
from kvtransfer.shm import frames as own
from kvtransfer.shm.admissions import Admission, Admissions
from kvtransfer.shm.channel import Channel
from kvtransfer.shm.copying import Copy, Outcome
from kvtransfer.shm.frames import GoFrame, MovedFrame, OwnKind, PutFrame
from kvtransfer.shm.memories import Exports, Imports
from kvtransfer.shm.resources import Resources
from kvtransfer.shm.system import PeerProcess
from kvtransfer.stream import frames
from kvtransfer.stream.frames import Header, Kind, TransferRequest
from kvtransfer.transport import Call
from kvtransfer.verification import digest

CALLER_ACCEPTS = frames.accepts(
    Kind.DONE,
    Kind.ERROR,
    own={
        kind: own.OWN_BODY_BYTES_MAX[kind]
        for kind in (OwnKind.BOARD, OwnKind.REGION, OwnKind.DROP, OwnKind.GO, OwnKind.ALIVE)
    },
)
"""What a caller receives."""

MOVED_S = 0.02
"""What we read is reported this long after the first read that was not."""
ABORT_S_MAX = 0.1
"""A call that gives up waits this long for an owner that still copies. A live one ends within a chunk."""


class _Pending:
    """A request that the owner did not answer yet."""

    __slots__ = ("admission", "call", "failure", "future", "is_put")

    def __init__(self, call: Call, *, is_put: bool) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call = call
        self.is_put = is_put
        self.admission: Admission | None = None
        self.failure: TransferError | None = None

    def settle(self, failure: TransferError | None) -> None:
        """Wake its caller, unless that gave up."""
        self.failure = failure
        if not self.future.done():
            self.future.set_result(None)


class CallerLink:
    """Our requests on one connection. Implements `transport.Link`; owns the socket that it is given."""

    kind = TransportKind.SHM

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        limits: Limits,
        resources: Resources,
        on_end: "Callable[[CallerLink], None]",
    ) -> None:
        """`on_end` is called when it is closed."""
        self._peer = peer
        self._limits = limits
        self._resources = resources
        self._on_end = on_end
        self._channel = Channel(sock, peer, self, CALLER_ACCEPTS, waits_for_room=False)
        self._exports = Exports(self._channel, resources.board)
        self._imports = Imports(self._channel, PeerProcess(sock), limits.regions_max)
        self._last_request = 0
        self._pending: dict[int, _Pending] = {}
        self._given_up: dict[int, _Pending] = {}
        self._admissions = Admissions()
        self._copies: set[Copy] = set()
        self._moved = MovedFrame(0, 0, 0)
        self._reporting: asyncio.TimerHandle | None = None
        self._error: TransferError | None = None

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def start(self) -> None:
        self._channel.start()
        self._exports.tell_board()

    def release(self, region: Region) -> None:
        """The region is gone."""
        self._exports.drop(region)

    async def write(self, call: Call) -> None:
        source = call.memory
        sent = await digest(source.region.view, source.ranges) if call.verify else b""
        while self._given_up:
            await asyncio.wait([pending.future for pending in self._given_up.values()])
        request = self._next_request()
        self._exports.tell(source.region)
        pending = _Pending(call, is_put=True)
        wanted = TransferRequest(
            *(call.token, call.remote, source.payload_bytes, call.tag, sent, call.verify, call.earlier_bytes)
        )
        slot = self._resources.board.open()
        put = PutFrame(source.region.region_id, slot.index, slot.epoch, source.ranges, wanted)
        try:
            await self._ask(own.pack_put(request, put), pending)
        except asyncio.CancelledError:
            self._resources.board.shut(slot)
            await self._give_up(request, pending)
            raise
        finally:
            self._resources.board.shut(slot)

    async def read(self, call: Call) -> None:
        admission = self._admissions.find(call) or await self._admitted(call)
        target = call.memory
        failed = True
        try:
            if target.payload_bytes:
                await self._copy(call, admission)
            if call.verify and admission.digest != await digest(target.region.view, target.ranges):
                raise ChecksumError(f"what {self._peer} sent is not what arrived")
            failed = False
        finally:
            self._report(0 if failed else target.payload_bytes, failed)

    def close_if_stalled(self) -> None:
        silent_s = time.monotonic() - self._channel.progress_at_s
        if silent_s >= self._limits.stall_s_max:
            self._channel.close(PeerLostError(f"{self._peer} stalls for {silent_s:.1f} s"))

    def close(self) -> None:
        self._channel.close(PeerLostError(f"the connection to {self._peer} was closed"))

    def on_frame(self, header: Header, body: bytes) -> None:
        match header.kind:
            case Kind.DONE:
                self._settle(header.request, frames.parse_done(bytearray(body))[0])
            case OwnKind.GO:
                self._settle(header.request, own.parse_go(body))
            case Kind.ERROR:
                self._settle(header.request, frames.parse_error(bytearray(body)))
            case OwnKind.REGION:
                self._imports.on_region(body)
            case OwnKind.DROP:
                self._on_drop(body)
            case OwnKind.BOARD:
                self._imports.on_board()
            case _:
                pass  # ALIVE: that it came is all that it says

    def on_closed(self, error: TransferError) -> None:
        self._error = error
        pending, self._pending = self._pending, {}
        self._given_up.clear()
        for entry in pending.values():
            entry.settle(error)
        for copy in list(self._copies):
            self._resources.threads.stop(copy)
        if self._reporting is not None:
            self._reporting.cancel()
        self._admissions.clear()
        self._imports.close()
        self._on_end(self)

    def _on_drop(self, body: bytes) -> None:
        self._admissions.drop(self._imports.on_drop(body))

    def _next_request(self) -> int:
        pending_max = self._limits.requests_pending_max
        if len(self._pending) >= pending_max:
            self._channel.close(PeerLostError(f"{self._peer} left {pending_max} requests open"))
        if self.closed:
            raise PeerLostError(f"the connection to {self._peer} is closed")
        self._last_request += 1
        return self._last_request

    async def _ask(self, frame: bytes, pending: "_Pending") -> None:
        """Send a request; returns when the owner granted it, raises its error otherwise.

        An error that is kept is raised anew: its own traceback would keep frames and their memory.
        """
        if self._error is not None:  # a frame before it met the end of the connection
            raise anew(self._error)
        if not self._pending:
            # A call begins to wait where none did: the peer's silence counts from now.
            self._channel.progress_at_s = time.monotonic()
        self._pending[self._last_request] = pending
        self._channel.send(frame)
        await pending.future
        if pending.failure is not None:
            raise anew(pending.failure)

    def _settle(self, request: int, answer: GoFrame | int | TransferError) -> None:
        pending = self._pending.get(request)
        if pending is None:
            raise FrameError(f"answer to request {request}, which is not pending")
        payload_bytes = pending.call.memory.payload_bytes
        if isinstance(answer, TransferError):
            known = payload_bytes if pending.is_put else 0
            answer.landed = tuple((start, min(count, known)) for start, count in answer.landed if known)
        elif isinstance(answer, GoFrame) is pending.is_put:
            raise FrameError(f"answer of the wrong kind to request {request}")
        elif isinstance(answer, GoFrame):
            pending.admission = self._admissions.understand(answer, pending.call, self._imports)
        elif answer != payload_bytes:
            raise FrameError(f"{self._peer} says DONE of {answer} bytes to {payload_bytes}")
        # A malformed answer raised above, while the request is still among those that the close fails.
        del self._pending[request]
        self._given_up.pop(request, None)
        pending.settle(answer if isinstance(answer, TransferError) else None)

    async def _give_up(self, request: int, pending: "_Pending") -> None:
        """The caller of a PUT is cancelled: wait a little until the owner does not touch its source any more.

        Where the owner does not answer, its permission is gone all the same (see above).
        """
        if self._pending.get(request) is not pending:
            return
        pending.future = asyncio.get_running_loop().create_future()
        self._given_up[request] = pending
        self._channel.send(frames.pack_abort(request))
        await asyncio.wait([pending.future], timeout=ABORT_S_MAX)

    async def _admitted(self, call: Call) -> Admission:
        """Ask the owner; its digest comes along if the call wants to verify."""
        wanted = TransferRequest(call.token, call.remote, call.memory.payload_bytes, verify=call.verify)
        request = self._next_request()
        pending = _Pending(call, is_put=False)
        await self._ask(frames.pack_request(Kind.READ, request, wanted), pending)
        assert pending.admission is not None
        return pending.admission

    async def _copy(self, call: Call, admission: Admission) -> None:
        target = call.memory
        copy = self._resources.copy(
            target.ranges, target.region, call.remote, admission.memory, admission.permission
        )
        if await self._resources.runs_inline_soon(target.payload_bytes):
            copy.run()
        else:
            await self._in_thread(copy)
        if copy.outcome is not Outcome.DONE:
            error = self._failure(call, copy.outcome)
            error.landed = ((0, copy.copied_bytes),) if copy.copied_bytes else ()
            raise error

    async def _in_thread(self, copy: Copy) -> None:
        """Returns when the copy ended. Cancelled, that is after the present chunk."""
        if not self._resources.threads.ready():
            raise BusyError("no thread is free for another copy")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copies.add(copy)
        self._resources.threads.start(copy, lambda: ended.set_result(None), self._progressed)
        try:
            await outlast(ended, lambda: self._resources.threads.stop(copy))
        finally:
            self._copies.discard(copy)

    def _progressed(self) -> None:
        self._channel.progress_at_s = time.monotonic()

    def _failure(self, call: Call, outcome: Outcome | None) -> TransferError:
        if self._error is not None:
            return anew(self._error)
        if outcome is Outcome.WITHDRAWN:
            self._admissions.forget(call.token)
            return GrantError(REVOKED)
        if outcome is Outcome.REFUSED:
            return TransportUnfit("the kernel does not let us read the peer's memory")
        error = PeerLostError(f"the memory of {self._peer} is not where it said")
        self._channel.close(error)
        return error

    def _report(self, payload_bytes: int, failed: bool) -> None:
        """Count a read for the owner's statistics, and see to it that it hears of it."""
        moved = self._moved
        self._moved = MovedFrame(
            moved.payload_bytes + payload_bytes, moved.reads + (not failed), moved.failures + failed
        )
        if self._reporting is None and not self.closed:
            self._reporting = asyncio.get_running_loop().call_later(MOVED_S, self._send_moved)

    def _send_moved(self) -> None:
        self._reporting = None
        moved, self._moved = self._moved, MovedFrame(0, 0, 0)
        self._channel.send(own.pack_moved(moved))
