"""Whatever happens to document and connection, what is in use is the last good one that was seen."""

import asyncio
import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import keys
from cluster.cluster_config import ClusterConfig
from cluster.config_watch import ConfigWatch
from cluster.logs import Level, Logger
from cluster.metrics import ServiceMetrics
from cluster.testing import FakeControlPlane, FakeStore

pytestmark = pytest.mark.unit

GOOD = {
    b"{}": ClusterConfig(),
    b'{"ttft_ms_default": 1}': ClusterConfig(ttft_ms_default=1.0),
    b'{"strategy": "random", "of_a_newer_version": 1}': ClusterConfig(strategy="random"),
}
BAD = (b"", b"{", b"[]", b'{"strategy": "best"}', b'{"ttft_ms_default": -1}')
TURNS_MAX = 8
"""Of the event loop, until an event in memory has reached everybody."""


class World:
    """One follower, and beside it what it should be following."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.control = FakeControlPlane(self.store)
        self.metrics = ServiceMetrics()
        self.seen: list[ClusterConfig] = []
        self.watch = ConfigWatch(
            self.control, self.metrics, Logger(Level.ERROR, io.StringIO()), self.seen.append
        )
        self.expected = ClusterConfig()
        self.rejected = 0
        self.revision = 0

    async def do(self, step: bytes | str) -> None:
        match step:
            case bytes():
                self.store.put(keys.CONFIG, step, None)
            case "beside":
                self.store.put(keys.CONFIG + "/of_another", b"{", None)
            case "delete":
                was_there = keys.CONFIG in self.store.entries
                self.store.delete(keys.CONFIG)
                if not was_there:
                    return
            case "cut":
                self.control.cut()
            case "restore":
                if self.control.connected:
                    return
                self.control.restore()
        if step != "beside" and self.control.connected:
            self.expect(self.store.entries.get(keys.CONFIG))
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)

    def expect(self, document: bytes | None) -> None:
        config = ClusterConfig() if document is None else GOOD.get(document)
        if config is None:
            self.rejected += 1
            return
        self.expected = config
        self.revision = self.store.revisions.get(keys.CONFIG, 0)

    def check(self) -> None:
        assert (self.seen or [ClusterConfig()])[-1] == self.expected
        assert self.metric("rejected_total") == self.rejected
        assert self.metric("revision") == self.revision
        changes = [ClusterConfig(), *self.seen]
        assert all(before != after for before, after in itertools.pairwise(changes))

    def metric(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"moonpool_cluster_config_{name}")


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*GOOD, *BAD]) | st.sampled_from(["beside", "delete", "cut", "restore"]), max_size=12
    )
)
def test_the_last_good_document_that_was_seen_is_in_use(steps: list[bytes | str]) -> None:
    async def run() -> None:
        world = World()
        await world.watch.start(timeout_s=5.0)
        for step in steps:
            await world.do(step)
            world.check()
        await world.watch.close()
        await world.control.close()

    asyncio.run(run())


async def test_a_callback_that_breaks_does_not_end_the_following() -> None:
    store = FakeStore()
    control = FakeControlPlane(store)
    seen: list[ClusterConfig] = []

    def take(config: ClusterConfig) -> None:
        seen.append(config)
        if len(seen) == 1:
            raise RuntimeError("broken")

    written = io.StringIO()
    watch = ConfigWatch(control, ServiceMetrics(), Logger(Level.INFO, written), take)
    store.put(keys.CONFIG, b'{"ttft_ms_default": 1}', None)
    await watch.start(timeout_s=5.0)
    store.put(keys.CONFIG, b'{"ttft_ms_default": 2}', None)
    for _ in range(TURNS_MAX):
        await asyncio.sleep(0)
    assert [config.ttft_ms_default for config in seen] == [1.0, 2.0]
    assert "cluster configuration not taken over" in written.getvalue()
    await watch.close()
    await control.close()
