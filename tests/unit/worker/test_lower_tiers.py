"""A worker whose prompts do not fit into the blocks it computes on: they sink, rise on a hit, outlive it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp.test_utils import make_mocked_request
from prometheus_client import generate_latest
from tests.support.reference import Reference
from tests.support.workers import Workers, greedy, prompt, workers

from cluster.errors import ConfigError
from cluster.messages import Finish
from engine.layout import KVLayout
from engine.model_folder import ModelConfig
from kvhash import BLOCK_TOKENS
from kvindex.core import Tier
from kvpool import BlockPool, SsdStore
from policy.core import RequestId, Role
from policy.evict import cost_doubles_at_blocks

pytestmark = pytest.mark.unit

ONE = {"w": (Role.PREFILL, Role.DECODE)}
COMPUTE_BLOCKS = 128
PROMPT_TOKENS = 321
PROMPT_BLOCKS = PROMPT_TOKENS // 16
PROMPTS = 10
"""With their answers well over what the compute tier holds."""
ANSWERED_S_MAX = 5.0
ANSWER_TOKENS = 4


def settings(tiny: Path, folder: Path, own_cache: bool = False) -> dict[str, object]:
    """Room for twice the compute tier in DRAM, where that is another tier, and for eight times on the SSD."""
    block_bytes = KVLayout.of(ModelConfig.load(tiny)).block_bytes
    compute_bytes = COMPUTE_BLOCKS * block_bytes
    chosen = {"pool_bytes": compute_bytes, "ssd_bytes": 8 * compute_bytes, "ssd_folder": str(folder)}
    if own_cache:
        chosen |= {"own_cache": True, "device_bytes": compute_bytes, "pool_bytes": 2 * compute_bytes}
    return chosen


async def ask(cluster: Workers, name: str, seed: int) -> tuple[list[int], int]:
    """(answer, cached tokens) of one prompt, to its end."""
    await cluster.submit(name, prompt(PROMPT_TOKENS, seed), ANSWER_TOKENS, at=("w", "w"))
    await cluster.ear.wait_finish(name)
    await cluster.ear.ask("w", Finish(RequestId(name), 0, ANSWER_TOKENS))
    return cluster.ear.answer(name), cluster.ear.cached_tokens.get(RequestId(name), 0)


async def fill(cluster: Workers) -> None:
    for seed in range(PROMPTS):
        await ask(cluster, f"first{seed}", seed)


@asynccontextmanager
async def worker(tiny: Path, **chosen: object) -> AsyncIterator[Workers]:
    """One that finds it worth while to read blocks back, however quickly this model would compute them."""
    async with workers(tiny, ONE, **chosen) as cluster:
        node = cluster.apps["w"]._node
        node.cost = replace(node.cost, ssd_fixed_s=0.0, ssd_bytes_per_s=1e15)
        yield cluster
        await cluster.quiet()


def right_answer(reference: Reference, seed: int) -> list[int]:
    return greedy(reference, prompt(PROMPT_TOKENS, seed))[:ANSWER_TOKENS]


def lower(cluster: Workers) -> dict[Tier, int]:
    """Blocks in use by tier, as the load tells it."""
    return {use.tier: use.blocks_used for use in cluster.apps["w"].load().lower_tiers}


async def pool(cluster: Workers, query: str = "") -> tuple[int, dict[str, object]]:
    (route,) = cluster.apps["w"].routes()
    assert (route.method, route.path) == ("GET", "/pool")
    response = await route.handler(make_mocked_request("GET", f"/pool{query}"))
    return response.status, json.loads(response.body)


@pytest.mark.parametrize("own_cache", [False, True], ids=["arena", "own_cache"])
async def test_what_had_to_make_room_is_a_hit_again_and_answers_the_same(
    tiny: Path, reference: Reference, tmp_path: Path, own_cache: bool
) -> None:
    async with worker(tiny, **settings(tiny, tmp_path, own_cache)) as cluster:
        await fill(cluster)
        node = cluster.apps["w"]._node
        assert node.pool.stats().dropped_total == 0
        again = [await ask(cluster, f"again{seed}", seed) for seed in range(PROMPTS)]
        assert [answer for answer, _ in again] == [right_answer(reference, n) for n in range(PROMPTS)]
        assert [cached for _, cached in again] == [PROMPT_BLOCKS * 16] * PROMPTS
        assert [*lower(cluster)] == ([Tier.DRAM, Tier.SSD] if own_cache else [Tier.SSD])
        risen = sum(counted.risen_blocks for counted in node.mover.counters.tiers.values())
        assert risen > COMPUTE_BLOCKS / 4


@pytest.mark.parametrize("own_cache", [False, True], ids=["arena", "own_cache"])
async def test_a_restart_under_the_same_name_finds_what_was_held(
    tiny: Path, reference: Reference, tmp_path: Path, own_cache: bool
) -> None:
    chosen = settings(tiny, tmp_path, own_cache)
    async with worker(tiny, **chosen) as cluster:
        await fill(cluster)
        await cluster.quiet()
        held = len(cluster.apps["w"]._node.pool.inventory()[1])
    async with worker(tiny, **chosen) as cluster:
        _, found = cluster.apps["w"]._node.pool.inventory()
        assert len(found) == held
        assert {tier for _, _, tier in found} == {Tier.SSD}
        answer, cached_tokens = await ask(cluster, "again", 0)
        assert answer == right_answer(reference, 0)
        assert cached_tokens == PROMPT_BLOCKS * 16
        await cluster.quiet()


async def test_a_deep_block_is_weighed_by_the_measured_cost_before_anything_is_found_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tiny, tmp_path) | {"eviction": "length_aware"}
    async with worker(tiny, **chosen) as cluster:
        await fill(cluster)
    told: list[tuple[int, int]] = []
    weigh = BlockPool.set_cost_doubles_at_blocks

    def watched(pool: BlockPool, depth_blocks: int) -> None:
        told.append((depth_blocks, len(pool.inventory()[1])))
        weigh(pool, depth_blocks)

    monkeypatch.setattr(BlockPool, "set_cost_doubles_at_blocks", watched)
    async with worker(tiny, **chosen) as cluster:
        node = cluster.apps["w"]._node
        assert len(node.pool.inventory()[1]) >= PROMPTS * PROMPT_BLOCKS
        assert told == [(cost_doubles_at_blocks(node.cost, BLOCK_TOKENS), 0)]


async def test_files_of_another_cluster_start_empty(tiny: Path, tmp_path: Path) -> None:
    chosen = settings(tiny, tmp_path)
    async with worker(tiny, **chosen) as cluster:
        await fill(cluster)
        await cluster.quiet()
    async with worker(tiny, **{**chosen, "dtype": "bfloat16", "backend": "torch"}) as cluster:
        assert cluster.apps["w"]._node.pool.inventory()[1] == []


async def test_the_servers_are_answered_while_files_are_allocated(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, answered = asyncio.get_running_loop(), threading.Event()
    waits: list[bool] = []
    open_store = SsdStore.open

    def slow(*arguments: object) -> SsdStore:
        loop.call_soon_threadsafe(answered.set)
        waits.append(answered.wait(ANSWERED_S_MAX))
        return open_store(*arguments)

    monkeypatch.setattr(SsdStore, "open", slow)
    async with worker(tiny, **settings(tiny, tmp_path)):
        assert waits == [True]


async def test_a_name_that_is_in_use_is_refused(tiny: Path, tmp_path: Path) -> None:
    chosen = settings(tiny, tmp_path)
    async with worker(tiny, **chosen):
        with pytest.raises(ConfigError, match=r"ssd_folder: .*w"):
            async with worker(tiny, **chosen):
                pass


async def test_a_secret_that_is_too_short_is_refused_with_where_it_is_set(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster_secret must have at least 16 .*MOONPOOL_CLUSTER_SECRET"):
        async with workers(tiny, ONE, cluster_secret="fifteen bytes.."):
            pass


@pytest.mark.parametrize("query", ["check=yes", "chek=1"])
async def test_a_question_about_the_pool_that_is_none_is_refused_by_name(tiny: Path, query: str) -> None:
    async with workers(tiny, ONE) as cluster:
        status, told = await pool(cluster, f"?{query}")
    assert status == 400
    assert str(told["error"]).startswith(query.partition("=")[0])


async def test_a_corrupt_block_is_computed_again_and_counted(
    tiny: Path, reference: Reference, tmp_path: Path
) -> None:
    chosen = settings(tiny, tmp_path)
    async with worker(tiny, **chosen) as cluster:
        await fill(cluster)
        await cluster.quiet()
    for path in (tmp_path / "w").glob("*.data"):
        data = bytearray(path.read_bytes())
        data[::512] = bytes(byte ^ 1 for byte in data[::512])
        path.write_bytes(data)
    async with worker(tiny, **chosen) as cluster:
        held = len(cluster.apps["w"]._node.pool.inventory()[1])
        answer, cached_tokens = await ask(cluster, "again", 0)
        assert answer == right_answer(reference, 0)
        assert cached_tokens == 0
        metrics = generate_latest(cluster.apps["w"]._context.metrics.registry).decode()
        assert 'moonpool_tier_failures_total{tier="ssd",what="corrupt"} 1.0' in metrics
        (ssd,) = cluster.apps["w"]._node.pool.stats().tiers
        assert ssd.lost_total >= PROMPT_BLOCKS
        assert f'moonpool_tier_moves_total{{move="lost",tier="ssd"}} {ssd.lost_total:.1f}' in metrics
        assert f'moonpool_tier_blocks{{state="used",tier="ssd"}} {held - ssd.lost_total:.1f}' in metrics
        await cluster.quiet()


async def test_the_pool_tells_what_it_holds_and_checks_itself(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(tiny, **settings(tiny, tmp_path)) as cluster:
        await fill(cluster)
        await cluster.quiet()
        node = cluster.apps["w"]._node
        status, told = await pool(cluster)
        assert status == 200
        assert "check" not in told
        assert told["blocks"] == COMPUTE_BLOCKS
        (ssd,) = told["tiers"]
        assert (ssd["tier"], ssd["copies"]) == ("ssd", lower(cluster)[Tier.SSD])
        assert ssd["copies"] >= PROMPTS * PROMPT_BLOCKS - COMPUTE_BLOCKS
        assert await pool(cluster, "?check=1") == (200, {**told, "check": "ok"})

        def contradiction() -> None:
            raise AssertionError("block 3 is lost")

        monkeypatch.setattr(node.pool, "check_integrity", contradiction)
        assert await pool(cluster, "?check=1") == (500, {**told, "check": "block 3 is lost"})
        monkeypatch.undo()
