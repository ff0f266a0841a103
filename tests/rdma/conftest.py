"""Where the tests of rdma run: on the host those that start the virtual machine, where a verbs device is
(in the machine, or on real hardware) those in `device`."""

import os
from pathlib import Path

from tests.rdma.machine import DEVICE_TESTS_VARIABLE

_has_device = any(Path("/sys/class/infiniband").glob("*"))
collect_ignore = [] if _has_device or os.environ.get(DEVICE_TESTS_VARIABLE) else ["device"]
