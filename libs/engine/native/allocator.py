"""The C allocator, told to keep what a step frees.

Every operation's result is new memory, megabytes in a prefill. glibc gives such sizes back to the kernel
when they are freed, and the kernel zeroes each page again for the next operation.
"""

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""As in glibc's malloc.h."""
KEPT_BYTES_MAX = 1 << 30
"""Freed memory at the heap's end that a process keeps for its next step."""
HEAP_ALLOCATION_BYTES_MAX = 32 << 20
"""Larger allocations are mapped one by one; glibc refuses a higher threshold."""


def keep_freed_memory() -> bool:
    """Affects the whole process, once and for all; False where the C library has no `mallopt`."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    kept = library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)
    return bool(library.mallopt(M_MMAP_THRESHOLD, HEAP_ALLOCATION_BYTES_MAX) and kept)
