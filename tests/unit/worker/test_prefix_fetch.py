"""A prefix that another instance computed is used here without computing it again; where that comes to
nothing it is computed, and the answer is the same."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support.prefix_sources import MOVING_PAYS, SOURCE, LendingSource, announce
from tests.support.reference import Reference
from tests.support.workers import TOKENS, Workers, greedy, packed, prompt, workers

from cluster.messages import Cancel, PinRefused, ReadPin, ReadPinned, RefusalReason, Refused
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvhash import BLOCK_TOKENS, BlockHash, block_hashes, unpack
from kvindex.core import InstanceId
from kvtransfer import ChecksumError, PeerLostError
from policy.core import RequestId, Role
from worker import avoided_sources, fetch_plan, prefix_fetch, prefix_source
from worker.placed_decode import PlacedDecode

pytestmark = pytest.mark.unit

ROLES = {"a": (Role.PREFILL, Role.DECODE), "b": (Role.PREFILL, Role.DECODE)}
HANDED_OVER = ("b", "a")
COUPLED = ("b", "b")
PROMPT = prompt(200)
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
Pinned = ReadPinned | PinRefused


@dataclass
class World:
    cluster: Workers
    source: LendingSource

    @property
    def b(self):
        return self.cluster.apps["b"]._node

    def computed_tokens(self, name: str) -> int:
        return self.cluster.apps[name]._node.steps.prefill_tokens_total

    def counted(self, name: str, metric: str, **labels: str) -> float:
        registry = self.cluster.apps[name]._context.metrics.registry
        return registry.get_sample_value(metric, labels) or 0.0

    def failures(self, reason: str, name: str = "b") -> float:
        return self.counted(name, "moonpool_fetch_failures_total", reason=reason)

    def blocks_read(self, name: str = "b") -> float:
        return self.counted(name, "moonpool_fetched_blocks_total", source="remote")

    async def warm(self) -> None:
        """`a` computes the prompt; its blocks are what the source lends."""
        await self.cluster.submit("warm", PROMPT, 1, at=("a", "a"))
        await self.cluster.ear.wait_finish("warm")
        await self.cluster.quiet()

    async def ask(self, request_id: str, attempt: int = 0, **fields: object) -> list[int]:
        """The answer of a request that is to start from the source's prefix."""
        fields = {"source": (SOURCE, BLOCKS), "at": HANDED_OVER, "attempt": attempt, **fields}
        await self.cluster.submit(request_id, PROMPT, TOKENS, **fields)
        await self.cluster.ear.wait_finish(request_id, attempt)
        return self.cluster.ear.answer(request_id, attempt)

    async def nothing_is_held(self) -> None:
        await self.cluster.quiet()
        await self.source.wait(lambda: not self.source.lent)
        for app in self.cluster.apps.values():
            assert len(app._node.endpoint._grants) == 0
            assert app._node.fetch._coming == {}


@pytest.fixture
async def world(tiny: Path) -> AsyncIterator[World]:
    async with workers(tiny, ROLES, step_tokens_max=64) as cluster:
        announce(cluster, MOVING_PAYS)
        source = LendingSource(cluster, "a")
        await source.start()
        world = World(cluster, source)
        await world.warm()
        yield world
        await world.nothing_is_held()


@pytest.mark.parametrize("at", [HANDED_OVER, COUPLED])
async def test_a_prefix_of_another_instance_is_not_computed_again(
    world: World, reference: Reference, at: tuple[str, str]
) -> None:
    answer = await world.ask("r", at=at)
    assert answer == greedy(reference, PROMPT)
    assert world.computed_tokens("b") == len(PROMPT) - BLOCKS * BLOCK_TOKENS
    assert world.cluster.ear.cached_tokens["r"] == BLOCKS * BLOCK_TOKENS
    assert world.blocks_read() == BLOCKS
    read_bytes = world.b.endpoint.statistics()["a"].read_bytes
    assert read_bytes == BLOCKS * world.b.layout.block_bytes
    assert world.counted("b", "moonpool_fetched_bytes_total", source="remote") == read_bytes
    assert world.b.pool.match(_hashes(world)) == BLOCKS


async def test_what_is_here_already_is_not_read(world: World, reference: Reference) -> None:
    await world.cluster.submit("half", PROMPT[:100], 1, at=COUPLED)
    await world.cluster.ear.wait_finish("half")
    held = 100 // BLOCK_TOKENS
    assert await world.ask("r") == greedy(reference, PROMPT)
    assert [asked.first_block for asked in world.source.asked] == [held]
    assert world.blocks_read() == BLOCKS - held
    assert await world.ask("again") == greedy(reference, PROMPT)
    assert len(world.source.asked) == 1


async def test_the_next_request_finds_what_the_first_one_read(world: World) -> None:
    await world.ask("r")
    await world.ask("again", source=None)
    assert world.cluster.ear.cached_tokens["again"] == BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("blocks", [-3, 0, 5, 10**6])
async def test_no_more_is_read_than_the_source_is_said_to_have_and_the_prompt_can_use(
    world: World, reference: Reference, blocks: int
) -> None:
    assert await world.ask("r", source=(SOURCE, blocks)) == greedy(reference, PROMPT)
    assert world.blocks_read() == min(max(0, blocks), BLOCKS)


async def unanswered(asked: ReadPin, right: Pinned) -> object:
    raise ZeroDivisionError


async def refused(asked: ReadPin, right: Pinned) -> object:
    return PinRefused(asked.pin_id, RefusalReason.NO_BLOCKS, "busy")


async def gone(asked: ReadPin, right: Pinned) -> object:
    return PinRefused(asked.pin_id, RefusalReason.UNKNOWN)


async def another_pin(asked: ReadPin, right: Pinned) -> object:
    return replace(right, pin_id="other")


async def another_message(asked: ReadPin, right: Pinned) -> object:
    return asked


async def too_many_blocks(asked: ReadPin, right: Pinned) -> object:
    return replace(right, block_ids=right.block_ids + right.block_ids)


async def a_block_below_zero(asked: ReadPin, right: Pinned) -> object:
    return replace(right, block_ids=b"\xff" * len(right.block_ids))


async def a_grant_that_ended(asked: ReadPin, right: Pinned) -> object:
    return replace(right, grant=right.grant[:-4] + "0000")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (unanswered, "unanswered"),
        (refused, "refused"),
        (gone, "gone"),
        (another_pin, "nonsense"),
        (another_message, "nonsense"),
        (too_many_blocks, "nonsense"),
        (a_block_below_zero, "nonsense"),
        (a_grant_that_ended, "transfer"),
    ],
)
async def test_a_source_that_fails_costs_a_recompute_and_is_left_alone(
    world: World, reference: Reference, answer, reason: str
) -> None:
    world.source.answer = answer
    assert await world.ask("r") == greedy(reference, PROMPT)
    assert world.computed_tokens("b") == len(PROMPT)
    assert world.failures(reason) == 1
    await world.source.wait(lambda: world.source.released)
    await world.cluster.quiet()
    _forget(world, "b")
    assert await world.ask("again") == greedy(reference, PROMPT)
    assert len(world.source.asked) == 1
    assert world.blocks_read() == 0


async def test_a_source_that_is_not_registered_is_not_asked(world: World, reference: Reference) -> None:
    await world.source.stop()
    assert await world.ask("r") == greedy(reference, PROMPT)
    assert world.failures("unregistered") == 1
    assert world.source.asked == []


async def test_a_source_is_asked_again_after_a_while(
    world: World, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(avoided_sources, "SOURCE_AVOIDED_S", 0.0)
    world.source.answer = gone
    assert await world.ask("r") == greedy(reference, PROMPT)
    await world.cluster.quiet()
    _forget(world, "b")
    world.source.answer = None
    assert await world.ask("again") == greedy(reference, PROMPT)
    assert world.blocks_read() == BLOCKS


async def test_a_source_that_does_not_answer_is_not_waited_for_longer_than_it_is_worth(
    world: World, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_plan, "FETCH_S_MIN", 0.2)

    async def never(asked: ReadPin, right: Pinned) -> object:
        await asyncio.Event().wait()
        return right

    world.source.answer = never
    async with asyncio.timeout(5.0):
        assert await world.ask("r") == greedy(reference, PROMPT)
    assert world.failures("unanswered") == 1


async def test_what_came_before_a_failure_is_kept(
    world: World, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant is withdrawn between the second piece and the third."""
    monkeypatch.setattr(prefix_fetch, "PIECE_BYTES", 2 * world.b.layout.block_bytes)
    read = prefix_source.PrefixSource.read
    pieces = []

    async def read_then_revoke(self, pinned, first, block_ids):
        done = await read(self, pinned, first, block_ids)
        pieces.append(len(block_ids))
        if len(pieces) == 2:
            await world.source.revoke(world.source.asked[0].pin_id)
        return done

    monkeypatch.setattr(prefix_source.PrefixSource, "read", read_then_revoke)
    assert await world.ask("r") == greedy(reference, PROMPT)
    assert pieces == [2, 2]
    assert world.computed_tokens("b") == len(PROMPT) - 4 * BLOCK_TOKENS
    assert world.cluster.ear.cached_tokens["r"] == 4 * BLOCK_TOKENS
    assert world.failures("transfer") == 1


async def test_a_source_that_has_less_is_read_as_far_as_it_goes(world: World, reference: Reference) -> None:
    async def less(asked: ReadPin, right: Pinned) -> object:
        return replace(right, block_ids=right.block_ids[: 3 * 4])

    world.source.answer = less
    assert await world.ask("r") == greedy(reference, PROMPT)
    assert world.computed_tokens("b") == len(PROMPT) - 3 * BLOCK_TOKENS
    assert world.failures("short") == 1


@pytest.mark.parametrize(
    ("failures", "reason", "blocks"), [(1, "", BLOCKS), (2, "checksum", 0), (2, "transfer", 0)]
)
async def test_a_read_is_made_again_once(
    world: World,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
    reason: str,
    blocks: int,
) -> None:
    peer = await world.b.endpoint.connect(world.source.node.endpoint.descriptor(), timeout_s=5.0)
    read, left = peer.read, [failures]

    async def failing(*arguments, **settings):
        if left[0]:
            left[0] -= 1
            raise PeerLostError("cut") if reason == "transfer" else ChecksumError("a flipped bit")
        return await read(*arguments, **settings)

    monkeypatch.setattr(peer, "read", failing)
    assert await world.ask("r") == greedy(reference, PROMPT)
    assert world.blocks_read() == blocks
    assert sum(world.failures(kind) for kind in ("checksum", "transfer")) == (1 if reason else 0)
    if reason:
        assert world.failures(reason) == 1


async def test_two_who_want_the_same_prefix_move_it_once(world: World, reference: Reference) -> None:
    async def slowly(asked: ReadPin, right: Pinned) -> object:
        await asyncio.sleep(0.05)
        return right

    world.source.answer = slowly
    answers = await asyncio.gather(*(world.ask(f"r{n}") for n in range(3)))
    assert answers == [greedy(reference, PROMPT)] * 3
    assert len(world.source.asked) == 1
    assert world.blocks_read() == BLOCKS
    for n in range(3):
        assert world.cluster.ear.cached_tokens[f"r{n}"] == BLOCKS * BLOCK_TOKENS


async def test_who_waits_for_a_fetch_that_fails_does_not_ask_again(
    world: World, reference: Reference
) -> None:
    async def slowly_refused(asked: ReadPin, right: Pinned) -> object:
        await asyncio.sleep(0.05)
        return await refused(asked, right)

    world.source.answer = slowly_refused
    answers = await asyncio.gather(*(world.ask(f"r{n}") for n in range(2)))
    assert answers == [greedy(reference, PROMPT)] * 2
    assert len(world.source.asked) == 1


async def test_where_moving_costs_more_than_computing_nothing_is_moved(
    tiny: Path, reference: Reference
) -> None:
    async with workers(tiny, ROLES) as cluster:
        announce(cluster, replace(MOVING_PAYS, transfer_bytes_per_s=1e3))
        source = LendingSource(cluster, "a")
        await source.start()
        world = World(cluster, source)
        await world.warm()
        assert await world.ask("r") == greedy(reference, PROMPT)
        assert source.asked == []
        assert world.computed_tokens("b") == len(PROMPT)


async def test_what_is_to_be_brought_in_counts_as_cached_in_the_load(world: World) -> None:
    held_back = asyncio.Event()

    async def later(asked: ReadPin, right: Pinned) -> object:
        await held_back.wait()
        return right

    world.source.answer = later
    answer = asyncio.create_task(world.ask("r"))
    await world.source.wait(lambda: world.source.asked)
    (queued,) = world.cluster.apps["b"].load().queued
    assert (queued.new_tokens, queued.prefix_tokens) == (
        len(PROMPT) - BLOCKS * BLOCK_TOKENS,
        BLOCKS * BLOCK_TOKENS,
    )
    held_back.set()
    await answer


@pytest.mark.parametrize("ending", ["cancel", "hand_back", "deadline", "newer"])
async def test_whoever_ends_while_the_prefix_comes_holds_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """`nothing_is_held` looks at the source and the reader after this."""
    monkeypatch.setattr("worker.prefill_duty.TICK_S", 0.01)

    async def never(asked: ReadPin, right: Pinned) -> object:
        await asyncio.Event().wait()
        return right

    world.source.answer = never
    deadline_s = 0.1 if ending == "deadline" else 60.0
    await world.cluster.submit(
        "r", PROMPT, TOKENS, at=HANDED_OVER, source=(SOURCE, BLOCKS), deadline_s=deadline_s
    )
    await world.source.wait(lambda: world.source.asked)
    assert world.b.pool.stats().in_use == BLOCKS
    match ending:
        case "cancel":
            await world.cluster.ear.ask("b", Cancel(RequestId("r"), 0))
        case "hand_back":
            world.cluster.apps["b"]._prefill.hand_back("the instance drains")
        case "newer":
            world.source.answer = None
            await world.ask("r", attempt=1)
    await world.source.wait(lambda: world.source.asked[0].pin_id in world.source.released)


@pytest.mark.parametrize("ending", ["reserved", "cancelled", "refused"])
async def test_what_came_is_held_until_decode_has_reserved(
    world: World, reference: Reference, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Others may want every block meanwhile."""
    asked, answered = asyncio.Event(), asyncio.Event()
    reserve = PlacedDecode.reserve

    async def slow_reserve(self, prompt_ids: bytes, ends_at_s: float):
        asked.set()
        await answered.wait()
        if ending == "refused":
            return Refused(RequestId("r"), 0, RefusalReason.NO_BLOCKS)
        return await reserve(self, prompt_ids, ends_at_s)

    monkeypatch.setattr(PlacedDecode, "reserve", slow_reserve)
    answer = asyncio.create_task(world.ask("r"))
    await world.source.wait(lambda: world.source.released)
    assert asked.is_set()
    assert world.b.pool.stats().in_use == BLOCKS
    world.b.pool.release(world.b.pool.allocate(world.b.pool.available()))
    if ending == "cancelled":
        await world.cluster.ear.ask("b", Cancel(RequestId("r"), 0))
    answered.set()
    if ending == "reserved":
        assert await answer == greedy(reference, PROMPT)
        assert world.cluster.ear.cached_tokens["r"] == BLOCKS * BLOCK_TOKENS
        assert world.blocks_read() == BLOCKS
    else:
        answer.cancel()
    await world.cluster.quiet()
    assert world.b.pool.stats().cached >= BLOCKS


async def test_a_fetch_finds_no_blocks_to_read_into(tiny: Path, reference: Reference) -> None:
    """Others took them after the request's turn came: it computes, if it can."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    async with workers(tiny, ROLES, pool_bytes=32 * block_bytes) as cluster:
        announce(cluster, MOVING_PAYS)
        source = LendingSource(cluster, "a")
        await source.start()
        world = World(cluster, source)
        await world.warm()
        pool = world.b.pool
        taken = pool.allocate(25)
        fetched = await world.b.fetch.bring(_hashes(world), SOURCE, BLOCKS, world.b.now_s() + 5.0)
        assert fetched.block_ids == []
        assert "no_blocks" in fetched.detail
        assert source.asked == []
        pool.release(taken)
        assert await world.ask("r") == greedy(reference, PROMPT)
        assert world.blocks_read() == BLOCKS
        await world.nothing_is_held()


async def test_who_comes_after_a_fetch_waits_only_for_room(tiny: Path, reference: Reference) -> None:
    """24 blocks: 12 are being read into and 1 is still to be taken, 11 are left for another request. Blocks
    that are promised are not lent meanwhile."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    async with workers(tiny, ROLES, pool_bytes=24 * block_bytes) as cluster:
        announce(cluster, MOVING_PAYS)
        source = LendingSource(cluster, "a")
        await source.start()
        world = World(cluster, source)
        await world.warm()
        held_back = asyncio.Event()

        async def later(asked: ReadPin, right: Pinned) -> object:
            await held_back.wait()
            return right

        source.answer = later
        answer = asyncio.create_task(world.ask("r", at=COUPLED))
        await source.wait(lambda: source.asked)
        assert world.b.pool.available() == 24 - BLOCKS
        assert world.b.spare_blocks() == 24 - BLOCKS - 24 // 4
        await cluster.submit("beside", prompt(11 * BLOCK_TOKENS, seed=3), 1, at=COUPLED)
        await cluster.ear.wait_finish("beside")
        assert not answer.done()
        held_back.set()
        assert await answer == greedy(reference, PROMPT)
        await world.nothing_is_held()


@pytest.mark.parametrize("own_cache", [False, True])
async def test_a_prefix_on_the_source_s_ssd_is_read_by_one_that_computes_elsewhere(
    tiny: Path, reference: Reference, tmp_path: Path, own_cache: bool
) -> None:
    """Two real workers. The source has computed so much since that the prompt lies below its memory."""
    compute_bytes = 40 * KVLayout.of(ModelConfig.load(tiny)).block_bytes
    settings = {
        "sink_ahead_share": 1.0,
        "pool_bytes": (2 if own_cache else 1) * compute_bytes,
        "device_bytes": compute_bytes if own_cache else 0,
        "own_cache": own_cache,
        "ssd_bytes": 8 * compute_bytes,
        "ssd_folder": str(tmp_path),
    }
    async with workers(tiny, ROLES, **settings) as cluster:
        announce(cluster, MOVING_PAYS)
        await cluster.submit("warm", PROMPT, 1, at=("a", "a"))
        await cluster.ear.wait_finish("warm")
        world = World(cluster, LendingSource(cluster, "a"))
        a = cluster.apps["a"]._node
        await _sink(cluster, "a")
        assert a.pool.match(_hashes(world)) < BLOCKS == a.pool.match_held(_hashes(world))
        answer = await world.ask("r", source=(InstanceId("a"), BLOCKS), at=COUPLED)
        assert answer == greedy(reference, PROMPT)
        assert cluster.ear.cached_tokens["r"] == BLOCKS * BLOCK_TOKENS
        assert world.computed_tokens("b") == len(PROMPT) - BLOCKS * BLOCK_TOKENS
        assert world.blocks_read() == BLOCKS
        await cluster.quiet()


@pytest.mark.parametrize("pays", [True, False])
async def test_what_lies_below_rises_where_that_pays(
    tiny: Path, reference: Reference, tmp_path: Path, pays: bool
) -> None:
    compute_bytes = 40 * KVLayout.of(ModelConfig.load(tiny)).block_bytes
    settings = {
        "sink_ahead_share": 1.0,
        "pool_bytes": compute_bytes,
        "ssd_bytes": 8 * compute_bytes,
        "ssd_folder": str(tmp_path),
    }
    async with workers(tiny, {"b": ROLES["b"]}, **settings) as cluster:
        announce(cluster, MOVING_PAYS if pays else replace(MOVING_PAYS, ssd_fixed_s=1e3))
        world = World(cluster, LendingSource(cluster, "b"))
        await world.ask("first", source=None, at=COUPLED)
        await _sink(cluster, "b")
        held = world.b.pool.match(_hashes(world))
        assert held < BLOCKS == world.b.pool.match_held(_hashes(world))
        computed = world.computed_tokens("b")
        assert await world.ask("r", source=None, at=COUPLED) == greedy(reference, PROMPT)
        reused = BLOCKS if pays else held
        assert world.computed_tokens("b") - computed == len(PROMPT) - reused * BLOCK_TOKENS
        assert cluster.ear.cached_tokens.get(RequestId("r"), 0) == reused * BLOCK_TOKENS
        risen = world.counted("b", "moonpool_fetched_blocks_total", source="local_ssd")
        assert risen == (BLOCKS - held if pays else 0)
        await cluster.quiet()


def _hashes(world: World) -> list[BlockHash]:
    """Of the prompt's full blocks that a request may reuse."""
    space = world.source.node.space(world.cluster.work("any", PROMPT, 1))
    return unpack(block_hashes(space, packed(PROMPT)))[:BLOCKS]


async def _sink(cluster: Workers, name: str) -> None:
    """Have it compute so much else that what it holds now lies below its memory, or most of it."""
    pool = cluster.apps[name]._node.pool
    for seed in range(1, 9):
        await cluster.submit(f"other{seed}", prompt(200, seed), 1, at=(name, name))
        await cluster.ear.wait_finish(f"other{seed}")
        await cluster.quiet()
        async with asyncio.timeout(10.0):
            while pool.stats().tiers[-1].copies < seed * BLOCKS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def _forget(world: World, name: str) -> None:
    """Nothing of the prompt is cached there any more."""
    pool = world.cluster.apps[name]._node.pool
    work = world.cluster.work("any", PROMPT + world.cluster.ear.answer("r"), 1)
    token_ids = packed(PROMPT + world.cluster.ear.answer("r"))
    block_ids = pool.acquire(unpack(block_hashes(world.source.node.space(work), token_ids)))
    pool.release(block_ids)
    pool.forget(block_ids)
