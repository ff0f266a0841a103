"""What the tcp transport promises besides: all of it runs on the event loop, turn by turn."""

import asyncio

import numpy as np
import pytest
from tests.support.eventually import eventually
from tests.support.transfer import no_leaks, pattern, side

from kvtransfer import Access, Limits

pytestmark = pytest.mark.contract

MIB = 1 << 20
TIMEOUT_S = 20.0


async def test_the_loop_gets_its_turn_during_a_large_transfer() -> None:
    limits = Limits(turn_bytes=64 << 10)
    total = 16 * MIB
    async with (
        side("tcp", "near", pattern(total), limits=limits) as near,
        side("tcp", "far", np.zeros(total, np.uint8), limits=limits) as far,
    ):
        grant = far.grant([(0, total)], "near")
        peer = await near.connect(far)
        writing = asyncio.create_task(
            peer.write(near.region, [(0, total)], grant.token, [(0, total)], timeout_s=TIMEOUT_S)
        )
        turns = 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        # Each turn of the loop moves at most turn_bytes of each stream into the memory.
        assert turns >= total // (limits.turn_bytes * limits.tcp_streams)


@pytest.mark.parametrize("direction", ["write", "read"])
async def test_an_owner_is_told_of_a_cancelled_call(direction: str) -> None:
    """It does not go on to the end for nobody."""
    total = 20 * MIB
    whole = [(0, total)]
    async with (
        no_leaks(),
        side("tcp", "caller", pattern(total)) as caller,
        side("tcp", "owner", np.zeros(total, np.uint8)) as owner,
    ):
        peer = await caller.connect(owner)
        grant = owner.grant(whole, "caller", access=Access(direction))
        if direction == "read":
            owner.memory[:] = 7
            caller.memory[:] = 0
        call = peer.write if direction == "write" else peer.read
        task = asyncio.create_task(call(caller.region, whole, grant.token, whole, timeout_s=TIMEOUT_S))
        target = owner if direction == "write" else caller
        await eventually(lambda: target.memory[0] != 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: owner.endpoint.statistics()["caller"].served_failures > 0)
