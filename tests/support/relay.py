"""A relay in front of a TCP port, for tests: the network between two endpoints, which can be cut or stall."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PART_BYTES = 256 << 10


class Relay:
    """Forwards connections to `target_port` of this host. Made by `running`."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.connections = 0
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False

    @classmethod
    @asynccontextmanager
    async def running(cls, target_port: int) -> AsyncIterator["Relay"]:
        relay = cls(target_port)
        await relay.restore()
        try:
            yield relay
        finally:
            await relay.cut()

    @property
    def busy(self) -> bool:
        """Whether a connection is open on either side."""
        return bool(self._sessions)

    async def restore(self) -> None:
        """Listen, at the same port as before."""
        self._refusing = False
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break all connections, refuse new ones."""
        assert self._server is not None
        self._server.close()
        for session in self._sessions:
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    async def refuse(self) -> None:
        """Break all connections; take new ones only to close them. `cut`, then `restore` end it."""
        await self.cut()
        await self.restore()
        self._refusing = True

    def stall(self) -> None:
        """Take no byte any more, close nothing."""
        self._flowing.clear()

    def resume(self) -> None:
        """What was taken before the stall goes on, also of connections that were closed meanwhile."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refusing:
            writer.transport.abort()
            return
        session = asyncio.current_task()
        assert session is not None
        self._sessions.add(session)
        session.add_done_callback(self._sessions.discard)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            with suppress(OSError):
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._forward(reader, far_writer))
                    ways.create_task(self._forward(far_reader, writer))
        except* OSError:
            pass
        except* asyncio.CancelledError:
            pass
        finally:
            for end in (writer, far_writer):
                end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(_PART_BYTES):
            await self._flowing.wait()
            writer.write(part)
            await writer.drain()
        writer.close()
