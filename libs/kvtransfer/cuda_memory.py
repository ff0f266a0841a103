"""The memory of a CUDA device, copied to and from host memory on a stream of its own.

The only module here that imports torch; it is imported once a CUDA tensor is registered.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtransfer.cuda_export import exported
from kvtransfer.device import DeviceMemory, DirectAccess
from kvtransfer.errors import TransferError
from kvtransfer.memory import Ranges, address_of

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class CudaMemoryError(TransferError):
    """The CUDA runtime refused; the text has its reason."""


class CudaMemory(DeviceMemory):
    """The bytes of a contiguous tensor.

    A copy comes after what was queued on the device's default stream before it. Work on other streams that
    makes the bytes is its owner's to wait for.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.detach().reshape(-1).view(torch.uint8)
        self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._default = torch.cuda.default_stream(tensor.device)

    @property
    def size_bytes(self) -> int:
        return self._bytes.numel()

    def pin(self, host: memoryview) -> Callable[[], None]:
        address = address_of(host)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        _checked("cudaHostRegister", runtime.cudaHostRegister(address, host.nbytes, _PORTABLE))
        return partial(_unpin, address)

    def copy_out(self, ranges: Ranges, host: memoryview) -> None:
        self._copy(ranges, torch.frombuffer(host, dtype=torch.uint8), out=True)

    def copy_in(self, host: memoryview, ranges: Ranges) -> None:
        self._copy(ranges, torch.frombuffer(host, dtype=torch.uint8), out=False)

    def direct_access(self) -> DirectAccess:
        address = self._bytes.data_ptr()
        dma_buf = exported(address, self.size_bytes)
        if dma_buf is None:
            return DirectAccess(address)
        return DirectAccess(address, dma_buf.descriptor, dma_buf.offset)

    def settle(self) -> None:
        self._default.synchronize()

    def _copy(self, ranges: Ranges, host: Tensor, *, out: bool) -> None:
        try:
            self._copy_on_stream(ranges, host, out=out)
        except RuntimeError as error:
            raise CudaMemoryError(f"a copy {'from' if out else 'to'} the device fails: {error}") from error

    def _copy_on_stream(self, ranges: Ranges, host: Tensor, *, out: bool) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(self._default)
        with torch.cuda.stream(self._stream):
            at = 0
            for offset, length in ranges.tolist():
                here, there = host[at : at + length], self._bytes[offset : offset + length]
                if out:
                    here.copy_(there, non_blocking=True)
                else:
                    there.copy_(here, non_blocking=True)
                at += length
            done.record(self._stream)
        done.synchronize()


def _unpin(address: int) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    _checked("cudaHostUnregister", runtime.cudaHostUnregister(address))


def _checked(what: str, result: object) -> None:
    code = int(result)  # type: ignore[call-overload]  # torch calls it an object, it is cudaError
    if code:
        raise CudaMemoryError(f"{what} fails with CUDA error {code}")
