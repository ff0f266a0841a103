"""Slots are lent to one at a time, in the order of asking, and come back exactly once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.device_contract import FakeDeviceError, FakeDeviceMemory
from tests.support.eventually import eventually

from kvtransfer import Limits
from kvtransfer.slots import HostSlots

pytestmark = pytest.mark.unit

SLOT_BYTES = 4096


@pytest.fixture
async def slots() -> AsyncIterator[HostSlots]:
    made = HostSlots(Limits(bounce_bytes=2 * SLOT_BYTES, bounce_slot_bytes=SLOT_BYTES))
    yield made
    assert (made.lent, made.waiting) == (0, 0)
    await made.close()


async def test_each_waits_for_the_one_before(slots: HostSlots) -> None:
    device = FakeDeviceMemory(10)
    order: list[int] = []
    offsets: set[int] = set()

    async def use(number: int) -> None:
        async with slots.slot(device) as slot:
            assert slot.offset not in offsets
            offsets.add(slot.offset)
            order.append(number)
            await asyncio.sleep(0)
            offsets.remove(slot.offset)

    await asyncio.gather(*(use(number) for number in range(20)))
    assert order == list(range(20))


@pytest.mark.parametrize("given_first", [False, True])
async def test_one_that_is_cancelled_as_it_gets_a_slot_gives_it_on(
    slots: HostSlots, given_first: bool
) -> None:
    device = FakeDeviceMemory(10)

    async def use() -> None:
        async with slots.slot(device):
            pass

    async with slots.slot(device):
        async with slots.slot(device):
            first, second = asyncio.create_task(use()), asyncio.create_task(use())
            await eventually(lambda: slots.waiting == 2)
            if not given_first:
                first.cancel()
        first.cancel()  # it was given the slot and had no turn since
        await asyncio.wait_for(second, 5)
    assert first.cancelled()


async def test_a_copy_that_fails_or_is_cancelled_gives_its_slot_back_once_it_ended(slots: HostSlots) -> None:
    device = FakeDeviceMemory(10)
    device.fails_at = 1

    async def copy() -> None:
        async with slots.slot(device) as slot:
            ranges = slot.ranges(10)
            ranges[:, 0] = 0
            await slots.copy(slot, 10, lambda host: device.copy_in(host, ranges))

    with pytest.raises(FakeDeviceError):
        await copy()
    assert slots.lent == 0
    device.hold()
    copying = asyncio.create_task(copy())
    await eventually(lambda: device.running)
    copying.cancel()
    await asyncio.sleep(0.01)  # nothing happens
    assert (slots.lent, device.running) == (1, 1)
    device.let_go()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert (slots.lent, device.running) == (0, 0)
