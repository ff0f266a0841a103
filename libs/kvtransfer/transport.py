"""What a transport is to the endpoint: a way to listen, a way to dial, and a promise about revocation.

Owns the words that both speak. A transport knows no other one; it asks the grant table of
`TransportContext` before it lets a peer touch memory, and counts there what landed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvtransfer.eras import Eras
from kvtransfer.grants import Grant, GrantTable
from kvtransfer.kinds import TransportKind
from kvtransfer.limits import Limits
from kvtransfer.memory import Ranges, Region
from kvtransfer.statistics import Statistics

Address = Mapping[str, str | int]
"""How to reach a transport, as it stands in a descriptor: JSON scalars, `kind` names the transport."""


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The caller's side of a call: checked ranges of one region.

    Not a view: an error's traceback keeps this alive, and must not keep the memory of a closed endpoint.
    """

    region: Region
    ranges: Ranges
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One write or read, checked: `memory` is the source of a write, the target of a read.

    `tag` of a write is handed over at the owner once all bytes landed. With `verify` what arrived is
    compared with what was sent by its xxh3_128. `earlier_bytes` landed by calls of the same write before this
    one, which brings the tag for all of them. With `piece_bytes_max` the owner's memory is that of a device:
    it takes so many bytes in one request, and says when those of a write may come.
    """

    memory: LocalMemory
    token: str
    remote: Ranges
    tag: bytes = b""
    verify: bool = False
    earlier_bytes: int = 0
    piece_bytes_max: int | None = None


class Link(Protocol):
    """A live, authenticated way to one peer. Its calls end by result, by error or by cancellation;
    after that no byte of the local memory is read or written any more. A call that fails names in its
    error's `landed` what is known to have landed."""

    @property
    def kind(self) -> TransportKind: ...

    @property
    def closed(self) -> bool: ...

    async def write(self, call: Call) -> None:
        """Returns when all bytes are visible at the peer."""
        ...

    async def read(self, call: Call) -> None:
        """Returns when all bytes are here."""
        ...

    def close_if_stalled(self) -> None:
        """A call on it ran out of time: close it if nothing moved for `stall_s_max`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DirectLink(Link, Protocol):
    """A link that may reach the memory of a device itself, without a copy in host memory."""

    def takes(self, call: Call) -> bool:
        """Whether it can carry this call on memory of a device."""
        ...


class Transport(Protocol):
    """One kind of link, listening and dialling."""

    @property
    def kind(self) -> TransportKind: ...

    async def start(self) -> Address:
        """Listen; the address goes into the descriptor. Raises TransportUnavailable, OSError."""
        ...

    def reaches(self, address: Address) -> bool:
        """Whether a peer at `address` may be reached from this machine; no I/O."""
        ...

    async def dial(self, address: Address, peer: str) -> Link:
        """A new link to the named peer; its id is one of `TransportContext.eras`. Raises PeerLostError,
        AuthError, BusyError, FrameError."""
        ...

    async def quiesce(self, grant: Grant) -> None:
        """The grant is revoked: after this returns no byte of it lands or leaves."""
        ...

    async def end_sessions(self, peer: str, but: bytes) -> None:
        """End what serves the named peer on links whose ids do not begin with `but`: after this returns no
        byte of theirs lands."""
        ...

    async def release(self, region: Region) -> None:
        """The region is unregistered and its grants are revoked: let go of its memory."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TransportContext:
    """What an endpoint lends its transports."""

    name: str
    secret: bytes
    limits: Limits
    grants: GrantTable
    statistics: Statistics
    eras: Eras = field(default_factory=Eras)
