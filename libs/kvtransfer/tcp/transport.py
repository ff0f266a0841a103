"""Listening and dialling over TCP, and the sessions that serve peers."""

import secrets
import socket

from kvtransfer.grants import Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Region
from kvtransfer.stream import sockets
from kvtransfer.stream.handshake import LINK_ID_BYTES
from kvtransfer.stream.listener import Listener
from kvtransfer.tcp.caller import CallerLink
from kvtransfer.tcp.owner import OwnerSession
from kvtransfer.transport import Address, TransportContext
from kvtransfer.verification import GrantedDigests


class TcpTransport:
    """Implements `transport.Transport`."""

    kind = TransportKind.TCP

    def __init__(self, context: TransportContext, bind: str, port: int, advertised_host: str) -> None:
        self._context = context
        self._bind = bind
        self._port = port
        self._advertised_host = advertised_host
        self._listener: Listener | None = None
        self._sessions: dict[str, OwnerSession] = {}
        self._digests = GrantedDigests()

    async def start(self) -> Address:
        sock = await sockets.listening(self._bind, self._port)
        port: int = sock.getsockname()[1]
        self._listener = Listener(sock, self._context, self, sockets.tune)
        return {"kind": self.kind, "host": self._advertised_host, "port": port}

    def reaches(self, address: Address) -> bool:
        return True

    async def dial(self, address: Address, peer: str) -> CallerLink:
        sock = await sockets.authenticated(self._context, address, peer, secrets.token_bytes(LINK_ID_BYTES))
        link = CallerLink(sock, peer, self._context.limits)
        link.start()
        return link

    async def quiesce(self, grant: Grant) -> None:
        # Only the event loop's thread receives, and it is here: nothing but a digest is to be waited for.
        session = self._sessions.get(grant.peer)
        if session is not None:
            session.stop_grant(grant)
        await self._digests.quiesce(grant)

    async def release(self, region: Region) -> None:
        """Nothing of a region is kept here."""

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for session in list(self._sessions.values()):
            session.close("the endpoint is closed")
        await self._digests.close()

    def admit(self, peer: str, link_id: bytes) -> bool:
        if peer not in self._sessions and len(self._sessions) >= self._context.limits.connections_max:
            return False
        self._end_session(peer)
        return True

    def welcome(self, sock: socket.socket, peer: str, link_id: bytes) -> None:
        self._end_session(peer)
        session = OwnerSession(sock, peer, self._context, self._digests, self._forget)
        self._sessions[peer] = session
        session.start()

    def _end_session(self, peer: str) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.close("the peer connected anew")

    def _forget(self, session: OwnerSession) -> None:
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
