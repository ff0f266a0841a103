"""Two workers that read each other's prefixes, from memory and from files, while both are short of blocks:
every answer is right, and nothing is held at the end."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.engines import sampled_answer
from tests.support.workers import Workers, prompt, workers

from cluster.messages import Cancel, Finish, Refused
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from policy.core import RequestId, Role, SamplingParams

pytestmark = pytest.mark.unit

BOTH = (Role.PREFILL, Role.DECODE)
ROLES = {"a": BOTH, "b": BOTH}
COMPUTE_BLOCKS = 40
DRAM_BLOCKS = 20
"""Where that is another tier."""
PREFIXES = 8
PREFIX_TOKENS = 160
ANSWER_TOKENS = 6
REQUESTS = 40
AT_ONCE = 3
SEEDS = (1, 2)


@asynccontextmanager
async def two(tiny: Path, folder: Path, own_cache: bool) -> AsyncIterator[Workers]:
    """Both find that moving a block always pays."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    chosen = {"own_cache": True, "device_bytes": COMPUTE_BLOCKS * block_bytes} if own_cache else {}
    sizes = {
        "pool_bytes": (COMPUTE_BLOCKS + (DRAM_BLOCKS if own_cache else 0)) * block_bytes,
        "ssd_bytes": 300 * block_bytes,
        "ssd_folder": str(folder),
    }
    async with workers(tiny, ROLES, **sizes, **chosen) as cluster:
        for app in cluster.apps.values():
            free = {"ssd_fixed_s": 0.0, "ssd_bytes_per_s": 1e15}
            free |= {"transfer_fixed_s": 0.0, "transfer_bytes_per_s": 1e15, "prefill_per_token_s": 1e-3}
            app._node.cost = replace(app._node.cost, **free)
        yield cluster


async def live(cluster: Workers, tiny: Path, number: int, rng: random.Random) -> None:
    """One request somewhere, with the other worker as its source; some are cancelled on the way."""
    token_ids = prompt(PREFIX_TOKENS, rng.randrange(PREFIXES)) + prompt(rng.randint(1, 40), 100 + number)
    prefill, other = rng.choice([("a", "b"), ("b", "a")])
    decode = rng.choice([prefill, other])
    request_id = RequestId(f"r{number}")
    for attempt in range(20):
        answer = await cluster.submit(
            request_id,
            token_ids,
            ANSWER_TOKENS,
            at=(prefill, decode),
            source=(other, PREFIX_TOKENS // 16),
            attempt=attempt,
        )
        assert not isinstance(answer, Refused)
        if rng.random() < 0.15:
            await asyncio.sleep(rng.random() * 0.05)
            for name in ROLES:
                await cluster.ear.ask(name, Cancel(request_id, attempt))
            return
        key = (request_id, attempt, 0)
        await cluster.ear.wait(
            lambda key=key: (
                key in cluster.ear.finished
                or any((failed.request_id, failed.attempt) == key[:2] for failed in cluster.ear.failed)
            )
        )
        if key in cluster.ear.finished:
            expected = sampled_answer(tiny, token_ids, SamplingParams(ANSWER_TOKENS))
            assert cluster.ear.answer(*key) == expected
            await cluster.ear.ask(decode, Finish(request_id, attempt, ANSWER_TOKENS))
            return
    raise AssertionError(f"{request_id} never had room")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("own_cache", [False, True], ids=["arena", "own_cache"])
async def test_workers_that_read_each_others_blocks_answer_right_and_keep_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, own_cache: bool
) -> None:
    monkeypatch.setattr("worker.avoided_sources.SOURCE_AVOIDED_S", 0.05)
    rng = random.Random(seed)
    async with two(tiny, tmp_path, own_cache) as cluster:
        turns = asyncio.Semaphore(AT_ONCE)

        async def in_turn(number: int, own: random.Random) -> None:
            async with turns:
                await live(cluster, tiny, number, own)

        await asyncio.gather(*(in_turn(n, random.Random(rng.random())) for n in range(REQUESTS)))
        metrics = [
            metric for app in cluster.apps.values() for metric in app._context.metrics.registry.collect()
        ]
        pins = [metric for metric in metrics if metric.name == "moonpool_read_pins"]
        assert sum(sample.value for metric in pins for sample in metric.samples) > 0
        tiers = [tier for app in cluster.apps.values() for tier in app._node.pool.stats().tiers]
        assert sum(tier.risen_total for tier in tiers) > 0
        await cluster.quiet()
        for app in cluster.apps.values():
            assert app._read_pins.pins() == 0
            assert len(app._node.endpoint._grants) == 0
            assert not app._context.failure.done()
