"""Which copies run on the loop's thread: so many bytes in a turn, and one copy that waits for the next."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvtransfer import Limits
from kvtransfer.shm.resources import INLINE_BYTES_MAX, Resources

pytestmark = pytest.mark.unit


@pytest.fixture
async def resources() -> AsyncIterator[Resources]:
    made = Resources(Limits(), 1)
    yield made
    await made.close()


async def test_a_turn_has_room_for_so_many_bytes(resources: Resources) -> None:
    assert resources.runs_inline(INLINE_BYTES_MAX - 1)
    assert resources.runs_inline(1)
    assert not resources.runs_inline(1)
    await asyncio.sleep(0)
    assert resources.runs_inline(1)


async def test_one_copy_waits_for_the_next_turn_and_others_go_to_threads(resources: Resources) -> None:
    assert await resources.runs_inline_soon(INLINE_BYTES_MAX)
    answers = await asyncio.gather(*(resources.runs_inline_soon(INLINE_BYTES_MAX) for _ in range(3)))
    assert answers == [True, True, False]
    assert not await resources.runs_inline_soon(INLINE_BYTES_MAX + 1)


async def test_a_copy_that_is_cancelled_while_it_waits_leaves_its_place(resources: Resources) -> None:
    async def two_copies() -> None:
        assert resources.runs_inline(INLINE_BYTES_MAX)
        await resources.runs_inline_soon(INLINE_BYTES_MAX)

    waiting = asyncio.create_task(two_copies())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert resources.runs_inline(INLINE_BYTES_MAX)
    assert await resources.runs_inline_soon(INLINE_BYTES_MAX)
