"""An instance that lends a real worker's blocks, and does what a test says while it does."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
from tests.support.contexts import deregister, register
from tests.support.workers import Workers

from cluster import subjects
from cluster.bus import Received
from cluster.life import dispatch
from cluster.messages import PinRefused, PinReleased, ReadPin, ReadPinned, RefusalReason, ReleasePin
from kvhash import unpack
from kvindex.core import InstanceId
from kvtransfer import Access, Grant
from policy.core import CostCoefficients
from policy.cost import ASSUMED_COST
from worker.handover import block_ranges

SOURCE = InstanceId("s")
MOVING_PAYS = replace(
    ASSUMED_COST,
    prefill_per_token_s=1e-4,
    transfer_fixed_s=0.0,
    transfer_bytes_per_s=1e15,
    ssd_fixed_s=0.0,
    ssd_bytes_per_s=1e15,
)
"""A profile's fit may find that a tiny model computes in no time at all, and then nothing would be moved."""
TTL_S = 30.0
Answer = Callable[[ReadPin, ReadPinned | PinRefused], Awaitable[object]]


def announce(cluster: Workers, cost: CostCoefficients) -> None:
    """As what every worker's profile found."""
    for app in cluster.apps.values():
        app._node.cost = cost


class LendingSource:
    """Registered as SOURCE; lends what `owner` of `cluster` holds in its compute tier.

    `answer(asked, right)` says what is answered in place of the right answer. `asked` and `released` are what
    was heard; `lent` is what is pinned.
    """

    def __init__(self, cluster: Workers, owner: str) -> None:
        self.cluster = cluster
        self.node = cluster.apps[owner]._node
        self.asked: list[ReadPin] = []
        self.released: list[str] = []
        self.lent: dict[tuple[InstanceId, str], tuple[Grant, list[int]]] = {}
        """By reader and its name for the pin: readers do not know each other's."""
        self.answer: Answer | None = None
        self.heard = asyncio.Condition()
        self._bus = cluster.broker.bus(SOURCE)

    async def start(self) -> None:
        handlers = {ReadPin: self._on_pin, ReleasePin: self._on_release}
        await self._bus.subscribe(subjects.instance(SOURCE), dispatch(handlers))
        context = self.node.context
        record = context.record(model=self.node.model, blocks=1, transfer=self.node.endpoint.descriptor())
        register(self.cluster.store, replace(record, instance=SOURCE))
        for app in self.cluster.apps.values():
            await app._context.registry.wait_for(lambda instances: SOURCE in instances, timeout_s=5.0)

    async def stop(self) -> None:
        """Nobody listens and nobody is registered any more."""
        await self._bus.close()
        deregister(self.cluster.store, SOURCE)
        for app in self.cluster.apps.values():
            await app._context.registry.wait_for(lambda instances: SOURCE not in instances, timeout_s=5.0)

    async def revoke(self, pin_id: str) -> None:
        """Take back what is lent under that name, whoever reads it."""
        for reader, name in tuple(self.lent):
            if name == pin_id:
                await self._take_back(reader, name)

    async def _take_back(self, reader: InstanceId, pin_id: str) -> None:
        grant, block_ids = self.lent.pop((reader, pin_id), (None, []))
        if grant is None:
            return
        await self.node.endpoint.revoke(grant)
        self.node.pool.release(block_ids)
        self.node.pool_changed()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0), self.heard:
            await self.heard.wait_for(condition)

    async def _on_pin(self, received: Received) -> object:
        asked = received.body
        assert isinstance(asked, ReadPin)
        assert asked.fingerprint == self.node.model.fingerprint
        self.asked.append(asked)
        right = self._pinned(asked, received.envelope.sender)
        await self._tell()
        return right if self.answer is None else await self.answer(asked, right)

    def _pinned(self, asked: ReadPin, reader: InstanceId) -> ReadPinned | PinRefused:
        block_ids = self.node.pool.acquire(unpack(asked.block_hashes))
        readable = block_ids[asked.first_block :]
        if not readable:
            self.node.pool.release(block_ids)
            return PinRefused(asked.pin_id, RefusalReason.UNKNOWN)
        ranges = block_ranges(readable, self.node.layout.block_bytes)
        grant = self.node.endpoint.grant(
            self.node.region, ranges, peer=reader, generation=len(self.asked), access=Access.READ
        )
        self.lent[reader, asked.pin_id] = grant, block_ids
        packed = np.asarray(readable, "<i4").tobytes()
        return ReadPinned(asked.pin_id, asked.first_block, packed, grant.token, TTL_S)

    async def _on_release(self, received: Received) -> PinReleased:
        release = received.body
        assert isinstance(release, ReleasePin)
        self.released.append(release.pin_id)
        await self._take_back(received.envelope.sender, release.pin_id)
        await self._tell()
        return PinReleased(release.pin_id)

    async def _tell(self) -> None:
        async with self.heard:
            self.heard.notify_all()
