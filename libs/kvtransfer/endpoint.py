"""One process's end of all its transfers: registered memory, grants given, peers called."""

from collections import OrderedDict

import numpy.typing as npt

from kvtransfer import descriptor as descriptors
from kvtransfer.descriptor import Descriptor
from kvtransfer.errors import BusyError, EndpointClosedError, RangeError
from kvtransfer.grants import Access, Grant, GrantTable
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import NAME_BYTES_MAX, SECRET_BYTES_MIN, Limits
from kvtransfer.memory import Region, RegisterableBuffer
from kvtransfer.peer import Peer
from kvtransfer.statistics import PeerStatistics, Statistics
from kvtransfer.tcp.transport import TcpTransport
from kvtransfer.transport import Link, TransportContext


class Endpoint:
    """Lives on one event loop, from `start` to `close`. Not for use from other threads.

    `name` is the peer's name in grants and unique among endpoints that are alive; `secret` is what
    all endpoints of a cluster share. `host` is bound; `advertised_host` (the same by default) goes
    into the descriptor. Raises ValueError for a name or secret out of bounds.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise ValueError(f"name must have 1 to {NAME_BYTES_MAX} bytes")
        if len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"secret must have at least {SECRET_BYTES_MIN} bytes")
        self.name = name
        self._limits = limits or Limits()
        self._grants = GrantTable(self._limits.grants_max)
        self._statistics = Statistics()
        context = TransportContext(name, secret, self._limits, self._grants, self._statistics)
        self._tcp = TcpTransport(context, host, port, advertised_host or host)
        self._descriptor: str | None = None
        self._regions: dict[int, Region] = {}
        self._regions_made = 0
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closed = False

    async def start(self) -> None:
        """Listen. Raises OSError if the address cannot be bound."""
        address = await self._tcp.start()
        self._descriptor = descriptors.encode(Descriptor(self.name, (dict(address),)))

    async def close(self) -> None:
        """Revoke all grants, fail all calls, close every socket and let go of all memory."""
        self._closed = True
        for grant in self._grants.all():
            await self.revoke(grant)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        await self._tcp.close()
        for region in self._regions.values():
            region.drop()
        self._regions.clear()

    def descriptor(self) -> str:
        """Opaque text by which others connect. Raises EndpointClosedError before `start`."""
        if self._descriptor is None or self._closed:
            raise EndpointClosedError(f"endpoint {self.name} is not running")
        return self._descriptor

    def register(self, buffer: RegisterableBuffer) -> Region:
        """Make a writable, contiguous buffer known. It must stay valid until `unregister` or `close`.

        Raises RangeError if it is not fit, BusyError at `regions_max`.
        """
        if len(self._regions) >= self._limits.regions_max:
            raise BusyError(f"regions_max of {self._limits.regions_max} regions is reached")
        self._regions_made += 1
        region = Region(self._regions_made, buffer)
        self._regions[region.region_id] = region
        return region

    async def unregister(self, region: Region) -> None:
        """Revoke all grants of the region and let go of its buffer. The owner ended its own calls before."""
        for grant in self._grants.of_region(region):
            await self.revoke(grant)
        self._regions.pop(region.region_id, None)
        region.drop()

    def grant(
        self,
        region: Region,
        ranges: npt.ArrayLike,
        *,
        peer: str,
        generation: int,
        access: Access = Access.WRITE,
    ) -> Grant:
        """Let `peer` write to (or read from) `ranges` of `region` until it is revoked.

        `grant.token` is what the peer passes to its calls. Raises RangeError, BusyError at `grants_max`.
        """
        if self._regions.get(region.region_id) is not region:
            raise RangeError(f"region {region.region_id} is not registered here")
        return self._grants.issue(region, ranges, peer, generation, access)

    async def revoke(self, grant: Grant) -> None:
        """After it returns no byte of the grant lands or leaves any more. Again is harmless."""
        self._grants.revoke(grant)
        await self._tcp.quiesce(grant)

    def written_bytes(self, grant: Grant) -> int:
        """Bytes that landed under it so far; a write that failed and was made again counts twice."""
        return grant.landed_bytes

    async def connect(self, descriptor: str, *, timeout_s: float) -> Peer:
        """The peer behind a descriptor, connected. One object per peer name; it reconnects by itself.

        A descriptor that differs from the last one of that name replaces it (the peer was started anew).
        Raises DescriptorError, PeerLostError, AuthError, TransferTimeout, BusyError.
        """
        if self._closed or self._descriptor is None:
            raise EndpointClosedError(f"endpoint {self.name} is not running")
        peer = self._peer(descriptors.decode(descriptor))
        await peer.ensure_link(timeout_s)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Forget a peer that is gone; its running calls fail."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        peer.close()

    def statistics(self) -> dict[str, PeerStatistics]:
        """Counters of this moment by peer name."""
        return self._statistics.snapshot()

    def _peer(self, descriptor: Descriptor) -> Peer:
        known = self._peers.get(descriptor.name)
        if known is not None and known.descriptor == descriptor:
            self._peers.move_to_end(descriptor.name)
            return known
        if known is not None:
            self.disconnect(known)
        self._make_room()
        peer = Peer(descriptor, self._dial, self._limits, self._statistics)
        self._peers[descriptor.name] = peer
        return peer

    def _make_room(self) -> None:
        if len(self._peers) < self._limits.peers_max:
            return
        unused = next((peer for peer in self._peers.values() if peer.idle), None)
        if unused is None:
            raise BusyError(f"peers_max of {self._limits.peers_max} peers is reached and all are in use")
        self.disconnect(unused)

    async def _dial(self, descriptor: Descriptor) -> Link:
        return await self._tcp.dial(descriptor.address(TransportKind.TCP), descriptor.name)
