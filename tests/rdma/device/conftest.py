"""What the tests with devices share: the counters of the two, and taking their network away."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

DEVICES = ("rxe0", "rxe1")
_NETWORK = {"rxe0": "rdma0", "rxe1": "rdma1"}


def packets_sent(device: str) -> int:
    """By the kernel's own count."""
    counter = Path("/sys/class/infiniband") / device / "ports/1/hw_counters/sent_pkts"
    return int(counter.read_text())


def set_link(device: str, state: str) -> None:
    """ "up" or "down": the network device below it."""
    subprocess.run(["ip", "link", "set", _NETWORK[device], state], check=True)


@pytest.fixture
def links_restored() -> Iterator[None]:
    yield
    for device in DEVICES:
        set_link(device, "up")
