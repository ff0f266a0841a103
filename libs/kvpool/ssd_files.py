"""The files of an SsdStore: taking a folder, allocating segments, whole reads and writes.

Every OSError leaves here as a StoreError that names file and cause.
"""

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvpool.block_store import StoreError
from kvpool.ssd_format import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_COPY_BYTES,
    Superblock,
    newest_superblock,
)
from kvpool.ssd_layout import SsdLayout, file_bytes

SUPERBLOCK_FILE = "superblock"
_SEGMENT_FILE = re.compile(r"segment-(\d{4})\.(data|records)")
_FILE_MODE = 0o600
"""Blocks are what users wrote: nobody else's to read."""
_FOLDER_MODE = 0o700


@contextmanager
def naming(path: Path, doing: str) -> Iterator[None]:
    """An OSError in here becomes a StoreError about `path`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {doing}: {error.strerror or error}") from error


class BlockFile:
    """An open file that is read and written in whole pieces at given places, from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens it, and makes it where there is none."""
        self.path = path
        with naming(path, "open"):
            self._opened: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`; StoreError where the file ends before."""
        done = 0
        with naming(self.path, f"read {len(into)} bytes at {offset}"):
            while done < len(into):
                got = os.preadv(self._descriptor, [into[done:]], offset + done)
                if not got:
                    raise StoreError(f"{self.path}: ends at {offset + done}, not {offset + len(into)}")
                done += got

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        with naming(self.path, f"write {len(data)} bytes at {offset}"):
            while done < len(data):
                wrote = os.pwritev(self._descriptor, [data[done:]], offset + done)
                if not wrote:
                    raise StoreError(f"{self.path}: nothing could be written at {offset + done}")
                done += wrote

    def size_bytes(self) -> int:
        with naming(self.path, "stat"):
            return os.fstat(self._descriptor).st_size

    def cut(self, size_bytes: int) -> None:
        """End the file at `size_bytes` if it is longer."""
        with naming(self.path, f"cut at {size_bytes}"):
            if self.size_bytes() > size_bytes:
                os.ftruncate(self._descriptor, size_bytes)

    def allocate(self, size_bytes: int) -> bool:
        """Give the file exactly this size, all of it with room on the disk; False where the disk is full."""
        before = self.size_bytes()
        self.cut(size_bytes)
        with naming(self.path, f"allocate {size_bytes} bytes"):
            try:
                os.posix_fallocate(self._descriptor, 0, size_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                os.ftruncate(self._descriptor, min(before, size_bytes))
                return False
        return True

    def lock(self) -> None:
        """Until `close`; StoreError where somebody else has it."""
        with naming(self.path, "lock"):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(
                    f"{self.path.parent}: in use by another process; one store, one folder"
                ) from error

    def flush(self) -> None:
        """What was written is on the disk when this returns."""
        with naming(self.path, "sync"):
            os.fsync(self._descriptor)

    def drop_cached(self, offset: int, size_bytes: int) -> None:
        """Have the next read of this range come from the disk."""
        self.flush()
        with naming(self.path, "drop from the page cache"):
            os.posix_fadvise(self._descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        if self._opened is not None:
            with suppress(OSError):
                os.close(self._opened)
            self._opened = None

    @property
    def _descriptor(self) -> int:
        if self._opened is None:
            raise StoreError(f"{self.path}: is closed")
        return self._opened


class SuperblockFile:
    """The file that says what a folder's store is; whoever has it open owns the folder."""

    def __init__(self, folder: Path) -> None:
        """StoreError where the folder cannot be made or written to, or has an owner."""
        with naming(folder, "make folder"):
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        self._file = BlockFile(folder / SUPERBLOCK_FILE)
        try:
            self._file.lock()
            if not self._file.allocate(SUPERBLOCK_BYTES):
                raise StoreError(f"{self._file.path}: {SUPERBLOCK_BYTES} bytes: no space left on the disk")
        except BaseException:
            self.close()
            raise

    def read(self) -> Superblock | None:
        """None where there is none that is good."""
        raw = bytearray(SUPERBLOCK_BYTES)
        self._file.read(0, memoryview(raw))
        return newest_superblock(bytes(raw))

    def write(self, superblock: Superblock) -> None:
        """Over the older copy."""
        copy = superblock.epoch % 2
        self._file.write(copy * SUPERBLOCK_COPY_BYTES, memoryview(superblock.encoded()))
        self._file.flush()

    def erase(self) -> None:
        self._file.write(0, memoryview(bytes(SUPERBLOCK_BYTES)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Segment:
    """Two open files with as many slots as the layout says: block data, and a record of each."""

    data: BlockFile
    records: BlockFile
    slots: int

    @classmethod
    def open(cls, folder: Path, number: int, slots: int, layout: SsdLayout) -> Self | None:
        """With `slots` slots, or half as many again and again while the disk has no room; None for none.

        Records of slots whose data is missing are cut off.
        """
        with ExitStack() as opened:
            data, records = (
                opened.enter_context(closing(BlockFile(folder / _file_name(number, kind))))
                for kind in ("data", "records")
            )
            records.cut(data.size_bytes() // layout.slot_bytes * RECORD_BYTES)
            while slots:
                data_bytes = slots * layout.slot_bytes
                records_bytes = file_bytes(slots, layout.block_bytes) - data_bytes
                if records.allocate(records_bytes) and data.allocate(data_bytes):
                    opened.pop_all()
                    return cls(data, records, slots)
                slots //= 2
        remove_segments(folder, first=number)
        return None

    def close(self) -> None:
        self.data.close()
        self.records.close()


def remove_segments(folder: Path, first: int) -> bool:
    """Delete the files of segment `first` and all after it. Whether there were any."""
    with naming(folder, "list"):
        names = os.listdir(folder)
    removed = False
    for name in names:
        match = _SEGMENT_FILE.fullmatch(name)
        if match and int(match[1]) >= first:
            with naming(folder / name, "remove"):
                os.unlink(folder / name)
            removed = True
    return removed


def missing_segments(folder: Path, layout: SsdLayout) -> list[str]:
    """Names of the segment files that are shorter than a store of this layout had, or not there."""
    missing = []
    for number, slots in enumerate(layout.slots_of_segments()):
        data_bytes = slots * layout.slot_bytes
        records_bytes = file_bytes(slots, layout.block_bytes) - data_bytes
        for kind, size_bytes in (("data", data_bytes), ("records", records_bytes)):
            path = folder / _file_name(number, kind)
            with naming(path, "stat"):
                if not path.exists() or path.stat().st_size < size_bytes:
                    missing.append(path.name)
    return missing


def _file_name(segment: int, kind: str) -> str:
    return f"segment-{segment:04}.{kind}"
