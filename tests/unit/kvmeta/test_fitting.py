"""Blocks of an instance that does not fit the others are not told to anybody."""

from dataclasses import replace

import pytest
from tests.support.contexts import deregister, register, service_context
from tests.support.eventually import eventually
from tests.support.records import MODEL_INFO, worker

from cluster import subjects
from cluster.messages import InventoryChunk
from cluster.testing import FakeBroker, FakeStore
from kvindex.core import Tier
from kvmeta.app import KvmetaApp
from kvmeta.config import KvmetaConfig
from policy.core import Role

pytestmark = pytest.mark.unit

BLOCK = b"b" * 16


async def test_only_those_that_fit_are_followed() -> None:
    broker, store, asked = FakeBroker(), FakeStore(), list[str]()

    async def inventory(received):
        asked.append(received.subject)
        return InventoryChunk(0, 0, 1, Tier.DRAM, BLOCK, bytes(16))

    for name in ("p1", "p2"):
        await broker.bus(name).subscribe(subjects.kv_inventory(name), inventory)
    stranger = replace(worker("p2", Role.PREFILL, incarnation=2), model=replace(MODEL_INFO, layers=1))
    register(store, worker("p1", Role.PREFILL), stranger)
    config = KvmetaConfig()
    async with service_context(broker, store, "kvmeta-1", Role.KVMETA, config) as context:
        app = KvmetaApp(context, config)
        try:
            await app.start()
            assert asked == [subjects.kv_inventory("p1")]
            # Once nobody serves the model the old way, it may be served the new way.
            deregister(store, "p1")
            await eventually(lambda: asked[1:] == [subjects.kv_inventory("p2")])
            await eventually(lambda: app.load().blocks_indexed == 1)
        finally:
            await app.close()
