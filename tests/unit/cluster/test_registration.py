import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.eventually import eventually
from tests.support.records import MODEL_INFO, worker

from cluster import keys
from cluster.control import ControlPlane, Lease
from cluster.errors import ConfigError
from cluster.logs import Level, Logger
from cluster.messages import InstanceRecord
from cluster.metrics import ServiceMetrics
from cluster.registration import Registration
from cluster.testing import FakeControlPlane, FakeStore
from cluster.wire import encode_record
from policy.core import Role

pytestmark = pytest.mark.unit

WAIT_S = 5.0
RECORD = worker("prefill-1", Role.PREFILL, incarnation=7)
KEY = keys.instance(RECORD.instance)
STRANGER = replace(worker("prefill-2", Role.PREFILL), model=replace(MODEL_INFO, dtype="bfloat16"))
"""Serves the same model in another way."""


def made(
    control: ControlPlane,
    record: InstanceRecord = RECORD,
    *,
    on_taken: Callable[[], None] = lambda: None,
    on_refused: Callable[[ConfigError], None] = lambda why: None,
) -> Registration:
    return Registration(
        record,
        control,
        ServiceMetrics(),
        Logger(Level.ERROR),
        ttl_s=0.1,
        on_taken=on_taken,
        on_refused=on_refused,
    )


@pytest.mark.parametrize(("other", "left"), [(8, 8), (6, 7)])
async def test_a_process_that_was_away_takes_its_name_back_only_from_an_older_one(
    other: int, left: int
) -> None:
    """It was frozen, say, and its name was given to another process; both would answer to it."""
    store, taken = FakeStore(), asyncio.Event()
    control = store.control()
    registration = made(control, on_taken=taken.set)
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
    registration = made(store.control())
    registration.start()
    await eventually(lambda: registration.registered)
    store.expire_leases()
    store.put(KEY, b"nonsense", None)
    await eventually(lambda: store.entries[KEY] == encode_record(RECORD))
    await registration.close()


@pytest.mark.parametrize("incarnation", [6, 8], ids=["older", "younger"])
async def test_who_serves_already_refuses_one_that_starts(incarnation: int) -> None:
    store, refusals = FakeStore(), asyncio.Queue[ConfigError]()
    stranger = replace(STRANGER, incarnation=incarnation)
    store.put(keys.instance(stranger.instance), encode_record(stranger), None)
    registration = made(store.control(), on_refused=refusals.put_nowait)
    registration.start()
    refusal = await asyncio.wait_for(refusals.get(), WAIT_S)
    assert "dtype is float32, but prefill-2, which is registered, has bfloat16" in str(refusal)
    assert not registration.registered
    assert KEY not in store.entries
    await registration.close()


@pytest.mark.parametrize(("incarnation", "goes"), [(6, True), (8, False)], ids=["older", "younger"])
async def test_a_record_that_appears_sends_away_only_who_is_younger(incarnation: int, goes: bool) -> None:
    store, refusals = FakeStore(), list[ConfigError]()
    registration = made(store.control(), on_refused=refusals.append)
    registration.start()
    await eventually(lambda: registration.registered)
    registration.appeared(replace(STRANGER, incarnation=incarnation))
    assert bool(refusals) is goes
    await registration.close()
    assert KEY not in store.entries


@pytest.mark.parametrize(("incarnation", "goes"), [(6, True), (8, False)], ids=["older", "younger"])
async def test_who_comes_back_after_its_lease_goes_only_before_an_older_one(
    incarnation: int, goes: bool
) -> None:
    store, refused = FakeStore(), asyncio.Event()
    registration = made(store.control(), on_refused=lambda why: refused.set())
    registration.start()
    await eventually(lambda: registration.registered)
    stranger = replace(STRANGER, incarnation=incarnation)
    store.put(keys.instance(stranger.instance), encode_record(stranger), None)
    store.expire_leases()
    await (asyncio.wait_for(refused.wait(), WAIT_S) if goes else eventually(lambda: KEY in store.entries))
    assert registration.registered is not goes
    await registration.close()
    assert refused.is_set() is goes


async def test_an_outage_between_registering_and_comparing_again_is_made_up_for() -> None:
    """The look that follows the registration fails: the next one finds who came at the same time."""
    store, refused = FakeStore(), asyncio.Event()
    stranger = replace(STRANGER, incarnation=6)

    class Cut(FakeControlPlane):
        async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
            await super().put(key, value, lease)
            self.cut()

    control = Cut(store)
    registration = made(control, on_refused=lambda why: refused.set())
    registration.start()
    await eventually(lambda: registration.registered)
    store.put(keys.instance(stranger.instance), encode_record(stranger), None)
    control.restore()
    await asyncio.wait_for(refused.wait(), WAIT_S)
    await registration.close()
