"""Address ranges that shared memory must have so that the kernel can map it in pages of 2 MiB.

With pages of 4 KiB a copy spends a third of its time on finding pages: memory of a virtual machine is
looked up twice. Owns reserving addresses. Knows nothing of what is mapped there.
"""

import ctypes
import mmap

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""From Linux 6.1; Python 3.11 has no name for it. Works whatever the machine's setting for huge pages is."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
map_memory = _libc.mmap
"""mmap(2): address, length, protection, flags, descriptor, offset."""
map_memory.restype = ctypes.c_void_p
map_memory.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
unmap_memory = _libc.munmap
"""munmap(2): address, length."""
unmap_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def collapse(address: int, length: int) -> bool:
    """Gather what is mapped there, each huge page with a page in memory at least, into huge pages.

    Takes milliseconds for each; lets go of the GIL. Returns whether the kernel could.
    """
    result: int = _madvise(address, length, _MADV_COLLAPSE)
    return result == 0


def mapped(address: int | None) -> bool:
    """Whether what `map_memory` returned is an address."""
    return address is not None and address != _MAP_FAILED


def map_aligned(size_bytes: int, protection: int, descriptor: int) -> int | None:
    """Map a whole file, shared, at a border of a huge page. Nothing if it fails; the reason is in errno."""
    whole = _rounded(size_bytes, mmap.PAGESIZE) + HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = map_memory(None, whole, _PROT_NONE, flags, -1, 0)
    if not mapped(base):
        return None
    start = _rounded(base, HUGE_BYTES)
    address = map_memory(start, size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if not mapped(address):
        number = ctypes.get_errno()
        unmap_memory(base, whole)
        ctypes.set_errno(number)
        return None
    end = start + _rounded(size_bytes, mmap.PAGESIZE)
    if start > base:
        unmap_memory(base, start - base)
    unmap_memory(end, base + whole - end)
    return start


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
