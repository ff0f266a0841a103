"""Which memory of which region is registered with which device: lazily, piece by piece, until released."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.device import DeviceRegion
from kvtransfer.errors import TransportUnfit
from kvtransfer.memory import Region
from kvtransfer.rdma.sources import Source, source_of
from kvtransfer.rdma.verbs import Device, Registration
from kvtransfer.rdma.work import PIECE_BYTES

Integers = npt.NDArray[np.int64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PieceKeys:
    """Keys of some pieces of a region, `pieces` in order; `local[piece][device]`, `remote[piece][device]`."""

    base_address: int
    pieces: Integers
    local: npt.NDArray[np.uint32]
    remote: npt.NDArray[np.uint32]


class _Registered:
    """One region: where it is, what of it is registered, and whose turn it is to register more."""

    __slots__ = ("made", "source", "turn")

    def __init__(self, source: Source) -> None:
        self.source = source
        self.made: dict[tuple[int, int], Registration] = {}
        self.turn = asyncio.Lock()

    def close(self) -> None:
        for registration in self.made.values():
            registration.close()
        self.source.close()


class Registrations:
    """Of one transport; used on the event loop's thread. Devices are named by their index."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._regions: dict[int, _Registered] = {}
        self._unfit: set[int] = set()
        self._closed = False

    def known(self, region: Region, pieces: Sequence[int], devices: Sequence[int]) -> PieceKeys | None:
        """The keys, if all of these pieces are registered with all of these devices already."""
        registered = self._regions.get(region.region_id)
        if registered is None:
            return None
        made = registered.made
        if any((piece, device) not in made for piece in pieces for device in devices):
            return None
        shape = (len(pieces), len(devices))
        found = [made[piece, device] for piece in pieces for device in devices]
        return PieceKeys(
            registered.source.base_address,
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
        wanted any more, or after `close`: the devices may be closed by then. Raises OSError where a device
        refuses, TransportUnfit for memory that none reaches, RangeError if the region was unregistered.
        """
        async with self._registered(region).turn:
            while still_wanted() and not self._closed:
                keys = self.known(region, pieces, devices)
                if keys is not None:
                    return keys
                self._register_next(region, pieces, devices)
                await asyncio.sleep(0)
        return None

    def reaches(self, region: DeviceRegion, devices: Sequence[int]) -> bool:
        """Whether the devices can register this memory; found out by the first piece, once."""
        if region.region_id in self._unfit or self._closed:
            return False
        try:
            while self.known(region, [0], devices) is None:
                self._register_next(region, [0], devices)
        except (OSError, TransportUnfit) as error:
            self.release(region)
            self._unfit.add(region.region_id)
            _log.info("rdma does not reach region %d, its bytes are copied: %s", region.region_id, error)
            return False
        return True

    def release(self, region: Region) -> None:
        """Nothing of the region is in use any more."""
        self._unfit.discard(region.region_id)
        registered = self._regions.pop(region.region_id, None)
        if registered is not None:
            registered.close()

    def close(self) -> None:
        self._closed = True
        for registered in self._regions.values():
            registered.close()
        self._regions.clear()

    def _registered(self, region: Region) -> _Registered:
        found = self._regions.get(region.region_id)
        if found is None:
            found = self._regions[region.region_id] = _Registered(source_of(region))
        return found

    def _register_next(self, region: Region, pieces: Sequence[int], devices: Sequence[int]) -> None:
        registered = self._registered(region)
        piece, device = next(
            (piece, device)
            for piece in pieces
            for device in devices
            if (piece, device) not in registered.made
        )
        start = piece * PIECE_BYTES
        length = min(PIECE_BYTES, region.region_bytes - start)
        registration = registered.source.register(self._devices[device], start, length)
        registered.made[piece, device] = registration
