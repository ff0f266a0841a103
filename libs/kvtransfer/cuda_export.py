"""Memory of a CUDA device as a dma-buf, by which the kernel lets other devices reach it.

Never run on hardware that has a network device beside: written after the manual of CUDA's driver.
"""

import ctypes
from dataclasses import dataclass

_DMA_BUF = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""
_ALIGNMENT_BYTES = 64 << 10
"""The driver exports whole pages of the device. Allocations begin and end at multiples of 2 MiB."""


@dataclass(frozen=True, slots=True)
class DmaBuf:
    """`descriptor` is the caller's to close; the memory begins at `offset`."""

    descriptor: int
    offset: int


def exported(address: int, size_bytes: int) -> DmaBuf | None:
    """None where the driver exports none: old, or without the open kernel modules."""
    begin = address // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
    end = -(-(address + size_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    descriptor = ctypes.c_int(-1)
    try:
        export = ctypes.CDLL("libcuda.so.1").cuMemGetHandleForAddressRange
    except (OSError, AttributeError):
        return None
    code = export(
        *(ctypes.byref(descriptor), ctypes.c_uint64(begin), ctypes.c_size_t(end - begin)),
        *(ctypes.c_int(_DMA_BUF), ctypes.c_uint64(0)),
    )
    return None if code else DmaBuf(descriptor.value, address - begin)
