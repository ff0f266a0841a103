"""A prefix is brought in because somebody says that it is hot: cached, and never at a request's expense."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support.prefix_sources import MOVING_PAYS, SOURCE, LendingSource, announce
from tests.support.reference import Reference
from tests.support.workers import TOKENS, Workers, greedy, packed, prompt, workers

from cluster.errors import RetryableError
from cluster.messages import PinRefused, ReadPin, ReadPinned, RefusalReason, Replicate, Replicated
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvhash import BLOCK_TOKENS, block_hashes
from kvindex.core import InstanceId
from policy.core import Role
from worker.replicas import REPLICAS_MAX

pytestmark = pytest.mark.unit

ROLES = {"a": (Role.PREFILL, Role.DECODE), "b": (Role.PREFILL, Role.DECODE)}
PROMPT = prompt(200)
BLOCKS = len(PROMPT) // BLOCK_TOKENS
POOL_BLOCKS = 32


@dataclass
class World:
    cluster: Workers
    source: LendingSource
    hashes: bytes

    @property
    def b(self):
        return self.cluster.apps["b"]._node

    async def replicate(self, **fields: object) -> Replicated:
        answer = await self.cluster.ear.ask("b", self.asked(**fields))
        assert isinstance(answer, Replicated)
        return answer

    def asked(self, **fields: object) -> Replicate:
        values = {
            "fingerprint": self.b.model.fingerprint,
            "source": SOURCE,
            "block_hashes": self.hashes,
            "deadline_s": 10.0,
        }
        return Replicate(**{**values, **fields})


@pytest.fixture
async def world(tiny: Path) -> AsyncIterator[World]:
    """`a` has computed the prompt."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    async with workers(tiny, ROLES, pool_bytes=POOL_BLOCKS * block_bytes) as cluster:
        announce(cluster, MOVING_PAYS)
        source = LendingSource(cluster, "a")
        await source.start()
        await cluster.submit("warm", PROMPT, 1, at=("a", "a"))
        await cluster.ear.wait_finish("warm")
        await cluster.quiet()
        space = cluster.apps["a"]._node.space(cluster.work("any", PROMPT, 1))
        yield World(cluster, source, block_hashes(space, packed(PROMPT)))
        await source.wait(lambda: not source.lent)
        await cluster.quiet()


async def test_a_replica_is_cached_and_the_next_request_hits_it(world: World, reference: Reference) -> None:
    replicated = await world.replicate()
    assert replicated == Replicated(BLOCKS, BLOCKS * world.b.layout.block_bytes)
    stats = world.b.pool.stats()
    assert (stats.cached, stats.in_use) == (BLOCKS, 0)
    assert world.b.steps.prefill_tokens_total == 0
    await world.cluster.submit("r", PROMPT, TOKENS, at=("b", "b"))
    await world.cluster.ear.wait_finish("r")
    assert world.cluster.ear.answer("r") == greedy(reference, PROMPT)
    assert world.cluster.ear.cached_tokens["r"] == BLOCKS * BLOCK_TOKENS


async def test_a_real_instance_is_the_source(world: World) -> None:
    replicated = await world.replicate(source=InstanceId("a"))
    assert replicated.held_blocks == BLOCKS
    assert world.b.endpoint.statistics()["a"].read_bytes == replicated.read_bytes > 0


async def test_it_is_brought_in_however_cheap_it_would_be_to_compute(world: World) -> None:
    """Whoever decides on replicas counts what they save by all requests together."""
    announce(world.cluster, replace(MOVING_PAYS, transfer_bytes_per_s=1.0))
    assert (await world.replicate()).held_blocks == BLOCKS


async def test_what_is_held_is_not_read_again(world: World) -> None:
    await world.replicate()
    assert await world.replicate() == Replicated(BLOCKS, 0)
    assert len(world.source.asked) == 1


async def test_a_source_that_fails_is_told(world: World) -> None:
    async def gone(asked: ReadPin, right: ReadPinned | PinRefused) -> object:
        return PinRefused(asked.pin_id, RefusalReason.UNKNOWN)

    world.source.answer = gone
    replicated = await world.replicate()
    assert (replicated.held_blocks, replicated.read_bytes) == (0, 0)
    assert "gone" in replicated.detail


async def test_it_takes_no_blocks_that_requests_may_need(world: World) -> None:
    taken = world.b.pool.allocate(POOL_BLOCKS // 2 + 4)
    replicated = await world.replicate()
    assert replicated.held_blocks == 0
    assert "to spare" in replicated.detail
    assert world.source.asked == []
    world.b.pool.release(taken)
    assert (await world.replicate()).held_blocks == BLOCKS


async def test_one_that_drains_refuses(world: World) -> None:
    await world.cluster.apps["b"].drain(0.0)
    assert await world.replicate() == Replicated(0, 0, "the instance drains")


async def test_another_model_is_refused(world: World) -> None:
    assert "fingerprint" in (await world.replicate(fingerprint="another")).detail
    assert world.source.asked == []


async def test_so_many_at_once_and_no_more(world: World) -> None:
    held_back = asyncio.Event()

    async def later(asked: ReadPin, right: ReadPinned | PinRefused) -> object:
        await held_back.wait()
        return right

    world.source.answer = later
    chains = [world.hashes[: 16 * blocks] for blocks in range(1, REPLICAS_MAX + 1)]
    running = [asyncio.create_task(world.replicate(block_hashes=chain)) for chain in chains]
    await world.source.wait(lambda: world.source.asked)
    assert "already" in (await world.replicate()).detail
    held_back.set()
    assert [answer.held_blocks for answer in await asyncio.gather(*running)] == [1, 2]
    assert (await world.replicate()).held_blocks == BLOCKS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_hashes", b""),
        ("block_hashes", bytes(17)),
        ("block_hashes", bytes(16 * 16_385)),
        ("deadline_s", 0.0),
        ("deadline_s", float("nan")),
    ],
)
async def test_nonsense_is_named(world: World, field: str, value: object) -> None:
    with pytest.raises(RetryableError, match=field):
        await world.replicate(**{field: value})
