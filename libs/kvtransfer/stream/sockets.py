"""TCP sockets as the streams use them: listening, connecting, tuned."""

import asyncio
import socket
import sys

from kvtransfer.errors import DescriptorError, PeerLostError
from kvtransfer.stream.listener import LISTEN_BACKLOG
from kvtransfer.stream.negotiation import prove_as_caller
from kvtransfer.transport import Address, TransportContext

_DEAD_HOST_MS = 20_000
"""Sent bytes unacknowledged by the peer's kernel for this long: its host is gone."""
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5


async def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`; OSError if the address cannot be bound."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


async def authenticated(
    context: TransportContext, address: Address, peer: str, link_id: bytes
) -> socket.socket:
    """A connection to the `host` and `port` of `address` that proved to be `peer`, in `handshake_s_max`.

    Raises DescriptorError for a malformed address, PeerLostError, AuthError, BusyError, FrameError.
    """
    host, port = address.get("host"), address.get("port")
    if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise DescriptorError(f"a {address.get('kind')} address needs a host and a port from 1 to 65535")
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(context.limits.handshake_s_max):
            sock = await _connected(host, port)
            await prove_as_caller(sock, context.name, peer, context.secret, link_id)
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError):  # TimeoutError is one
            raise PeerLostError(f"cannot reach {peer} at {host}:{port}: {error!r}") from error
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Non-blocking, no delay for small frames, a dead host is noticed. The kernel tunes the buffers."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_HOST_MS)


async def _connected(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock
