"""Copies between two memories, chunk by chunk, in the event loop's thread or in threads of its own.

Owns how bytes are copied, when a copy stops, and the threads. Knows nothing of grants or frames: a copy
has pieces, a permission to read its source, and somebody to tell.

Two ways to copy a chunk. Large pieces go by memmove, a call per piece, at the speed of memory. Many small
ones go by process_vm_readv, up to 1,024 in a call, without a Python object or a turn at the GIL for each;
the same call reads a process whose memory is not mapped here.
"""

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from queue import SimpleQueue

from kvtransfer.limits import IOVECS_MAX
from kvtransfer.shm.board import Permission
from kvtransfer.shm.pieces import Chunk, Pieces
from kvtransfer.shm.system import PeerProcess, copy_memory, fill_memory, read_process

MEAN_PIECE_BYTES_MIN = 128 << 10
"""Smaller pieces on average are gathered into system calls. Measured alone, memmove is a little faster at
all sizes (1 µs a piece against 0.9), but its thread asks for the GIL once for each piece: with four copies
of 1,024 x 64 KiB at once gathering is ahead by a tenth to a fifth, and beside an engine as below."""
GATHERED_PIECES_MIN = 8
STARVED_S = 0.003
"""A chunk of a MiB takes some 0.1 ms to move. One that took this long waited for the GIL, piece by piece,
while some other thread computed: the rest of that copy is gathered, with one turn at the GIL a chunk. Seen
with 64 KiB pieces beside a thread that counts: 0.1 GB/s moved, 1.1 gathered."""
TURN_CHUNKS_MAX = 4
"""Chunks of a copy before its thread turns to the next one: a small copy does not wait for a large."""
PROGRESS_S = 0.001
"""A copy in a thread tells how far it is this often at most."""
COPY_THREADS = 2
JOBS_MAX = 65_536
"""Copies that wait for a thread; more is refused. What peers and callers may have in flight is far less."""


_log = logging.getLogger(__name__)


class Outcome(Enum):
    DONE = "done"
    STOPPED = "stopped"
    WITHDRAWN = "withdrawn"
    """The permission to read the source is gone. What was copied after that is wiped: it may be of others."""
    LOST = "lost"
    """The process that was read is gone. What was copied of the last chunk is wiped, for the same reason."""
    REFUSED = "refused"
    """The kernel does not let us read that process."""
    FAULT = "fault"
    """The source is not there."""


_OUTCOME_BY_ERRNO = {
    errno.ESRCH: Outcome.LOST,
    errno.EPERM: Outcome.REFUSED,
    errno.EACCES: Outcome.REFUSED,
    errno.ENOSYS: Outcome.REFUSED,
}


class Copy:
    """One copy on its way. `process` is read if the source is not mapped here; `kept` lives till the end.

    `copied_bytes` grows as it goes. Where the copy ends before it is done, the bytes from there on are
    what they were, or of the source, or zero.
    """

    __slots__ = (
        *("_bounds", "_gathered", "_gathers", "_iovecs"),
        *("_kept", "_permission", "_pid", "_pieces", "_process"),
        *("copied_bytes", "on_end", "on_progress", "outcome", "queued", "stop", "told_at_s"),
    )

    def __init__(
        self,
        pieces: Pieces,
        permission: Permission,
        process: PeerProcess | None,
        kept: tuple[object, ...],
        *,
        chunk_bytes: int,
        gathers: bool,
    ) -> None:
        self._pieces = pieces
        self._permission: Permission | None = permission
        self._process = process
        self._pid = os.getpid() if process is None else process.pid
        self._kept = kept
        self._gathers = gathers
        self._gathered = process is not None or (gathers and _worth_gathering(pieces))
        self._bounds: Iterator[Chunk] = pieces.chunks(chunk_bytes, IOVECS_MAX)
        self._iovecs = pieces.iovecs() if self._gathered else None
        self.copied_bytes = 0
        self.stop = False
        self.outcome: Outcome | None = None
        self.queued = False
        self.told_at_s = 0.0
        self.on_end: Callable[[], None] | None = None
        self.on_progress: Callable[[], None] | None = None

    def run(self) -> None:
        """All of it, here and now."""
        while self.outcome is None:
            self.run_chunk()

    def run_chunk(self) -> None:
        """The next chunk. `outcome` is set once there is no other."""
        permission = self._permission
        assert permission is not None
        if self.stop:
            self.end(Outcome.STOPPED)
            return
        if self.copied_bytes == 0 and not permission.stands():
            self.end(Outcome.WITHDRAWN)
            return
        bounds = next(self._bounds, None)
        if bounds is None:
            self.end(Outcome.DONE)
            return
        first, end, count = bounds
        failure: Outcome | None = None
        if self._gathered:
            failure = self._gather(first, end, count)
        else:
            begin_s = time.perf_counter()
            self._move(first, end)
            if self._gathers and time.perf_counter() - begin_s > STARVED_S and end - first > 1:
                self._gathered, self._iovecs = True, self._pieces.iovecs()
        if not permission.stands():
            self._wipe(first, end)
            self.end(Outcome.WITHDRAWN)
        elif failure is not None:
            if failure is Outcome.LOST:
                self._wipe(first, end)
            self.end(failure)
        else:
            self.copied_bytes += count
            if end == len(self._pieces):
                self.end(Outcome.DONE)

    def end(self, outcome: Outcome) -> None:
        """Nothing is touched any more; let go of the memories."""
        self.outcome = outcome
        self._kept = ()
        self._permission = None
        self._process = None

    def _move(self, first: int, end: int) -> None:
        for to, source, count in self._pieces.listed(first, end):
            copy_memory(to, source, count)

    def _gather(self, first: int, end: int, count: int) -> Outcome | None:
        assert self._iovecs is not None
        if self._process is not None and not self._process.known:
            return Outcome.REFUSED
        to, source = self._iovecs
        step = first * to.strides[0]
        try:
            done = read_process(self._pid, to.ctypes.data + step, source.ctypes.data + step, end - first)
        except OSError as error:
            return _OUTCOME_BY_ERRNO.get(error.errno or 0, Outcome.FAULT)
        if self._process is not None and not self._process.alive():
            return Outcome.LOST  # its number may be another process's by now
        return None if done == count else Outcome.FAULT

    def _wipe(self, first: int, end: int) -> None:
        for to, _, count in self._pieces.listed(first, end):
            fill_memory(to, 0, count)


def _worth_gathering(pieces: Pieces) -> bool:
    return len(pieces) >= GATHERED_PIECES_MIN and pieces.mean_bytes < MEAN_PIECE_BYTES_MIN


class CopyThreads:
    """At most `threads_max` threads, started when first needed, that take turns at the copies.

    All methods are for the event loop's thread; `on_end` and `on_progress` are called there.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._running: set[Copy] = set()
        self._idle: asyncio.Future[None] | None = None
        self._closed = False

    def ready(self) -> bool:
        """Whether a copy may start. Begins a thread for it, unless the system gives none: what runs goes on
        with those that there are."""
        if self._closed or len(self._running) >= JOBS_MAX:
            return False
        if len(self._threads) < min(self._threads_max, len(self._running) + 1):
            thread = threading.Thread(target=self._work, name="kvtransfer-copy", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("no thread for copies: %s", error)
            else:
                self._threads.append(thread)
        return bool(self._threads)

    def start(
        self, copy: Copy, on_end: Callable[[], None], on_progress: Callable[[], None] | None = None
    ) -> None:
        """`on_end` is called once, after the last touch of either memory. Right after `ready` said True."""
        assert self._threads
        self._running.add(copy)
        copy.on_end, copy.on_progress = on_end, on_progress
        copy.queued = True
        self._queue.put(copy)

    def stop(self, copy: Copy) -> None:
        """End it before its next chunk; at once if no thread has it. Again, or too late, is harmless."""
        copy.stop = True
        with self._lock:
            waiting = copy.queued and copy.outcome is None
            if waiting:
                copy.end(Outcome.STOPPED)
        if waiting:
            self._ended(copy)

    async def close(self) -> None:
        """Stop all copies and end the threads; waits for a chunk at most."""
        self._closed = True
        for copy in list(self._running):
            self.stop(copy)
        if self._running:
            self._idle = self._loop.create_future()
            await self._idle
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (copy := self._queue.get()) is not None:
            with self._lock:
                if copy.outcome is not None:
                    continue
                copy.queued = False
            self._turn(copy)

    def _turn(self, copy: Copy) -> None:
        """Some chunks of it; then it ends, or stands in the queue again if others wait."""
        chunks = 0
        while copy.outcome is None:
            if chunks >= TURN_CHUNKS_MAX and not self._queue.empty():
                with self._lock:
                    copy.queued = True
                self._queue.put(copy)
                return
            self._run_chunk(copy)
            chunks += 1
            self._tell(copy)
        self._call(self._ended, copy)

    def _run_chunk(self, copy: Copy) -> None:
        try:
            copy.run_chunk()
        except Exception:
            _log.exception("a copy fails on a defect of our own")
            copy.end(Outcome.FAULT)

    def _tell(self, copy: Copy) -> None:
        if copy.on_progress is None or copy.outcome is not None:
            return
        now_s = time.monotonic()
        if now_s - copy.told_at_s >= PROGRESS_S:
            copy.told_at_s = now_s
            self._call(copy.on_progress)

    def _call(self, callback: Callable[..., None], *arguments: object) -> None:
        """In the loop's thread; nobody is there to hear it once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _ended(self, copy: Copy) -> None:
        self._running.discard(copy)
        on_end, copy.on_end = copy.on_end, None
        copy.on_progress = None
        if on_end is not None:
            on_end()
        if not self._running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
