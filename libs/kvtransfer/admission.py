"""Backpressure: how many transfers and bytes may be in flight to one peer."""

import asyncio
from collections import deque

from kvtransfer.errors import BusyError
from kvtransfer.limits import Limits


class Admission:
    """First come, first served. A transfer larger than all that may be in flight goes alone.

    Every `enter` that returned, and every `enter_now` that said True, is followed by one `leave`.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.transfers = 0
        self.payload_bytes = 0

    @property
    def idle(self) -> bool:
        return not self.transfers and not self._waiting

    def enter_now(self, payload_bytes: int) -> bool:
        """Take room if there is some and nobody came before."""
        if self._waiting or not self._fits(payload_bytes):
            return False
        self._take(payload_bytes)
        return True

    async def enter(self, payload_bytes: int) -> None:
        """Wait for room and take it. Raises BusyError if `transfers_waiting_max` wait already."""
        if self.enter_now(payload_bytes):
            return
        if len(self._waiting) >= self._limits.transfers_waiting_max:
            raise BusyError(f"transfers_waiting_max of {self._limits.transfers_waiting_max} is reached")
        entry = (payload_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._wake()
            elif not entry[1].cancelled():
                # Admitted and cancelled in the same turn: nobody else gives this room back.
                self.leave(payload_bytes)
            raise

    def leave(self, payload_bytes: int) -> None:
        self.transfers -= 1
        self.payload_bytes -= payload_bytes
        if self._waiting:
            self._wake()

    def _fits(self, payload_bytes: int) -> bool:
        if not self.transfers:
            return True
        room_bytes = self._limits.bytes_in_flight_max - self.payload_bytes
        return self.transfers < self._limits.transfers_in_flight_max and payload_bytes <= room_bytes

    def _take(self, payload_bytes: int) -> None:
        self.transfers += 1
        self.payload_bytes += payload_bytes

    def _wake(self) -> None:
        while self._waiting:
            payload_bytes, future = self._waiting[0]
            if not self._fits(payload_bytes):
                return
            self._waiting.popleft()
            if not future.cancelled():
                self._take(payload_bytes)
                future.set_result(None)
