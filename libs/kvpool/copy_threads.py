"""A bounded number of threads that copy blocks, and how long they have been at it."""

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class CopyThreads:
    """At most `threads` pieces of work at once; the rest waits its turn, first come, first served.

    All methods are for the event loop's thread.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)
        self._numbers = itertools.count()
        self._began_at_s: dict[int, float] = {}

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns, from a thread. Only for tasks that nobody cancels: the thread would go on."""
        loop = asyncio.get_running_loop()
        async with self._free:
            number = next(self._numbers)
            self._began_at_s[number] = loop.time()
            try:
                return await loop.run_in_executor(self._executor, work)
            finally:
                del self._began_at_s[number]

    def busy_s(self) -> float:
        """For how long the longest piece of work has been under way; 0 where there is none."""
        began_at_s = min(self._began_at_s.values(), default=None)
        return 0.0 if began_at_s is None else asyncio.get_running_loop().time() - began_at_s

    def close(self) -> None:
        """Begin nothing more; what is under way ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)
