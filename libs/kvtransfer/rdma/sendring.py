"""Work requests that are made once and filled anew for each post. Knows pyverbs, not what it moves."""

import ctypes
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvtransfer.rdma.bindings import SGE, SendWR, enums


class Columns(NamedTuple):
    """Work requests by column: one contiguous stretch at each end."""

    addresses: Sequence[int]
    lengths: Sequence[int]
    local_keys: Sequence[int]
    remote_addresses: Sequence[int]
    remote_keys: Sequence[int]


class _Scatter(ctypes.Structure):
    """struct ibv_sge."""

    _fields_ = (("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32))


class SendRing:
    """Work requests that are filled anew for each post: making one costs more than filling it ten times.

    They are linked once, for good, and pyverbs cannot unlink them: a chain of n requests is the last n.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._made = [SGE(0, 0, 0) for _ in range(size)]
        self._requests = [
            SendWR(opcode=enums.IBV_WR_RDMA_WRITE, num_sge=1, sg=[scatter]) for scatter in self._made
        ]
        self._scatters = [
            _own_scatter(request, scatter)
            for request, scatter in zip(self._requests, self._made, strict=True)
        ]
        for index in range(size - 1):
            self._requests[index].next_wr = self._requests[index + 1]

    def write(
        self, columns: Columns, numbers: range, signalled: Sequence[bool], immediate: int | None
    ) -> Any:
        """A chain of WRITEs, the last one with the immediate, if any."""
        first = self._filled(columns, numbers, signalled, enums.IBV_WR_RDMA_WRITE)
        if immediate is not None:
            last = self._requests[-1]
            last.opcode = enums.IBV_WR_RDMA_WRITE_WITH_IMM
            last.imm_data = socket.htonl(immediate)
        return first

    def read(self, columns: Columns, numbers: range, signalled: Sequence[bool]) -> Any:
        return self._filled(columns, numbers, signalled, enums.IBV_WR_RDMA_READ)

    def close(self) -> None:
        """Nothing is posted after it."""
        self._requests, self._scatters = [], []
        while self._made:
            self._made.pop().close()

    def _filled(self, columns: Columns, numbers: range, signalled: Sequence[bool], opcode: int) -> Any:
        begin = self.size - len(numbers)
        assert 0 <= begin < self.size
        rows = zip(self._requests[begin:], self._scatters[begin:], numbers, signalled, *columns, strict=True)
        for request, scatter, number, signal, address, length, local_key, remote_address, key in rows:
            scatter.addr, scatter.length, scatter.lkey = address, length, local_key
            request.set_wr_rdma(key, remote_address)
            request.wr_id = number
            request.opcode = opcode
            request.send_flags = enums.IBV_SEND_SIGNALED if signal else 0
        return self._requests[begin]


def _own_scatter(request: Any, scatter: Any) -> Any:
    """The one scatter entry that `request` points to, with attributes addr, length and lkey to set.

    Newer pyverbs tell where the request's own entry is. 44 does not, but lets a request point to the entry of
    an SGE, and frees neither: the request's own entry is freed here, that of the SGE by `SendRing.close`.
    """
    try:
        return _Scatter.from_address(request.sg_list)
    except AttributeError:
        request.close()
        request.sg_list = scatter
        return scatter
