"""Mooncake's TransferEngine over TCP, with peer-to-peer metadata; in an environment of its own.

The protocol is named to `initialize`, which takes "rdma" too where there is none and then uses TCP: what is
asked for here is what is meant.
"""

import sys
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from driven import OWNER, SynchronousSystem, main, own
from mooncake.engine import TransferEngine

from moonpool.benchmarks.transfer_plan import Direction, Memory

HOST = "127.0.0.1"
PROTOCOL = "tcp"
PACKAGE = "mooncake-transfer-engine-non-cuda"

Call = tuple[list[int], list[int], list[int]]
"""Addresses here, addresses there, lengths."""


def engine_over(memory: Memory) -> TransferEngine:
    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", PROTOCOL, "") != 0:
        raise RuntimeError("TransferEngine.initialize failed")
    if engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
        raise RuntimeError("TransferEngine.register_memory failed")
    return engine


class MooncakeSystem(SynchronousSystem):
    def __init__(self) -> None:
        super().__init__()
        self._engine = engine_over(self.memory)
        address = self.owner.ask(do="address")
        self._segment, self._remote = address["segment"], address["memory"]

    def about(self) -> dict[str, str]:
        return {PACKAGE: version(PACKAGE), "protocol": PROTOCOL, "metadata": "P2PHANDSHAKE"}

    def prepare(self, direction: Direction, local: Sequence[int], remote: Sequence[int], size: int) -> Call:
        here = self.memory.ctypes.data
        return (
            [here + offset for offset in local],
            [self._remote + offset for offset in remote],
            [size] * len(local),
        )

    def call(self, direction: Direction, prepared: Call) -> None:
        local, remote, lengths = prepared
        engine, write = self._engine, direction is Direction.WRITE
        if len(local) == 1:
            move = engine.transfer_sync_write if write else engine.transfer_sync_read
            status = move(self._segment, local[0], remote[0], lengths[0])
        else:
            move = engine.batch_transfer_sync_write if write else engine.batch_transfer_sync_read
            status = move(self._segment, local, remote, lengths)
        if status != 0:
            raise RuntimeError(f"{move.__name__} gave {status}")

    def begin(self, direction: Direction, prepared: Call) -> int:
        engine = self._engine
        write = direction is Direction.WRITE
        move = engine.batch_transfer_async_write if write else engine.batch_transfer_async_read
        batch = move(self._segment, *prepared)
        if batch in (0, -1):
            raise RuntimeError(f"{move.__name__} gave {batch}")
        return batch

    def finish_one(self, running: deque[int]) -> None:
        """The oldest: the engine waits for named batches only."""
        status = self._engine.get_batch_transfer_status([running.popleft()])
        if status != 0:
            raise RuntimeError(f"get_batch_transfer_status gave {status}")


def owner(memory: Memory) -> tuple[object, dict[str, Any]]:
    engine = engine_over(memory)
    return engine, {"segment": f"{HOST}:{engine.get_rpc_port()}", "memory": memory.ctypes.data}


if __name__ == "__main__":
    if sys.argv[1:] == [OWNER]:
        own(owner)
    else:
        main(MooncakeSystem)
