"""Listening and dialling over TCP, and the sessions that serve peers."""

import asyncio
import logging
import socket
import sys

from kvtransfer.errors import DescriptorError, PeerLostError, TransferError
from kvtransfer.grants import Grant
from kvtransfer.tcp import handshake
from kvtransfer.tcp.caller import CallerLink
from kvtransfer.tcp.handshake import Refusal
from kvtransfer.tcp.negotiation import check_caller, prove_as_caller
from kvtransfer.tcp.owner import OwnerSession
from kvtransfer.transport import Address, TransportContext

KIND = "tcp"
_LISTEN_BACKLOG = 128
_ACCEPT_RETRY_S = 0.1
"""Pause after a failed accept (out of file descriptors): the listener stays readable all the while."""
_DEAD_HOST_MS = 20_000
"""Sent bytes unacknowledged by the peer's kernel for this long: its host is gone."""
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5

_log = logging.getLogger(__name__)


class TcpTransport:
    """Implements `transport.Transport`."""

    def __init__(self, context: TransportContext, bind: str, port: int, advertised_host: str) -> None:
        self._context = context
        self._bind = bind
        self._port = port
        self._advertised_host = advertised_host
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._sessions: dict[str, OwnerSession] = {}

    async def start(self) -> Address:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._bind, self._port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))
        port: int = listener.getsockname()[1]
        return {"kind": KIND, "host": self._advertised_host, "port": port}

    async def dial(self, address: Address, peer: str) -> CallerLink:
        """A new connection that proved to be `peer`, within `handshake_s_max`."""
        host, port = address.get("host"), address.get("port")
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
            raise DescriptorError("a tcp address needs a host and a port from 1 to 65535")
        context = self._context
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(context.limits.handshake_s_max):
                sock = await _connected(host, port)
                await prove_as_caller(sock, context.name, peer, context.secret)
            link = CallerLink(sock, peer, context.limits)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise PeerLostError(f"cannot reach {peer} at {host}:{port}: {error!r}") from error
            raise
        link.start()
        return link

    async def quiesce(self, grant: Grant) -> None:
        # Only the event loop's thread receives, and it is here: there is nothing to wait for.
        session = self._sessions.get(grant.peer)
        if session is not None:
            session.stop_grant(grant)

    async def close(self) -> None:
        tasks = [task for task in (self._accepting, *self._handshakes) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for session in list(self._sessions.values()):
            session.close("the endpoint is closed")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._handshakes) >= self._context.limits.handshakes_max:
                sock.close()
                continue
            task = asyncio.create_task(self._welcome(sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _welcome(self, sock: socket.socket) -> None:
        """Authenticate one accepted connection and serve it; a failure concerns that connection only."""
        session: OwnerSession | None = None
        context = self._context
        try:
            async with asyncio.timeout(context.limits.handshake_s_max):
                _tune(sock)
                peer, welcome = await check_caller(sock, context.name, context.secret)
                loop = asyncio.get_running_loop()
                if peer not in self._sessions and len(self._sessions) >= context.limits.connections_max:
                    await loop.sock_sendall(sock, handshake.pack_refused(Refusal.BUSY))
                    return
                # A peer calls over one connection. What an older one still has in the kernel's buffers
                # must not land after bytes of the new one, so it ends before the peer may send there.
                self._end_session(peer)
                await loop.sock_sendall(sock, welcome)
            self._end_session(peer)
            session = OwnerSession(sock, peer, context, self._forget)
            self._sessions[peer] = session
            session.start()
        except (TransferError, OSError) as error:
            _log.info("a connection failed its handshake: %s", error)
        finally:
            if session is None:
                sock.close()

    def _end_session(self, peer: str) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.close("the peer connected anew")

    def _forget(self, session: OwnerSession) -> None:
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _tune(sock)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _tune(sock: socket.socket) -> None:
    """Non-blocking, no delay for small frames, a dead host is noticed. The kernel tunes the buffers."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_HOST_MS)
