"""Whoever is cancelled while a thread touches memory goes on waiting for the thread."""

import asyncio

import pytest

from kvtransfer.outlasting import outlast

pytestmark = pytest.mark.unit


async def test_cancelled_twice_it_ends_with_the_work_and_not_before() -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = []
    task = asyncio.create_task(outlast(work, lambda: asked.append("end soon")))
    for times in (1, 2):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        assert asked == ["end soon"] * times
    work.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_is_its_asker_s_to_look_at() -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(outlast(work))
    await asyncio.sleep(0)
    work.set_exception(ValueError("it failed"))
    await task
    assert str(work.exception()) == "it failed"
