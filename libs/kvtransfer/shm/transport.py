"""Listening and dialling over unix sockets, and what all links of an endpoint share."""

import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path

from kvtransfer.errors import DescriptorError, PeerLostError, TransportUnavailable
from kvtransfer.grants import Grant
from kvtransfer.kinds import TransportKind
from kvtransfer.memory import Region
from kvtransfer.shared_buffer import SharedBufferError
from kvtransfer.shm.caller import CallerLink
from kvtransfer.shm.copying import COPY_THREADS
from kvtransfer.shm.owner import OwnerSession
from kvtransfer.shm.resources import Resources
from kvtransfer.stream.listener import LISTEN_BACKLOG, Listener
from kvtransfer.stream.negotiation import prove_as_caller
from kvtransfer.transport import Address, TransportContext

PATH_BYTES_MAX = 107
"""Of a unix socket's address, by Linux."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_NAME_BYTES = 8


class ShmTransport:
    """Implements `transport.Transport`. `folder` is where its socket lies; without one it has an abstract
    name, which processes in the same network namespace reach."""

    kind = TransportKind.SHM

    def __init__(
        self, context: TransportContext, folder: Path | None = None, *, copy_threads: int = COPY_THREADS
    ) -> None:
        self._context = context
        self._folder = folder
        self._copy_threads = copy_threads
        self._path: Path | None = None
        self._boot_id = ""
        self._network = 0
        self._resources_made: Resources | None = None
        self._listener: Listener | None = None
        self._sessions: dict[str, OwnerSession] = {}
        self._draining: set[OwnerSession] = set()
        self._drained: asyncio.Future[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._links: set[CallerLink] = set()

    @property
    def _resources(self) -> Resources:
        if self._resources_made is None:
            raise PeerLostError("the shared memory transport is not running")
        return self._resources_made

    async def start(self) -> Address:
        if sys.platform != "linux":
            raise TransportUnavailable(f"shared memory needs Linux, this is {sys.platform}")
        try:
            self._boot_id, self._network = _this_host()
            resources = Resources(self._context.limits, self._copy_threads)
        except (OSError, SharedBufferError) as error:
            raise TransportUnavailable(f"shared memory: {error}") from error
        if resources.board.memory.private_reason is not None:
            reason = resources.board.memory.private_reason
            await resources.close()
            raise TransportUnavailable(f"shared memory: {reason}")
        try:
            sock = self._listening()
        except BaseException:
            await resources.close()
            raise
        self._resources_made = resources
        self._listener = Listener(sock, self._context, self, _tune)
        address: dict[str, str | int] = {"kind": self.kind, "host_id": self._boot_id}
        if self._path is not None:
            return {**address, "path": str(self._path)}
        return {**address, "name": sock.getsockname()[1:].decode(), "network": self._network}

    def reaches(self, address: Address) -> bool:
        if self._resources_made is None or address.get("host_id") != self._boot_id:
            return False
        return "path" in address or address.get("network") == self._network

    async def dial(self, address: Address, peer: str) -> CallerLink:
        where = _socket_address(address)
        context, resources = self._context, self._resources
        sock: socket.socket | None = None
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _tune(sock)
            async with asyncio.timeout(context.limits.handshake_s_max):
                await asyncio.get_running_loop().sock_connect(sock, where)
                link_id = context.eras.link_id(peer)
                await prove_as_caller(sock, context.name, peer, context.secret, link_id)
            link = CallerLink(sock, peer, context.limits, resources, self._links.discard)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if isinstance(error, OSError):  # TimeoutError is one
                raise PeerLostError(f"cannot reach {peer} at {where!r}: {error!r}") from error
            raise
        self._links.add(link)
        link.start()
        return link

    async def quiesce(self, grant: Grant) -> None:
        if self._resources_made is None:
            return
        # Readers first: from here on nobody reads under it and believes what it got.
        self._resources.shut(grant)
        for session in (self._sessions.get(grant.peer), *self._draining):
            if session is not None:
                await session.stop_grant(grant)
        await self._resources.digests.quiesce(grant)

    async def end_sessions(self, peer: str, but: bytes) -> None:
        session = self._sessions.get(peer)
        if session is not None and not session.link_id.startswith(but):
            self._end_session(peer)
        while any(session.peer == peer for session in self._draining):
            ended = asyncio.get_running_loop().create_future()
            self._waiting.append(ended)
            await ended

    async def release(self, region: Region) -> None:
        for link in self._links:
            link.release(region)
        for session in self._sessions.values():
            session.release(region)

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for session in list(self._sessions.values()):
            session.close("the endpoint is closed")
        for link in list(self._links):
            link.close()
        if self._draining:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        if self._resources_made is not None:
            await self._resources_made.close()
            self._resources_made = None

    def admit(self, peer: str, link_id: bytes) -> bool:
        if peer not in self._sessions and len(self._sessions) >= self._context.limits.connections_max:
            return False
        self._end_session(peer)
        return True

    def welcome(self, sock: socket.socket, peer: str, link_id: bytes) -> None:
        self._end_session(peer)
        session = OwnerSession(
            *(sock, peer, link_id, self._context, self._resources),
            on_closed=self._on_closed,
            on_drained=self._on_drained,
        )
        self._sessions[peer] = session
        self._start_if_alone(session)

    def _end_session(self, peer: str) -> None:
        session = self._sessions.get(peer)
        if session is not None:
            session.close("the peer connected anew")

    def _start_if_alone(self, session: OwnerSession) -> None:
        """What an older connection of the peer still copies must not land after bytes of the new one."""
        if not session.closed and not any(old.peer == session.peer for old in self._draining):
            session.start()

    def _on_closed(self, session: OwnerSession) -> None:
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
        self._draining.add(session)

    def _on_drained(self, session: OwnerSession) -> None:
        self._draining.discard(session)
        waiting, self._waiting = self._waiting, []
        for ended in waiting:
            if not ended.done():
                ended.set_result(None)
        successor = self._sessions.get(session.peer)
        if successor is not None:
            self._start_if_alone(successor)
        if not self._draining and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _listening(self) -> socket.socket:
        name = secrets.token_hex(_NAME_BYTES)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if self._folder is None:
                sock.bind(f"\0moonpool-{name}")
            else:
                path = self._folder / f"moonpool-{name}.sock"
                if len(os.fsencode(path)) > PATH_BYTES_MAX:
                    raise ValueError(f"shm_folder: {path} has over {PATH_BYTES_MAX} bytes")
                os.fchmod(sock.fileno(), 0o600)  # before it has a name, so that nobody slips in between
                sock.bind(os.fspath(path))
                self._path = path
            sock.listen(LISTEN_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock


def _this_host() -> tuple[str, int]:
    """The boot, which no two hosts share, and the network namespace, in which abstract names are known."""
    return _BOOT_ID.read_text().strip(), _NETWORK.stat().st_ino


def _socket_address(address: Address) -> str:
    """Raises DescriptorError unless it names a socket."""
    name, path = address.get("name"), address.get("path")
    if isinstance(path, str) and 0 < len(os.fsencode(path)) <= PATH_BYTES_MAX and "\0" not in path:
        return path
    if isinstance(name, str) and name.isascii() and 0 < len(name) < PATH_BYTES_MAX:
        return f"\0{name}"
    raise DescriptorError("a shm address needs the path or the abstract name of a socket")


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
