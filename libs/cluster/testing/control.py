"""A control plane in memory: one FakeStore joins any number of FakeControlPlane."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from cluster.control import ABSENT_REVISION, Deleted, Lease, Listing, Put, Versioned, WatchEvent
from cluster.errors import DisconnectedError, LeaseLostError


@dataclass
class _StoreLease:
    ttl_s: float
    keys: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class FakeStore:
    """Keys and leases, like an etcd server; in memory, within one event loop."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.revisions: dict[str, int] = {}
        self._revision = ABSENT_REVISION
        self.watchers: list[tuple[str, asyncio.Queue[WatchEvent | None]]] = []
        self._leases: dict[int, _StoreLease] = {}
        self._next_lease = 0

    def control(self) -> "FakeControlPlane":
        return FakeControlPlane(self)

    def expire_leases(self) -> None:
        """Let all leases end now, as after an outage that lasted too long."""
        for lease_id in tuple(self._leases):
            self.end_lease(lease_id)

    def wipe(self) -> None:
        """Come back with nothing, as a server that lost its disk; no watcher sees it happen."""
        for lease in self._leases.values():
            if lease.timer is not None:
                lease.timer.cancel()
        self._leases.clear()
        self.entries.clear()
        self.revisions.clear()

    def put(self, key: str, value: bytes, lease_id: int | None) -> int:
        for other in self._leases.values():
            other.keys.discard(key)
        if lease_id is not None:
            if lease_id not in self._leases:
                raise LeaseLostError(f"lease {lease_id} is gone")
            self._leases[lease_id].keys.add(key)
        self._revision += 1
        self.entries[key] = value
        self.revisions[key] = self._revision
        self._tell(key, Put(key, value, self._revision))
        return self._revision

    def delete(self, key: str) -> None:
        if self.entries.pop(key, None) is not None:
            self._revision += 1
            del self.revisions[key]
            self._tell(key, Deleted(key))

    def grant(self, ttl_s: float) -> int:
        self._next_lease += 1
        self._leases[self._next_lease] = _StoreLease(ttl_s)
        self.refresh(self._next_lease)
        return self._next_lease

    def refresh(self, lease_id: int) -> bool:
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        if lease.timer is not None:
            lease.timer.cancel()
        lease.timer = asyncio.get_running_loop().call_later(lease.ttl_s, self.end_lease, lease_id)
        return True

    def end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        if lease.timer is not None:
            lease.timer.cancel()
        for key in tuple(lease.keys):
            self.delete(key)

    def listing(self, prefix: str) -> Listing:
        entries = {key: value for key, value in sorted(self.entries.items()) if key.startswith(prefix)}
        return Listing(entries, {key: self.revisions[key] for key in entries})

    def _tell(self, key: str, event: WatchEvent) -> None:
        for prefix, events in self.watchers:
            if key.startswith(prefix):
                events.put_nowait(event)


class FakeControlPlane:
    """Implements `cluster.control.ControlPlane`. `cut` and `restore` play an outage for this client."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self._reachable = asyncio.Event()
        self._reachable.set()
        self._watches: list[asyncio.Queue[WatchEvent | None]] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._reachable.is_set()

    def cut(self) -> None:
        self._reachable.clear()
        self.store.watchers = [w for w in self.store.watchers if w[1] not in self._watches]

    def restore(self) -> None:
        """Watches start over with a listing."""
        self._reachable.set()
        for events in self._watches:
            events.put_nowait(None)

    async def get(self, key: str) -> bytes | None:
        self._check()
        return self.store.entries.get(key)

    async def get_versioned(self, key: str) -> Versioned | None:
        value = await self.get(key)
        return None if value is None else Versioned(value, self.store.revisions[key])

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        self._check()
        return self.store.listing(prefix).entries

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        self._check()
        if lease is None:
            self.store.put(key, value, None)
        else:
            assert isinstance(lease, _FakeLease)
            self.store.put(key, value, lease.lease_id)

    async def put_if_absent(self, key: str, value: bytes, lease: Lease | None = None) -> bytes:
        self._check()
        if key not in self.store.entries:
            await self.put(key, value, lease)
        return self.store.entries[key]

    async def put_at(self, key: str, value: bytes, revision: int) -> int | None:
        self._check()
        if self.store.revisions.get(key, ABSENT_REVISION) != revision:
            return None
        return self.store.put(key, value, None)

    async def delete(self, key: str) -> None:
        self._check()
        self.store.delete(key)

    async def grant_lease(self, ttl_s: float) -> Lease:
        self._check()
        return _FakeLease(self, self.store.grant(ttl_s), ttl_s)

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._watch(prefix)

    async def close(self) -> None:
        self._closed = True
        self._reachable.set()
        for events in self._watches:
            events.put_nowait(None)

    def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if self._closed or not self._reachable.is_set():
            raise DisconnectedError("the control plane is away")

    async def _watch(self, prefix: str) -> AsyncGenerator[WatchEvent, None]:
        """None in the queue means: something happened that a watcher must not trust, start over."""
        events: asyncio.Queue[WatchEvent | None] = asyncio.Queue()
        self._watches.append(events)
        try:
            while not self._closed:
                await self._reachable.wait()
                if self._closed:
                    return
                while not events.empty():
                    events.get_nowait()
                self.store.watchers = [w for w in self.store.watchers if w[1] is not events]
                self.store.watchers.append((prefix, events))
                yield self.store.listing(prefix)
                while (event := await events.get()) is not None:
                    yield event
        finally:
            self._watches.remove(events)
            self.store.watchers = [w for w in self.store.watchers if w[1] is not events]


class _FakeLease:
    def __init__(self, control: FakeControlPlane, lease_id: int, ttl_s: float) -> None:
        self._control = control
        self.lease_id = lease_id
        self._ttl_s = ttl_s

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    async def keep_alive(self) -> bool:
        self._control.check()
        return self._control.store.refresh(self.lease_id)

    async def revoke(self) -> None:
        self._control.check()
        self._control.store.end_lease(self.lease_id)
