"""Calls to one peer: deadlines, room in flight, and a link that is made anew when it was lost."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from enum import Enum

import numpy.typing as npt

from kvtransfer.admission import Admission
from kvtransfer.descriptor import Descriptor
from kvtransfer.errors import PeerLostError, RangeError, TransferTimeout
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import REGION_BYTES_MAX, TOKEN_BYTES_MAX, Limits
from kvtransfer.memory import Ranges, Region, checked_ranges, total_bytes
from kvtransfer.statistics import PeerStatistics, Statistics
from kvtransfer.transport import Call, Link, LocalMemory


class _Direction(Enum):
    WRITE = "write"
    READ = "read"


class Peer:
    """Made by `Endpoint.connect`. Calls may run at once, up to the endpoint's limits; the rest wait.

    Each call raises, besides what is named there: RangeError for malformed arguments, GrantError if
    the peer refuses, TransferTimeout at the deadline, PeerLostError if the connection breaks, BusyError
    at a limit. A call that fails or is cancelled touches no local memory afterwards. Of a failed write
    any part may have landed, or zeros in its place; the call may be made again.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        dial: Callable[[Descriptor], Coroutine[None, None, Link]],
        limits: Limits,
        statistics: Statistics,
    ) -> None:
        self.descriptor = descriptor
        self._dial = dial
        self._statistics = statistics
        self._admission = Admission(limits)
        self._link: Link | None = None
        self._dialling = asyncio.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def idle(self) -> bool:
        """No call is running or waiting."""
        return self._admission.idle

    def statistics(self) -> PeerStatistics:
        """The counters of this peer at this moment."""
        return self._statistics.peer(self.name)

    async def write(
        self,
        region: Region,
        local: npt.ArrayLike,
        grant_token: str,
        remote: npt.ArrayLike,
        *,
        timeout_s: float,
    ) -> int:
        """Copy the `local` ranges of `region` to the `remote` ranges of the granted region.

        The two lists are the same bytes in the same order, cut as each side likes. Returns their
        number once all of them are visible at the peer.
        """
        return await self._call(_Direction.WRITE, region, local, grant_token, remote, timeout_s)

    async def read(
        self,
        region: Region,
        local: npt.ArrayLike,
        grant_token: str,
        remote: npt.ArrayLike,
        *,
        timeout_s: float,
    ) -> int:
        """Copy the `remote` ranges of the granted region to the `local` ranges of `region`."""
        return await self._call(_Direction.READ, region, local, grant_token, remote, timeout_s)

    async def ensure_link(self, timeout_s: float) -> None:
        """Connect now if there is no connection. Raises what a call raises."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._live_link()
        except TimeoutError as error:
            raise TransferTimeout(f"no connection to {self.name} within {timeout_s} s") from error

    def close(self) -> None:
        """Break the connection for good; running calls fail with PeerLostError."""
        self._closed = True
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _call(
        self,
        direction: _Direction,
        region: Region,
        local: npt.ArrayLike,
        token: str,
        remote: npt.ArrayLike,
        timeout_s: float,
    ) -> int:
        memory, remote_ranges = _checked_call(region, local, token, remote)
        counters = self._statistics.of(self.name, TransportKind.TCP)
        begin_s = time.monotonic()
        try:
            await self._within(timeout_s, direction, memory, token, remote_ranges)
        except BaseException:
            counters.failures += 1
            raise
        finally:
            counters.transfer_s += time.monotonic() - begin_s
        if direction is _Direction.WRITE:
            counters.writes += 1
            counters.written_bytes += memory.payload_bytes
        else:
            counters.reads += 1
            counters.read_bytes += memory.payload_bytes
        return memory.payload_bytes

    async def _within(
        self, timeout_s: float, direction: _Direction, memory: LocalMemory, token: str, remote: Ranges
    ) -> None:
        link: Link | None = None
        try:
            async with asyncio.timeout(timeout_s), self._admission.admitted(memory.payload_bytes):
                link = await self._live_link()
                call = Call(memory, token, remote)
                if direction is _Direction.WRITE:
                    await link.write(call)
                else:
                    await link.read(call)
        except TimeoutError as error:
            if link is not None:
                link.close_if_stalled()
            raise TransferTimeout(f"{direction.value} to {self.name} not done in {timeout_s} s") from error

    async def _live_link(self) -> Link:
        """The link, made anew if need be. Callers wait for one attempt, each as long as it likes."""
        async with self._dialling:
            if self._closed:
                raise PeerLostError(f"this connection to {self.name} was given up; connect again")
            if self._link is None or self._link.closed:
                self._link = await self._dial(self.descriptor)
                if self._closed:
                    self._link.close()
                    raise PeerLostError(f"this connection to {self.name} was given up; connect again")
            return self._link


def _checked_call(
    region: Region, local: npt.ArrayLike, token: str, remote: npt.ArrayLike
) -> tuple[LocalMemory, Ranges]:
    if not token.isascii() or not 0 < len(token) <= TOKEN_BYTES_MAX:
        raise RangeError(f"grant_token must be 1 to {TOKEN_BYTES_MAX} ASCII characters")
    local_ranges = checked_ranges(local, region.region_bytes, "local")
    remote_ranges = checked_ranges(remote, REGION_BYTES_MAX, "remote")
    payload_bytes = total_bytes(local_ranges)
    if total_bytes(remote_ranges) != payload_bytes:
        raise RangeError(f"local has {payload_bytes} bytes, remote has {total_bytes(remote_ranges)}")
    return LocalMemory(region, local_ranges, payload_bytes), remote_ranges
