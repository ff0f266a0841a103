"""What the virtual machine with RDMA needs of its host, and how its tests are told where they run."""

import importlib.util
import shutil
from pathlib import Path

REQUIRED_VARIABLE = "MOONPOOL_RDMA_REQUIRED"
"""Set: what the machine needs must be there, or its tests fail; else they are skipped, with the reason."""
DEVICE_TESTS_VARIABLE = "MOONPOOL_RDMA_DEVICE_TESTS"
"""Set: collect the tests in `device` although this machine has no device, to learn their names."""
RUN = Path(__file__).parent / "vm" / "run"
"""The command that runs another one in the machine."""

_COMMANDS = ("qemu-system-x86_64", "modprobe", "busybox", "rdma", "apt-get", "dpkg")
_PACKAGES = "qemu-system-x86 kmod busybox-static rdma-core ibverbs-providers libibverbs1 python3-pyverbs"


def missing() -> str:
    """What this host lacks for the machine, in words; empty if it lacks nothing."""
    found = [name for name in _COMMANDS if shutil.which(name) is None]
    if importlib.util.find_spec("pyverbs") is None:
        found.append("pyverbs in this Python (make rdma links Debian's into the virtual environment)")
    return f"the machine with RDMA needs {', '.join(found)}; Debian's packages: {_PACKAGES}" if found else ""
