"""The cluster's configuration over the fake and over a real etcd: followed live, changed without loss."""

import asyncio
import io
import json
from dataclasses import dataclass, field

import pytest
from tests.support.control_worlds import World
from tests.support.eventually import eventually

from cluster import config_watch, keys
from cluster.cluster_config import ClusterConfig, Document, with_settings
from cluster.config_watch import ConfigWatch, change_document, read_document
from cluster.control import ControlPlane
from cluster.errors import ConfigError, DeadlineError, RetryableError
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeControlPlane, FakeStore

pytestmark = pytest.mark.contract

WAIT_S = 15.0


@dataclass
class Follower:
    control: ControlPlane
    metrics: ServiceMetrics = field(default_factory=ServiceMetrics)
    written: io.StringIO = field(default_factory=io.StringIO)
    seen: list[ClusterConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        log = Logger(Level.INFO, self.written)
        self.watch = ConfigWatch(self.control, self.metrics, log, self.seen.append)

    def metric(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"moonpool_cluster_config_{name}")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.written.getvalue().splitlines()]


@pytest.fixture
async def control(world: World) -> ControlPlane:
    control = await world.connect()
    await control.delete(keys.CONFIG)
    return control


async def test_a_follower_has_what_is_set_and_takes_changes_over(world: World, control: ControlPlane) -> None:
    set_before, revision = await change_document(
        control, lambda document: with_settings(document, {"ttft_ms_default": "500"})
    )
    assert set_before == {"ttft_ms_default": 500.0}
    follower = Follower(await world.connect())
    await follower.watch.start(timeout_s=WAIT_S)
    assert follower.seen == [ClusterConfig(ttft_ms_default=500.0)]
    assert follower.metric("revision") == revision
    _, later = await change_document(
        control, lambda document: with_settings(document, {"strategy": "random", "ttft_ms_default": "20"})
    )
    await eventually(lambda: len(follower.seen) == 2)
    assert follower.seen[-1] == ClusterConfig(strategy="random", ttft_ms_default=20.0)
    assert follower.metric("revision") == later > revision
    line = follower.lines()[-1]
    assert line["message"] == "cluster configuration changed"
    assert (line["strategy"], line["ttft_ms_default"], line["revision"]) == ("random", 20.0, later)
    await control.delete(keys.CONFIG)
    await eventually(lambda: follower.seen[-1] == ClusterConfig())
    assert follower.metric("revision") == 0
    await follower.watch.close()


@pytest.mark.parametrize("bad", [b"{", b"[]", b'{"ttft_ms_default": -1}', b'{"strategy": "best"}'])
async def test_a_bad_document_is_counted_and_the_last_good_one_stays(
    world: World, control: ControlPlane, bad: bytes
) -> None:
    await control.put(keys.CONFIG, b'{"ttft_ms_default": 500}')
    follower = Follower(await world.connect())
    await follower.watch.start(timeout_s=WAIT_S)
    good = follower.metric("revision")
    await control.put(keys.CONFIG, bad)
    await eventually(lambda: follower.metric("rejected_total") == 1)
    assert follower.seen == [ClusterConfig(ttft_ms_default=500.0)]
    assert follower.metric("revision") == good
    assert follower.lines()[-1]["message"] == "cluster configuration passed over"
    await control.put(keys.CONFIG, b'{"ttft_ms_default": 20}')
    await eventually(lambda: follower.seen[-1] == ClusterConfig(ttft_ms_default=20.0))
    await follower.watch.close()


async def test_a_follower_starts_where_the_document_is_bad(world: World, control: ControlPlane) -> None:
    await control.put(keys.CONFIG, b"{")
    follower = Follower(await world.connect())
    await follower.watch.start(timeout_s=WAIT_S)
    assert follower.seen == []
    assert follower.metric("rejected_total") == 1
    await follower.watch.close()


async def test_changes_at_the_same_time_lose_nothing(world: World, control: ControlPlane) -> None:
    writers = [await world.connect() for _ in range(3)]
    changes = ("ttft_ms_default", "tbt_ms_default", "decode_horizon_s")

    async def change(writer: ControlPlane, name: str) -> None:
        await change_document(writer, lambda document: with_settings(document, {name: "20"}))

    await asyncio.gather(*map(change, writers, changes))
    document, revision = await read_document(control)
    assert document == dict.fromkeys(changes, 20.0)
    assert revision > 0


async def test_a_change_that_changes_nothing_writes_nothing(world: World, control: ControlPlane) -> None:
    def change(document: Document) -> Document:
        return with_settings(document, {"admission": "none"})

    first = await change_document(control, change)
    assert await change_document(control, change) == first


async def test_a_refused_change_leaves_all_as_it_was(world: World, control: ControlPlane) -> None:
    await control.put(keys.CONFIG, b'{"admission": "none"}')
    with pytest.raises(ConfigError, match=r"tbt_ms_default: -5\.0 is not from 0\.0 to 60000\.0"):
        await change_document(control, lambda document: with_settings(document, {"tbt_ms_default": "-5"}))
    assert (await read_document(control))[0] == {"admission": "none"}


async def test_whoever_is_never_first_gives_up(world: World, control: ControlPlane) -> None:
    """Another one writes between each read and its put."""
    changed = 0

    def change(document: Document) -> Document:
        nonlocal changed
        changed += 1
        return {"decode_horizon_s": float(changed)}

    class Hurried:
        get_versioned = control.get_versioned

        async def put_at(self, key: str, value: bytes, revision: int) -> int | None:
            await control.put(key, b"{}")
            return await control.put_at(key, value, revision)

    with pytest.raises(RetryableError, match="changed by others"):
        await change_document(Hurried(), change)  # type: ignore[arg-type]
    assert changed == config_watch.WRITE_TRIES_MAX


async def test_an_outage_leaves_the_last_known_in_use() -> None:
    store = FakeStore()
    control = FakeControlPlane(store)
    store.put(keys.CONFIG, b'{"ttft_ms_default": 500}', None)
    follower = Follower(control)
    await follower.watch.start(timeout_s=WAIT_S)
    control.cut()
    store.put(keys.CONFIG, b'{"ttft_ms_default": 20}', None)
    assert follower.seen == [ClusterConfig(ttft_ms_default=500.0)]
    control.restore()
    await eventually(lambda: follower.seen[-1] == ClusterConfig(ttft_ms_default=20.0))
    await follower.watch.close()
    await control.close()


async def test_a_control_plane_that_says_nothing_is_not_waited_for_longer_than_told() -> None:
    control = FakeControlPlane(FakeStore())
    control.cut()
    follower = Follower(control)
    with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
        await follower.watch.start(timeout_s=0.05)
    await follower.watch.close()
    await control.close()
