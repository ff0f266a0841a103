"""One process's end of all its transfers: registered memory, grants given, peers called."""

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.typing as npt

from kvtransfer import descriptor as descriptors
from kvtransfer.availability import Started, TransportSettings, start_transports
from kvtransfer.bounce import Bounce
from kvtransfer.descriptor import Descriptor
from kvtransfer.device import DeviceMemory, region_of
from kvtransfer.errors import BusyError, DescriptorError, EndpointClosedError, RangeError
from kvtransfer.grants import Access, Arrival, Grant, GrantTable
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import NAME_BYTES_MAX, SECRET_BYTES_MIN, Limits
from kvtransfer.lines import Dialler, Lines
from kvtransfer.memory import Region, RegisterableBuffer
from kvtransfer.peer import Peer
from kvtransfer.statistics import PeerStatistics, Statistics, TransferCounters
from kvtransfer.transport import Transport, TransportContext

if TYPE_CHECKING:  # whoever registers a tensor has imported it
    from torch import Tensor

TRANSPORTS = (TransportKind.SHM, TransportKind.RDMA, TransportKind.TCP)
"""What an endpoint has unless it is told otherwise, best first; to another host shm falls away by itself."""


class Endpoint:
    """Lives on one event loop, from `start` to `close`. Not for use from other threads.

    `name` is the peer's name in grants and unique among endpoints that are alive; `secret` is what
    all endpoints of a cluster share. `host` is bound; `advertised_host` (the same by default) goes
    into the descriptor, `port` is that of tcp, or of rdma where there is no tcp. `transports` are tried
    in this order for each peer that offers them too; one that this machine lacks is left out.
    `shm_folder` holds the sockets of shm (by default they have abstract names), `rdma_devices` names the
    devices to use (by default all that are up).
    Raises ValueError for a name, a secret or transports out of bounds.
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
        transports: Sequence[TransportKind] = TRANSPORTS,
        shm_folder: Path | None = None,
        rdma_devices: Sequence[str] | None = None,
    ) -> None:
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise ValueError(f"name must have 1 to {NAME_BYTES_MAX} bytes")
        if not isinstance(secret, bytes) or len(secret) < SECRET_BYTES_MIN:
            raise ValueError(f"secret must be bytes, and have at least {SECRET_BYTES_MIN} bytes")
        if not transports or len(set(transports)) != len(transports):
            raise ValueError(f"transports must name at least one, each once, not {list(transports)}")
        self.name = name
        self._limits = limits or Limits()
        self._grants = GrantTable(self._limits.grants_max)
        self._statistics = Statistics()
        self._context = TransportContext(name, secret, self._limits, self._grants, self._statistics)
        self._kinds = tuple(TransportKind(kind) for kind in transports)
        devices = None if rdma_devices is None else tuple(rdma_devices)
        rdma_port = 0 if TransportKind.TCP in self._kinds else port
        advertised = advertised_host or host
        self._settings = TransportSettings(host, port, rdma_port, advertised, shm_folder, devices)
        self._bounce = Bounce(self._limits)
        self._started: Started | None = None
        self._descriptor: str | None = None
        self._regions: dict[int, Region] = {}
        self._regions_made = 0
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closed = False

    async def start(self) -> None:
        """Listen. Raises OSError if an address cannot be bound, TransportUnavailable if this machine has
        none of the transports, ValueError for a folder or devices that a transport cannot use,
        EndpointClosedError after `close`."""
        self._check_open()
        started = await start_transports(self._kinds, self._context, self._settings)
        self._started = started
        addresses = tuple(dict(address) for address in started.addresses)
        self._descriptor = descriptors.encode(Descriptor(self.name, addresses))

    @property
    def unavailable(self) -> Mapping[TransportKind, str]:
        """The transports that were asked for and that this machine lacks, each with the reason."""
        return {} if self._started is None else self._started.unavailable

    async def close(self) -> None:
        """Revoke all grants, fail all calls, close every socket and let go of all memory."""
        self._closed = True
        for grant in self._grants.all():
            await self.revoke(grant)
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            peer.close()
        for peer in peers:
            await peer.wait_closed()
        ring = self._bounce.slots.region
        for transport in self._transports():
            if ring is not None:
                await transport.release(ring)
            await transport.close()
        await self._bounce.slots.close()
        for region in self._regions.values():
            region.drop()
        self._regions.clear()

    def descriptor(self) -> str:
        """Opaque text by which others connect. Raises EndpointClosedError before `start`."""
        if self._descriptor is None or self._closed:
            raise EndpointClosedError(f"endpoint {self.name} is not running")
        return self._descriptor

    def register(self, buffer: "RegisterableBuffer | DeviceMemory | Tensor") -> Region:
        """Make a writable, contiguous buffer known. It must stay valid until `unregister` or `close`.

        Takes anything with the buffer protocol, tensors of torch, and `DeviceMemory`. What lies on a device
        goes through host memory, unless the transport reaches it; to peers it is granted over tcp only.
        Raises RangeError if it is not fit, BusyError at `regions_max`, EndpointClosedError.
        """
        self._check_open()
        if len(self._regions) >= self._limits.regions_max:
            raise BusyError(f"regions_max of {self._limits.regions_max} regions is reached")
        self._regions_made += 1
        region = region_of(self._regions_made, buffer)
        self._regions[region.region_id] = region
        return region

    async def unregister(self, region: Region) -> None:
        """Revoke all grants of the region and let go of its buffer. The owner ended its own calls before."""
        for grant in self._grants.of_region(region):
            await self.revoke(grant)
        self._regions.pop(region.region_id, None)
        for transport in self._transports():
            await transport.release(region)
        region.drop()

    def grant(
        self,
        region: Region,
        ranges: npt.ArrayLike,
        *,
        peer: str,
        generation: int,
        access: Access = Access.WRITE,
        on_arrival: Callable[[Arrival], None] | None = None,
    ) -> Grant:
        """Let `peer` write to (or read from) `ranges` of `region` until it is revoked.

        `grant.token` is what the peer passes to its calls. `on_arrival` is called on the event loop for each
        tagged write, once its bytes are visible; without it tags are refused. Raises RangeError, and
        BusyError at `grants_max`.
        """
        if self._regions.get(region.region_id) is not region:
            raise RangeError(f"region {region.region_id} is not registered here")
        return self._grants.issue(region, ranges, peer, generation, access, on_arrival)

    async def revoke(self, grant: Grant) -> None:
        """After it returns no byte of the grant lands or leaves any more. Again is harmless."""
        self._grants.revoke(grant)
        for transport in self._transports():
            await transport.quiesce(grant)

    def written_bytes(self, grant: Grant) -> int:
        """Bytes that landed under it so far; a write that failed and was made again counts twice."""
        return grant.landed_bytes

    async def connect(self, descriptor: str, *, timeout_s: float) -> Peer:
        """The peer behind a descriptor, connected. One object per peer name; it reconnects by itself.

        A descriptor that differs from the last one of that name replaces it (the peer was started anew).
        Raises DescriptorError, PeerLostError, AuthError, TransferTimeout, BusyError.
        """
        if self._closed or self._started is None:
            raise EndpointClosedError(f"endpoint {self.name} is not running")
        peer = self._peer(descriptors.decode(descriptor), self._started)
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

    def totals(self) -> dict[TransportKind, TransferCounters]:
        """Of all peers together since the endpoint was made, by transport; these only grow."""
        return self._statistics.totals()

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosedError(f"endpoint {self.name} is closed")

    def _peer(self, descriptor: Descriptor, started: Started) -> Peer:
        known = self._peers.get(descriptor.name)
        if known is not None and known.descriptor == descriptor:
            self._peers.move_to_end(descriptor.name)
            return known
        diallers = _diallers(descriptor, started)
        if known is not None:
            self.disconnect(known)
        self._make_room()
        begin_era = partial(self._context.eras.begin, descriptor.name)
        lines = Lines(descriptor.name, diallers, self._limits, random.random, begin_era)
        peer = Peer(descriptor, lines, self._bounce, self._limits, self._statistics)
        self._peers[descriptor.name] = peer
        return peer

    def _make_room(self) -> None:
        if len(self._peers) < self._limits.peers_max:
            return
        unused = next((peer for peer in self._peers.values() if peer.idle), None)
        if unused is None:
            raise BusyError(f"peers_max of {self._limits.peers_max} peers is reached and all are in use")
        self.disconnect(unused)

    def _transports(self) -> Sequence[Transport]:
        return () if self._started is None else tuple(self._started.transports.values())


def _diallers(descriptor: Descriptor, started: Started) -> dict[TransportKind, Dialler]:
    """How to reach the peer, in our order of preference. Raises DescriptorError if there is no way."""
    found: dict[TransportKind, Dialler] = {}
    for kind, transport in started.transports.items():
        address = descriptor.address(kind)
        if address is not None and transport.reaches(address):
            found[kind] = partial(transport.dial, address, descriptor.name)
    if not found:
        offered = [str(address.get("kind")) for address in descriptor.transports]
        raise DescriptorError(f"{descriptor.name} offers {offered}, of which none reaches it from here")
    return found
