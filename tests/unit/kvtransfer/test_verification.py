"""Digests in a thread: right, and over once nobody wants them."""

import asyncio
import mmap
import threading

import numpy as np
import pytest
import xxhash

from kvtransfer import Access, Region
from kvtransfer import verification as digests
from kvtransfer.grants import GrantTable
from kvtransfer.memory import checked_ranges
from kvtransfer.verification import INLINE_BYTES_MAX, PIECE_BYTES_MAX, GrantedDigests, digest

pytestmark = pytest.mark.unit

SIZE = 3 * PIECE_BYTES_MAX
SIZES = (0, 1, INLINE_BYTES_MAX, INLINE_BYTES_MAX + 1, PIECE_BYTES_MAX + 5, SIZE)


@pytest.mark.parametrize("count", SIZES)
async def test_a_digest_is_xxh3_128_whatever_the_size(count: int) -> None:
    memory = np.random.default_rng(1).integers(0, 255, SIZE, dtype=np.uint8)
    ranges = checked_ranges([(count // 2, count - count // 2), (0, count // 2)], SIZE, "ranges")
    expected = xxhash.xxh3_128_digest(memory[count // 2 : count].tobytes() + memory[: count // 2].tobytes())
    assert await digest(memory.data, ranges) == expected
    grant = GrantTable(1).issue(Region(1, memory), [(0, SIZE)], "peer", 1, Access.READ)
    found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    GrantedDigests().start(grant, ranges, found.set_result)
    assert await found == expected


async def test_a_cancelled_digest_has_let_go_of_the_memory() -> None:
    memory = mmap.mmap(-1, 8 * PIECE_BYTES_MAX)
    view = memoryview(memory)
    task = asyncio.create_task(digest(view, checked_ranges([(0, len(view))], len(view), "ranges")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    view.release()
    memory.close()  # BufferError if anything still reads it


async def test_a_system_that_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that waits for its digest would hold up the revoke of its grant for good."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    memory = bytearray(range(251)) * (SIZE // 251 + 1)
    grant = GrantTable(1).issue(Region(1, memory), [(0, SIZE)], "peer", 1, Access.WRITE)
    found: list[bytes] = []
    running = GrantedDigests()
    running.start(grant, checked_ranges([(0, SIZE)], SIZE, "ranges"), found.append)
    await running.quiesce(grant)
    monkeypatch.undo()
    assert found == [xxhash.xxh3_128_digest(memory[:SIZE])]
    await running.close()


async def test_a_revoked_grant_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = GrantTable(1).issue(Region(1, bytearray(SIZE)), [(0, SIZE)], "peer", 1, Access.READ)
    grant.revoked = True
    hashed = 0

    class Counting:
        def update(self, view: memoryview) -> None:
            nonlocal hashed
            hashed += len(view)

        def digest(self) -> bytes:
            return b""

    monkeypatch.setattr(digests.xxhash, "xxh3_128", Counting)
    running = GrantedDigests()
    running.start(grant, checked_ranges([(0, SIZE)], SIZE, "ranges"), lambda found: None)
    await running.quiesce(grant)
    assert hashed == 0
    await running.close()
