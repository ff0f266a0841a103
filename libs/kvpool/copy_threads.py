"""A bounded number of threads that copy blocks, and how long they have been at it."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

ResultT = TypeVar("ResultT")


class CopyThreads:
    """At most `threads` pieces of work at once; the rest waits its turn, first come, first served.

    A process does not wait for these threads when it ends: a disk that hangs gives none back. All methods are
    for the event loop's thread.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._name = name
        self._free = asyncio.Semaphore(threads)
        self._numbers = itertools.count()
        self._began_at_s: dict[int, float] = {}
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._started = 0
        self._closed = False

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns, from a thread. Only for tasks that nobody cancels: the thread would go on.
        Raises what `work` raises, and RuntimeError where the system gives no thread, or after `close`."""
        loop = asyncio.get_running_loop()
        async with self._free:
            if self._closed:
                raise RuntimeError(f"the threads {self._name} are closed")
            number = next(self._numbers)
            self._began_at_s[number] = loop.time()
            try:
                self._start_if_all_are_busy()
                done: asyncio.Future[ResultT] = loop.create_future()
                self._work.put(partial(_do, work, loop, done))
                return await done
            finally:
                del self._began_at_s[number]

    def busy_s(self) -> float:
        """For how long the longest piece of work has been under way; 0 where there is none."""
        began_at_s = min(self._began_at_s.values(), default=None)
        return 0.0 if began_at_s is None else asyncio.get_running_loop().time() - began_at_s

    def close(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        self._closed = True
        for _ in range(self._started):
            self._work.put(None)

    def _start_if_all_are_busy(self) -> None:
        if self._started < len(self._began_at_s):
            name = f"{self._name}_{self._started}"
            Thread(target=_serve, args=(self._work,), name=name, daemon=True).start()
            self._started += 1


def _serve(work: "SimpleQueue[Callable[[], None] | None]") -> None:
    """In a thread of its own."""
    while (do := work.get()) is not None:
        do()


def _do(
    work: Callable[[], ResultT], loop: asyncio.AbstractEventLoop, done: "asyncio.Future[ResultT]"
) -> None:
    """In a thread."""
    try:
        tell: Callable[[], None] = partial(_tell_result, done, work())
    except BaseException as error:
        tell = partial(_tell_error, done, error)
    # Nobody listens any more where the loop is closed.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def _tell_result(done: "asyncio.Future[ResultT]", result: ResultT) -> None:
    if not done.done():
        done.set_result(result)


def _tell_error(done: "asyncio.Future[ResultT]", error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
