"""What all links of one endpoint share: the board, the copy threads, and how a copy is run."""

import asyncio

from kvtransfer.grants import Grant
from kvtransfer.limits import Limits
from kvtransfer.memory import Ranges, Region
from kvtransfer.shm.board import Board, Permission, Slot
from kvtransfer.shm.copying import Copy, CopyThreads
from kvtransfer.shm.memories import PeerMemory
from kvtransfer.shm.pieces import merged
from kvtransfer.shm.system import reads_itself
from kvtransfer.verification import GrantedDigests

INLINE_BYTES_MAX = 1 << 20
"""Copied on the loop's thread in one turn: some 100 µs, where the way to a thread and back takes 80, and
no more than tcp moves in a turn. What is larger, and what comes while another copy waits, goes to threads."""


class Resources:
    """Made in the event loop; raises SharedBufferError if there is no memory for the board."""

    def __init__(self, limits: Limits, copy_threads: int) -> None:
        self.board = Board(limits.grants_max + limits.peers_max * limits.transfers_in_flight_max)
        self.threads = CopyThreads(copy_threads)
        self.digests = GrantedDigests()
        self._chunk_bytes = limits.turn_bytes
        self._gathers = reads_itself()
        self._slots: dict[str, Slot] = {}
        self._loop = asyncio.get_running_loop()
        self._inline_left = INLINE_BYTES_MAX
        self._refilling = False
        self._next_turn_taken = False

    def copy(
        self, target: Ranges, region: Region, source: Ranges, memory: PeerMemory, permission: Permission
    ) -> Copy:
        """A copy into a region of ours; both lists of ranges are checked and of one total > 0.

        Nobody else is to keep the region's view in a variable: the traceback of an error would keep it.
        """
        return Copy(
            merged(target, region.address, source, memory.address, self._chunk_bytes),
            permission,
            memory.process,
            (region.view, memory.mapping),
            chunk_bytes=self._chunk_bytes,
            gathers=self._gathers,
        )

    def runs_inline(self, payload_bytes: int) -> bool:
        """Whether this copy may run here and now: INLINE_BYTES_MAX bytes may in a turn of the loop."""
        if payload_bytes > self._inline_left:
            return False
        self._inline_left -= payload_bytes
        if not self._refilling:
            self._refilling = True
            self._loop.call_soon(self._refill)
        return True

    async def runs_inline_soon(self, payload_bytes: int) -> bool:
        """Whether it may run here, now or in the next turn of the loop; one copy at a time waits for that."""
        if self.runs_inline(payload_bytes):
            return True
        if self._next_turn_taken or payload_bytes > INLINE_BYTES_MAX:
            return False
        self._next_turn_taken = True
        try:
            await asyncio.sleep(0)
        finally:
            self._next_turn_taken = False
        return self.runs_inline(payload_bytes)

    def slot_of(self, grant: Grant) -> Slot:
        """Where peers see whether the grant stands."""
        slot = self._slots.get(grant.token)
        if slot is None:
            slot = self._slots[grant.token] = self.board.open()
        return slot

    def shut(self, grant: Grant) -> None:
        """No peer takes a byte under it for good any more."""
        slot = self._slots.pop(grant.token, None)
        if slot is not None:
            self.board.shut(slot)

    async def close(self) -> None:
        await self.threads.close()
        await self.digests.close()
        self._slots.clear()
        self.board.close()

    def _refill(self) -> None:
        self._inline_left = INLINE_BYTES_MAX
        self._refilling = False
