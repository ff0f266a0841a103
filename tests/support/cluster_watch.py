"""What a stack holds for requests, as its instances say when asked, and how long it takes to let go."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.loose_stack import LooseStack
from tests.support.scrape import pool

from cluster import subjects
from cluster.bus import Bus
from cluster.messages import Describe
from kvindex.core import InstanceId
from moonpool.cluster_client import bus
from policy.core import LoadSnapshot

ASK_S_MAX = 5.0
LOOK_S = 0.02
REACHED_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Held:
    """Of one instance: what it holds for requests, and all its blocks that somebody could have."""

    requests: int
    queued: int
    running: int
    blocks_in_use: int
    blocks_available: int
    """Free, or cached and not in use."""

    @property
    def nothing(self) -> bool:
        return not (self.requests or self.queued or self.running or self.blocks_in_use)


class ClusterWatch:
    """Asks instances for their load, again and again: nobody announces what a test waits for."""

    def __init__(self, stack: LooseStack, connection: Bus, names: Sequence[str]) -> None:
        self._stack = stack
        self._bus = connection
        self._names = names

    async def load(self, name: str) -> LoadSnapshot:
        subject = subjects.instance(InstanceId(name))
        answer = await self._bus.request(subject, Describe(), timeout_s=ASK_S_MAX)
        assert isinstance(answer, LoadSnapshot), answer
        return answer

    async def held(self) -> dict[str, Held]:
        """By instance."""
        loads = await asyncio.gather(*(self.load(name) for name in self._names))
        return {
            str(load.instance): Held(
                load.requests,
                len(load.queued),
                len(load.running),
                load.blocks_in_use,
                load.blocks_free + load.blocks_cached,
            )
            for load in loads
        }

    async def until(
        self, name: str, holds: Callable[[LoadSnapshot], bool], timeout_s: float = REACHED_S_MAX
    ) -> LoadSnapshot:
        """The first load of the instance for which `holds` is true."""
        async with asyncio.timeout(timeout_s):
            while not holds(load := await self.load(name)):  # noqa: ASYNC110  # as in `eventually`
                await asyncio.sleep(LOOK_S)
        return load

    async def freed_s(self, timeout_s: float) -> float:
        """How long it takes from now until nobody holds anything; AssertionError after `timeout_s`."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            held = await self.held()
            waited_s = loop.time() - started_s
            left = {name: one for name, one in held.items() if not one.nothing}
            if not left:
                return waited_s
            assert waited_s < timeout_s, f"after {waited_s:.2f} s there is still {left}"
            await asyncio.sleep(LOOK_S)

    async def check_pools(self) -> None:
        """AssertionError where a pool contradicts itself."""
        for name in self._names:
            if (await self.load(name)).blocks:
                await asyncio.to_thread(pool, self._stack.url(name), check=True)


@asynccontextmanager
async def cluster_watch(stack: LooseStack, *names: str) -> AsyncIterator[ClusterWatch]:
    async with bus(stack.addresses.nats_url, timeout_s=ASK_S_MAX) as connection:
        yield ClusterWatch(stack, connection, names)
