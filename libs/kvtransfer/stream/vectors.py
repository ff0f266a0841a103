"""A table of buffers for one system call (`struct iovec[]`), filled without an object for each.

`readv` and `writev` are called through ctypes, which lets go of the GIL meanwhile. Worth it for many
small ranges; for a few views Python's own calls are quicker.
"""

import ctypes
import os

import numpy as np
import numpy.typing as npt

from kvtransfer.limits import IOVECS_MAX
from kvtransfer.memory import Cursor

_libc = ctypes.CDLL(None, use_errno=True)
_ARGUMENTS = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_writev = _libc.writev
_readv = _libc.readv
_writev.argtypes = _readv.argtypes = _ARGUMENTS
_writev.restype = _readv.restype = ctypes.c_ssize_t


class Vectors:
    """What one system call sends or receives. The memory behind it is kept valid by who filled it, and
    filling and calling are one step: nothing of the table is used later."""

    __slots__ = ("_address", "_rows", "_used", "total_bytes")

    def __init__(self) -> None:
        self._rows: npt.NDArray[np.uint64] = np.empty((IOVECS_MAX, 2), np.uint64)
        self._address = int(self._rows.ctypes.data)
        self._used = 0
        self.total_bytes = 0

    def fill(self, cursor: Cursor, bytes_max: int) -> None:
        """The next bytes of a tabled cursor, at most `bytes_max`; leaves a row free."""
        self._used, self.total_bytes = cursor.rows(bytes_max, self._rows[: IOVECS_MAX - 1])

    def add(self, address: int, count: int) -> None:
        """One buffer more, in the row that `fill` left free."""
        self._rows[self._used] = (address, count)
        self._used += 1
        self.total_bytes += count

    def send(self, fd: int) -> int:
        """Like `os.writev`. Raises OSError."""
        return _checked(_writev(fd, self._address, self._used))

    def receive(self, fd: int) -> int:
        """Like `os.readv`. Raises OSError."""
        return _checked(_readv(fd, self._address, self._used))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
