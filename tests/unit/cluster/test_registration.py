import asyncio
from dataclasses import replace

import pytest
from tests.support.eventually import eventually
from tests.support.records import worker

from cluster import keys
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.registration import Registration
from cluster.testing import FakeStore
from cluster.wire import encode_record
from policy.core import Role

pytestmark = pytest.mark.unit

WAIT_S = 5.0
RECORD = worker("prefill-1", Role.PREFILL, incarnation=7)
KEY = keys.instance(RECORD.instance)


@pytest.mark.parametrize(("other", "left"), [(8, 8), (6, 7)])
async def test_a_process_that_was_away_takes_its_name_back_only_from_an_older_one(
    other: int, left: int
) -> None:
    """It was frozen, say, and its name was given to another process; both would answer to it."""
    store, taken = FakeStore(), asyncio.Event()
    control = store.control()
    registration = Registration(
        RECORD, control, ServiceMetrics(), Logger(Level.ERROR), ttl_s=0.1, on_taken=taken.set
    )
    registration.start()
    await eventually(lambda: registration.registered)
    control.cut()
    store.expire_leases()
    store.put(KEY, encode_record(replace(RECORD, incarnation=other)), None)
    control.restore()
    if left == RECORD.incarnation:
        await eventually(lambda: store.entries[KEY] == encode_record(RECORD))
    else:
        await asyncio.wait_for(taken.wait(), WAIT_S)
    assert taken.is_set() is (left != RECORD.incarnation)
    assert store.entries[KEY] == encode_record(replace(RECORD, incarnation=left))
    await registration.close()


async def test_a_record_that_nobody_can_read_is_replaced() -> None:
    store = FakeStore()
    registration = Registration(
        RECORD, store.control(), ServiceMetrics(), Logger(Level.ERROR), ttl_s=0.1, on_taken=lambda: None
    )
    registration.start()
    await eventually(lambda: registration.registered)
    store.expire_leases()
    store.put(KEY, b"nonsense", None)
    await eventually(lambda: store.entries[KEY] == encode_record(RECORD))
    await registration.close()
