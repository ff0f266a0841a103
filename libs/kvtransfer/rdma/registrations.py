"""Which memory of which region is registered with which device: lazily, piece by piece, until released."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.memory import Region
from kvtransfer.rdma.verbs import Device, Registration
from kvtransfer.rdma.work import PIECE_BYTES

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceKeys:
    """Keys of some pieces of a region, `pieces` in order; `local[piece][device]`, `remote[piece][device]`."""

    base_address: int
    pieces: Integers
    local: npt.NDArray[np.uint32]
    remote: npt.NDArray[np.uint32]


class Registrations:
    """Of one transport; used on the event loop's thread. Devices are named by their index."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._regions: dict[int, dict[tuple[int, int], Registration]] = {}
        self._turns: dict[int, asyncio.Lock] = {}

    def known(self, region: Region, pieces: Sequence[int], devices: Sequence[int]) -> PieceKeys | None:
        """The keys, if all of these pieces are registered with all of these devices already."""
        made = self._regions.get(region.region_id, {})
        if any((piece, device) not in made for piece in pieces for device in devices):
            return None
        shape = (len(pieces), len(devices))
        found = [made[piece, device] for piece in pieces for device in devices]
        return PieceKeys(
            _address(region),
            np.array(pieces, np.int64),
            np.array([one.local_key for one in found], np.uint32).reshape(shape),
            np.array([one.remote_key for one in found], np.uint32).reshape(shape),
        )

    async def make(
        self,
        region: Region,
        pieces: Sequence[int],
        devices: Sequence[int],
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> PieceKeys | None:
        """The keys, after registering what is missing; the loop gets its turn between registrations.

        Calls for one region are served in the order in which they came. None as soon as the keys are not
        wanted any more. Raises OSError where a device refuses, RangeError if the region was unregistered.
        """
        async with self._turns.setdefault(region.region_id, asyncio.Lock()):
            while still_wanted():
                keys = self.known(region, pieces, devices)
                if keys is not None:
                    return keys
                self._register_next(region, pieces, devices)
                await asyncio.sleep(0)
        return None

    def _register_next(self, region: Region, pieces: Sequence[int], devices: Sequence[int]) -> None:
        made = self._regions.setdefault(region.region_id, {})
        piece, device = next(
            (piece, device) for piece in pieces for device in devices if (piece, device) not in made
        )
        start = piece * PIECE_BYTES
        length = min(PIECE_BYTES, region.region_bytes - start)
        made[piece, device] = self._devices[device].register(_address(region) + start, length)

    def release(self, region: Region) -> None:
        """Nothing of the region is in use any more."""
        self._turns.pop(region.region_id, None)
        for registration in self._regions.pop(region.region_id, {}).values():
            registration.close()

    def close(self) -> None:
        for made in self._regions.values():
            for registration in made.values():
                registration.close()
        self._regions.clear()


def _address(region: Region) -> int:
    """Raises RangeError once it is unregistered."""
    _ = region.view
    return region.address
