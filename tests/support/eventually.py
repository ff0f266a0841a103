"""Waiting in tests for states that announce themselves by no event."""

import asyncio
import time
from collections.abc import Callable

WAIT_S_MAX = 5.0


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


async def eventually(condition: Callable[[], object], timeout_s: float = WAIT_S_MAX) -> None:
    """Return as soon as `condition()` is true; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # what it waits for is another room's state, without an event
            await asyncio.sleep(0.001)


def soon(condition: Callable[[], object], timeout_s: float, look_s: float = 0.1) -> None:
    """The same where no event loop runs: states of other processes, looked at every `look_s`."""
    ends_at_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at_s
        time.sleep(look_s)
