"""Memory that other processes of this host can map read-only, and in no other way.

Owns making it and sealing it. Knows nothing of regions, grants or how the descriptor travels.
"""

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from contextlib import suppress
from typing import Self

from kvtransfer.errors import TransferError
from kvtransfer.huge_pages import HUGE_BYTES, collapse
from kvtransfer.limits import REGION_BYTES_MAX

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x0001
F_SEAL_SHRINK = 0x0002
F_SEAL_GROW = 0x0004
F_SEAL_FUTURE_WRITE = 0x0010
"""Constants of Linux that Python 3.11 does not name all of; FUTURE_WRITE came with 5.1."""

_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL
_ALIGNING_ATTEMPTS = 8


class SharedBufferError(TransferError):
    """The memory cannot be had; the message names the size and the reason."""


class SharedBuffer(mmap.mmap):
    """`size_bytes` bytes, zeroed, page-aligned, writable here and in forked children.

    A `mmap`, so it is a buffer for memoryview, numpy and torch, and `memoryview(x).obj` leads back here.
    Pages take memory only once they are touched. Whoever gets `fileno()` can map it read-only: its seals
    refuse every writable mapping but ours, and every change of size, so that no access can fault.
    Where the kernel cannot promise that, it is memory of this process and its children all the same;
    `private_reason` says why, and `fileno()` raises.
    """

    size_bytes: int
    offset_bytes: int = 0
    """Where it begins in the file of `fileno()`."""
    private_reason: str | None = None
    _descriptor: int | None = None
    _closing: "weakref.finalize[[int], SharedBuffer] | None" = None

    @classmethod
    def create(cls, size_bytes: int, *, from_start: bool = False) -> Self:
        """Raises SharedBufferError. `from_start`: it is the whole file, and its pages may stay small."""
        if not 1 <= size_bytes <= REGION_BYTES_MAX:
            raise SharedBufferError(f"size_bytes: {size_bytes}, from 1 to {REGION_BYTES_MAX}")
        try:
            # A memfd takes any size without a look at the machine; an anonymous mapping is refused where
            # it can never be filled. Asking first turns a later kill for lack of memory into an error.
            probe = mmap.mmap(-1, size_bytes)
            likely_address = _address_of(probe)
            probe.close()
            descriptor, reason = _sealable()
            if descriptor is None:
                buffer = cls(-1, size_bytes)
            else:
                aligns = size_bytes >= HUGE_BYTES and not from_start
                buffer = cls._mapped(descriptor, size_bytes, likely_address if aligns else None)
        except (OSError, OverflowError, ValueError) as error:
            raise SharedBufferError(f"{size_bytes} bytes of shared memory: {error}") from error
        buffer.size_bytes = size_bytes
        if descriptor is not None and (reason := _sealed(descriptor)) is not None:
            # Sealing failed: a peer could write or truncate. Nobody is to get this descriptor.
            os.close(descriptor)
            descriptor = None
        if descriptor is not None:
            buffer._descriptor = descriptor
            # The mapping goes with its last reference, closed or not; so must the descriptor.
            buffer._closing = weakref.finalize(buffer, os.close, descriptor)
            # Takes effect where the machine's setting for huge pages of shared memory is "advise".
            with suppress(OSError):
                buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.private_reason = reason
        return buffer

    @classmethod
    def _mapped(cls, descriptor: int, size_bytes: int, likely_address: int | None) -> Self:
        """Maps the descriptor, which it closes if that fails.

        The kernel can use huge pages only where borders of them are the same in the file and in memory,
        and Python has no say in the address. So the buffer begins as far into the file as its address is
        into a huge page; where the kernel chose another address than expected, that one is tried.
        """
        try:
            for attempt in range(_ALIGNING_ATTEMPTS):
                offset = 0 if likely_address is None else likely_address % HUGE_BYTES
                os.truncate(descriptor, offset + size_bytes)
                buffer = cls(descriptor, size_bytes, offset=offset)
                buffer.offset_bytes = offset
                address = _address_of(buffer)
                if likely_address is None or (address - offset) % HUGE_BYTES == 0:
                    break
                likely_address = address
                if attempt < _ALIGNING_ATTEMPTS - 1:
                    buffer.close()
        except BaseException:
            os.close(descriptor)
            raise
        return buffer

    def take_memory(self) -> bool:
        """Take all of the memory now, in huge pages: copies are a third faster. Its content stays.

        Takes memory that is not used yet as well, and about a second for 400 MB: for a thread, at the
        start, where all of it will be used. Returns whether the kernel could (Linux from 6.1); if it
        could not, nothing is lost but time.
        """
        with memoryview(self) as view:
            address = _address_of(self)
            skipped = -address % HUGE_BYTES
            whole_bytes = (self.size_bytes - skipped) // HUGE_BYTES * HUGE_BYTES
            if sys.platform != "linux" or whole_bytes <= 0:
                return False
            # The kernel gathers only where there is something, so that a page of each is needed.
            view[skipped : skipped + whole_bytes : HUGE_BYTES].tobytes()
            return collapse(address + skipped, whole_bytes)

    def fileno(self) -> int:
        """The sealed descriptor, ours until `close`. Raises SharedBufferError if there is none."""
        if self._descriptor is None:
            raise SharedBufferError(self.private_reason or "the buffer is closed")
        return self._descriptor

    def close(self) -> None:
        """Give the memory back: at once, or when the last view of it is gone. Again is harmless."""
        if self._closing is not None:
            self._closing()
        self._descriptor = None
        try:
            super().close()
        except BufferError:
            # Somebody still has a view (an array, a tensor). Unmapping now would crash them; the mapping
            # goes with the last reference to it.
            return


def _sealable() -> tuple[int | None, str | None]:
    """A descriptor that can be sealed, or why there is none."""
    if sys.platform != "linux":
        return None, f"sealed memory needs Linux, this is {sys.platform}"
    try:
        return os.memfd_create("moonpool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), None
    except OSError as error:
        return None, f"memfd_create is refused: {error}"


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _sealed(descriptor: int) -> str | None:
    """Seal a descriptor that is mapped; the reason if this kernel cannot."""
    try:
        fcntl.fcntl(descriptor, F_ADD_SEALS, _SEALS)
    except OSError as error:
        return f"F_SEAL_FUTURE_WRITE is refused (it came with Linux 5.1): {error}"
    return None
