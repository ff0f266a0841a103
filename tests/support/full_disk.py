"""A disk that is full or failing, as far as one process sees it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PAGE_BYTES = 4096
"""In whole ones a file system gives room."""


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, call: str, error_number: int) -> Iterator[None]:
    """Every `os.<call>` in here ends with that error."""

    def fail(*_: object) -> int:
        raise OSError(error_number, os.strerror(error_number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        yield


@contextmanager
def room_for(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> Iterator[None]:
    """`os.posix_fallocate` in here makes files grow by so many bytes in all, and then finds the disk full."""
    allocate = os.posix_fallocate
    left_bytes = free_bytes

    def allocate_within(descriptor: int, offset: int, length: int) -> None:
        nonlocal left_bytes
        held_bytes = -(-os.fstat(descriptor).st_size // PAGE_BYTES) * PAGE_BYTES
        grows_by = max(0, offset + length - held_bytes)
        if grows_by > left_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left_bytes -= grows_by
        allocate(descriptor, offset, length)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", allocate_within)
        yield


@contextmanager
def short_transfers(monkeypatch: pytest.MonkeyPatch, bytes_max: int) -> Iterator[None]:
    """`os.preadv` and `os.pwritev` in here move at most so many bytes a call."""
    read, write = os.preadv, os.pwritev

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:bytes_max]], at))
        patched.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:bytes_max]], at))
        yield
