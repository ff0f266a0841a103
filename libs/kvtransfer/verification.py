"""Digests of what ranges hold, so that the two ends of a transfer can be compared."""

import asyncio
import logging
import threading
from collections.abc import Callable

import xxhash

from kvtransfer.grants import Grant
from kvtransfer.limits import RANGES_MAX
from kvtransfer.memory import Cursor, Ranges
from kvtransfer.outlasting import outlast

INLINE_BYTES_MAX = 256 << 10
"""Hashed on the event loop's thread (some 20 µs); more goes to a thread, which costs about as much."""

PIECE_BYTES_MAX = 8 << 20
"""Hashed between two looks at whether the digest is still wanted: about a millisecond."""

_log = logging.getLogger(__name__)


async def digest(view: memoryview, ranges: Ranges) -> bytes:
    """xxh3_128, 16 bytes, over the bytes of `ranges` of `view` in their order. If it is cancelled, it ends
    once no byte is read any more."""
    cursor = Cursor(view, ranges)
    if cursor.remaining <= INLINE_BYTES_MAX:
        return _digest(cursor, _never)
    given_up = threading.Event()
    hashing = asyncio.get_running_loop().run_in_executor(None, _digest, cursor, given_up.is_set)
    try:
        await outlast(hashing, given_up.set)
    except asyncio.CancelledError:
        del view, cursor  # the error's traceback keeps this frame, and must not keep the memory
        raise
    return hashing.result()


class GrantedDigests:
    """Digests of granted memory, asked for where nothing can be awaited. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], Grant] = {}

    def start(self, grant: Grant, ranges: Ranges, then: Callable[[bytes], None]) -> None:
        """`then` gets the digest: at once if the bytes are few, else in a later turn of the loop. If the
        grant is revoked meanwhile it gets something soon: to be looked at only while the grant stands."""
        cursor = Cursor(grant.region.view, ranges)
        if cursor.remaining <= INLINE_BYTES_MAX:
            then(_digest(cursor, _never))
            return
        task = asyncio.create_task(_digest_then(grant, ranges, then))
        self._running[task] = grant
        task.add_done_callback(lambda done: self._running.pop(done, None))

    async def quiesce(self, grant: Grant) -> None:
        """The grant is revoked: after this returns no memory of it is read here."""
        tasks = [task for task, owner in self._running.items() if owner is grant]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Wait for all."""
        if self._running:
            await asyncio.wait(list(self._running))


async def _digest_then(grant: Grant, ranges: Ranges, then: Callable[[bytes], None]) -> None:
    def is_unwanted() -> bool:
        return grant.revoked

    try:
        found = await asyncio.to_thread(_digest, Cursor(grant.region.view, ranges), is_unwanted)
    except RuntimeError as error:
        # The system gives no thread. Who waits for the digest would wait for good, and a revoke for it.
        _log.warning("a digest keeps the event loop: %s", error)
        found = _digest(Cursor(grant.region.view, ranges), is_unwanted)
    then(found)


def _digest(cursor: Cursor, is_unwanted: Callable[[], bool]) -> bytes:
    hashing = xxhash.xxh3_128()
    while cursor.remaining and not is_unwanted():
        for view in cursor.peek(PIECE_BYTES_MAX, RANGES_MAX):
            hashing.update(view)
            cursor.advance(len(view))
    return hashing.digest()


def _never() -> bool:
    return False
