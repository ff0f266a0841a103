"""What may be registered, and what a region of a device refuses; how its bytes move is a contract suite."""

import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.support.device_contract import FakeDeviceMemory

from kvtransfer import Endpoint, Limits, RangeError, Region
from kvtransfer.device import DeviceRegion, region_of
from kvtransfer.shared_buffer import SharedBuffer

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(4096),
        memoryview(bytearray(4096)),
        mmap.mmap(-1, 4096),
        np.zeros((32, 64), np.int16),
        SharedBuffer.create(4096),
        torch.zeros(16, 8, 16, dtype=torch.bfloat16),
        torch.zeros(1024, dtype=torch.float32).view(32, 32).requires_grad_(),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_host_memory_of_any_kind(buffer: object) -> None:
    region = region_of(1, buffer)
    assert type(region) is Region
    assert region.region_bytes == 4096
    region.view[10] = 1
    if isinstance(buffer, torch.Tensor):
        assert bytes(buffer.detach().view(torch.uint8).numpy().reshape(-1)[8:12]) == b"\0\0\1\0"
    else:
        assert bytes(memoryview(buffer).cast("B")[8:12]) == b"\0\0\1\0"


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (torch.zeros(8, 8).t(), "contiguous"),
        (torch.zeros(0), "not empty"),
        (torch.zeros(8, device="meta"), "not of meta"),
        (FakeDeviceMemory(0), "1 to"),
        (b"read only", "writable"),
    ],
)
def test_what_cannot_be_a_region(buffer: object, text: str) -> None:
    with pytest.raises(RangeError, match=text):
        region_of(1, buffer)


def test_a_region_of_a_device() -> None:
    region = region_of(3, FakeDeviceMemory(100))
    assert isinstance(region, DeviceRegion)
    assert (region.region_id, region.region_bytes) == (3, 100)
    with pytest.raises(RangeError, match="has no view"):
        region.view  # noqa: B018
    region.drop()
    with pytest.raises(RangeError, match="not registered any more"):
        region.device  # noqa: B018


def test_slots_fit_the_ring() -> None:
    with pytest.raises(ValueError, match="bounce_slot_bytes must be at most bounce_bytes, 10"):
        Limits(bounce_bytes=10, bounce_slot_bytes=11)


def test_registering_host_memory_imports_no_torch() -> None:
    code = (
        "import sys; from kvtransfer import Endpoint; "
        "Endpoint('name', bytes(16)).register(bytearray(10)); "
        "print('torch' in sys.modules, 'pyverbs' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_endpoint_registers_a_tensor() -> None:
    tensor = torch.arange(10, dtype=torch.int64)
    region = Endpoint("name", bytes(16)).register(tensor)
    assert np.frombuffer(region.view, np.int64).tolist() == list(range(10))
