"""An endpoint in a process of its own, driven over JSON lines, and the handle to drive it.

The process runs `python -m tests.support.transfer_peer` with the arguments of `_endpoint` and the size of
its memory. Each command is a JSON object with `id` and `do`; each answer carries the `id`. Commands run at
once, so that a process can be asked something while it writes; a write or read that has a `call` can be
cancelled by it.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.eventually import eventually

from kvtransfer import Access, Endpoint, Grant, Limits, TransferError, TransportKind, checksum
from kvtransfer.shared_buffer import SharedBuffer

SECRET = b"the secret that this cluster has"
ANSWER_S_MAX = 30.0
COMMAND_BYTES_MAX = 4 << 20
"""One line; 10,000 ranges have some 200 KB."""
_ROOT = Path(__file__).parents[2]


class PeerProcess:
    """Handle of one running peer process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self.descriptor = ""

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        name: str,
        memory_bytes: int,
        *,
        transport: str = "tcp",
        launcher: tuple[str, ...] = (),
        host: str = "127.0.0.1",
        secret: bytes = SECRET,
        **limits: float,
    ) -> AsyncIterator["PeerProcess"]:
        """A peer that has this transport (or several, "shm,tcp") and listens at `host`; it is ended by its
        pid, whatever state the test left it in.

        `launcher` is a command that becomes the one that follows it, such as `ip netns exec NAME`.
        """
        process = await asyncio.create_subprocess_exec(
            *(*launcher, sys.executable, "-m", "tests.support.transfer_peer"),
            *(name, str(memory_bytes), json.dumps(limits), host, secret.decode(), transport),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
        )
        peer = cls(name, process)
        try:
            peer.descriptor = (await peer.ask("descriptor"))["descriptor"]
            yield peer
        finally:
            await peer.kill()

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Do a command and wait for its answer."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S_MAX):
            return await answer

    def stop(self) -> None:
        """SIGSTOP; returns when the process stands."""
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            os.sched_yield()

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        await self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._answers.pop(answer["id"]).set_result(answer)
        for future in self._answers.values():
            future.cancel()


class _Served:
    """The endpoint inside the process."""

    def __init__(self, endpoint: Endpoint, memory_bytes: int) -> None:
        self._endpoint = endpoint
        # As a worker's arena is: shared memory maps it, the other transports see any memory.
        buffer = SharedBuffer.create(memory_bytes)
        self._memory = np.frombuffer(buffer, np.uint8)
        self._region = endpoint.register(buffer)
        self._grants: dict[str, Grant] = {}
        self._calls: dict[str, asyncio.Task[Any]] = {}

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "descriptor":
                return {"descriptor": self._endpoint.descriptor()}
            case "fill":
                self._memory[:] = command["value"]
                return {}
            case "fill_random":
                values = np.random.default_rng(command["seed"]).integers(1, 250, len(self._memory), np.uint8)
                self._memory[:] = values
                return {}
            case "count":
                return {"count": int((self._memory == command["value"]).sum())}
            case "checksum":
                return {"checksum": checksum(self._region, command["ranges"])}
            case "grant":
                return self._grant(command)
            case "revoke":
                await self._endpoint.revoke(self._grants.pop(command["token"]))
                return {}
            case "written":
                return {"bytes": self._endpoint.written_bytes(self._grants[command["token"]])}
            case "landing":
                await eventually(lambda: self._landed(command) > command["more_than_bytes"], ANSWER_S_MAX)
                return {"bytes": self._landed(command)}
            case "cancel":
                self._calls[command["call"]].cancel()
                return {}
            case "write" | "read":
                return await self._transfer(command)
            case unknown:
                raise ValueError(f"unknown command {unknown}")

    def _landed(self, command: dict[str, Any]) -> int:
        """Bytes under a grant of ours, or without one those of our memory that are not zero."""
        if "token" in command:
            return self._endpoint.written_bytes(self._grants[command["token"]])
        return int(np.count_nonzero(self._memory))

    def _grant(self, command: dict[str, Any]) -> dict[str, Any]:
        grant = self._endpoint.grant(
            self._region,
            command["ranges"],
            peer=command["peer"],
            generation=command.get("generation", 1),
            access=Access(command.get("access", "write")),
        )
        self._grants[grant.token] = grant
        return {"token": grant.token}

    async def _transfer(self, command: dict[str, Any]) -> dict[str, Any]:
        timeout_s = command.get("timeout_s", 20.0)
        task = asyncio.current_task()
        assert task is not None
        self._calls[command.get("call", "")] = task
        try:
            peer = await self._endpoint.connect(command["descriptor"], timeout_s=timeout_s)
            call = peer.write if command["do"] == "write" else peer.read
            again = True
            while again:
                moved = await call(
                    self._region, command["local"], command["token"], command["remote"], timeout_s=timeout_s
                )
                again = command.get("until_it_fails", False)
        except TransferError as error:
            return {"error": type(error).__name__, "retryable": error.retryable, "text": str(error)}
        except asyncio.CancelledError:
            return {"error": asyncio.CancelledError.__name__}
        return {"bytes": moved.payload_bytes, "transport": moved.transport}


async def _main(endpoint: Endpoint, memory_bytes: int) -> None:
    await endpoint.start()
    served = _Served(endpoint, memory_bytes)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=COMMAND_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def answer(command: dict[str, Any]) -> None:
        reply = {"id": command["id"], **await served.do(command)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as commands:
        async for line in lines:
            commands.create_task(answer(json.loads(line)))
    await endpoint.close()


def _endpoint(name: str, limits: str, host: str, secret: str, transport: str) -> Endpoint:
    return Endpoint(
        name,
        secret.encode(),
        host=host,
        limits=Limits(**json.loads(limits)),
        transports=[TransportKind(kind) for kind in transport.split(",")],
    )


if __name__ == "__main__":
    own_name, own_bytes, *own_settings = sys.argv[1:]
    asyncio.run(_main(_endpoint(own_name, *own_settings), int(own_bytes)))
