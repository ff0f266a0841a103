"""Accepts connections on a listening socket and authenticates them, so many at a time.

Owns the socket and the handshakes. Knows nothing of what a connection is for: an authenticated one goes
to its `Host`.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from kvtransfer.errors import TransferError
from kvtransfer.stream import handshake
from kvtransfer.stream.handshake import Refusal
from kvtransfer.stream.negotiation import check_caller
from kvtransfer.transport import TransportContext

LISTEN_BACKLOG = 128
_ACCEPT_RETRY_S = 0.1
"""Pause after a failed accept (out of file descriptors): the listener stays readable all the while."""

_log = logging.getLogger(__name__)


class Host(Protocol):
    """Who takes authenticated connections."""

    def admit(self, peer: str, link_id: bytes) -> bool:
        """Whether there is room. What an older link of this peer still has in the kernel's buffers must not
        land after bytes of the new one, so it ends here, before the peer may send on the new one."""
        ...

    def welcome(self, sock: socket.socket, peer: str, link_id: bytes) -> None:
        """The connection is the host's from now on; an older link that came up meanwhile ends."""
        ...


class Listener:
    """Runs from its making to `close`. `sock` listens, does not block, and is the listener's from now on."""

    def __init__(
        self,
        sock: socket.socket,
        context: TransportContext,
        host: Host,
        tune: Callable[[socket.socket], None],
    ) -> None:
        self._sock = sock
        self._context = context
        self._host = host
        self._tune = tune
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Again is harmless."""
        if self._sock.fileno() >= 0:
            # asyncio accepts what comes now all the same, and fails at handing it to a cancelled task.
            asyncio.get_running_loop().remove_reader(self._sock)
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._handshakes) >= self._context.limits.handshakes_max:
                sock.close()
                continue
            task = asyncio.create_task(self._authenticate(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _authenticate(self, sock: socket.socket) -> None:
        """A failure concerns this connection only."""
        welcomed = False
        context = self._context
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(context.limits.handshake_s_max):
                self._tune(sock)
                admitted = await check_caller(sock, context.name, context.secret)
                in_time = await context.eras.admit(admitted.peer, admitted.link_id)
                if not in_time or not self._host.admit(admitted.peer, admitted.link_id):
                    await loop.sock_sendall(sock, handshake.pack_refused(Refusal.BUSY))
                    return
                await loop.sock_sendall(sock, admitted.welcome)
            self._host.welcome(sock, admitted.peer, admitted.link_id)
            welcomed = True
        except (TransferError, OSError) as error:
            _log.info("a connection failed its handshake: %s", error)
        finally:
            if not welcomed:
                sock.close()
