"""The control plane as every service sees it: keys, leases and watches.

Owns the interface; `cluster.etcd_control` is the real thing, `cluster.testing` the fake, and one
contract suite runs over both.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under the watched prefix: the first event of a watch, and again after any trouble."""

    entries: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    key: str


WatchEvent = Listing | Put | Deleted


class Lease(Protocol):
    @property
    def ttl_s(self) -> float: ...

    async def keep_alive(self) -> bool:
        """Renew once; False where the lease is gone. Raises DisconnectedError where etcd is away."""

    async def revoke(self) -> None: ...


class ControlPlane(Protocol):
    """Calls raise DisconnectedError within `call_timeout_s` where the servers are away."""

    @property
    def connected(self) -> bool: ...

    async def get(self, key: str) -> bytes | None: ...

    async def get_prefix(self, prefix: str) -> dict[str, bytes]: ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None: ...

    async def put_if_absent(self, key: str, value: bytes) -> bytes:
        """The value that stands afterwards: ours, or the one that was there."""

    async def delete(self, key: str) -> None: ...

    async def grant_lease(self, ttl_s: float) -> Lease: ...

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Listing, then changes in order. After an outage or a compaction it starts over with a
        Listing; it never ends by itself and never raises for an outage."""

    async def close(self) -> None: ...
