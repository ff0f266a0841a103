"""Waiting for work that touches memory, in a thread, and cannot be stopped at once."""

import asyncio
from collections.abc import Callable
from typing import Any


async def outlast(work: "asyncio.Future[Any]", on_cancel: Callable[[], None] | None = None) -> None:
    """Returns when `work` is done; its outcome is the caller's to look at.

    Cancelled, however often, it still waits for that, since memory is touched until then, and is cancelled
    afterwards. `on_cancel` asks the work to end soon, which bounds the wait.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # seen, whatever it is
        raise cancelled
