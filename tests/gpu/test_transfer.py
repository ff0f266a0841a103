"""Transfers from and to the memory of a GPU: the contracts of device memory, and how quick its copies are."""

import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch
from tests.support.device_contract import (
    DEVICE_BYTES,
    MIB,
    WHOLE,
    Bytes,
    Device,
    DeviceContract,
    DevicePair,
    device_pair,
)
from tests.support.device_owner_contract import DeviceOwnerContract, OwnedDevice, owned_device
from tests.support.transfer import make_endpoint, side

from kvtransfer import Access, DeviceMemory, Limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class CudaDevice(Device):
    def __init__(self, size_bytes: int = DEVICE_BYTES) -> None:
        self.tensor = torch.zeros(size_bytes // 2, dtype=torch.bfloat16, device="cuda")

    @property
    def registered(self) -> object:
        return self.tensor

    @property
    def memory(self) -> DeviceMemory:
        from kvtransfer.cuda_memory import CudaMemory

        return CudaMemory(self.tensor)

    def get(self) -> Bytes:
        return self.tensor.view(torch.uint8).cpu().numpy()

    def set(self, values: Bytes) -> None:
        self.tensor.view(torch.uint8).copy_(torch.from_numpy(values))


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice()


@pytest.fixture(params=["tcp", "shm"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[DevicePair]:
    device = CudaDevice()
    async with device_pair(request.param, device) as made:
        yield made


class TestCudaMemory(DeviceContract):
    async def test_what_a_kernel_just_wrote_is_what_leaves(self, pair: DevicePair) -> None:
        """Work queued on the default stream before the call is waited for."""
        assert isinstance(pair.device, CudaDevice)
        square = torch.rand(4096, 4096, device="cuda")
        for _ in range(20):
            square = square @ square / 1000
        pair.device.tensor.fill_(1.5)
        await pair.write(pair.far.grant(WHOLE, "near").token, WHOLE, WHOLE)
        assert (pair.far.memory.view(np.uint16) == 0x3FC0).all()


class TestGrantedCudaMemory(DeviceOwnerContract):
    @pytest.fixture
    async def owned(self) -> AsyncIterator[OwnedDevice]:
        async with owned_device(CudaDevice()) as made:
            yield made

    async def test_a_kernel_sees_what_arrived_and_a_reader_what_a_kernel_wrote(
        self, owned: OwnedDevice
    ) -> None:
        """In the order of the default stream, without a wait of the owner's."""
        assert isinstance(owned.device, CudaDevice)
        owned.near.memory.view(np.uint16)[:] = 0x3FC0  # 1.5
        await owned.write(owned.grant().token, WHOLE, WHOLE, verify=True)
        assert float(owned.device.tensor.float().mean()) == 1.5
        square = torch.rand(4096, 4096, device="cuda")
        for _ in range(20):
            square = square @ square / 1000
        owned.device.tensor.fill_(2.0)
        await owned.read(owned.grant(Access.READ).token, WHOLE, WHOLE)
        assert (owned.near.memory.view(np.uint16) == 0x4000).all()


async def test_through_the_ring_at_half_of_what_the_slower_part_reaches() -> None:
    """The slower part over shared memory is a copy of the host, from the ring to the owner's memory."""
    size = 512 * MIB
    device = CudaDevice(size)
    near = make_endpoint("shm", "near", limits=Limits())
    async with side("shm", "far", np.zeros(size, np.uint8)) as far:
        await near.start()
        try:
            region = near.register(device.registered)
            peer = await near.connect(far.endpoint.descriptor(), timeout_s=5)
            token = far.grant([(0, size)], "near").token
            took_s = []
            for _ in range(4):
                begin_s = time.perf_counter()
                await peer.write(region, [(0, size)], token, [(0, size)], timeout_s=60.0)
                took_s.append(time.perf_counter() - begin_s)
        finally:
            await near.close()
        source = np.ones(size, np.uint8)
        begin_s = time.perf_counter()
        far.memory[:] = source
        ceiling_s = time.perf_counter() - begin_s
    print(f"ring {size / min(took_s) / 1e9:.1f} GB/s, memcpy {size / ceiling_s / 1e9:.1f} GB/s")
    assert min(took_s) < 2 * ceiling_s
