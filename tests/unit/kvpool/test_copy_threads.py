"""Threads that copy blocks: so many at once, and no process waits for one that a disk does not give back."""

import asyncio
import subprocess
import sys
import threading

import pytest

from kvpool.copy_threads import CopyThreads

pytestmark = pytest.mark.unit

END_S_MAX = 20.0

HANGING = """
import asyncio, threading
from kvpool.copy_threads import CopyThreads

async def main():
    threads = CopyThreads(2, "hanging")
    began = threading.Event()
    task = asyncio.create_task(threads.run(lambda: (began.set(), threading.Event().wait())))
    assert await asyncio.to_thread(began.wait, 10.0)
    threads.close()

asyncio.run(main())
print("ended")
"""


async def test_results_and_errors_come_back() -> None:
    threads = CopyThreads(2, "copy")
    assert await threads.run(lambda: 7) == 7
    with pytest.raises(OSError, match="bad"):
        await threads.run(lambda: fail(OSError("bad")))
    assert await threads.run(threading.current_thread) is not threading.current_thread()
    assert threads.busy_s() == 0.0
    threads.close()
    with pytest.raises(RuntimeError):
        await threads.run(lambda: 7)


async def test_so_many_at_once_and_the_rest_waits_its_turn() -> None:
    threads = CopyThreads(2, "copy")
    lock, goes_on, running, most = threading.Lock(), threading.Event(), 0, 0

    def work() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        goes_on.wait(END_S_MAX)
        with lock:
            running -= 1
        return threading.get_ident()

    waiting = [asyncio.create_task(threads.run(work)) for _ in range(6)]
    async with asyncio.timeout(END_S_MAX):
        while running < 2:  # noqa: ASYNC110  # threads announce themselves by no event
            await asyncio.sleep(0.001)
    assert threads.busy_s() > 0
    goes_on.set()
    idents = await asyncio.gather(*waiting)
    assert most == 2
    assert len(set(idents)) <= 2
    threads.close()


def test_a_process_ends_while_a_thread_hangs() -> None:
    ended = subprocess.run(
        (sys.executable, "-c", HANGING), capture_output=True, text=True, timeout=END_S_MAX, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr


def fail(error: Exception) -> None:
    raise error
