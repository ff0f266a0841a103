"""How the memory of a region is registered: host memory by its address; memory of a device, so that a network
device reaches it without a copy, by a dma-buf, or by its address where the driver of that device lets others
in (peer memory).

The ways for memory of a device were never run on hardware; by address they are tested with a fake device.
"""

import os
from dataclasses import dataclass

from kvtransfer.device import DeviceRegion
from kvtransfer.errors import TransportUnfit
from kvtransfer.memory import Region
from kvtransfer.rdma.verbs import Device, Registration


@dataclass(frozen=True, slots=True)
class Source:
    """Work requests name byte n of the region by `base_address` + n."""

    base_address: int
    dma_buf: int | None = None

    def register(self, device: Device, start: int, length: int) -> Registration:
        """Raises OSError."""
        if self.dma_buf is None:
            return device.register(self.base_address + start, length)
        return device.register_dma_buf(self.dma_buf, self.base_address + start, length)

    def close(self) -> None:
        """Nothing more is registered of it."""
        if self.dma_buf is not None:
            os.close(self.dma_buf)


def source_of(region: Region) -> Source:
    """Raises RangeError once it is unregistered, TransportUnfit for memory that only copies reach."""
    if not isinstance(region, DeviceRegion):
        _ = region.view
        return Source(region.address)
    access = region.device.direct_access()
    if access is None:
        raise TransportUnfit("this memory of a device is reached by copies only")
    if access.dma_buf is None:
        return Source(access.address)
    return Source(access.dma_buf_offset, access.dma_buf)
