"""Memory of a device that a network device reaches itself. The device is a fake, its cells are host memory:
what is tested is the way without copies, not CUDA."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from tests.support.device_contract import (
    DEVICE_BYTES,
    WHOLE,
    DevicePair,
    FakeDevice,
    FakeDeviceMemory,
    device_pair,
)
from tests.support.transfer import pattern

from kvtransfer import Access, Limits
from kvtransfer.device import DirectAccess

pytestmark = pytest.mark.rdma


class ReachableMemory(FakeDeviceMemory):
    """Has an address; `reachable` says whether a driver would let the network device have it."""

    def __init__(self, size_bytes: int, reachable: bool) -> None:
        super().__init__(size_bytes)
        self.reachable = reachable
        self.asked = 0
        self.settled = 0

    def direct_access(self) -> DirectAccess:
        self.asked += 1
        # Where nothing is mapped no device may pin pages.
        return DirectAccess(self.cells.ctypes.data if self.reachable else 4096)

    def settle(self) -> None:
        self.settled += 1


@asynccontextmanager
async def pair_with(memory: ReachableMemory) -> AsyncIterator[DevicePair]:
    device = FakeDevice()
    device.fake = memory
    async with device_pair("rdma", device, Limits()) as made:
        yield made


async def test_no_byte_is_copied_in_host_memory() -> None:
    memory = ReachableMemory(DEVICE_BYTES, reachable=True)
    async with pair_with(memory) as pair:
        values = pattern(DEVICE_BYTES)
        pair.device.set(values)
        await pair.write(pair.far.grant(WHOLE, "near").token, WHOLE, WHOLE)
        assert np.array_equal(pair.far.memory, values)
        pair.far.memory[:] = pattern(DEVICE_BYTES, 2)
        await pair.read(pair.far.grant(WHOLE, "near", access=Access.READ).token, WHOLE, WHOLE)
        assert np.array_equal(pair.device.get(), pair.far.memory)
        assert memory.copies == memory.pinned == 0
        assert memory.settled == 2
        # A digest needs the bytes here.
        await pair.write(pair.far.grant(WHOLE, "near").token, [(0, 9)], [(0, 9)], verify=True)
        assert memory.copies == 1


async def test_memory_that_the_driver_keeps_to_itself_is_copied() -> None:
    memory = ReachableMemory(DEVICE_BYTES, reachable=False)
    async with pair_with(memory) as pair:
        values = pattern(DEVICE_BYTES)
        pair.device.set(values)
        for _ in range(2):
            await pair.write(pair.far.grant(WHOLE, "near").token, WHOLE, WHOLE)
        assert np.array_equal(pair.far.memory, values)
        assert memory.copies > 0
        assert memory.asked == 1
        assert memory.settled == 0
