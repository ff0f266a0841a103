"""Digests of what ranges hold, so that the two ends of a transfer can be compared."""

import asyncio
from collections.abc import Callable

import xxhash

from kvtransfer.grants import Grant
from kvtransfer.limits import RANGES_MAX
from kvtransfer.memory import Cursor, Ranges

INLINE_BYTES_MAX = 256 << 10
"""Hashed on the event loop's thread (some 20 µs); more goes to a thread, which costs about as much."""


async def digest(view: memoryview, ranges: Ranges) -> bytes:
    """xxh3_128, 16 bytes, over the bytes of `ranges` of `view` in their order."""
    cursor = Cursor(view, ranges)
    if cursor.remaining <= INLINE_BYTES_MAX:
        return _digest(cursor)
    return await asyncio.to_thread(_digest, cursor)


class GrantedDigests:
    """Digests of granted memory, asked for where nothing can be awaited. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], Grant] = {}

    def start(self, grant: Grant, ranges: Ranges, then: Callable[[bytes], None]) -> None:
        """`then` gets the digest: at once if the bytes are few, else in a later turn of the loop, whatever
        became of the grant meanwhile."""
        cursor = Cursor(grant.region.view, ranges)
        if cursor.remaining <= INLINE_BYTES_MAX:
            then(_digest(cursor))
            return
        task = asyncio.create_task(_digest_then(cursor, then))
        self._running[task] = grant
        task.add_done_callback(lambda done: self._running.pop(done, None))

    async def quiesce(self, grant: Grant) -> None:
        """After it returns no memory of the grant is read here; takes as long as what runs."""
        tasks = [task for task, owner in self._running.items() if owner is grant]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Wait for all."""
        if self._running:
            await asyncio.wait(list(self._running))


async def _digest_then(cursor: Cursor, then: Callable[[bytes], None]) -> None:
    then(await asyncio.to_thread(_digest, cursor))


def _digest(cursor: Cursor) -> bytes:
    hashing = xxhash.xxh3_128()
    for view in cursor.peek(cursor.remaining, RANGES_MAX):
        hashing.update(view)
    return hashing.digest()
