"""NIXL with its UCX backend, in an environment of its own. UCX chooses the way unless UCX_TLS names one:
by itself it takes cross-memory attach (process_vm_readv and its like) on one host.
"""

import base64
import os
import sys
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from driven import OWNER, SynchronousSystem, main, own
from nixl_cu12._api import nixl_agent, nixl_agent_config

from moonpool.benchmarks.transfer_plan import Direction, Memory

PACKAGE = "nixl-cu12"
OPERATIONS = {Direction.WRITE: "WRITE", Direction.READ: "READ"}
DONE, FAILED = "DONE", "ERR"


def agent_over(name: str, memory: Memory) -> nixl_agent:
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


class NixlSystem(SynchronousSystem):
    def __init__(self) -> None:
        super().__init__()
        self._agent = agent_over("caller", self.memory)
        address = self.owner.ask(do="address")
        name = self._agent.add_remote_agent(base64.b64decode(address["metadata"]))
        self._owner_name = name.decode() if isinstance(name, bytes) else name
        self._remote = address["memory"]

    def about(self) -> dict[str, str]:
        return {PACKAGE: version(PACKAGE), "backend": "UCX", "UCX_TLS": os.environ.get("UCX_TLS", "default")}

    def prepare(self, direction: Direction, local: Sequence[int], remote: Sequence[int], size: int) -> Any:
        here, there = self.memory.ctypes.data, self._remote
        agent = self._agent
        return agent.initialize_xfer(
            OPERATIONS[direction],
            agent.get_xfer_descs([(here + offset, size, 0) for offset in local], "DRAM"),
            agent.get_xfer_descs([(there + offset, size, 0) for offset in remote], "DRAM"),
            self._owner_name,
        )

    def call(self, direction: Direction, prepared: Any) -> None:
        state = self._agent.transfer(prepared)
        while state != DONE:
            _check(state)
            state = self._agent.check_xfer_state(prepared)

    def begin(self, direction: Direction, prepared: Any) -> Any:
        _check(self._agent.transfer(prepared))
        return prepared

    def finish_one(self, running: deque[Any]) -> None:
        while True:
            for handle in running:
                state = self._agent.check_xfer_state(handle)
                _check(state)
                if state == DONE:
                    running.remove(handle)
                    return

    def let_go(self, prepared: Any) -> None:
        self._agent.release_xfer_handle(prepared)


def _check(state: str) -> None:
    if state == FAILED:
        raise RuntimeError("a NIXL transfer failed")


def owner(memory: Memory) -> tuple[object, dict[str, Any]]:
    agent = agent_over("owner", memory)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    return agent, {"metadata": metadata, "memory": memory.ctypes.data}


if __name__ == "__main__":
    if sys.argv[1:] == [OWNER]:
        own(owner)
    else:
        main(NixlSystem)
