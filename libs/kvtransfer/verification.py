"""Digests of what ranges hold, so that the two ends of a transfer can be compared."""

import asyncio

import xxhash

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


def _digest(cursor: Cursor) -> bytes:
    hashing = xxhash.xxh3_128()
    for view in cursor.peek(cursor.remaining, RANGES_MAX):
        hashing.update(view)
    return hashing.digest()
