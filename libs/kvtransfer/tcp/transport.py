"""Listening and dialling over TCP, and the sessions that serve peers."""

import asyncio
import logging
import socket
from dataclasses import dataclass, field

from kvtransfer.errors import TransferError
from kvtransfer.grants import Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import STREAMS_MAX
from kvtransfer.memory import Region
from kvtransfer.stream import sockets
from kvtransfer.stream.listener import Listener
from kvtransfer.tcp.caller import CallerStream
from kvtransfer.tcp.link import TcpLink
from kvtransfer.tcp.owner import OwnerSession
from kvtransfer.tcp.staging import Staging
from kvtransfer.transport import Address, TransportContext
from kvtransfer.verification import GrantedDigests

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _ServedLink:
    """The streams of a peer's newest link. `before` is the id of the one that it took the place of: a stream
    of that one may still be in its handshake."""

    link_id: bytes
    before: bytes
    sessions: list[OwnerSession] = field(default_factory=list)


class TcpTransport:
    """Implements `transport.Transport`."""

    kind = TransportKind.TCP

    def __init__(self, context: TransportContext, bind: str, port: int, advertised_host: str) -> None:
        self._context = context
        self._bind = bind
        self._port = port
        self._advertised_host = advertised_host
        self._listener: Listener | None = None
        self._links: dict[str, _ServedLink] = {}
        self._digests = GrantedDigests()
        self._staging = Staging(context.limits)

    async def start(self) -> Address:
        sock = await sockets.listening(self._bind, self._port)
        port: int = sock.getsockname()[1]
        self._listener = Listener(sock, self._context, self, sockets.tune)
        return {"kind": self.kind, "host": self._advertised_host, "port": port}

    def reaches(self, address: Address) -> bool:
        return True

    async def dial(self, address: Address, peer: str) -> TcpLink:
        """The first stream shows whether the peer is there; the others come up together, or not at all if
        the peer has no more room."""
        link_id = self._context.eras.link_id(peer)
        first = await sockets.authenticated(self._context, address, peer, link_id)
        more: list[asyncio.Task[socket.socket]] = []
        try:
            for _ in range(self._context.limits.tcp_streams - 1):
                another = sockets.authenticated(self._context, address, peer, link_id)
                more.append(asyncio.create_task(another))
            if more:
                await asyncio.wait(more)
            streams = [self._stream(sock, peer) for sock in (first, *_dialled(more, peer))]
        except BaseException:
            first.close()
            await _discard(more)
            raise
        return TcpLink(streams, peer, self._context.limits)

    async def quiesce(self, grant: Grant) -> None:
        # Only the event loop's thread receives, and it is here: only digests and copies of
        # devices are to be waited for.
        link = self._links.get(grant.peer)
        if link is not None:
            for session in list(link.sessions):
                session.stop_grant(grant)
        await self._digests.quiesce(grant)
        await self._staging.quiesce(grant)

    async def end_sessions(self, peer: str, but: bytes) -> None:
        link = self._links.get(peer)
        if link is not None and not link.link_id.startswith(but):
            self._end(peer, "the peer connected anew")
            await self._staging.quiesce_peer(peer)

    async def release(self, region: Region) -> None:
        """Nothing of a region is kept here."""

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for peer in list(self._links):
            self._end(peer, "the endpoint is closed")
        await self._digests.close()
        await self._staging.close()

    def admit(self, peer: str, link_id: bytes) -> bool:
        link = self._links.get(peer)
        served = sum(len(link.sessions) for link in self._links.values())
        connections_max = self._context.limits.connections_max
        if link is not None and link.link_id == link_id:
            return len(link.sessions) < STREAMS_MAX and served < connections_max
        if link is not None and (link.before == link_id or served - len(link.sessions) >= connections_max):
            return False
        if link is None and served >= connections_max:
            return False
        self._end(peer, "the peer connected anew")
        self._forget_unused()
        self._links[peer] = _ServedLink(link_id, before=link.link_id if link is not None else b"")
        return True

    def welcome(self, sock: socket.socket, peer: str, link_id: bytes) -> None:
        link = self._links.get(peer)
        if link is None or link.link_id != link_id:
            sock.close()  # a newer link of the peer came up meanwhile
            return
        session = OwnerSession(sock, peer, self._context, self._digests, self._staging, self._forget)
        link.sessions.append(session)
        session.start()

    def _stream(self, sock: socket.socket, peer: str) -> CallerStream:
        return CallerStream(sock, peer, self._context.limits)

    def _end(self, peer: str, reason: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            for session in list(link.sessions):
                session.close(reason)

    def _forget(self, session: OwnerSession) -> None:
        link = self._links.get(session.peer)
        if link is not None and session in link.sessions:
            link.sessions.remove(session)

    def _forget_unused(self) -> None:
        """A link without streams stays known, so that a late stream of it is not taken for a newer link; so
        many are kept."""
        if len(self._links) > 2 * self._context.limits.connections_max:
            self._links = {peer: link for peer, link in self._links.items() if link.sessions}


def _dialled(tasks: list[asyncio.Task[socket.socket]], peer: str) -> list[socket.socket]:
    """Of the tasks that are done, the connections; a peer that gives none has its reason."""
    socks = []
    for task in tasks:
        try:
            socks.append(task.result())
        except TransferError as error:
            _log.info("the link to %s has a stream less: %s", peer, error)
    return socks


async def _discard(tasks: list[asyncio.Task[socket.socket]]) -> None:
    """End dials that nobody waits for any more."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, socket.socket):
            result.close()
