"""Listening and dialling for RDMA: the devices, the stream on which peers meet, the sessions.

Imports pyverbs, so it is imported once rdma is asked for.
"""

import asyncio
import socket
from collections.abc import Sequence

from kvtransfer.errors import DescriptorError, PeerLostError
from kvtransfer.grants import Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Region
from kvtransfer.rdma import ports
from kvtransfer.rdma.caller import RdmaLink
from kvtransfer.rdma.devices import OpenDevice, open_devices
from kvtransfer.rdma.frames import LANES_MAX
from kvtransfer.rdma.owner import RdmaSession
from kvtransfer.rdma.registrations import Registrations
from kvtransfer.rdma.sendring import SendRing
from kvtransfer.stream import sockets
from kvtransfer.stream.listener import Listener
from kvtransfer.transport import Address, Link, TransportContext
from kvtransfer.verification import GrantedDigests

_RING_SIZE = 64
"""Work requests posted at once."""


class RdmaTransport:
    """Implements `transport.Transport`.

    `devices` names the verbs devices to use, best first (NAME, or NAME:INDEX for an entry of the GID table);
    by default all with an active port are used, near ones first.
    """

    kind = TransportKind.RDMA

    def __init__(
        self,
        context: TransportContext,
        bind: str,
        port: int,
        advertised_host: str,
        devices: Sequence[str] | None = None,
    ) -> None:
        self._context = context
        self._bind = bind
        self._port = port
        self._advertised_host = advertised_host
        self._wanted = devices
        self._opened: list[OpenDevice] = []
        self._registrations: Registrations | None = None
        self._ring: SendRing | None = None
        self._listener: Listener | None = None
        self._sessions: dict[str, RdmaSession] = {}
        self._digests = GrantedDigests()

    async def start(self) -> Address:
        self._opened = open_devices(self._wanted)
        self._registrations = Registrations([one.device for one in self._opened])
        self._ring = SendRing(_RING_SIZE)
        try:
            sock = await sockets.listening(self._bind, self._port)
        except BaseException:
            self._close_devices()
            raise
        port: int = sock.getsockname()[1]
        self._listener = Listener(sock, self._context, self, sockets.tune)
        gids = ",".join(one.facts.gid.text for one in self._opened)
        return {"kind": self.kind, "host": self._advertised_host, "port": port, "gids": gids}

    def reaches(self, address: Address) -> bool:
        return bool(self._opened) and bool(address.get("gids"))

    async def dial(self, address: Address, peer: str) -> Link:
        """A new link that proved to be `peer`, with a lane that works, within `handshake_s_max`."""
        if self._registrations is None or self._ring is None:
            raise PeerLostError("the rdma transport is not running")
        pairs = ports.paired([one.facts.gid for one in self._opened], _parsed_gids(address), LANES_MAX)
        sock = await sockets.authenticated(self._context, address, peer, self._context.eras.link_id(peer))
        link = RdmaLink(sock, peer, self._context.limits, self._opened, self._registrations, self._ring)
        try:
            async with asyncio.timeout(self._context.limits.handshake_s_max):
                await link.establish(pairs)
        except BaseException as error:
            link.close()
            if isinstance(error, TimeoutError):
                raise PeerLostError(f"{peer} did not make its queue pairs in time") from error
            raise
        return link

    async def quiesce(self, grant: Grant) -> None:
        session = self._sessions.get(grant.peer)
        if session is not None:
            await session.stop_grant(grant)
        await self._digests.quiesce(grant)

    async def end_sessions(self, peer: str, but: bytes) -> None:
        # Its queue pairs are destroyed at once.
        session = self._sessions.get(peer)
        if session is not None and not session.link_id.startswith(but):
            self._end_session(peer)

    async def release(self, region: Region) -> None:
        if self._registrations is not None:
            self._registrations.release(region)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for session in list(self._sessions.values()):
            session.close("the endpoint is closed")
        await self._digests.close()
        self._close_devices()

    def admit(self, peer: str, link_id: bytes) -> bool:
        if peer not in self._sessions and len(self._sessions) >= self._context.limits.connections_max:
            return False
        self._end_session(peer)
        return True

    def welcome(self, sock: socket.socket, peer: str, link_id: bytes) -> None:
        assert self._registrations is not None
        assert self._ring is not None
        self._end_session(peer)
        session = RdmaSession(
            *(sock, peer, link_id, self._context, self._opened),
            *(self._registrations, self._ring, self._digests),
            on_end=self._forget,
        )
        self._sessions[peer] = session
        session.start()

    def _end_session(self, peer: str) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.close("the peer connected anew")

    def _forget(self, session: RdmaSession) -> None:
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]

    def _close_devices(self) -> None:
        if self._registrations is not None:
            self._registrations.close()
        if self._ring is not None:
            self._ring.close()
        self._registrations, self._ring = None, None
        while self._opened:
            self._opened.pop().device.close()


def _parsed_gids(address: Address) -> list[str]:
    """The GIDs of an address. Raises DescriptorError."""
    text = address.get("gids")
    gids = text.split(",") if isinstance(text, str) and text else []
    if not 0 < len(gids) <= LANES_MAX or not all(map(ports.is_gid, gids)):
        raise DescriptorError(f"an rdma address needs 1 to {LANES_MAX} GIDs")
    return gids
