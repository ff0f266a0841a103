"""Sequences that lose their blocks: computed again or swapped, every answer is the one without preemption."""

import asyncio
import random
from pathlib import Path

import pytest
from tests.support.engines import sampled_answer
from tests.support.step_bench import WAIT_S_MAX, Bench, running
from tests.support.workers import TOKENS, Workers, prompt, workers

from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from policy.core import Role, SamplingParams
from policy.plan_step import StepLimits
from policy.preempt import Preemption
from worker.sequence import Sequence

pytestmark = pytest.mark.unit

COUPLED = {"w": (Role.PREFILL, Role.DECODE)}


def preemptions(bench: Bench, way: Preemption) -> float:
    return bench.metrics.preemptions.labels(way)._value.get()


@pytest.mark.parametrize(("slots", "way"), [(0, Preemption.RECOMPUTE), (16, Preemption.SWAP)])
async def test_both_ways_lead_to_the_same_answers(slots: int, way: Preemption) -> None:
    async with running(blocks=8, slots=slots) as bench:
        both = [bench.add(f"r{n}", [n] * 50, 40) for n in range(2)]
        for listener in both:
            await listener.expect_answer()
        assert preemptions(bench, way) > 0
        assert bench.slots.free == slots
        computed_again = bench.steps.prefill_tokens_total - 100
        assert (computed_again == 0) is (way is Preemption.SWAP)


async def test_without_enough_slots_it_is_computed_again() -> None:
    async with running(blocks=8, slots=2) as bench:
        both = [bench.add(f"r{n}", [n] * 50, 40) for n in range(2)]
        for listener in both:
            await listener.expect_answer()
        assert preemptions(bench, Preemption.RECOMPUTE) > 0
        assert preemptions(bench, Preemption.SWAP) == 0


async def test_what_others_use_is_not_copied() -> None:
    """Two samples of 64 tokens: only what the second has for itself goes to a slot."""
    async with running(blocks=6, slots=1) as bench:
        first = bench.add("r", list(range(64)), 20, samples=2)
        await first.expect_answer()
        assert preemptions(bench, Preemption.SWAP) > 0
        assert preemptions(bench, Preemption.RECOMPUTE) == 0


def recorded_moves(bench: Bench) -> list[tuple[str, str]]:
    """("out" or "in", request) of everyone who loses its blocks or gets them back."""
    moves: list[tuple[str, str]] = []
    take, bring_back = bench.preempted.take, bench.preempted.bring_back

    async def recorded_take(sequence: Sequence) -> None:
        moves.append(("out", sequence.request_id))
        await take(sequence)

    async def recorded_bring_back(sequence: Sequence) -> bool:
        came_back = await bring_back(sequence)
        if came_back:
            moves.append(("in", sequence.request_id))
        return came_back

    bench.preempted.take, bench.preempted.bring_back = recorded_take, recorded_bring_back
    return moves


async def test_the_youngest_goes_alone_where_that_is_enough_and_the_oldest_comes_back_first() -> None:
    """All three need a block in the same step; later two need one."""
    async with running(blocks=12) as bench:
        moves = recorded_moves(bench)
        for listener in [bench.add(f"r{n}", [n] * 48, 60) for n in range(3)]:
            await listener.expect_answer()
        assert moves == [("out", "r2"), ("out", "r1"), ("in", "r1"), ("in", "r2")]


async def test_who_comes_back_takes_its_old_place() -> None:
    """Before one that came meanwhile, whose blocks were promised before: that one goes first next time."""
    async with running(blocks=12) as bench:
        moves = recorded_moves(bench)
        oldest, old = [bench.add(f"r{n}", [n] * 48, 60 + 60 * n) for n in range(2)]
        async with asyncio.timeout(WAIT_S_MAX):
            while not moves:  # noqa: ASYNC110
                await asyncio.sleep(0)
        young = bench.add("r2", [2] * 16, 120)
        for listener in (oldest, old, young):
            await listener.expect_answer()
        assert moves[:2] == [("out", "r1"), ("in", "r1")]
        assert [name for way, name in moves[2:] if way == "out"].count("r1") == 0


async def test_a_prefix_that_went_meanwhile_is_computed_again() -> None:
    """What others used was not copied. They go, it is evicted: the copy of the rest is of no use."""
    async with running(blocks=6, slots=4) as bench:
        first = bench.add("r", list(range(64)), 30, samples=2)
        await first.begun.wait()
        (second,) = first.others
        take = bench.preempted.take

        async def take_then_evict(sequence: Sequence) -> None:
            await take(sequence)
            if not first.ended.is_set() and first.sequence.owner is not None:
                await first.leave()
                bench.pool.release(bench.pool.allocate(bench.pool.available()))

        bench.preempted.take = take_then_evict
        await second.expect_answer()
        assert first.sequence.owner is None
        assert bench.engine.swaps == ["out"]
        assert bench.slots.free == 4


@pytest.mark.parametrize("way", ["out", "in"])
async def test_who_leaves_while_its_blocks_are_copied_leaves_nothing(way: str) -> None:
    async with running(blocks=8, slots=16) as bench:
        listeners = [bench.add(f"r{n}", [n] * 50, 40) for n in range(2)]
        leaving = []

        def leave(now: str) -> None:
            if now == way and not leaving:
                leaving.append(asyncio.get_running_loop().create_task(listeners[1].leave()))

        bench.engine.before_swap = leave
        await listeners[0].expect_answer()
        await asyncio.gather(*leaving)
        assert leaving
        assert not listeners[1].ended.is_set()
        assert bench.slots.free == 16
        assert bench.pool.stats().in_use == 0
        await bench.add("s", [5] * 60, 30).expect_answer()


@pytest.mark.parametrize("way", ["out", "in"])
async def test_a_copy_that_fails_costs_time_and_nothing_else(way: str) -> None:
    async with running(blocks=8, slots=16) as bench:

        def fail(now: str) -> None:
            if now == way:
                raise RuntimeError("no such memory")

        bench.engine.before_swap = fail
        both = [bench.add(f"r{n}", [n] * 50, 40) for n in range(2)]
        for listener in both:
            await listener.expect_answer()
        assert way in bench.engine.swaps
        assert bench.steps.prefill_tokens_total > 100
        assert bench.slots.free == 16


@pytest.mark.parametrize("seed", range(12))
async def test_lives_in_few_blocks_and_fewer_slots(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, shared prefixes, both ways of preemption by the throw of a coin, and some who leave."""
    rng = random.Random(seed)
    ways = list(Preemption)
    monkeypatch.setattr("worker.preemption.choose_preemption", lambda *_: rng.choice(ways))
    limits = StepLimits(rng.randint(16, 64), rng.randint(1, 8))
    async with running(blocks=rng.randint(12, 18), limits=limits, slots=rng.randint(0, 12)) as bench:
        staying, leaving = [], []
        for number in range(10):
            length = rng.randint(1, 80)
            ids = [(7 * i + i * i + number % 2) % 500 for i in range(length)]
            output_tokens = rng.randint(1, 90)
            stays = rng.random() < 0.75
            samples = rng.choice([1, 1, 2, 4]) if stays else 1
            while not bench.has_room_for(ids):  # noqa: ASYNC110
                await asyncio.sleep(0)
            listener = bench.add(f"r{number}", ids, output_tokens, samples=samples)
            (staying if stays else leaving).append(listener)
        for listener in leaving:
            for _ in range(rng.randint(0, 40)):
                await asyncio.sleep(0)
            await listener.leave()
        for listener in staying:
            await listener.expect_answer()
        assert bench.pool.stats().in_use == 0
        assert bench.slots.free == bench.slots.slots
        assert len(bench.preempted) == 0


def ways_taken(cluster: Workers) -> dict[Preemption, float]:
    counter = cluster.apps["w"]._node.metrics.preemptions
    return {way: counter.labels(way)._value.get() for way in Preemption}


@pytest.mark.parametrize("way", list(Preemption))
@pytest.mark.parametrize(
    "sampling", [SamplingParams(TOKENS), SamplingParams(TOKENS, temperature=1.0, seed=5)]
)
async def test_the_models_tokens_are_the_same_either_way(
    tiny: Path, sampling: SamplingParams, way: Preemption, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real engine, eight answers that do not fit together, greedy and drawn."""
    monkeypatch.setattr("worker.preemption.choose_preemption", lambda *_: way)
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    settings = {"pool_bytes": 20 * block_bytes, "swap_bytes": 60 * block_bytes}
    async with workers(tiny, COUPLED, **settings) as one:
        prompts = {f"r{n}": prompt(60, seed=n) for n in range(8)}
        for name, ids in prompts.items():
            await one.submit(name, ids, TOKENS, at=("w", "w"), sampling=sampling)
        for name, ids in prompts.items():
            await one.ear.wait_finish(name)
            assert one.ear.answer(name) == sampled_answer(tiny, ids, sampling)
        taken = ways_taken(one)
        assert taken[way] > 0
        assert sum(taken.values()) == taken[way]
        await one.quiet()


async def test_a_worker_chooses_by_what_it_measured(tiny: Path) -> None:
    """On any machine a copy of a few KiB is cheaper than the forward pass of as many tokens."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    settings = {"pool_bytes": 20 * block_bytes, "swap_bytes": 60 * block_bytes}
    async with workers(tiny, COUPLED, **settings) as one:
        for n in range(6):
            await one.submit(f"r{n}", prompt(60, seed=n), TOKENS, at=("w", "w"))
        for n in range(6):
            await one.ear.wait_finish(f"r{n}")
        assert ways_taken(one)[Preemption.SWAP] > 0
