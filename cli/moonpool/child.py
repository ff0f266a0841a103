"""Becomes another program that dies with its parent: `python child.py PARENT_PID PROGRAM ARGUMENT…`.

The kernel kills the process as soon as the parent is gone, however the parent went (Linux:
PR_SET_PDEATHSIG, which survives exec). It runs as a file of its own, without site-packages, because
code between fork and exec in a process with threads is not safe.
"""

import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def main(arguments: list[str]) -> None:
    parent_pid, program = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        die_with_parent(parent_pid)
    os.execv(program[0], program)


def die_with_parent(parent_pid: int) -> None:
    """From here on the kernel kills this process when the thread that started it ends."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        # The parent went before the call; nothing would ever kill us.
        os.kill(os.getpid(), SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
