"""The verbs themselves, on one device of this machine: events, immediates, failures."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tests.support.transfer import no_leaks, pattern

from kvtransfer.rdma.devices import OpenDevice, open_devices
from kvtransfer.rdma.frames import LaneEnd
from kvtransfer.rdma.lane import RECEIVES_MAX, SENDS_MAX
from kvtransfer.rdma.meeting import LaneInMaking, caller_lane, connect_caller_lane, owner_lane
from kvtransfer.rdma.sendring import Columns, SendRing
from kvtransfer.rdma.verbs import QueuePair

pytestmark = pytest.mark.rdma

SIZE = 1 << 20
WAIT_S_MAX = 20.0
ASLEEP_S = 0.2


@pytest.fixture
def opened() -> Iterator[OpenDevice]:
    devices = open_devices(["rxe0"])
    yield devices[0]
    devices[0].device.close()


@dataclass(slots=True)
class Ends:
    """Two connected queue pairs, and what came out of them."""

    caller: LaneInMaking
    owner: LaneInMaking
    immediates: "asyncio.Queue[int]"
    failures: "asyncio.Queue[str]"

    def close(self) -> None:
        for made in (self.caller, self.owner):
            made.lane.close(ConnectionError("the test is over"))  # type: ignore[arg-type]


def connected(opened: OpenDevice, ring: SendRing) -> Ends:
    immediates: asyncio.Queue[int] = asyncio.Queue()
    failures: asyncio.Queue[str] = asyncio.Queue()
    caller = caller_lane(opened, 0, 0, ring, immediates.put_nowait, failures.put_nowait)
    owner = owner_lane(opened, 0, caller.end, ring, immediates.put_nowait, failures.put_nowait)
    connect_caller_lane(opened, caller, owner.end)
    return Ends(caller, owner, immediates, failures)


async def test_a_waiter_that_sleeps_is_woken_by_the_event_of_an_immediate(opened: OpenDevice) -> None:
    source, target = pattern(SIZE), np.zeros(SIZE, np.uint8)
    ring = SendRing(4)
    near = opened.device.register(source.ctypes.data, SIZE)
    far = opened.device.register(target.ctypes.data, SIZE)
    ends = connected(opened, ring)
    waiter = asyncio.create_task(ends.immediates.get())
    # It has been asleep in the loop for long when the write is posted: only an event can wake it.
    await asyncio.sleep(ASLEEP_S)
    assert not waiter.done()
    assert ends.owner.lane.pair.events == 0
    columns = Columns([source.ctypes.data], [SIZE], [near.local_key], [target.ctypes.data], [far.remote_key])
    number = ends.caller.lane.write(columns, 0xC0FFEE)
    async with asyncio.timeout(WAIT_S_MAX):
        assert await waiter == 0xC0FFEE
        await ends.caller.lane.completed(number)
    assert ends.owner.lane.pair.events >= 1
    assert ends.caller.lane.pair.events >= 1
    assert np.array_equal(source, target)
    assert ends.failures.empty()
    ends.close()
    near.close()
    far.close()
    ring.close()


async def test_an_event_without_completions_is_harmless(opened: OpenDevice) -> None:
    """Two completions, each with an event: the first turn of the loop may take both completions."""
    ring = SendRing(4)
    ends = connected(opened, ring)
    nothing = Columns([0], [0], [0], [0], [0])
    async with asyncio.timeout(WAIT_S_MAX):
        for number in range(1, 3 * SENDS_MAX):
            await ends.caller.lane.room()
            assert ends.caller.lane.write(nothing, number) == number
        await ends.caller.lane.completed(number)
        received = [await ends.immediates.get() for _ in range(1, 3 * SENDS_MAX)]
    assert received == list(range(1, 3 * SENDS_MAX))
    assert len(received) > RECEIVES_MAX
    assert ends.failures.empty()
    ends.close()
    ring.close()


async def test_a_wrong_key_fails_the_queue_pair_and_touches_nothing(opened: OpenDevice) -> None:
    source, target = pattern(4096), np.zeros(4096, np.uint8)
    ring = SendRing(4)
    near = opened.device.register(source.ctypes.data, 4096)
    far = opened.device.register(target.ctypes.data, 4096)
    ends = connected(opened, ring)
    wrong = far.remote_key ^ 0x5A5A
    ends.caller.lane.write(
        Columns([source.ctypes.data], [4096], [near.local_key], [target.ctypes.data], [wrong]), 1
    )
    async with asyncio.timeout(WAIT_S_MAX):
        assert "access" in (await ends.failures.get()).lower()
    assert not target.any()
    assert ends.immediates.empty()
    ends.close()
    near.close()
    far.close()
    ring.close()


async def test_after_its_queue_pair_is_closed_a_stopped_write_does_not_land(opened: OpenDevice) -> None:
    """Half of a large write is under way when the owner takes its end away and gives the memory on."""
    source, target = pattern(16 * SIZE), np.zeros(16 * SIZE, np.uint8)
    ring = SendRing(32)
    near = opened.device.register(source.ctypes.data, source.size)
    far = opened.device.register(target.ctypes.data, target.size)
    ends = connected(opened, ring)
    for at in range(0, source.size, SIZE):
        columns = Columns(
            *([source.ctypes.data + at], [SIZE], [near.local_key], [target.ctypes.data + at]),
            [far.remote_key],
        )
        ends.caller.lane.write(columns, None)
        if at == 4 * SIZE:
            ends.owner.lane.close(ConnectionError("revoked"))  # type: ignore[arg-type]
            target[:] = 255
    async with asyncio.timeout(WAIT_S_MAX):
        assert await ends.failures.get()
    assert (target == 255).all()
    ends.close()
    near.close()
    far.close()
    ring.close()


async def test_queue_pairs_leave_nothing_behind(opened: OpenDevice) -> None:
    ring = SendRing(4)
    async with no_leaks():
        for _ in range(20):
            connected(opened, ring).close()
    ring.close()


def test_a_queue_pair_names_its_descriptor(opened: OpenDevice) -> None:
    pairs = [QueuePair(opened.device, 8, 8) for _ in range(3)]
    assert len({pair.event_descriptor for pair in pairs}) == 3
    assert not any(pair.take_event() for pair in pairs)
    for pair in pairs:
        pair.close()
        pair.close()


def test_ends_know_their_gid(opened: OpenDevice) -> None:
    assert opened.facts.gid.address.ipv4_mapped is not None
    assert opened.facts.mtu_bytes == 4096
    end = LaneEnd(0, opened.facts.gid.text, 1, 2, 0, 4096, 1)
    assert end.gid.startswith("0000:0000:0000:0000:0000:ffff:")
