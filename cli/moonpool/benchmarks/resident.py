"""How much memory this process has."""

import os
from pathlib import Path

STATM = Path("/proc/self/statm")
RESIDENT_FIELD = 1


def resident_bytes() -> int:
    """Resident pages, of Linux; OSError elsewhere."""
    return int(STATM.read_text(encoding="ascii").split()[RESIDENT_FIELD]) * os.sysconf("SC_PAGE_SIZE")
