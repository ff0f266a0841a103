"""Packed weights as files that every process of the machine maps: one copy in memory, packed once.

A file's name is the hash of what was packed and how, so it is right or absent; it is written under another
name and put in place when it is whole. Where the disk refuses, a weight is packed into private memory.
"""

import contextlib
import logging
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

SHARED_BYTES_MIN = 1 << 20
"""Smaller weights are not worth a file."""
STORE_BYTES_MAX = 64 << 30
"""Above this the files that were not used for longest are removed when a store is opened."""
FREE_BYTES_MIN = 2 << 30
"""What a new file must leave free on the disk."""

PARTIAL_AGE_S_MAX = 3600.0
"""A partial file that old was left by a process that died."""

_SUFFIX = ".weight"
_PARTIAL_SUFFIX = ".partial"
_log = logging.getLogger(__name__)


class WeightStore:
    """A folder of packed weights. Several processes may use it at once."""

    def __init__(self, folder: Path, *, bytes_max: int = STORE_BYTES_MAX) -> None:
        self._folder = folder
        self._refused = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_unused(folder, bytes_max)
            _remove_left_behind(folder)
        except OSError as error:
            self._refuse(error)

    def obtain(self, key: str, size: int, pack: Callable[[int], None]) -> FloatArray:
        """`size` floats that `pack` writes, given the address of zeroed memory; read-only if shared."""
        if size * 4 < SHARED_BYTES_MIN or self._refused:
            return packed_privately(size, pack)
        path = self._folder / f"{key}{_SUFFIX}"
        try:
            if not (path.is_file() and path.stat().st_size == size * 4):
                self._make(path, size, pack)
            with contextlib.suppress(OSError):  # a folder that is only read has no need of it
                os.utime(path)  # the order of removal
            return _mapped(path)
        except OSError as error:
            self._refuse(error)
            return packed_privately(size, pack)

    def _make(self, path: Path, size: int, pack: Callable[[int], None]) -> None:
        if shutil.disk_usage(self._folder).free < size * 4 + FREE_BYTES_MIN:
            raise OSError(f"less than {FREE_BYTES_MIN} bytes would be left free")
        partial = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{_PARTIAL_SUFFIX}")
        try:
            with partial.open("w+b") as file:
                # Reserved now: a disk that fills up later would kill the process as it writes.
                os.posix_fallocate(file.fileno(), 0, size * 4)
                mapped = np.frombuffer(mmap.mmap(file.fileno(), size * 4), dtype=np.float32)
                pack(_address(mapped))
                os.fsync(file.fileno())  # after a power failure the name must not stand for zeros
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _refuse(self, error: OSError) -> None:
        self._refused = True
        _log.warning("packed weights stay private to this process: %s: %s", self._folder, error)


def packed_privately(size: int, pack: Callable[[int], None]) -> FloatArray:
    array = np.zeros(size, dtype=np.float32)
    pack(_address(array))
    return array


def _mapped(path: Path) -> FloatArray:
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapping.madvise(mmap.MADV_WILLNEED)  # all of it, soon: the first step reads it page by page otherwise
    return np.frombuffer(mapping, dtype=np.float32)


def _address(array: FloatArray) -> int:
    return array.ctypes.data


def _remove_unused(folder: Path, bytes_max: int) -> None:
    kept_bytes = 0
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=_used_at_s, reverse=True):
        with contextlib.suppress(FileNotFoundError):
            kept_bytes += path.stat().st_size
            if kept_bytes > bytes_max:
                path.unlink()


def _remove_left_behind(folder: Path) -> None:
    for path in folder.glob(f".*{_PARTIAL_SUFFIX}"):
        if time.time() - _used_at_s(path) > PARTIAL_AGE_S_MAX:
            path.unlink(missing_ok=True)


def _used_at_s(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):  # another process removes at the same time
        return path.stat().st_mtime
    return 0.0
