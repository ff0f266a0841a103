"""Excludes other processes of this machine while something is made that all of them want."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import EngineError

POLL_S = 0.1


class FileLockTimeoutError(EngineError):
    """Another process held the lock for longer than the caller waits."""


@contextmanager
def file_lock(path: Path, *, wait_s_max: float, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock on `path`, which is made if need be; the kernel frees the lock of a process that dies.

    `waiting` is called once if another process holds it. Raises FileLockTimeoutError after `wait_s_max`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        deadline_s = time.monotonic() + wait_s_max
        while not _try_lock(file.fileno()):
            if waiting is not None:
                waiting()
                waiting = None
            if time.monotonic() > deadline_s:
                raise FileLockTimeoutError(f"{path} is held by another process for over {wait_s_max:.0f} s")
            time.sleep(POLL_S)  # flock has no timeout of its own
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
