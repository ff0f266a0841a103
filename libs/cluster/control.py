"""The control plane as every service sees it: keys, leases and watches.

Owns the interface; `cluster.etcd_control` is the real thing, `cluster.testing` the fake, and one
contract suite runs over both.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

ABSENT_REVISION = 0
"""Of a key that is not there. Every put gives its key a higher one than any key had before."""


@dataclass(frozen=True, slots=True)
class Versioned:
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All keys under the watched prefix: the first event of a watch, and again after any trouble."""

    entries: dict[str, bytes]
    revisions: dict[str, int] = field(default_factory=dict, compare=False)
    """Of each key."""


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    revision: int = field(default=ABSENT_REVISION, compare=False)


@dataclass(frozen=True, slots=True)
class Deleted:
    key: str


WatchEvent = Listing | Put | Deleted


class Lease(Protocol):
    @property
    def ttl_s(self) -> float: ...

    async def keep_alive(self) -> bool:
        """Renew once; False where the lease is gone. Raises DisconnectedError where etcd is away."""

    async def revoke(self) -> None:
        """End it now, and its keys with it; one that is gone already is no error."""


class ControlPlane(Protocol):
    """Calls raise DisconnectedError within `call_timeout_s` where the servers are away."""

    @property
    def connected(self) -> bool: ...

    async def get(self, key: str) -> bytes | None: ...

    async def get_versioned(self, key: str) -> Versioned | None: ...

    async def get_prefix(self, prefix: str) -> dict[str, bytes]: ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Under a lease the key goes when the lease goes. LeaseLostError where it is gone already."""

    async def put_if_absent(self, key: str, value: bytes, lease: Lease | None = None) -> bytes:
        """The value that stands afterwards: ours, or the one that was there. The lease is as for `put`;
        one that is gone is no error where the key was there."""

    async def put_at(self, key: str, value: bytes, revision: int) -> int | None:
        """Put where the key still has `revision` (ABSENT_REVISION: where it is not there), under no lease.
        Its new revision, or None where another was quicker."""

    async def delete(self, key: str) -> None:
        """Deleting what is not there changes nothing."""

    async def grant_lease(self, ttl_s: float) -> Lease:
        """A lease of `ttl_s` or, where the servers round, a little more: see `Lease.ttl_s`."""

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Listing, then changes in order. After an outage or a compaction it starts over with a
        Listing; it ends only with `close` and never raises for an outage."""

    async def close(self) -> None:
        """End the watches and let the connection go. What calls still run fail."""
