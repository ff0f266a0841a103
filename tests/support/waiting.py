"""Waiting for states that announce themselves by no event."""

import asyncio
from collections.abc import Callable

POLL_S = 0.005


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return when `condition()` holds; TimeoutError where it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(POLL_S)
