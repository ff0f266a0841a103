"""Blocks lent to another instance: pinned where they lie, readable under a grant, given back in any case."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.contexts import register
from tests.support.workers import TIMEOUT_S, Workers, prompt, workers

from cluster import subjects
from cluster.errors import RetryableError
from cluster.messages import (
    Finish,
    PinRefused,
    PinReleased,
    ReadPin,
    ReadPinned,
    RefusalReason,
    ReleasePin,
)
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvhash import block_hashes
from kvindex.core import InstanceId
from kvtransfer import GrantError
from policy.core import RequestId, Role
from protocol.read_pin import PIN_ID_CHARS_MAX
from worker import read_pins
from worker.handover import block_ranges
from worker.node import KEPT_SHARE

pytestmark = pytest.mark.unit

BOTH = (Role.PREFILL, Role.DECODE)
ROLES = {"source": BOTH, "reader": BOTH}
POOL_BLOCKS = 128
PROMPT_BLOCKS = 6


@dataclass
class Lender:
    """A source that has computed a prompt, and a reader beside it."""

    cluster: Workers
    numbers: itertools.count

    @property
    def source(self):
        return self.cluster.apps["source"]._node

    @property
    def reader(self):
        return self.cluster.apps["reader"]._node

    @property
    def pins(self):
        return self.cluster.apps["source"]._read_pins

    async def compute(self, token_ids: list[int], output_tokens: int = 1) -> bytes:
        """Have the source compute a prompt and end it: the hashes of its full blocks."""
        name = f"r{next(self.numbers)}"
        await self.cluster.submit(name, token_ids, output_tokens, at=("source", "source"))
        await self.cluster.ear.wait_finish(name)
        await self.cluster.ear.ask("source", Finish(RequestId(name), 0, output_tokens))
        space = self.source.space(self.cluster.work(name, token_ids, 1))
        return block_hashes(space, token_ids)

    async def ask(self, body: object) -> object:
        """As the reader."""
        bus = self.reader.context.bus
        return await bus.request(subjects.instance(InstanceId("source")), body, timeout_s=TIMEOUT_S)

    def pin(self, hashes: bytes, pin_id: str = "pin", first_block: int = 0, ttl_s: float = 20.0) -> ReadPin:
        return ReadPin(pin_id, self.source.model.fingerprint, hashes, first_block, ttl_s)

    async def read(self, pinned: ReadPinned) -> np.ndarray:
        """The blocks' bytes, as the reader gets them."""
        remote = np.frombuffer(pinned.block_ids, "<i4").tolist()
        block_bytes = self.reader.layout.block_bytes
        peer = await self.reader.endpoint.connect(self.source.endpoint.descriptor(), timeout_s=TIMEOUT_S)
        local = self.reader.pool.allocate(len(remote))
        try:
            await peer.read(
                self.reader.region,
                block_ranges(local, block_bytes),
                pinned.grant,
                block_ranges(remote, block_bytes),
                timeout_s=TIMEOUT_S,
            )
            return self.bytes_of("reader", local)
        finally:
            self.reader.pool.release(local)

    def bytes_of(self, name: str, block_ids: list[int]) -> np.ndarray:
        arena = self.cluster.apps[name]._node.arena
        return np.array([np.frombuffer(arena.block(block_id), np.uint8) for block_id in block_ids])

    def held_bytes(self, hashes: bytes) -> np.ndarray:
        """What the source's own pool has under these hashes, which must all lie in its compute tier."""
        chain = [hashes[start : start + 16] for start in range(0, len(hashes), 16)]
        block_ids = self.source.pool.acquire(chain)
        assert len(block_ids) == len(chain)
        self.source.pool.release(block_ids)
        return self.bytes_of("source", block_ids)

    async def crowd_out(self, prompts: int, blocks: int = 20) -> None:
        """Fill the source's pool with other prompts."""
        for number in range(prompts):
            await self.compute(prompt(blocks * 16 + 1, seed=100 + number))


def settings(tiny: Path) -> dict[str, object]:
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    return {"pool_bytes": POOL_BLOCKS * block_bytes}


@pytest.fixture
async def lender(tiny: Path) -> AsyncIterator[Lender]:
    async with workers(tiny, ROLES, **settings(tiny)) as cluster:
        yield Lender(cluster, itertools.count())
        await cluster.quiet()


@pytest.fixture(params=[False, True], ids=["arena", "own_cache"])
async def tiered(tiny: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Lender]:
    """A source whose prompts have room below; with a cache of its own in DRAM first."""
    blocks = settings(tiny)["pool_bytes"] // POOL_BLOCKS
    lower = {"ssd_bytes": 1024 * blocks, "ssd_folder": str(tmp_path)}
    beside = {"own_cache": True, "device_bytes": POOL_BLOCKS * blocks, "pool_bytes": 2 * POOL_BLOCKS * blocks}
    chosen = {**settings(tiny), **lower, **(beside if request.param else {})}
    async with workers(tiny, ROLES, **chosen) as cluster:
        yield Lender(cluster, itertools.count())
        await cluster.quiet()


async def test_what_was_computed_can_be_read_until_it_is_released(lender: Lender) -> None:
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    await lender.cluster.quiet()
    pinned = await lender.ask(lender.pin(hashes, first_block=2))
    assert isinstance(pinned, ReadPinned)
    assert (pinned.first_block, len(pinned.block_ids) // 4) == (2, PROMPT_BLOCKS - 2)
    assert 19.0 < pinned.ttl_s <= 20.0
    assert lender.source.pool.stats().in_use == PROMPT_BLOCKS
    assert (await lender.read(pinned) == lender.held_bytes(hashes)[2:]).all()
    assert await lender.ask(ReleasePin("pin")) == PinReleased("pin")
    await lender.cluster.quiet()
    with pytest.raises(GrantError):
        await lender.read(pinned)


async def test_the_answer_of_a_finished_request_is_lent_as_well(lender: Lender) -> None:
    """The next turn of a chat starts with both; the answer's last token has no KV yet."""
    first = prompt(40)
    await lender.compute(first, output_tokens=24)
    answer = lender.cluster.ear.answer("r0")
    assert len(answer) == 24
    turn = [*first, *answer]
    hashes = block_hashes(lender.source.space(lender.cluster.work("x", turn, 1)), turn[:-1])
    pinned = await lender.ask(lender.pin(hashes))
    assert isinstance(pinned, ReadPinned)
    assert len(pinned.block_ids) // 4 == 63 // 16
    await lender.ask(ReleasePin("pin"))


async def test_a_pin_holds_its_blocks_against_eviction_until_its_time_is_over(lender: Lender) -> None:
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    before = lender.held_bytes(hashes)
    pinned = await lender.ask(lender.pin(hashes, ttl_s=1.0))
    assert isinstance(pinned, ReadPinned)
    await lender.crowd_out(prompts=6, blocks=20)
    if lender.pins.pins():  # a slow machine may have taken the lease's time for it
        assert (await lender.read(pinned) == before).all()
    await lender.cluster.quiet()
    with pytest.raises(GrantError):
        await lender.read(pinned)
    answer = await lender.ask(lender.pin(hashes))
    assert isinstance(answer, PinRefused)
    assert answer.reason is RefusalReason.EXPIRED


async def test_asked_twice_it_pins_once(lender: Lender) -> None:
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    first, second = await asyncio.gather(lender.ask(lender.pin(hashes)), lender.ask(lender.pin(hashes)))
    assert isinstance(first, ReadPinned)
    assert replace(second, ttl_s=0.0) == replace(first, ttl_s=0.0)
    assert lender.pins.pins() == 1
    await lender.ask(ReleasePin("pin"))
    await lender.cluster.quiet()


async def test_a_release_that_overtakes_its_request_leaves_nothing_pinned(lender: Lender) -> None:
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    assert await lender.ask(ReleasePin("pin")) == PinReleased("pin")
    answer = await lender.ask(lender.pin(hashes))
    assert isinstance(answer, PinRefused)
    assert answer.reason is RefusalReason.CANCELLED


async def test_ids_that_no_pin_can_have_are_not_remembered(lender: Lender) -> None:
    """Thousands of ended pins are, and a message may be a megabyte."""
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    long_id = "p" * (PIN_ID_CHARS_MAX + 1)
    answer = await lender.ask(lender.pin(hashes, long_id))
    assert isinstance(answer, PinRefused)
    assert answer.reason is RefusalReason.BAD_REQUEST
    with pytest.raises(RetryableError, match="pin_id"):
        await lender.ask(ReleasePin(long_id))
    assert lender.pins._lent == {}


async def test_what_is_not_lent_is_refused_with_the_reason(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    refusals = {
        "unknown": lender.pin(b"x" * 32, "a"),
        "unknown to the end": lender.pin(hashes + b"x" * 16, "b", first_block=PROMPT_BLOCKS),
        "wrong model": replace(lender.pin(hashes, "c"), fingerprint="other"),
        "malformed": lender.pin(hashes[:-1], "d"),
    }
    answers = {name: await lender.ask(asked) for name, asked in refusals.items()}
    assert all(isinstance(answer, PinRefused) for answer in answers.values())
    assert [answer.reason for answer in answers.values()] == [
        RefusalReason.UNKNOWN,
        RefusalReason.UNKNOWN,
        RefusalReason.WRONG_MODEL,
        RefusalReason.BAD_REQUEST,
    ]
    monkeypatch.setattr(read_pins, "PINS_MAX", 1)
    assert isinstance(await lender.ask(lender.pin(hashes, "one")), ReadPinned)
    second = await lender.ask(lender.pin(hashes, "two"))
    assert (type(second), second.reason) == (PinRefused, RefusalReason.QUEUE_FULL)
    lender.pins.refuse_new()
    third = await lender.ask(lender.pin(hashes, "three"))
    assert (type(third), third.reason) == (PinRefused, RefusalReason.DRAINING)
    assert isinstance(await lender.ask(lender.pin(hashes, "one")), ReadPinned)
    await lender.ask(ReleasePin("one"))


async def test_blocks_are_kept_for_the_requests_of_the_instance_itself(lender: Lender) -> None:
    """Of a pool full of one long prompt only so much may be held at once that a share stays free."""
    hashes = await lender.compute(prompt((POOL_BLOCKS - 2) * 16))
    pinned = await lender.ask(lender.pin(hashes))
    assert isinstance(pinned, ReadPinned)
    kept = int(KEPT_SHARE * POOL_BLOCKS)
    assert len(pinned.block_ids) // 4 == POOL_BLOCKS - kept
    assert lender.source.pool.available() == kept
    behind = await lender.ask(lender.pin(hashes, "behind", first_block=POOL_BLOCKS - kept))
    assert (type(behind), behind.reason) == (PinRefused, RefusalReason.NO_BLOCKS)
    await lender.compute(prompt(10 * 16, seed=5))
    await lender.ask(ReleasePin("pin"))


async def test_the_pins_of_a_reader_that_was_replaced_end(lender: Lender) -> None:
    hashes = await lender.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    assert isinstance(await lender.ask(lender.pin(hashes)), ReadPinned)
    registry = lender.source.context.registry
    record = registry.instances[InstanceId("reader")]
    register(lender.cluster.store, replace(record, incarnation=record.incarnation + 1))
    await lender.cluster.quiet()
    assert lender.pins.pins() == 0


async def test_what_lies_below_rises_for_a_reader(tiered: Lender) -> None:
    hashes = await tiered.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    before = tiered.held_bytes(hashes)
    chain = [hashes[start : start + 16] for start in range(0, len(hashes), 16)]
    await tiered.crowd_out(prompts=8, blocks=20)
    pool = tiered.source.pool
    assert pool.match(chain) < PROMPT_BLOCKS
    assert pool.match_held(chain) == PROMPT_BLOCKS
    pinned = await tiered.ask(tiered.pin(hashes))
    assert isinstance(pinned, ReadPinned)
    assert len(pinned.block_ids) // 4 == PROMPT_BLOCKS
    assert (await tiered.read(pinned) == before).all()
    await tiered.ask(ReleasePin("pin"))


@pytest.mark.parametrize("released", [False, True], ids=["expired", "released"])
async def test_what_rises_for_a_pin_that_has_ended_is_given_back(
    tiered: Lender, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    hashes = await tiered.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    await tiered.crowd_out(prompts=8, blocks=20)
    rise, begun, may_end = tiered.source.mover.rise, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: object) -> list[int]:
        begun.set()
        await may_end.wait()
        return await rise(*arguments)

    monkeypatch.setattr(tiered.source.mover, "rise", slow)
    asking = asyncio.create_task(tiered.ask(tiered.pin(hashes, ttl_s=20.0 if released else 0.5)))
    await asyncio.wait_for(begun.wait(), TIMEOUT_S)
    if released:
        await tiered.ask(ReleasePin("pin"))
    answer = await asking
    assert isinstance(answer, PinRefused)
    assert answer.reason is (RefusalReason.CANCELLED if released else RefusalReason.EXPIRED)
    assert tiered.pins.pins() == 0
    may_end.set()
    await tiered.cluster.quiet()


async def test_so_many_pins_wait_for_the_disk_and_the_next_one_is_answered_at_once(
    tiered: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = await tiered.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    await tiered.crowd_out(prompts=8, blocks=20)
    monkeypatch.setattr(read_pins, "RISING_MAX", 1)
    rise, begun, may_end = tiered.source.mover.rise, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: object) -> list[int]:
        begun.set()
        await may_end.wait()
        return await rise(*arguments)

    monkeypatch.setattr(tiered.source.mover, "rise", slow)
    asking = asyncio.create_task(tiered.ask(tiered.pin(hashes)))
    await asyncio.wait_for(begun.wait(), TIMEOUT_S)
    other = await tiered.ask(tiered.pin(hashes, "other"))
    assert isinstance(other, PinRefused)
    assert other.reason is RefusalReason.NO_BLOCKS
    may_end.set()
    assert isinstance(await asking, ReadPinned)
    await tiered.ask(ReleasePin("pin"))
    # Up now, they need nobody to wait.
    assert isinstance(await tiered.ask(tiered.pin(hashes, "later")), ReadPinned)
    await tiered.ask(ReleasePin("later"))


async def test_a_rise_that_breaks_is_answered_and_leaves_nothing_pinned(
    tiered: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = await tiered.compute(prompt(PROMPT_BLOCKS * 16 + 1))
    await tiered.crowd_out(prompts=8, blocks=20)

    async def broken(*_: object) -> list[int]:
        raise OSError("no thread to be had")

    monkeypatch.setattr(tiered.source.mover, "rise", broken)
    answer = await tiered.ask(tiered.pin(hashes))
    assert isinstance(answer, PinRefused)
    assert "no thread" in answer.detail
    await tiered.cluster.quiet()
