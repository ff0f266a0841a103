"""Regions in the memory of a device, which transports do not reach: their bytes go through host memory.

Owns what may be registered. Knows a device by `DeviceMemory` only; that of CUDA is `cuda_memory`, imported
once a tensor of it is registered.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvtransfer.errors import RangeError
from kvtransfer.limits import REGION_BYTES_MAX
from kvtransfer.memory import Ranges, Region, RegisterableBuffer

if TYPE_CHECKING:  # whoever has a tensor has imported it
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DirectAccess:
    """How a network device reaches the memory by itself: by a dma-buf that holds it from `dma_buf_offset` on,
    whose descriptor is the asker's to close, or, where there is none, by its address."""

    address: int
    dma_buf: int | None = None
    dma_buf_offset: int = 0


class DeviceMemory(ABC):
    """`size_bytes` of a device. Its methods block and are called in threads, several at once."""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @abstractmethod
    def pin(self, host: memoryview) -> Callable[[], None]:
        """Have devices of this kind reach `host` quickly, until the returned function is called."""

    @abstractmethod
    def copy_out(self, ranges: Ranges, host: memoryview) -> None:
        """Fill `host`, which has their size, from the ranges in their order. Done when it returns."""

    @abstractmethod
    def copy_in(self, host: memoryview, ranges: Ranges) -> None:
        """Fill the ranges in their order from `host`. Whoever asks the device afterwards sees the bytes."""

    def direct_access(self) -> DirectAccess | None:
        """None if only copies reach it."""
        return None

    def settle(self) -> None:
        """Before a network device touches it: returns when what was queued for the memory is done."""
        raise NotImplementedError("memory without direct access")


class DeviceRegion(Region):
    """A region without a view: only `bounce` moves its bytes."""

    __slots__ = ("_device",)

    def __init__(self, region_id: int, device: DeviceMemory) -> None:
        if not 0 < device.size_bytes <= REGION_BYTES_MAX:
            raise RangeError(f"a region has 1 to {REGION_BYTES_MAX} bytes, not {device.size_bytes}")
        self.region_id = region_id
        self.region_bytes = device.size_bytes
        self._device: DeviceMemory | None = device

    @property
    def device(self) -> DeviceMemory:
        """Raises RangeError once it is unregistered."""
        if self._device is None:
            raise RangeError(f"region {self.region_id} is not registered any more")
        return self._device

    @property
    def view(self) -> memoryview:
        raise RangeError(f"region {self.region_id} is memory of a device, which has no view")

    def drop(self) -> None:
        self._device = None


def region_of(region_id: int, buffer: "RegisterableBuffer | DeviceMemory | Tensor") -> Region:
    """Raises RangeError if it is not fit."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _of_tensor(region_id, cast("Tensor", buffer))
    if isinstance(buffer, DeviceMemory):
        return DeviceRegion(region_id, buffer)
    return Region(region_id, cast(RegisterableBuffer, buffer))


def _of_tensor(region_id: int, tensor: "Tensor") -> Region:
    if not tensor.is_contiguous() or tensor.numel() == 0:
        raise RangeError("a region must be a contiguous tensor that is not empty")
    match tensor.device.type:
        case "cpu":
            # Over a view of bytes, as numpy lacks some of torch's types.
            flat = tensor.detach().reshape(-1)
            return Region(region_id, flat.view(sys.modules["torch"].uint8).numpy())
        case "cuda":
            from kvtransfer.cuda_memory import CudaMemory

            return DeviceRegion(region_id, CudaMemory(tensor))
        case other:
            raise RangeError(f"a region may be a tensor of cpu or cuda, not of {other}")
