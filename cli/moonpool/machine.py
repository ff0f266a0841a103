"""What a benchmark's reader needs to know of the machine it ran on."""

import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def machine_context() -> dict[str, object]:
    """The processor, how many of its cores are ours, and how busy the machine is now."""
    return {
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
