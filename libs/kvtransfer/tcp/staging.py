"""Requests of peers on granted memory of devices: their bytes rest in a slot of host memory on the way.

Owns the slots and the task of each such request, over all sessions. A write asks for its payload once it has
a slot, so nothing waits on a connection for one. Its copy to the device begins only while the grant stands,
and whoever revokes it waits for the end of a copy that runs. A slot is given back once nothing touches it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvtransfer.device import DeviceMemory, DeviceRegion
from kvtransfer.errors import BusyError, ChecksumError, GrantError, PieceTooLarge, TransferError
from kvtransfer.grants import REVOKED, Access, Grant
from kvtransfer.limits import Limits
from kvtransfer.memory import Cursor, no_ranges
from kvtransfer.slots import HostSlots, Slot
from kvtransfer.stream import frames
from kvtransfer.stream.frames import ErrorCode, TransferRequest, error_code
from kvtransfer.stream.outbox import Outgoing
from kvtransfer.tcp.serving import Serving, Staged
from kvtransfer.verification import digest

_NOTHING = memoryview(b"")

_log = logging.getLogger(__name__)


class StagingSession(Protocol):
    """The session that a request came by."""

    def land(self, serving: Serving, slot: Cursor) -> None:
        """Ask for the payload of a write."""
        ...

    def send(self, serving: Serving, outgoing: Outgoing) -> None:
        """The payload of a read and its DONE."""
        ...

    def stop(self, serving: Serving) -> None:
        """Touch its slot no more."""
        ...

    def silent_s(self) -> float:
        """For how long nothing moved on the connection."""
        ...

    def conclude_write(self, serving: Serving) -> None: ...

    def conclude_read(self, serving: Serving, digest: bytes) -> None: ...

    def refuse_if_open(self, serving: Serving, code: ErrorCode, text: str) -> None: ...


class Staging:
    """For the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self.slots = HostSlots(limits)
        self._limits = limits
        self._running: dict[asyncio.Task[None], Serving] = {}

    def check(self, access: Access, wanted: TransferRequest) -> None:
        """Raises PieceTooLarge for what does not fit a slot, or comes without being asked for; BusyError."""
        slot_bytes = self.slots.slot_bytes
        uncalled = access is Access.WRITE and wanted.payload_bytes > 0 and not wanted.awaits_go
        if uncalled or wanted.payload_bytes > slot_bytes:
            raise PieceTooLarge(f"memory of a device takes {slot_bytes} bytes at once", slot_bytes)
        waiting_max = self._limits.bounce_waiting_max
        if self.slots.waiting >= waiting_max:
            raise BusyError(f"bounce_waiting_max of {waiting_max} is reached")

    def start(self, session: StagingSession, serving: Serving) -> None:
        """Serve it, up to its answer."""
        staged = Staged(asyncio.get_running_loop().create_future())
        serving.staged = staged
        serve = self._write if serving.access is Access.WRITE else self._read
        task = staged.task = asyncio.create_task(serve(session, serving, staged))
        self._running[task] = serving
        task.add_done_callback(partial(self._ended, session, serving, staged))

    def give_up(self, staged: Staged, code: ErrorCode, text: str) -> None:
        """It ends soon, with this answer."""
        assert staged.task is not None
        if staged.refusal is None:
            staged.refusal = (code, text)
            staged.task.cancel()

    async def quiesce(self, grant: Grant) -> None:
        """What runs under the grant was given up: after this returns no memory of it is touched."""
        await self._wait(lambda serving: serving.grant is grant)

    async def quiesce_peer(self, peer: str) -> None:
        """After this returns nothing lands of the peer's requests that were given up."""
        await self._wait(lambda serving: serving.grant.peer == peer and _is_given_up(serving))

    async def close(self) -> None:
        """All sessions have ended."""
        await self._wait(lambda serving: True)
        await self.slots.close()

    async def _wait(self, concerns: Callable[[Serving], bool]) -> None:
        while tasks := [task for task, serving in self._running.items() if concerns(serving)]:
            await asyncio.wait(tasks)

    async def _write(self, session: StagingSession, serving: Serving, staged: Staged) -> None:
        wanted, count = serving.wanted, serving.wanted.payload_bytes
        if not count:
            _compare(wanted.digest, await digest(_NOTHING, no_ranges()))
            session.conclude_write(serving)
            return
        async with self.slots.slot(_device_of(serving)) as slot:
            try:
                session.land(serving, _cursor(slot, count))
                await self._moved(session, staged)
            finally:
                session.stop(serving)
            if wanted.digest:
                _compare(wanted.digest, await digest(slot.region.view, slot.ranges(count)))
            # What an older link of the peer left behind must not land after this.
            await self.quiesce_peer(serving.grant.peer)
            if not await self.slots.copy(slot, count, partial(_copy_in, serving, staged)):
                raise GrantError(REVOKED)
            serving.grant.landed_bytes += count
        session.conclude_write(serving)

    async def _read(self, session: StagingSession, serving: Serving, staged: Staged) -> None:
        wanted, count = serving.wanted, serving.wanted.payload_bytes
        if not count:
            session.conclude_read(serving, await digest(_NOTHING, no_ranges()) if wanted.verify else b"")
            return
        async with self.slots.slot(_device_of(serving)) as slot:
            await self.slots.copy(slot, count, partial(_device_of(serving).copy_out, serving.ranges))
            found = await digest(slot.region.view, slot.ranges(count)) if wanted.verify else b""
            if serving.grant.revoked:
                raise GrantError(REVOKED)
            closing = frames.pack_done(serving.request, count, found)
            try:
                session.send(serving, Outgoing(serving.request, b"", _cursor(slot, count), closing))
                await self._moved(session, staged)
            finally:
                session.stop(serving)

    async def _moved(self, session: StagingSession, staged: Staged) -> None:
        """The slot is for others if the peer is silent for `stall_s_max`: BusyError."""
        stall_s_max = self._limits.stall_s_max
        while not staged.moved.done():
            await asyncio.wait([staged.moved], timeout=stall_s_max)
            if not staged.moved.done() and session.silent_s() >= stall_s_max:
                raise BusyError(f"nothing moved for {stall_s_max} s while the request had a slot")

    def _ended(
        self, session: StagingSession, serving: Serving, staged: Staged, task: "asyncio.Task[None]"
    ) -> None:
        del self._running[task]
        if task.cancelled():
            session.refuse_if_open(serving, *(staged.refusal or (ErrorCode.ABORTED, "it was given up")))
        elif (error := task.exception()) is not None:
            session.refuse_if_open(serving, *_told(error))


def _copy_in(serving: Serving, staged: Staged, host: memoryview) -> bool:
    """In a thread. Whether it is still to land."""
    if serving.grant.revoked or staged.refusal is not None:
        return False
    _device_of(serving).copy_in(host, serving.ranges)
    return True


def _device_of(serving: Serving) -> DeviceMemory:
    region = serving.grant.region
    assert isinstance(region, DeviceRegion)
    return region.device


def _cursor(slot: Slot, count: int) -> Cursor:
    return Cursor(slot.region.view, slot.ranges(count))


def _is_given_up(serving: Serving) -> bool:
    return serving.staged is not None and serving.staged.refusal is not None


def _compare(sent: bytes, found: bytes) -> None:
    if sent and sent != found:
        raise ChecksumError("what arrived is not what was sent")


def _told(error: BaseException) -> tuple[ErrorCode, str]:
    """An error as the peer hears of it."""
    match error:
        case GrantError() | BusyError() | ChecksumError():
            return error_code(error), str(error)
        case TransferError():
            return ErrorCode.ABORTED, f"the owner's device failed: {error}"
        case _:
            _log.error("serving a request on memory of a device fails", exc_info=error)
            return ErrorCode.ABORTED, "the owner's device failed"
