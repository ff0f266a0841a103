"""The system calls that Python lacks: reading another process, mapping read-only, and raw addresses.

Owns ctypes. Every address that goes in here was computed from a live buffer or a live `Mapping`.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import stat
import struct
import weakref

import numpy as np

from kvtransfer.errors import FrameError
from kvtransfer.huge_pages import map_aligned, unmap_memory
from kvtransfer.shared_buffer import F_GET_SEALS, F_SEAL_SHRINK

_CREDENTIALS = struct.Struct("3i")

_libc = ctypes.CDLL(None, use_errno=True)
copy_memory = ctypes.memmove
"""(to, from, count) by address; lets go of the GIL."""
fill_memory = ctypes.memset
"""(to, byte, count) by address; lets go of the GIL."""


def _found(name: str) -> "ctypes._NamedFuncPointer | None":
    """A function of libc, or nothing where it lacks it."""
    try:
        return _libc[name]
    except AttributeError:
        return None


_vm_readv = _found("process_vm_readv")
if _vm_readv is not None:
    _vm_readv.restype = ctypes.c_ssize_t
    _vm_readv.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )


def read_process(pid: int, to: int, source: int, pieces: int) -> int:
    """process_vm_readv: `to` and `source` are addresses of arrays of `pieces` iovecs. OSError if it fails."""
    if _vm_readv is None:
        raise OSError(errno.ENOSYS, "libc has no process_vm_readv")
    count: int = _vm_readv(pid, to, pieces, source, pieces, 0)
    if count < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return count


def reads_itself() -> bool:
    """Whether process_vm_readv is allowed at all here; a container's seccomp filter may refuse it."""
    probe = np.arange(2, dtype=np.int64)
    to = np.array([[probe.ctypes.data, 8]], np.int64)
    source = np.array([[probe.ctypes.data + 8, 8]], np.int64)
    try:
        return read_process(os.getpid(), to.ctypes.data, source.ctypes.data, 1) == 8 and int(probe[0]) == 1
    except OSError:
        return False


class Mapping:
    """A file of a peer, mapped read-only; unmapped with the last reference to this object."""

    __slots__ = ("__weakref__", "address", "size_bytes")

    def __init__(self, descriptor: int) -> None:
        """Keeps nothing of the descriptor. FrameError unless it is memory that can never shrink."""
        self.size_bytes = _sealed_bytes(descriptor)
        address = map_aligned(self.size_bytes, mmap.PROT_READ, descriptor)
        if address is None:
            reason = os.strerror(ctypes.get_errno())
            raise FrameError(f"cannot map {self.size_bytes} bytes of the peer's memory: {reason}")
        self.address: int = address
        weakref.finalize(self, unmap_memory, address, self.size_bytes).atexit = False

    def words(self) -> memoryview:
        """The 8-byte words of it; not to be looked at after this object is gone."""
        whole = (ctypes.c_char * (self.size_bytes // 8 * 8)).from_address(self.address)
        return memoryview(whole).cast("B").cast("Q").toreadonly()


def _sealed_bytes(descriptor: int) -> int:
    """Its size, which is final. Without the seal a peer could truncate it and our next access would fault."""
    found = os.fstat(descriptor)
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
    except OSError:
        seals = 0
    if not stat.S_ISREG(found.st_mode) or not seals & F_SEAL_SHRINK or found.st_size < 1:
        raise FrameError("the peer sent a descriptor that is no memory sealed against shrinking")
    return found.st_size


class PeerProcess:
    """The process at the other end of a unix socket, as the kernel names it."""

    def __init__(self, sock: socket.socket) -> None:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(credentials)[0]
        self._handle = _opened(self.pid)
        self.known = self._handle is not None
        """Whether it has a number here that can be held on to; without it, it is not read."""

    def alive(self) -> bool:
        """Whether `pid` still is that process; while it is not reaped, nobody else can have its number."""
        handle = self._handle
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, 0)
        except PermissionError:
            return True
        except OSError:  # it is gone, or the handle was closed meanwhile
            return False
        return True

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _opened(pid: int) -> int | None:
    """A handle of the process; nothing if it is in another pid namespace, gone, or this is refused."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
