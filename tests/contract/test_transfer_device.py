"""Calls on the memory of a device over every transport; the device is a fake here, CUDA's in tests/gpu."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from tests.support.device_contract import (
    DEVICE_BYTES,
    LIMITS,
    WHOLE,
    DeviceContract,
    DevicePair,
    FakeDevice,
    FakeDeviceError,
    FakeDeviceMemory,
    device_pair,
)
from tests.support.eventually import eventually
from tests.support.transfer import pattern

from kvtransfer import EndpointClosedError, PeerLostError

pytestmark = pytest.mark.contract


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
async def pair(transport: str) -> AsyncIterator[DevicePair]:
    device = FakeDevice()
    async with device_pair(transport, device) as made:
        yield made
    assert device.fake.pinned == 0


class TestFakeDevice(DeviceContract):
    async def test_a_call_goes_in_pieces_of_a_slot(self, pair: DevicePair) -> None:
        assert isinstance(pair.device, FakeDevice)
        pair.device.set(pattern(DEVICE_BYTES))
        await pair.write(pair.far.grant(WHOLE, "near").token, WHOLE, WHOLE)
        assert pair.device.fake.copies == DEVICE_BYTES // LIMITS.bounce_slot_bytes
        assert pair.device.fake.pinned == 1

    async def test_a_copy_that_runs_at_a_cancel_is_waited_for(self, pair: DevicePair) -> None:
        fake = pair.device.memory
        assert isinstance(fake, FakeDeviceMemory)
        fake.copy_s = 0.05
        writing = asyncio.create_task(pair.write(pair.far.grant(WHOLE, "near").token, WHOLE, WHOLE))
        await eventually(lambda: fake.running)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not fake.running

    async def test_closing_waits_for_copies_and_fails_the_calls(self, pair: DevicePair) -> None:
        fake = pair.device.memory
        assert isinstance(fake, FakeDeviceMemory)
        fake.copy_s = 0.02
        token = pair.far.grant(WHOLE, "near").token
        calls = [asyncio.create_task(pair.write(token, WHOLE, WHOLE)) for _ in range(3)]
        await eventually(lambda: fake.running)
        await pair.near.close()
        assert fake.pinned == fake.running == 0
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failure, PeerLostError | EndpointClosedError)

    async def test_a_device_that_fails_fails_the_call(self, pair: DevicePair) -> None:
        fake = pair.device.memory
        assert isinstance(fake, FakeDeviceMemory)
        token = pair.far.grant(WHOLE, "near").token
        fake.fails_at = 5
        with pytest.raises(FakeDeviceError, match="broken") as raised:
            await pair.write(token, WHOLE, WHOLE)
        assert not raised.value.settled  # other pieces were on the wire
        fake.fails_at = None
        pair.device.set(pattern(DEVICE_BYTES))
        await pair.write(token, WHOLE, WHOLE)
        assert np.array_equal(pair.far.memory, pair.device.get())
