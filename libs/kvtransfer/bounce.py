"""Calls on the memory of a device: piece by piece through slots of host memory, over any link.

Owns the order of copies: while a piece is on the wire the next is copied. Knows no transport.
"""

from functools import partial

from kvtransfer.device import DeviceMemory, DeviceRegion
from kvtransfer.limits import Limits
from kvtransfer.memory import no_ranges
from kvtransfer.parts import sliced
from kvtransfer.piecewise import Piece, in_pieces
from kvtransfer.slots import HostSlots, Slot
from kvtransfer.transport import Call, Link, LocalMemory


class Bounce:
    """Over slots that its calls have for themselves: a call holds one while it waits for the peer, so if
    what serves peers took from the same ones, two endpoints could wait for each other."""

    def __init__(self, limits: Limits) -> None:
        self.slots = HostSlots(limits)

    async def write(self, link: Link, call: Call) -> None:
        """As `link.write`, of memory of a device. A tag goes with the last piece, after all others."""
        await in_pieces(
            call, self._piece_bytes(call), partial(self._write_piece, link, call, _device_of(call))
        )

    async def read(self, link: Link, call: Call) -> None:
        """As `link.read`, to memory of a device."""
        await in_pieces(
            call, self._piece_bytes(call), partial(self._read_piece, link, call, _device_of(call))
        )

    def _piece_bytes(self, call: Call) -> int:
        mine, peers = self.slots.slot_bytes, call.piece_bytes_max
        return mine if peers is None else min(mine, peers)

    async def _write_piece(self, link: Link, call: Call, device: DeviceMemory, piece: Piece) -> None:
        local = sliced(call.memory.ranges, piece.start, piece.count)
        async with self.slots.slot(device) as slot:
            if piece.count:
                await self.slots.copy(slot, piece.count, partial(device.copy_out, local))
            await link.write(piece.call(call, _memory(slot, piece)))

    async def _read_piece(self, link: Link, call: Call, device: DeviceMemory, piece: Piece) -> None:
        local = sliced(call.memory.ranges, piece.start, piece.count)
        async with self.slots.slot(device) as slot:
            await link.read(piece.call(call, _memory(slot, piece)))
            if piece.count:
                await self.slots.copy(slot, piece.count, lambda host: device.copy_in(host, local))


def _device_of(call: Call) -> DeviceMemory:
    region = call.memory.region
    assert isinstance(region, DeviceRegion)
    return region.device


def _memory(slot: Slot, piece: Piece) -> LocalMemory:
    ranges = slot.ranges(piece.count) if piece.count else no_ranges()
    return LocalMemory(slot.region, ranges, piece.count)
