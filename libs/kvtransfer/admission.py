"""Backpressure: how many transfers and bytes may be in flight to one peer."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.errors import BusyError
from kvtransfer.limits import Limits


class Admission:
    """First come, first served. A transfer larger than all that may be in flight goes alone."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.transfers = 0
        self.payload_bytes = 0

    @property
    def idle(self) -> bool:
        return not self.transfers and not self._waiting

    @asynccontextmanager
    async def admitted(self, payload_bytes: int) -> AsyncIterator[None]:
        """Waits for room and holds it. Raises BusyError if `transfers_waiting_max` wait already."""
        if self._waiting or not self._fits(payload_bytes):
            await self._wait(payload_bytes)
        else:
            self._take(payload_bytes)
        try:
            yield
        finally:
            self.transfers -= 1
            self.payload_bytes -= payload_bytes
            self._wake()

    def _fits(self, payload_bytes: int) -> bool:
        if not self.transfers:
            return True
        room_bytes = self._limits.bytes_in_flight_max - self.payload_bytes
        return self.transfers < self._limits.transfers_in_flight_max and payload_bytes <= room_bytes

    def _take(self, payload_bytes: int) -> None:
        self.transfers += 1
        self.payload_bytes += payload_bytes

    async def _wait(self, payload_bytes: int) -> None:
        if len(self._waiting) >= self._limits.transfers_waiting_max:
            raise BusyError(f"transfers_waiting_max of {self._limits.transfers_waiting_max} is reached")
        entry = (payload_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not entry[1].cancelled():
                # Admitted and cancelled in the same turn: nobody else gives this room back.
                self.transfers -= 1
                self.payload_bytes -= payload_bytes
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting:
            payload_bytes, future = self._waiting[0]
            if not self._fits(payload_bytes):
                return
            self._waiting.popleft()
            if not future.cancelled():
                self._take(payload_bytes)
                future.set_result(None)
